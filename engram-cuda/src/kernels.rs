//! The kernels: what is embedded, and what every entry takes.
//!
//! Each entry takes one parameter, a struct by value ([`Hash`] or [`Rows`]); `kernels/*.cu` holds the same structs and asserts the
//! same sizes. Pointers are device addresses; those marked *pinned allowed* may be device addresses of pinned or registered host
//! memory. Nothing is launched for no tokens: a grid of 0 is a driver error. No entry uses dynamic shared memory, local memory of
//! note, or a second kernel, and all may be captured into a graph.
//!
//! | module | entry | parameter | grid | block | does |
//! |---|---|---|---|---|---|
//! | [`HASH`] | `hash_engram`, `hash_ple` | [`Hash`] | ceil([`len`](Hash::len) / 16), [`layers`](Hash::layers), 1 | [`HASH_THREADS`] | ids (and mixes) of a ragged batch |
//! | [`ROWS`] | `rows_copy_U`, U = 16, 8, 4, 1 | [`Rows`] | any, see [`Rows::tile`] | a multiple of 32 up to [`ROWS_THREADS`] | rows as they are: packed bytes, or rows of an unquantised format |
//! | [`ROWS`] | `rows_mx_U`, U = 16, 1 | [`Rows`] | any | same | E4M3 values as they are, E8M0 scales in MX order with their padding |
//! | [`FLOATS`] | `rows_float_U`, U = 8, 1 | [`Rows`] | any | same | E4M3 rows of both kinds to bf16 or f16 |
//!
//! U is the unit in bytes that an entry reads at a time. Its requirements are given at [`Rows`]; entries of unit 1 have none.

/// PTX of one translation unit: for every GPU from compute capability 8.0 on, and where it pays again for 9.0 on.
#[derive(Debug, Clone, Copy)]
pub struct Ptx {
    sm_80: &'static str,
    sm_90: Option<&'static str>,
}

impl Ptx {
    /// The text for a GPU of this compute capability, NUL-terminated as `cuModuleLoadData` wants it.
    #[must_use]
    pub fn text(&self, major: i32) -> &'static str {
        self.sm_90.filter(|_| major >= 9).unwrap_or(self.sm_80)
    }
}

macro_rules! ptx {
    ($file:literal) => {
        concat!(include_str!(concat!("../kernels/", $file)), "\0")
    };
}

/// Entries `hash_engram` and `hash_ple`.
pub const HASH: Ptx = Ptx { sm_80: ptx!("hash.compute_80.ptx"), sm_90: None };
/// Entries `rows_copy_16`, `rows_copy_8`, `rows_copy_4`, `rows_copy_1`, `rows_mx_16` and `rows_mx_1`.
pub const ROWS: Ptx = Ptx { sm_80: ptx!("rows.compute_80.ptx"), sm_90: None };
/// Entries `rows_float_8` and `rows_float_1`.
pub const FLOATS: Ptx = Ptx { sm_80: ptx!("floats.compute_80.ptx"), sm_90: Some(ptx!("floats.compute_90.ptx")) };

/// Threads a block of the hash kernels, no other number.
pub const HASH_THREADS: u32 = 128;
/// Tokens that a block of the hash kernels takes, of one layer.
pub const HASH_TOKENS: u32 = 16;
/// Threads a block of the row kernels at most; any multiple of 32 up to it works.
pub const ROWS_THREADS: u32 = 256;
/// Blocks of [`ROWS_THREADS`] that fit a multiprocessor: more of them in a grid only queue.
pub const ROWS_BLOCKS: u32 = 5;
/// Largest [`Rows::tile`].
pub const ROWS_TILE: u32 = 32;

/// What a hash kernel needs to know of a column: `x mod size` by one multiply-high, then the column's place in the table.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// floor((2^64 - 1) / size): the quotient estimated with it is exact or one short, for every 64-bit x.
    pub magic: u64,
    /// The column's modulus, `0 < size < 2^31`.
    pub size: u32,
    /// The table row of remainder 0; `offset + size <= 2^31`.
    pub offset: u32,
}

