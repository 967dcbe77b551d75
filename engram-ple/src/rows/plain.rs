//! Unquantised rows: little-endian bf16, f16 or f32. The storage type passes through bit by bit; another is converted, ties to even.

use super::RowFormat;
use half::slice::HalfFloatSliceExt;
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

/// Numbers that are converted through f32 at once, where hardware converts f16 by the vector.
const LANES: usize = 32;

/// Converts by way of f32, which holds every bf16 and f16 exactly.
fn through_f32<const N: usize, T>(
    values: &[u8],
    out: &mut [T],
    widen: impl Fn(&[[u8; N]], &mut [f32]),
    narrow: impl Fn(&mut [T], &[f32]),
) {
    let values = values.as_chunks().0;
    for (values, out) in values.chunks(LANES).zip(out.chunks_mut(LANES)) {
        let mut numbers = [0.0; LANES];
        let numbers = &mut numbers[..values.len()];
        widen(values, numbers);
        narrow(out, numbers);
    }
}

fn widen_f16(values: &[[u8; 2]], numbers: &mut [f32]) {
    let mut halves = [f16::ZERO; LANES];
    let halves = &mut halves[..values.len()];
    for (half, &value) in halves.iter_mut().zip(values) {
        *half = f16::from_le_bytes(value);
    }
    halves.convert_to_f32_slice(numbers);
}

fn widen<const N: usize>(to_f32: impl Fn([u8; N]) -> f32) -> impl Fn(&[[u8; N]], &mut [f32]) {
    move |values, numbers| {
        for (number, &value) in numbers.iter_mut().zip(values) {
            *number = to_f32(value);
        }
    }
}

fn narrow_bf16(out: &mut [bf16], numbers: &[f32]) {
    for (out, &number) in out.iter_mut().zip(numbers) {
        *out = bf16::from_f32(number);
    }
}

fn narrow_f16(out: &mut [f16], numbers: &[f32]) {
    out.convert_from_f32_slice(numbers);
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
        through_f32(values, out, widen(|value| bf16::from_le_bytes(value).to_f32()), narrow_f16);
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
        through_f32(values, out, widen_f16, narrow_bf16);
    }

    fn decode_f16(&self, values: &[u8], _scales: &[u8], out: &mut [f16]) {
        convert(values, out, f16::from_le_bytes);
    }

    fn decode_f32(&self, values: &[u8], _scales: &[u8], out: &mut [f32]) {
        through_f32(values, out, widen_f16, <[f32]>::copy_from_slice);
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
        through_f32(values, out, widen(f32::from_le_bytes), narrow_f16);
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
