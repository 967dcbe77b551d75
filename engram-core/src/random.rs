//! The two random streams that checkpoints were made with. Their bits are part of the format.

/// numpy's `default_rng(seed)`: PCG64 (XSL-RR) seeded through `SeedSequence`. Engram's multipliers are drawn from it.
#[derive(Debug, Clone)]
pub struct NumpyRng {
    state: u128,
    increment: u128,
    /// High half of a 64-bit draw of which the low half was used.
    spare: Option<u32>,
}

const PCG_MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

impl NumpyRng {
    /// The stream of one seed.
    pub fn new(seed: u64) -> Self {
        let [state_high, state_low, stream_high, stream_low] = seed_sequence(seed);
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut rng = Self { state: 0, increment: wide(stream_high, stream_low) << 1 | 1, spare: None };
        rng.step();
        rng.state = rng.state.wrapping_add(wide(state_high, state_low));
        rng.step();
        rng
    }

    const fn step(&mut self) {
        self.state = self.state.wrapping_mul(PCG_MULTIPLIER).wrapping_add(self.increment);
    }

    #[expect(clippy::cast_possible_truncation, reason = "halves of the state")]
    const fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    #[expect(clippy::cast_possible_truncation, reason = "halves of a draw")]
    fn next_u32(&mut self) -> u32 {
        self.spare.take().unwrap_or_else(|| {
            let draw = self.next_u64();
            self.spare = Some((draw >> 32) as u32);
            draw as u32
        })
    }

    /// One value of `integers(0, bound, dtype=int64)`. numpy draws nothing for bound 1, takes buffered 32-bit draws up
    /// to bound 2^32 and 64-bit draws above; both reject by Lemire's method.
    ///
    /// `bound` is not 0.
    #[expect(clippy::cast_possible_truncation, reason = "low halves of products")]
    pub fn integer(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0, "an empty range has no value");
        if bound == 1 {
            0
        } else if bound == 1 << 32 {
            self.next_u32().into()
        } else if let Ok(narrow) = u32::try_from(bound) {
            let threshold = narrow.wrapping_neg() % narrow;
            loop {
                let product = u64::from(self.next_u32()) * bound;
                if product as u32 >= threshold {
                    return product >> 32;
                }
            }
        } else {
            let threshold = bound.wrapping_neg() % bound;
            loop {
                let product = u128::from(self.next_u64()) * u128::from(bound);
                if product as u64 >= threshold {
                    return (product >> 64) as u64;
                }
            }
        }
    }
}

/// numpy's `SeedSequence(seed).generate_state(4, uint64)` with its pool of four words.
fn seed_sequence(seed: u64) -> [u64; 4] {
    const INIT_A: u32 = 0x43b0_d7e5;
    const MULT_A: u32 = 0x931e_8875;
    const INIT_B: u32 = 0x8b51_f9dd;
    const MULT_B: u32 = 0x58f3_8ded;
    const MIX_LEFT: u32 = 0xca01_f9dd;
    const MIX_RIGHT: u32 = 0x4973_f715;

    #[expect(clippy::cast_possible_truncation, reason = "halves of the seed")]
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut constant = INIT_A;
    let mut hash = |word: u32| {
        let word = word ^ constant;
        constant = constant.wrapping_mul(MULT_A);
        let word = word.wrapping_mul(constant);
        word ^ word >> 16
    };
    let mut pool = entropy.map(&mut hash);
    for source in 0..4 {
        for target in (0..4).filter(|&target| target != source) {
            let word = hash(pool[source]);
            let mixed = pool[target].wrapping_mul(MIX_LEFT).wrapping_sub(word.wrapping_mul(MIX_RIGHT));
            pool[target] = mixed ^ mixed >> 16;
        }
    }
    let mut constant = INIT_B;
    let mut draw = |place: usize| {
        let word = pool[place % 4] ^ constant;
        constant = constant.wrapping_mul(MULT_B);
        let word = word.wrapping_mul(constant);
        u64::from(word ^ word >> 16)
    };
    std::array::from_fn(|place| {
        let low = draw(2 * place);
        low | draw(2 * place + 1) << 32
    })
}

/// Increment of the SplitMix64 stream, also the stride between the seeds of a PLE layer's multipliers.
pub(crate) const SPLITMIX_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// One SplitMix64 output; the increment is added here.
pub(crate) const fn splitmix64(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(SPLITMIX_GAMMA);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::NumpyRng;

    #[derive(serde::Deserialize)]
    struct Case {
        seed: u64,
        bound: u64,
        draws: Vec<u64>,
    }

    #[test]
    fn draws_equal_numpy() {
        let golden = include_bytes!("../../tests/data/golden/numpy_integers.json");
        let cases: Vec<Case> = serde_json::from_slice(golden).unwrap();
        assert!(cases.len() > 100);
        for Case { seed, bound, draws } in cases {
            let mut rng = NumpyRng::new(seed);
            let drawn: Vec<u64> = draws.iter().map(|_| rng.integer(bound)).collect();
            assert_eq!(drawn, draws, "seed {seed}, bound {bound}");
        }
    }
}
