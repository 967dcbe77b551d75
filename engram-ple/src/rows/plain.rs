//! Unquantised rows: little-endian bf16, f16 or f32. The storage type passes through bit by bit; another is converted, ties to even.

use super::RowFormat;
use half::{bf16, f16};

#[derive(Debug)]
pub(crate) struct Bf16;
#[derive(Debug)]
pub(crate) struct F16;
#[derive(Debug)]
pub(crate) struct F32;

fn convert<const N: usize, T>(values: &[u8], out: &mut [T], from: impl Fn([u8; N]) -> T) {
    let (values, rest) = values.as_chunks();
    debug_assert!(rest.is_empty());
    for (out, &value) in out.iter_mut().zip(values) {
        *out = from(value);
    }
}

fn store<const N: usize>(numbers: &[f32], values: &mut [u8], to: impl Fn(f32) -> [u8; N]) {
    let (values, rest) = values.as_chunks_mut();
    debug_assert!(rest.is_empty());
    for (value, &number) in values.iter_mut().zip(numbers) {
        *value = to(number);
    }
}

/// Whether any value of `N` bytes is, without its sign, past the bits of infinity. A plain fold, which compiles to vector code.
macro_rules! any_nan {
    ($values:expr, $int:ty, $infinity:expr) => {
        $values
            .as_chunks()
            .0
            .iter()
            .fold(false, |found, &value| found | (<$int>::from_le_bytes(value) & <$int>::MAX > $infinity))
    };
}

impl RowFormat for Bf16 {
    fn value_bytes(&self, width: usize) -> usize {
        width * 2
    }

    fn decode_bf16(&self, values: &[u8], _scales: &[u8], out: &mut [bf16]) {
        convert(values, out, bf16::from_le_bytes);
    }

    fn decode_f16(&self, values: &[u8], _scales: &[u8], out: &mut [f16]) {
        convert(values, out, |value| f16::from_f32(bf16::from_le_bytes(value).to_f32()));
    }

    fn decode_f32(&self, values: &[u8], _scales: &[u8], out: &mut [f32]) {
        convert(values, out, |value| bf16::from_le_bytes(value).to_f32());
    }

    fn encode(&self, numbers: &[f32], values: &mut [u8], _scales: &mut [u8]) {
        store(numbers, values, |number| bf16::from_f32(number).to_le_bytes());
    }

    fn nan_value(&self, values: &[u8]) -> bool {
        any_nan!(values, i16, 0x7f80)
    }
}

impl RowFormat for F16 {
    fn value_bytes(&self, width: usize) -> usize {
        width * 2
    }

    fn decode_bf16(&self, values: &[u8], _scales: &[u8], out: &mut [bf16]) {
        convert(values, out, |value| bf16::from_f32(f16::from_le_bytes(value).to_f32()));
    }

    fn decode_f16(&self, values: &[u8], _scales: &[u8], out: &mut [f16]) {
        convert(values, out, f16::from_le_bytes);
    }

    fn decode_f32(&self, values: &[u8], _scales: &[u8], out: &mut [f32]) {
        convert(values, out, |value| f16::from_le_bytes(value).to_f32());
    }

    fn encode(&self, numbers: &[f32], values: &mut [u8], _scales: &mut [u8]) {
        store(numbers, values, |number| f16::from_f32(number).to_le_bytes());
    }

    fn nan_value(&self, values: &[u8]) -> bool {
        any_nan!(values, i16, 0x7c00)
    }
}

impl RowFormat for F32 {
    fn value_bytes(&self, width: usize) -> usize {
        width * 4
    }

    fn decode_bf16(&self, values: &[u8], _scales: &[u8], out: &mut [bf16]) {
        convert(values, out, |value| bf16::from_f32(f32::from_le_bytes(value)));
    }

    fn decode_f16(&self, values: &[u8], _scales: &[u8], out: &mut [f16]) {
        convert(values, out, |value| f16::from_f32(f32::from_le_bytes(value)));
    }

    fn decode_f32(&self, values: &[u8], _scales: &[u8], out: &mut [f32]) {
        convert(values, out, f32::from_le_bytes);
    }

    fn encode(&self, numbers: &[f32], values: &mut [u8], _scales: &mut [u8]) {
        store(numbers, values, f32::to_le_bytes);
    }

    fn nan_value(&self, values: &[u8]) -> bool {
        any_nan!(values, i32, 0x7f80_0000)
    }
}
