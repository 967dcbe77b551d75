//! Finding NaN in many rows at memory speed.

use crate::rows::RowFormat;
use std::iter::FusedIterator;

/// Bytes that are asked about at once: few enough to be in the cache when a finding has to be pinned to its row.
const BLOCK_BYTES: usize = 16 * 1024;

/// The part of a row that the bytes hold.
#[derive(Debug, Clone, Copy)]
enum Part {
    Values,
    Scales,
    /// Values, this many bytes, then scales.
    Packed(usize),
}

/// The indices of rows with a NaN, ascending, each once; see [`TableFormat::nan_rows`](crate::TableFormat::nan_rows).
#[derive(Debug, Clone)]
pub struct NanRows<'a> {
    format: &'a dyn RowFormat,
    part: Part,
    bytes: &'a [u8],
    stride: usize,
    /// The next row to look at.
    row: usize,
    /// Rows before this one are known to be in a block with a NaN somewhere, so they are looked at one by one.
    suspect: usize,
}

impl<'a> NanRows<'a> {
    pub(crate) fn values(format: &'a dyn RowFormat, stride: usize, bytes: &'a [u8]) -> Self {
        Self::new(format, Part::Values, stride, bytes)
    }

    pub(crate) fn scales(format: &'a dyn RowFormat, stride: usize, bytes: &'a [u8]) -> Self {
        Self::new(format, Part::Scales, stride, bytes)
    }

    pub(crate) fn packed(format: &'a dyn RowFormat, value_bytes: usize, stride: usize, bytes: &'a [u8]) -> Self {
        let part = if value_bytes == stride { Part::Values } else { Part::Packed(value_bytes) };
        Self::new(format, part, stride, bytes)
    }

    fn new(format: &'a dyn RowFormat, part: Part, stride: usize, bytes: &'a [u8]) -> Self {
        let whole = bytes.is_empty() || stride > 0 && bytes.len().is_multiple_of(stride);
        assert!(whole, "{} bytes are not whole rows of {stride} bytes", bytes.len());
        Self { format, part, bytes, stride: stride.max(1), row: 0, suspect: 0 }
    }

    /// Whether any of whole rows has a NaN.
    fn holds_nan(&self, rows: &[u8]) -> bool {
        match self.part {
            Part::Values => self.format.nan_value(rows),
            Part::Scales => self.format.nan_scale(rows),
            Part::Packed(value_bytes) => rows.chunks_exact(self.stride).any(|row| {
                let (values, scales) = row.split_at(value_bytes);
                self.format.nan_value(values) | self.format.nan_scale(scales)
            }),
        }
    }
}

impl Iterator for NanRows<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let rows = self.bytes.len() / self.stride;
        let block = (BLOCK_BYTES / self.stride).max(1);
        while self.row < rows {
            if self.row < self.suspect {
                let row = self.row;
                self.row += 1;
                if self.holds_nan(&self.bytes[row * self.stride..][..self.stride]) {
                    return Some(row);
                }
            } else {
                let end = (self.row + block).min(rows);
                if self.holds_nan(&self.bytes[self.row * self.stride..end * self.stride]) {
                    self.suspect = end;
                } else {
                    self.row = end;
                }
            }
        }
        None
    }
}

impl FusedIterator for NanRows<'_> {}
