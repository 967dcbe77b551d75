//! The closed set of row formats, one module each.

pub(crate) mod e4m3_e8m0x32;
pub(crate) mod e4m3_global;
pub(crate) mod plain;

use half::{bf16, f16};
use std::fmt::Debug;

/// How the values and scales of rows become numbers and back.
///
/// One row is `value_bytes(width)` bytes of values and `scale_bytes(width)` bytes of scales, which need not lie side by side. The lengths
/// of all slices agree with that: the caller checked them.
pub(crate) trait RowFormat: Debug + Send + Sync {
    /// What the width has to be a multiple of.
    fn multiple(&self) -> usize {
        1
    }

    /// Bytes that the values of a row take.
    fn value_bytes(&self, width: usize) -> usize;

    /// Bytes that the scales of a row take.
    fn scale_bytes(&self, _width: usize) -> usize {
        0
    }

    fn decode_bf16(&self, values: &[u8], scales: &[u8], out: &mut [bf16]);
    fn decode_f16(&self, values: &[u8], scales: &[u8], out: &mut [f16]);
    fn decode_f32(&self, values: &[u8], scales: &[u8], out: &mut [f32]);

    /// The nearest codes, ties to even.
    fn encode(&self, numbers: &[f32], values: &mut [u8], scales: &mut [u8]);

    /// Whether a NaN code is among the values. Takes any number of whole values.
    fn nan_value(&self, values: &[u8]) -> bool;

    /// Whether a NaN code is among the scales.
    fn nan_scale(&self, _scales: &[u8]) -> bool {
        false
    }
}