/// Parameter of `hash_engram` and `hash_ple`. Inputs are those of [`engram_core::hash::Batch`], on the device.
///
/// Any contents of `tokens`, `starts` and `history` are memory-safe; ids are right for what `Batch` admits.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Hash {
    /// i32 `[len]`.
    pub tokens: u64,
    /// i32 `[requests + 1]`; tokens from the last boundary on get ids -1.
    pub starts: u64,
    /// i32 `[requests][order - 1]`; Engram newest first with -1 dead and -2 unknown, PLE oldest first. Null only with 0 requests.
    pub history: u64,
    /// i64 `[layers][order]`.
    pub multipliers: u64,
    /// [`Column`] `[layers][(order - 1) * heads]`, 16-byte aligned.
    pub columns: u64,
    /// Output, i32 `[len][layers][(order - 1) * heads]`.
    pub ids: u64,
    /// Output, i64 `[len][layers][order - 1]`, 0 for tokens past the last boundary; null for none.
    pub mixes: u64,
    /// Tokens, at most 2^31 - 16; at least 1.
    pub len: u32,
    /// Requests, at most 2^31 - 1; 0 allowed.
    pub requests: u32,
    /// Layers, 1..=65535 (they are the grid's second dimension).
    pub layers: u32,
    /// Longest n-gram, 2..=8.
    pub order: u32,
    /// Heads an order, at least 1.
    pub heads: u32,
    /// Engram: the compressed pad id. PLE: EOS.
    pub fill: i32,
}

/// One layer's table, or the part of it that is here. An array of these, one a layer, lies in device memory.
///
/// Packed rows (values then scales, as in a gathered staging buffer) have `scales = values + value bytes` and both strides equal
/// to the packed row's bytes. Unowned ids and -1 give zero rows.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// Values of row `first`; pinned allowed.
    pub values: u64,
    /// Scales of row `first`; pinned allowed. Not read where [`Rows::scale_bytes`] is 0.
    pub scales: u64,
    /// Bytes from a row's values to the next row's.
    pub value_stride: u64,
    /// Bytes from a row's scales to the next row's.
    pub scale_stride: u64,
    /// First row that is here.
    pub first: u32,
    /// Rows that are here; 0 for a layer of which nothing is.
    pub rows: u32,
}

/// Parameter of the row kernels.
///
/// The id of (token, layer, column) is `ids[token * token_stride + (first + layer * columns + column) / share]`. Row (token, layer,
/// column) is written at `out + token * out_token + layer * out_layer + column * out_column`:
///
/// | output | `out_token` | `out_layer` | `out_column` |
/// |---|---|---|---|
/// | packed `[token][layer][column][row_bytes]` | `layers * columns * row_bytes` | `columns * row_bytes` | `row_bytes` |
/// | 16-bit floats `[layer][capacity][columns * width]` | `columns * width * 2` | `capacity * columns * width * 2` | `width * 2` |
/// | raw rows, MX values | `columns * value_bytes` | `capacity * columns * value_bytes` | `value_bytes` |
///
/// Requirements. `rows_copy_U`, `rows_mx_U`: every table's `values` and `value_stride`, `out` and its strides and `value_bytes` are
/// multiples of U; `rows_copy_U` with `scale_bytes > 0`: `scales`, `scale_stride` and `scale_bytes` too; `rows_mx_16`: `scales`,
/// `scale_stride`, `scale_bytes` and `out_scales` are multiples of 4. `rows_float_8`: `values`, `value_stride` and `value_bytes` are multiples of
/// 8, `out` and its strides of 16. The unit 1 entries only want 16-bit outputs at even addresses. Always:
/// `slot * layers * columns <= 2^31` (`rows_mx`: with `slot` rounded up to a multiple of 128) and `grid * block / 32 * tile <= 2^31`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// i32, or i64 with `wide`.
    pub ids: u64,
    /// From a token's ids to the next token's, in ids.
    pub token_stride: i64,
    /// [`Table`] `[layers]`, 8-byte aligned: that of the view's first layer first.
    pub tables: u64,
    /// Output.
    pub out: u64,
    /// Bytes from token to token.
    pub out_token: u64,
    /// Bytes from layer to layer.
    pub out_layer: u64,
    /// Bytes from column to column.
    pub out_column: u64,
    /// `rows_mx`: scales, a layer after the other; else not used.
    pub out_scales: u64,
    /// `rows_mx`: bytes from a layer's scales to the next layer's, at least `ceil(slot / 128) * ceil(columns * scale_bytes / 4) * 512`.
    pub out_scales_layer: u64,
    /// Tokens that have ids.
    pub tokens: u32,
    /// Tokens that are written, at least `tokens`: those past `tokens` get zero rows, and their ids are not read.
    pub slot: u32,
    /// First column of the view, counted through all layers: first layer * columns.
    pub first: u32,
    /// Layers of the view.
    pub layers: u32,
    /// Columns a layer.
    pub columns: u32,
    /// How many neighbouring columns have one id `i` in common; they take rows `i * share`, `i * share + 1`, and so on. It divides
    /// `columns`. 1: every column has its own id.
    pub share: u32,
    /// 1: ids are i64; 0: i32.
    pub wide: u32,
    /// Bytes of a row's values.
    pub value_bytes: u32,
    /// Bytes of a row's scales. `rows_copy`: 0 leaves scales out (and packed rows copied whole count as values). `rows_float`: 0
    /// takes `global_scale`.
    pub scale_bytes: u32,
    /// Rows that a warp takes at a time, 1..=[`ROWS_TILE`]. Many rows: what fills a warp's loads, see [`Launch::of_rows`]. Tile t goes to block
    /// `t % grid`.
    pub tile: u32,
    /// `rows_float` of a format with a global scale: that scale, not yet rounded.
    pub global_scale: f32,
    /// `rows_float`: 1 gives f16, 0 bf16.
    pub f16: u32,
}

