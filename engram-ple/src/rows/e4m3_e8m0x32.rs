//! E4M3 values with one E8M0 scale per 32 elements. The true product is rounded once, to the output type.

use super::RowFormat;
use crate::{e4m3, e8m0};
use half::{bf16, f16};

/// Elements that share a scale.
pub(crate) const GROUP: usize = 32;

#[derive(Debug)]
pub(crate) struct E4m3E8m0x32;

/// Whether a NaN code is among E4M3 values.
pub(super) fn nan_code(values: &[u8]) -> bool {
    values.iter().fold(0, |highest, &code| highest.max(code & e4m3::NAN)) == e4m3::NAN
}

/// Four significant bits times a power of two from 2^-136 on: exact in f32, infinite past its range.
fn decode<T>(values: &[u8], scales: &[u8], out: &mut [T], to: impl Fn(f32) -> T) {
    let (values, out) = (values.as_chunks::<GROUP>().0, out.as_chunks_mut::<GROUP>().0);
    for ((values, &scale), out) in values.iter().zip(scales).zip(out) {
        let scale = e8m0::to_f32(scale);
        for (out, &code) in out.iter_mut().zip(values) {
            *out = to(e4m3::to_f32(code) * scale);
        }
    }
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
        decode(values, scales, out, bf16::from_f32);
    }

    fn decode_f16(&self, values: &[u8], scales: &[u8], out: &mut [f16]) {
        decode(values, scales, out, f16::from_f32);
    }

    fn decode_f32(&self, values: &[u8], scales: &[u8], out: &mut [f32]) {
        decode(values, scales, out, |number| number);
    }

    fn encode(&self, numbers: &[f32], values: &mut [u8], scales: &mut [u8]) {
        let (numbers, values) = (numbers.as_chunks::<GROUP>().0, values.as_chunks_mut::<GROUP>().0);
        for ((numbers, values), code) in numbers.iter().zip(values).zip(scales) {
            // `max` passes over NaN, so a NaN element does not spoil its neighbours.
            *code = e8m0::for_amax(numbers.iter().fold(0.0, |amax, number| number.abs().max(amax)));
            let scale = f64::from(e8m0::to_f32(*code));
            for (value, &number) in values.iter_mut().zip(numbers) {
                *value = e4m3::from_f64(f64::from(number) / scale);
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
