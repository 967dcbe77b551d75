//! Sixteen row ids at once. The one place in this crate where `unsafe` is allowed: calling code for CPUs with AVX-512 is
//! unsafe until the CPU has been asked, and unaligned vectors are read and written through pointers.
//!
//! # Why it is exact
//! For a divisor `d >= 2^14` and any 64-bit `x`, `q = round(f64(x) * f64(1 / d))` differs from `x / d` by less than 1:
//! rounding `x`, `1 / d` and their product costs a relative error of at most `2^-53` each (a fused multiply-add rounds
//! the product only once, together with the addition below), so with `|x / d| <= 2^49` an absolute one below
//! `3 * 2^-53 * 2^49 < 0.2`, and rounding to an integer at most 0.5 more. So `r = x - q * d` lies in `-d < r < d`, and as
//! `d < 2^31`, its low 32 bits tell it. As unsigned numbers, the smaller of `r` and `r + d` is the remainder: for
//! `r >= 0` that is `r`, and a negative `r` is above `2^31` while `r + d` is not.
//!
//! `q` is rounded by adding `1.5 * 2^52`: the sum's last bits are then the integer's, in two's complement. That needs
//! `|q| <= 2^51`, which `2^49` is.

#![expect(unsafe_code, reason = "run-time CPU dispatch")]

use std::arch::x86_64::*;

use super::Column;

/// Columns of one step.
const LANES: usize = 16;
/// Columns whose 64-bit mixes fill a vector.
const HALF: usize = LANES / 2;
/// Smallest divisor for which the quotient is exact enough.
const DIVISOR_MIN: u32 = 1 << 14;
/// Adding it to a small number rounds that to an integer in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Elements that must be readable behind the last mix.
pub(super) const PADDING: usize = 8;

/// The constants of sixteen columns, which may lie in several orders and layers.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Step {
    inverses: [[f64; HALF]; 2],
    /// For each column, its mix among the eight from its half's `base` on.
    lanes: [[u64; HALF]; 2],
    divisors: [u32; LANES],
    offsets: [u32; LANES],
    /// First mix of each half.
    base: [usize; 2],
    /// Columns that are there.
    mask: u16,
}

/// What the AVX-512 path needs to know of a layout, on a CPU that has AVX-512 F and DQ.
#[derive(Debug, Clone)]
pub(super) struct Steps {
    steps: Box<[Step]>,
    ids_per_token: usize,
    mixes_per_token: usize,
}

/// Whether this CPU has what [`Steps`] needs.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq")
}

impl Steps {
    /// `None` where the CPU lacks AVX-512, or a divisor is too small for it.
    pub(super) fn new(columns: &[Column], heads: usize) -> Option<Self> {
        let small = columns.iter().any(|column| column.reciprocal.divisor() < DIVISOR_MIN);
        if small || !is_available() {
            return None;
        }
        let step = |(place, columns): (usize, &[Column])| {
            // Lanes behind the last column repeat it; they are not stored.
            let lane = |lane: usize| lane.min(columns.len() - 1);
            let mix = |column: usize| (place * LANES + lane(column)) / heads;
            let divisor = |column: usize| columns[lane(column)].reciprocal.divisor();
            let base = [mix(0), mix(HALF)];
            let halves = |half: usize| move |place: usize| half * HALF + place;
            Step {
                inverses: [0, 1]
                    .map(|half| std::array::from_fn(halves(half)).map(|column| 1.0 / f64::from(divisor(column)))),
                lanes: [0, 1]
                    .map(|half| std::array::from_fn(halves(half)).map(|column| (mix(column) - base[half]) as u64)),
                divisors: std::array::from_fn(divisor),
                offsets: std::array::from_fn(|column| columns[lane(column)].offset),
                base,
                mask: u16::MAX >> (LANES - columns.len()),
            }
        };
        Some(Self {
            steps: columns.chunks(LANES).enumerate().map(step).collect(),
            ids_per_token: columns.len(),
            mixes_per_token: columns.len() / heads,
        })
    }

    /// Row ids of whole tokens from their mixes, which [`PADDING`] more elements follow.
    pub(super) fn reduce(&self, mixes: &[i64], ids: &mut [i32]) {
        let tokens = ids.len() / self.ids_per_token;
        assert_eq!(ids.len(), tokens * self.ids_per_token, "whole tokens");
        assert!(mixes.len() >= tokens * self.mixes_per_token + PADDING, "mixes of every token, and padding");
        for (place, step) in self.steps.iter().enumerate() {
            let ids = &mut ids[place * LANES..];
            // SAFETY: `Steps::new` has found AVX-512 F and DQ. For every token `t < tokens`, the step reads eight mixes
            // from `t * mixes_per_token + base` on, where `base < mixes_per_token`, so they end before
            // `tokens * mixes_per_token + 8 <= mixes.len()`; and it writes the `mask` lowest of sixteen ids from
            // `t * ids_per_token` on, which are the columns `16 * place..` of that token, so they end within `ids`.
            unsafe { step.run(mixes.as_ptr(), self.mixes_per_token, ids.as_mut_ptr(), self.ids_per_token, tokens) }
        }
    }
}

/// A vector's worth of constants.
#[target_feature(enable = "avx512f")]
fn load<T: Copy, const N: usize>(values: &[T; N]) -> __m512i {
    const { assert!(size_of::<[T; N]>() == size_of::<__m512i>()) };
    // SAFETY: the array is as long as the vector, and any bits are a vector.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

impl Step {
    /// # Safety
    /// The CPU has AVX-512 F and DQ. For each `t` in `0..tokens`, eight mixes from `mixes + t * mix_stride + base` on
    /// are readable, and the masked ones of sixteen ids from `ids + t * id_stride` on are writable.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn run(&self, mixes: *const i64, mix_stride: usize, ids: *mut i32, id_stride: usize, tokens: usize) {
        let inverses = [0, 1].map(|half| _mm512_castsi512_pd(load(&self.inverses[half])));
        let lanes = [0, 1].map(|half| load(&self.lanes[half]));
        let (divisors, offsets) = (load(&self.divisors), load(&self.offsets));
        let round = _mm512_set1_pd(ROUND);
        // The low halves of two vectors of eight.
        let low_halves = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        for token in 0..tokens {
            let mixes = mixes.wrapping_add(token * mix_stride);
            let [low, high] = self.base.map(|base| {
                // SAFETY: eight mixes from here on are readable by the caller's promise.
                unsafe { _mm512_loadu_epi64(mixes.wrapping_add(base)) }
            });
            let low = _mm512_permutexvar_epi64(lanes[0], low);
            let high = _mm512_permutexvar_epi64(lanes[1], high);
            let low_quotients = _mm512_fmadd_pd(_mm512_cvtepi64_pd(low), inverses[0], round);
            let high_quotients = _mm512_fmadd_pd(_mm512_cvtepi64_pd(high), inverses[1], round);
            let mix = _mm512_permutex2var_epi32(low, low_halves, high);
            let quotient = _mm512_permutex2var_epi32(
                _mm512_castpd_si512(low_quotients),
                low_halves,
                _mm512_castpd_si512(high_quotients),
            );
            let difference = _mm512_sub_epi32(mix, _mm512_mullo_epi32(quotient, divisors));
            let remainder = _mm512_min_epu32(difference, _mm512_add_epi32(difference, divisors));
            let id = _mm512_add_epi32(remainder, offsets);
            let ids = ids.wrapping_add(token * id_stride);
            // SAFETY: the masked ones of sixteen ids from here on are writable by the caller's promise.
            unsafe { _mm512_mask_storeu_epi32(ids, self.mask, id) }
        }
    }
}
