//! Tables of any size without files.

use crate::dispatch::{self, Vectorized};
use crate::{FormatKind, SourceError, TableFormat, TableSource};
use std::ops::Range;

/// A made-up table: each row is a pure function of (format, seed, layer, row), so any part of it can be made anywhere, in any order. The
/// function stays the same from version to version, so that checksums of made-up tables can be written down.
///
/// Rows have no NaN, and decode to numbers of magnitude below 2 (under a global scale of 1/256 or less for
/// [`FormatKind::E4m3Global`]).
#[derive(Debug, Clone)]
pub struct SynthSource {
    format: TableFormat,
    key: u64,
    rows: u64,
    shape: Shape,
}

/// How eight random bytes become eight bytes of values.
#[derive(Debug, Clone, Copy)]
struct Shape {
    keep: u64,
    set: u64,
    e4m3: bool,
}

/// The increment of SplitMix64, 2^64 over the golden ratio: keeps successive states far apart.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64: every bit of the state reaches every bit of the result.
#[inline(always)]
const fn mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl SynthSource {
    /// A table of `rows` rows, for the backbone layer `layer`.
    pub fn new(format: TableFormat, seed: u64, layer: u32, rows: u64) -> Self {
        let key = mix(mix(seed.wrapping_add(GAMMA)).wrapping_add(u64::from(layer)).wrapping_add(GAMMA));
        // Exponents 112 to 127 for the wide floats, 0 to 15 for f16.
        let shape = match format.kind() {
            FormatKind::Bf16 => Shape { keep: 0x87ff_87ff_87ff_87ff, set: 0x3800_3800_3800_3800, e4m3: false },
            FormatKind::F16 => Shape { keep: 0xbfff_bfff_bfff_bfff, set: 0, e4m3: false },
            FormatKind::F32 => Shape { keep: 0x87ff_ffff_87ff_ffff, set: 0x3800_0000_3800_0000, e4m3: false },
            FormatKind::E4m3Global | FormatKind::E4m3E8m0x32 => Shape { keep: u64::MAX, set: 0, e4m3: true },
        };
        Self { format, key, rows, shape }
    }

    #[inline(always)]
    fn fill_row(&self, row: u64, out: &mut [u8], value_bytes: usize) {
        let (values, scales) = out.split_at_mut(value_bytes);
        let shape = self.shape;
        let mut state = mix(self.key.wrapping_add(row));
        fill(values, &mut state, |word| {
            let word = word & shape.keep | shape.set;
            if shape.e4m3 { spare_nan(word) } else { word }
        });
        // Scales 2^-15 to 2^-8.
        fill(scales, &mut state, |word| word & 0x0707_0707_0707_0707 | 0x7070_7070_7070_7070);
    }
}

/// Rows of a table, from `first` on, and where they go.
struct Rows<'a> {
    table: &'a SynthSource,
    first: u64,
    out: &'a mut [u8],
}

impl Vectorized for Rows<'_> {
    #[inline(always)]
    fn run(self) {
        let format = &self.table.format;
        let value_bytes = format.value_bytes();
        for (row, out) in (self.first..).zip(self.out.chunks_exact_mut(format.row_bytes())) {
            self.table.fill_row(row, out, value_bytes);
        }
    }
}

/// Turns the last bit of every E4M3 NaN code among eight, which makes it 448.
#[inline(always)]
const fn spare_nan(codes: u64) -> u64 {
    let all_ones = (codes & 0x7f7f_7f7f_7f7f_7f7f).wrapping_add(0x0101_0101_0101_0101) & 0x8080_8080_8080_8080;
    codes ^ (all_ones >> 7)
}

#[inline(always)]
fn fill(out: &mut [u8], state: &mut u64, shape: impl Fn(u64) -> u64) {
    let mut next = || {
        *state = state.wrapping_add(GAMMA);
        shape(mix(*state)).to_le_bytes()
    };
    let (words, rest) = out.as_chunks_mut::<8>();
    for word in words {
        *word = next();
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&next()[..rest.len()]);
    }
}

impl TableSource for SynthSource {
    fn format(&self) -> &TableFormat {
        &self.format
    }

    fn rows(&self) -> u64 {
        self.rows
    }

    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_range(&self.format, self.rows, &rows, out)?;
        dispatch::run(Rows { table: self, first: rows.start, out });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cpu_makes_the_same_rows() {
        let format = TableFormat::new(FormatKind::E4m3E8m0x32, 32, None).unwrap();
        let table = SynthSource::new(format, 0, 1, u64::MAX);
        let (mut plain, mut best) = ([0; 33 * 64], [0; 33 * 64]);
        Rows { table: &table, first: 1 << 33, out: &mut plain }.run();
        table.read_range(1 << 33..(1 << 33) + 64, &mut best).unwrap();
        assert_eq!(plain, best);
        assert_eq!(plain[..8], [60, 135, 31, 175, 115, 97, 120, 2]);
    }
}
