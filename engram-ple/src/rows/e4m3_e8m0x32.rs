//! E4M3 values with one E8M0 scale per 32 elements. The true product is rounded once, to the output type.

use super::RowFormat;
use crate::dispatch::{self, Vectorized};
use crate::{e4m3, e8m0};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements that share a scale.
pub(crate) const GROUP: usize = 32;

#[derive(Debug)]
pub(crate) struct E4m3E8m0x32;

/// Whether a NaN code is among E4M3 values.
pub(super) fn nan_code(values: &[u8]) -> bool {
    values.iter().fold(0, |highest, &code| highest.max(code & e4m3::NAN)) == e4m3::NAN
}

/// Groups with their scales, and where their numbers go.
struct Groups<'a, T> {
    values: &'a [u8],
    scales: &'a [u8],
    out: &'a mut [T],
}

impl<T: Number> Vectorized for Groups<'_, T> {
    #[inline(always)]
    fn run(self) {
        let (values, out) = (self.values.as_chunks().0, self.out.as_chunks_mut().0);
        for ((codes, &scale), out) in values.iter().zip(self.scales).zip(out) {
            T::decode(codes, scale, out);
        }
    }
}

trait Number: Sized {
    fn decode(codes: &[u8; GROUP], scale: u8, out: &mut [Self; GROUP]);
}

impl Number for bf16 {
    #[inline(always)]
    fn decode(codes: &[u8; GROUP], scale: u8, out: &mut [Self; GROUP]) {
        *out = if is_normal(scale) {
            normal(codes, scale).map(Self::from_bits)
        } else {
            product(codes, scale).map(Self::from_f32)
        };
    }
}

impl Number for f32 {
    #[inline(always)]
    fn decode(codes: &[u8; GROUP], scale: u8, out: &mut [Self; GROUP]) {
        *out = if is_normal(scale) {
            normal(codes, scale).map(|bits| Self::from_bits(u32::from(bits) << 16))
        } else {
            product(codes, scale)
        };
    }
}

impl Number for f16 {
    #[inline(always)]
    fn decode(codes: &[u8; GROUP], scale: u8, out: &mut [Self; GROUP]) {
        let mut numbers = [0.0; GROUP];
        f32::decode(codes, scale, &mut numbers);
        out.convert_from_f32_slice(&numbers);
    }
}

/// Whether every product under this scale is zero, NaN, or a normal bf16. Codes are 2^-9 to 448 in magnitude.
#[inline(always)]
fn is_normal(scale: u8) -> bool {
    (127 - 126 + 9..=127 + 127 - 8).contains(&scale)
}

/// The bits of one group in bf16, under a scale that leaves all of it normal: with four significant bits there is nothing to round.
#[inline(always)]
fn normal(codes: &[u8; GROUP], scale: u8) -> [u16; GROUP] {
    let shift = (i16::from(scale) - 127) << 7;
    codes.map(|code| {
        let magnitude = code & e4m3::NAN;
        let scaled = if magnitude == 0 { 0 } else { e4m3::bf16_bits(magnitude) + shift };
        let scaled = if magnitude == e4m3::NAN { 0x7fc0 } else { scaled };
        scaled.cast_unsigned() | u16::from(code & 0x80) << 8
    })
}

/// One group under any scale. Four significant bits times a power of two from 2^-136 on are exact in f32, or infinite.
#[cold]
#[expect(clippy::cast_possible_truncation, reason = "the nearest f32, which is the product itself or infinity")]
fn product(codes: &[u8; GROUP], scale: u8) -> [f32; GROUP] {
    codes.map(|code| (f64::from(e4m3::to_f32(code)) * e8m0::to_f64(scale)) as f32)
}

impl RowFormat for E4m3E8m0x32 {
    fn multiple(&self) -> usize {
        GROUP
    }

    fn value_bytes(&self, width: usize) -> usize {
        width
    }

    fn scale_bytes(&self, width: usize) -> usize {
        width / GROUP
    }

    fn decode_bf16(&self, values: &[u8], scales: &[u8], out: &mut [bf16]) {
        dispatch::run(Groups { values, scales, out });
    }

    fn decode_f16(&self, values: &[u8], scales: &[u8], out: &mut [f16]) {
        dispatch::run(Groups { values, scales, out });
    }

    fn decode_f32(&self, values: &[u8], scales: &[u8], out: &mut [f32]) {
        dispatch::run(Groups { values, scales, out });
    }

    fn encode(&self, numbers: &[f32], values: &mut [u8], scales: &mut [u8]) {
        let (numbers, values) = (numbers.as_chunks::<GROUP>().0, values.as_chunks_mut::<GROUP>().0);
        for ((numbers, values), code) in numbers.iter().zip(values).zip(scales) {
            // `max` passes over NaN, so a NaN element does not spoil its neighbours.
            *code = e8m0::for_amax(numbers.iter().fold(0.0, |amax, number| number.abs().max(amax)));
            let reciprocal = 1.0 / e8m0::to_f64(*code);
            for (value, &number) in values.iter_mut().zip(numbers) {
                *value = e4m3::from_f64(f64::from(number) * reciprocal);
            }
        }
    }

    fn nan_value(&self, values: &[u8]) -> bool {
        nan_code(values)
    }

    fn nan_scale(&self, scales: &[u8]) -> bool {
        scales.iter().fold(0, |highest, &code| highest.max(code)) == e8m0::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests elsewhere decode as this CPU does; here the plain loops, as any CPU runs them, against that.
    #[test]
    fn every_cpu_decodes_alike() {
        let values: Vec<u8> = (0..=255).collect();
        for scale in 0..=255 {
            let scales = [scale; 8];
            let (mut plain, mut best) = ([bf16::ZERO; 256], [bf16::ZERO; 256]);
            Groups { values: &values, scales: &scales, out: &mut plain }.run();
            dispatch::run(Groups { values: &values, scales: &scales, out: &mut best });
            assert_eq!(plain.map(bf16::to_bits), best.map(bf16::to_bits), "{scale}");
        }
    }
}
