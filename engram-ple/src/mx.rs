//! The MX (MXFP8) form of rows: for each layer E4M3 values `[capacity][elements]` and E8M0 scales in tiles of 128 tokens by 4 groups.
//!
//! A token's rows of all columns stand side by side, `elements = columns * width`, one scale per *group* of 32. A tile is 512 bytes;
//! inside, the token `m` and group `k` lie at `(m % 32) * 16 + (m % 128 / 32) * 4 + k % 4`. Tiles of the same tokens follow each other.
//! Tokens are padded to a multiple of 128 and groups to a multiple of 4, with scales of 0.

use crate::{Error, FormatKind, TableFormat};

/// Elements that share a scale.
pub const GROUP: usize = crate::rows::e4m3_e8m0x32::GROUP;

/// Tokens of a tile.
pub const TILE_TOKENS: usize = 128;

/// Groups of a tile.
pub const TILE_GROUPS: usize = 4;

/// Where the MX scales of one layer lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleLayout {
    groups: usize,
    tiles: usize,
}

impl ScaleLayout {
    /// The layout for `columns` rows a token.
    ///
    /// # Errors
    /// [`Error::NoMxScales`] when the format does not carry one E8M0 scale per 32 elements.
    pub fn new(format: &TableFormat, columns: usize) -> Result<Self, Error> {
        if format.kind() != FormatKind::E4m3E8m0x32 {
            return Err(Error::NoMxScales { kind: format.kind() });
        }
        let groups = columns * format.scale_bytes();
        Ok(Self { groups, tiles: groups.div_ceil(TILE_GROUPS) })
    }

    /// Groups of 32 elements a token, padding not counted.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Tiles side by side, `ceil(groups / 4)`; named `K4` elsewhere.
    pub fn tiles(&self) -> usize {
        self.tiles
    }

    /// Bytes that the scales of `tokens` tokens take, padding included.
    pub fn layer_bytes(&self, tokens: usize) -> usize {
        layer_bytes(tokens, self.groups * GROUP)
    }

    /// The byte that holds the scale of a token's group.
    pub fn offset(&self, token: usize, group: usize) -> usize {
        scale_offset(token, group, self.tiles)
    }

    /// Writes the scales of one row, that is, of one token and column, to their places in the layer.
    ///
    /// # Panics
    /// When `scales` is not the scales of one row, or the row lies outside `layer`.
    pub fn write_row(&self, layer: &mut [u8], token: usize, column: usize, scales: &[u8]) {
        let first = column * scales.len();
        assert!(first + scales.len() <= self.groups, "column {column} is past the {} groups of a token", self.groups);
        for (group, &scale) in (first..).zip(scales) {
            layer[self.offset(token, group)] = scale;
        }
    }
}

/// Bytes that a layer's scales take for `elements` (columns * width) a token, padding included.
pub const fn layer_bytes(tokens: usize, elements: usize) -> usize {
    tokens.div_ceil(TILE_TOKENS) * elements.div_ceil(GROUP * TILE_GROUPS) * (TILE_TOKENS * TILE_GROUPS)
}

/// The byte, inside a layer's scales, of the scale of `token` (m) and `group` (k), for rows of tiles `tiles` (K4) wide.
pub const fn scale_offset(token: usize, group: usize, tiles: usize) -> usize {
    let tile = (token / TILE_TOKENS) * tiles + group / TILE_GROUPS;
    tile * (TILE_TOKENS * TILE_GROUPS) + (token % 32) * 16 + (token % TILE_TOKENS / 32) * 4 + group % TILE_GROUPS
}
