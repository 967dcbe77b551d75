//! E4M3 values under one scale for the whole table.
//!
//! The order of roundings is part of the format: the code and the scale are each cast to the output type, and their product is rounded
//! once more in it. With the scale known there are 256 results, so decoding is a table.

use super::RowFormat;
use crate::e4m3;
use half::{bf16, f16};

#[derive(Debug)]
pub(crate) struct E4m3Global {
    scale: f32,
    bf16: [bf16; 256],
    f16: [f16; 256],
    f32: [f32; 256],
}

impl E4m3Global {
    pub(crate) fn new(scale: f32) -> Self {
        // A code has four significant bits, a 16-bit float at most eleven: their product is exact in f32.
        let product = |code, scale| e4m3::to_f32(code) * scale;
        #[expect(clippy::cast_possible_truncation, reason = "256 codes")]
        Self {
            scale,
            bf16: std::array::from_fn(|code| bf16::from_f32(product(code as u8, bf16::from_f32(scale).to_f32()))),
            f16: std::array::from_fn(|code| f16::from_f32(product(code as u8, f16::from_f32(scale).to_f32()))),
            f32: std::array::from_fn(|code| product(code as u8, scale)),
        }
    }
}

fn look_up<T: Copy>(table: &[T; 256], values: &[u8], out: &mut [T]) {
    for (out, &code) in out.iter_mut().zip(values) {
        *out = table[usize::from(code)];
    }
}

impl RowFormat for E4m3Global {
    fn value_bytes(&self, width: usize) -> usize {
        width
    }

    fn decode_bf16(&self, values: &[u8], _scales: &[u8], out: &mut [bf16]) {
        look_up(&self.bf16, values, out);
    }

    fn decode_f16(&self, values: &[u8], _scales: &[u8], out: &mut [f16]) {
        look_up(&self.f16, values, out);
    }

    fn decode_f32(&self, values: &[u8], _scales: &[u8], out: &mut [f32]) {
        look_up(&self.f32, values, out);
    }

    fn encode(&self, numbers: &[f32], values: &mut [u8], _scales: &mut [u8]) {
        for (value, &number) in values.iter_mut().zip(numbers) {
            *value = e4m3::from_f64(f64::from(number) / f64::from(self.scale));
        }
    }

    fn nan_value(&self, values: &[u8]) -> bool {
        super::e4m3_e8m0x32::nan_code(values)
    }
}
