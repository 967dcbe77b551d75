//! Exact remainders without division.

/// `x mod divisor` for every 64-bit `x`, by one multiply-high.
///
/// # Why it is exact
/// Let `d` be the divisor, `1 <= d < 2^31`, `s` the least integer with `d <= 2^s`, and
/// `m = ceil(2^(63 + s) / d)`. Then `m * d = 2^(63 + s) + e` with `0 <= e < d <= 2^s`, so for `0 <= x < 2^63`
///
/// ```text
/// x * m / 2^(63 + s)  =  x / d  +  (x / 2^63) * (e / 2^s) / d,     where  0 <= (x / 2^63) * (e / 2^s) < 1.
/// ```
///
/// The fraction of `x / d` is at most `(d - 1) / d`, so adding less than `1 / d` never reaches the next integer:
/// `floor(x * m / 2^(63 + s)) = floor(x / d)`, exactly. `m` fits 64 bits: `d > 2^(s - 1)` makes `2^(63 + s) / d` less
/// than `2^64`, and by an integer's distance wherever `d` is no power of two; `d = 2^s` gives `m = 2^63`. The product
/// by `2^(63 + s)` is taken as the high half of `(2 * x) * m`, shifted right by `s`, where `2 * x` fits 64 bits.
///
/// A negative `x` (products of PLE tokens wrap) has `y = -1 - x = !x` in `0..2^63`, and the non-negative remainder of
/// `x` is `d - 1 - (y mod d)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reciprocal {
    divisor: u32,
    multiplier: u64,
    shift: u32,
}

impl Reciprocal {
    /// The reciprocal of `divisor`, or `None` unless `1 <= divisor < 2^31`.
    pub const fn new(divisor: u32) -> Option<Self> {
        if divisor == 0 || divisor > i32::MAX.unsigned_abs() {
            return None;
        }
        let shift = u32::BITS - (divisor - 1).leading_zeros();
        let multiplier = (1_u128 << (63 + shift)).div_ceil(divisor as u128);
        #[expect(clippy::cast_possible_truncation, reason = "below 2^64, see above")]
        let multiplier = multiplier as u64;
        Some(Self { divisor, multiplier, shift })
    }

    /// The divisor `d`.
    pub const fn divisor(self) -> u32 {
        self.divisor
    }

    /// The multiplier `m`: `x / d` is `(high64(2 * x * m)) >> shift` for `0 <= x < 2^63`.
    pub const fn multiplier(self) -> u64 {
        self.multiplier
    }

    /// The shift `s`, 0 to 31.
    pub const fn shift(self) -> u32 {
        self.shift
    }

    /// The remainder in `0..divisor` (as Python's and torch's `%`), for every `x`.
    #[inline]
    pub const fn remainder(self, x: i64) -> u32 {
        let sign = x >> 63;
        let remainder = self.remainder_of_magnitude((x ^ sign).cast_unsigned());
        let sign = low_half(sign.cast_unsigned());
        (remainder ^ sign).wrapping_add(self.divisor & sign)
    }

    /// The remainder for `0 <= x < 2^63`.
    #[inline]
    pub(crate) const fn remainder_of_magnitude(self, x: u64) -> u32 {
        let high = (((x << 1) as u128 * self.multiplier as u128) >> 64) as u64;
        let quotient = low_half(high >> self.shift);
        // The remainder fits 31 bits, so arithmetic modulo 2^32 gives it.
        low_half(x).wrapping_sub(quotient.wrapping_mul(self.divisor))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is asked for")]
const fn low_half(value: u64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Reciprocal;

    fn check(x: i64, divisor: u32) {
        let expected = i128::from(x).rem_euclid(divisor.into());
        let reciprocal = Reciprocal::new(divisor).unwrap();
        assert_eq!(i128::from(reciprocal.remainder(x)), expected, "{x} mod {divisor}");
    }

    #[test]
    fn divisors_outside_the_domain_are_refused() {
        for divisor in [0, 1 << 31, u32::MAX] {
            assert_eq!(Reciprocal::new(divisor), None);
        }
    }

    /// Around every multiple that can go wrong: the ends of the domain, powers of two, and the last multiples of `d`.
    #[test]
    fn edges_are_exact() {
        let mut divisors: Vec<u32> = (1..=300).collect();
        for power in 1..=31 {
            divisors.extend([(1_u32 << power) - 1, 1 << power, (1 << power) + 1]);
        }
        divisors.extend([16_000_057, 20_000_171, 2_147_483_647, 2_147_483_629]);
        for divisor in divisors.into_iter().filter(|&divisor| divisor <= i32::MAX.unsigned_abs()) {
            let last = i64::MAX - i64::MAX % i64::from(divisor);
            let edges = (0..63).map(|power| 1_i64 << power).chain([0, last, i64::MAX, i64::from(divisor)]);
            for edge in edges {
                for step in -2..=2 {
                    check(edge.wrapping_add(step), divisor);
                    check(edge.wrapping_add(step).wrapping_neg(), divisor);
                    check(edge.wrapping_add(step).wrapping_sub(i64::from(divisor)), divisor);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn everything_else_is_exact(x: i64, divisor in 1..=i32::MAX.unsigned_abs(), bits in 0_u32..31) {
            check(x, divisor);
            check(x, (divisor >> bits).max(1));
        }
    }
}