const _: () = {
    assert!(size_of::<Column>() == 16);
    assert!(size_of::<Hash>() == 80);
    assert!(size_of::<Table>() == 40);
    assert!(size_of::<Rows>() == 120);
};

impl Column {
    /// The constants of a column of `size` ids from table row `offset` on.
    ///
    /// # Panics
    /// When `size` is 0.
    #[must_use]
    pub const fn new(size: u32, offset: u32) -> Self {
        Self { magic: u64::MAX / size as u64, size, offset }
    }
}

impl Rows {
    /// The `rows_copy` entry with the widest unit that these addresses allow.
    #[must_use]
    pub fn copy_entry(&self, tables: &[Table]) -> (&'static str, u32) {
        let mut bits = self.value_bits(tables);
        if self.scale_bytes > 0 {
            bits |= u64::from(self.scale_bytes);
            bits |= tables.iter().fold(0, |bits, t| bits | t.scales | t.scale_stride);
        }
        match bits.trailing_zeros() {
            4.. => ("rows_copy_16", 16),
            3 => ("rows_copy_8", 8),
            2 => ("rows_copy_4", 4),
            _ => ("rows_copy_1", 1),
        }
    }

    /// The `rows_mx` entry with the widest unit that these addresses allow.
    #[must_use]
    pub fn mx_entry(&self, tables: &[Table]) -> (&'static str, u32) {
        let scales = tables
            .iter()
            .fold(u64::from(self.scale_bytes) | self.out_scales, |bits, t| bits | t.scales | t.scale_stride);
        if self.value_bits(tables).trailing_zeros() >= 4 && scales.trailing_zeros() >= 2 {
            ("rows_mx_16", 16)
        } else {
            ("rows_mx_1", 1)
        }
    }

    /// The `rows_float` entry with the widest unit that these addresses allow.
    #[must_use]
    pub fn float_entry(&self, tables: &[Table]) -> (&'static str, u32) {
        let source = tables.iter().fold(u64::from(self.value_bytes), |bits, t| bits | t.values | t.value_stride);
        let out = self.out | self.out_token | self.out_layer | self.out_column;
        if source.trailing_zeros() >= 3 && out.trailing_zeros() >= 4 {
            ("rows_float_8", 8)
        } else {
            ("rows_float_1", 1)
        }
    }

    fn value_bits(&self, tables: &[Table]) -> u64 {
        let out = self.out | self.out_token | self.out_layer | self.out_column | u64::from(self.value_bytes);
        tables.iter().fold(out, |bits, t| bits | t.values | t.value_stride)
    }
}

/// How a row kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: u32,
    /// Threads a block.
    pub block: u32,
    /// For [`Rows::tile`].
    pub tile: u32,
}

impl Launch {
    /// For `rows` rows (at least 1) of `units` units each on at most `blocks` blocks: `ROWS_BLOCKS` a multiprocessor for the whole GPU, fewer in
    /// the background. Few rows spread over as many blocks as there are tiles.
    #[must_use]
    pub fn of_rows(rows: u32, units: u32, blocks: u32) -> Self {
        let blocks = blocks.max(1);
        let warps = blocks.saturating_mul(ROWS_THREADS / 32);
        let full = 32u32.div_ceil(units.max(1));
        let tile = rows.div_ceil(warps).clamp(full, ROWS_TILE);
        let tiles = rows.div_ceil(tile);
        let grid = tiles.min(blocks);
        Self { grid, block: tiles.div_ceil(grid).min(ROWS_THREADS / 32) * 32, tile }
    }
}
