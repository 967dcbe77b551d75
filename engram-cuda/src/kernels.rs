//! The kernels: what is embedded, and what every entry takes.
//!
//! Each entry takes one parameter, a struct by value ([`struct@Hash`], [`Rows`] or [`Stage`]); `kernels/*.cu` holds the same structs and asserts the
//! same sizes. Pointers are device addresses; those marked *pinned allowed* may be device addresses of pinned or registered host
//! memory. Nothing is launched for no tokens: a grid of 0 is a driver error. No entry uses dynamic shared memory, local memory of
//! note, or a second kernel, and all may be captured into a graph.
//!
//! | module | entry | parameter | grid | block | does |
//! |---|---|---|---|---|---|
//! | [`HASH`] | `hash_engram`, `hash_ple` | [`struct@Hash`] | ceil([`len`](Hash::len) / 16), [`layers`](Hash::layers), 1 | [`HASH_THREADS`] | ids (and mixes) of a ragged batch |
//! | [`ROWS`] | `rows_copy_U`, U = 16, 8, 4, 1 | [`Rows`] | any number | a multiple of 32 up to [`ROWS_THREADS`] | rows as they are: packed bytes, or rows of an unquantised format |
//! | [`ROWS`] | `rows_mx_U`, U = 8, 1 | [`Rows`] | any number | same | E4M3 values as they are, E8M0 scales in MX order with their padding |
//! | [`FLOATS`] | `rows_float_U`, U = 8, 1 | [`Rows`] | any number | same | E4M3 rows of both kinds to bf16 or f16 |
//! | [`ROWS`], [`FLOATS`] | `few_copy_U`, U = 16, 8, `few_float_8` | [`Rows`] | `slot`, `layers`, ceil(`columns` / c) | `units`, c, 1 | as `rows_copy_U` and `rows_float_8` |
//! | [`STAGE`] | `stage` | [`Stage`] | any number, the same for one [`Stage::state`] | [`STAGE_THREADS`] | rows that host threads are gathering, into device memory |
//!
//! [`Rows::plan`] chooses between `few_` and `rows_`, grid and block.
//! U is the unit in bytes that an entry reads at a time. Its requirements are given at [`Rows`]; entries of unit 1 have none.

use engram_core::Reciprocal;

/// PTX of one translation unit: for every GPU from compute capability 8.0 on, and where it pays again for 9.0 on.
#[derive(Debug, Clone, Copy)]
pub struct Ptx {
    /// Its kernels, all of them.
    pub entries: &'static [&'static str],
    sm_80: &'static str,
    sm_90: Option<&'static str>,
    early: bool,
}

impl Ptx {
    /// PTX texts with these entries: one for every GPU, and where it pays another for GPUs of compute capability 9.0 and above.
    ///
    /// # Panics
    /// When a text does not end with a NUL. In a constant that is an error of the build.
    #[must_use]
    pub const fn new(entries: &'static [&'static str], sm_80: &'static str, sm_90: Option<&'static str>) -> Self {
        assert!(matches!(sm_80.as_bytes(), [.., 0]), "the text ends with a NUL");
        if let Some(text) = sm_90 {
            assert!(matches!(text.as_bytes(), [.., 0]), "the text ends with a NUL");
        }
        Self { entries, sm_80, sm_90, early: false }
    }

    /// Has the kernels of the text for 9.0 start early: they may be on the device before the kernel ahead of them in their stream is done, as soon
    /// as all blocks of that one have allowed it (`griddepcontrol.launch_dependents`) or have ended. Each of them has to execute
    /// `griddepcontrol.wait`, in all threads, before it touches what kernels before it read or write, and in any case before it ends: from there on
    /// the kernel ahead is done and what it did is seen, and so it is with all before that one, if they keep to this as well.
    ///
    /// # Panics
    /// When there is no text for 9.0.
    #[must_use]
    pub const fn starting_early(mut self) -> Self {
        assert!(self.sm_90.is_some(), "kernels that start early need compute capability 9.0");
        self.early = true;
        self
    }

    /// Whether they do on a GPU of this compute capability.
    #[must_use]
    pub fn starts_early(&self, major: i32) -> bool {
        self.early && major >= 9
    }

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

/// The hash kernels.
pub const HASH: Ptx = Ptx::new(&["hash_engram", "hash_ple"], ptx!("hash.compute_80.ptx"), None);
/// The row kernels that keep bytes as they are.
pub const ROWS: Ptx = Ptx::new(
    &[
        "rows_copy_16",
        "rows_copy_8",
        "rows_copy_4",
        "rows_copy_1",
        "few_copy_16",
        "few_copy_8",
        "rows_mx_8",
        "rows_mx_1",
    ],
    ptx!("rows.compute_80.ptx"),
    None,
);
/// The row kernels that decode.
pub const FLOATS: Ptx = Ptx::new(
    &["rows_float_8", "rows_float_1", "few_float_8"],
    ptx!("floats.compute_80.ptx"),
    Some(ptx!("floats.compute_90.ptx")),
);

/// The kernel that takes rows over while threads of the host gather them.
pub const STAGE: Ptx = Ptx::new(&["stage"], ptx!("stage.compute_80.ptx"), None);

/// Threads a block of the stage kernel, no other number.
pub const STAGE_THREADS: u32 = 256;
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
/// [`Rows::tile`] where warps take several.
const SMALL_TILE: u32 = 8;

/// What a hash kernel needs to know of a column: its modulus as a [`Reciprocal`], and its place in the table.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// The multiplier of the size's [`Reciprocal`]; its shift follows from the size.
    pub multiplier: u64,
    /// The column's modulus, `0 < size < 2^31`.
    pub size: u32,
    /// The table row of remainder 0; `offset + size <= 2^31`.
    pub offset: u32,
}

/// Parameter of `hash_engram` and `hash_ple`. Inputs are those of [`engram_core::Batch`], on the device.
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
    /// Output, i64 `[len][layers][order - 1]`, -1 for tokens past the last boundary; null for none.
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
    /// `requests / len`. Set by [`Hash::plan`], as all below is.
    pub per_token: f32,
    /// Columns that a block takes side by side: all, or as many as it has threads.
    pub across: u32,
    /// Divides by `across`.
    pub by_across: Divisor,
    /// Divides by `heads`.
    pub by_heads: Divisor,
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
/// multiples of U; `rows_copy_U` with `scale_bytes > 0`: `scales`, `scale_stride` and `scale_bytes` too; `rows_mx_8`: `scales`,
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
    pub wide: u16,
    /// `rows_float`: 1 gives f16, 0 bf16.
    pub f16: u16,
    /// Bytes of a row's values.
    pub value_bytes: u32,
    /// Bytes of a row's scales. `rows_copy`: 0 leaves scales out (and packed rows copied whole count as values). `rows_float`: 0
    /// takes `global_scale`.
    pub scale_bytes: u32,
    /// Units a row has. Set by [`Rows::plan`], as `tile` and the divisors are.
    pub units: u32,
    /// Rows that a warp takes at a time, 1..=[`ROWS_TILE`].
    pub tile: u32,
    /// `rows_float` of a format with a global scale: that scale, not yet rounded.
    pub global_scale: f32,
    /// `rows_mx`: scales, a layer after the other; else not used.
    pub out_scales: u64,
    /// `rows_mx`: bytes from a layer's scales to the next layer's, at least `ceil(slot / 128) * ceil(columns * scale_bytes / 4) * 512`.
    pub out_scales_layer: u64,
    /// Divides by `layers * columns`.
    pub by_across: Divisor,
    /// Divides by `columns`.
    pub by_columns: Divisor,
    /// Divides by `share`.
    pub by_share: Divisor,
    /// Divides by `units`.
    pub by_units: Divisor,
}

/// Parameter of `stage`: memory cut into chunks, which threads of the host fill and publish one by one, and blocks copy.
///
/// The chunks of a run are the first [`slot_chunks`](Self::slot_chunks), then, of each area, the first [`used_chunks`](Self::used_chunks) of
/// [`area_chunks`](Self::area_chunks). All of them have to be published in every run, as `run << 32 | bytes`; runs count from 1. A run that is not
/// published in time takes nothing and sets every slot to -1.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Stage {
    /// u64 `[chunks]`, pinned.
    pub ready: u64,
    /// Chunks to copy from, pinned, 16-byte aligned.
    pub from: u64,
    /// Chunks to copy to, 16-byte aligned.
    pub to: u64,
    /// u32 `[4]` in device memory, zero before the first run: runs finished, and two words of the kernel's own.
    pub state: u64,
    /// u32 `[2]`, pinned: runs finished, and the last run that expired.
    pub status: u64,
    /// i32 `[slot_count]`, inside `to`.
    pub slots: u64,
    /// How long a run may take, in nanoseconds.
    pub deadline_ns: u64,
    /// Slots.
    pub slot_count: u32,
    /// Bytes from chunk to chunk, a multiple of 16.
    pub chunk_bytes: u32,
    /// Chunks before the first area's.
    pub slot_chunks: u32,
    /// Areas.
    pub areas: u32,
    /// Chunks from area to area.
    pub area_chunks: u32,
    /// Chunks of each area that this run uses.
    pub used_chunks: u32,
}

const _: () = {
    assert!(size_of::<Stage>() == 80);
    assert!(size_of::<Column>() == 16);
    assert!(size_of::<Hash>() == 104);
    assert!(size_of::<Divisor>() == 8);
    assert!(size_of::<Table>() == 40);
    assert!(size_of::<Rows>() == 152);
};

impl Column {
    /// The constants of a column whose ids begin at table row `offset`.
    #[must_use]
    pub const fn new(size: Reciprocal, offset: u32) -> Self {
        Self { multiplier: size.multiplier(), size: size.divisor(), offset }
    }
}

/// Divides numbers up to 2^31 by a multiplication: `(n * magic) >> shift`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Divisor {
    magic: u32,
    shift: u32,
}

impl Divisor {
    /// For `1 <= divisor <= 2^31`; 0 is taken as 1.
    ///
    /// With `2^(s - 1) < divisor <= 2^s` and `magic = ceil(2^(31 + s) / divisor)`, the product is too large by less than `n * divisor <= 2^(31 + s)`
    /// in units of `1 / divisor`, which never reaches the next quotient.
    #[must_use]
    pub const fn new(divisor: u32) -> Self {
        let divisor = if divisor == 0 { 1 } else { divisor };
        let shift = 31 + (u32::BITS - (divisor - 1).leading_zeros());
        #[expect(clippy::cast_possible_truncation, reason = "2^(31 + s) / divisor is below 2^32")]
        let magic = (1_u64 << shift).div_ceil(divisor as u64) as u32;
        Self { magic, shift }
    }
}

impl Hash {
    /// Sets `per_token`, `across` and the divisors, and gives the grid and the block.
    #[must_use]
    pub fn plan(&mut self) -> ([u32; 3], [u32; 3]) {
        #[expect(clippy::cast_precision_loss, reason = "it is where a search begins")]
        let per_token = self.requests as f32 / self.len.max(1) as f32;
        self.per_token = per_token;
        self.across = ((self.order - 1) * self.heads).min(HASH_THREADS);
        self.by_across = Divisor::new(self.across);
        self.by_heads = Divisor::new(self.heads);
        ([self.len.div_ceil(HASH_TOKENS), self.layers, 1], [HASH_THREADS, 1, 1])
    }
}

/// A row kernel: the one with the widest unit that the addresses allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// For any number of rows.
    pub name: &'static str,
    /// For few rows, where there is one: a thread a unit, an id a column, and no scales apart from the values where bytes are kept.
    pub few: Option<&'static str>,
    /// Units a row has.
    pub units: u32,
}

impl Rows {
    /// The entry that keeps bytes as they are.
    #[must_use]
    pub fn copy_entry(&self, tables: &[Table]) -> Entry {
        let mut bits = self.value_bits(tables);
        if self.scale_bytes > 0 {
            bits |= u64::from(self.scale_bytes);
            bits |= tables.iter().fold(0, |bits, t| bits | t.scales | t.scale_stride);
        }
        let (name, few, unit) = match bits.trailing_zeros() {
            4.. => ("rows_copy_16", Some("few_copy_16"), 16),
            3 => ("rows_copy_8", Some("few_copy_8"), 8),
            2 => ("rows_copy_4", None, 4),
            _ => ("rows_copy_1", None, 1),
        };
        Entry { name, few: few.filter(|_| self.scale_bytes == 0), units: (self.value_bytes + self.scale_bytes) / unit }
    }

    /// The entry that puts scales into MX order.
    #[must_use]
    pub fn mx_entry(&self, tables: &[Table]) -> Entry {
        let own = u64::from(self.scale_bytes) | self.out_scales | self.out_scales_layer;
        let scales = tables.iter().fold(own, |bits, t| bits | t.scales | t.scale_stride);
        if self.value_bits(tables).trailing_zeros() >= 3 && scales.trailing_zeros() >= 2 {
            Entry { name: "rows_mx_8", few: None, units: self.value_bytes / 8 }
        } else {
            Entry { name: "rows_mx_1", few: None, units: self.value_bytes }
        }
    }

    /// The entry that decodes to bf16 or f16.
    #[must_use]
    pub fn float_entry(&self, tables: &[Table]) -> Entry {
        let source = tables.iter().fold(u64::from(self.value_bytes), |bits, t| bits | t.values | t.value_stride);
        let out = self.out | self.out_token | self.out_layer | self.out_column;
        if source.trailing_zeros() >= 3 && out.trailing_zeros() >= 4 {
            Entry { name: "rows_float_8", few: Some("few_float_8"), units: self.value_bytes / 8 }
        } else {
            Entry { name: "rows_float_1", few: None, units: self.value_bytes }
        }
    }

    fn value_bits(&self, tables: &[Table]) -> u64 {
        let out = self.out | self.out_token | self.out_layer | self.out_column | u64::from(self.value_bytes);
        tables.iter().fold(out, |bits, t| bits | t.values | t.value_stride)
    }

    /// Sets `units`, `tile` and the divisors, for `written` tokens (at least 1: `slot`, or for MX that rounded up to a multiple of 128) on as
    /// much of the GPU as `blocks` blocks of [`ROWS_THREADS`] take: [`ROWS_BLOCKS`] a multiprocessor for all of it, fewer in the background.
    ///
    /// Few rows are a thread a unit, since their time is that of one access. Many rows fill the loads of warps that stay.
    #[must_use]
    pub fn plan(&mut self, entry: Entry, written: u32, blocks: u32) -> Launch {
        let (written, blocks, units) = (written.max(1), blocks.max(1), entry.units.max(1));
        let rows = written.saturating_mul(self.layers * self.columns);
        self.units = units;
        self.by_across = Divisor::new(self.layers * self.columns);
        self.by_columns = Divisor::new(self.columns);
        self.by_share = Divisor::new(self.share);
        self.by_units = Divisor::new(units);

        let fits = u64::from(rows) * u64::from(units) <= u64::from(blocks) * u64::from(ROWS_THREADS);
        if let Some(few) = entry.few.filter(|_| fits && self.share == 1 && units <= ROWS_THREADS) {
            self.tile = 1;
            let columns = (ROWS_THREADS / units).min(self.columns);
            let grid = [written, self.layers, self.columns.div_ceil(columns)];
            return Launch { entry: few, grid, block: [units, columns, 1] };
        }
        let warps = blocks.saturating_mul(ROWS_THREADS / 32);
        // All at once where a tile each is enough; else small tiles, which leave no warp with much more to do than another.
        let tile = rows.div_ceil(warps);
        let tile = if tile > ROWS_TILE { SMALL_TILE } else { tile };
        self.tile = tile.clamp(32_u32.div_ceil(units), ROWS_TILE);
        let tiles = rows.div_ceil(self.tile);
        // Tiles go round the blocks, so that each multiprocessor has its share.
        let grid = tiles.min(blocks);
        let block = tiles.div_ceil(grid).min(ROWS_THREADS / 32) * 32;
        Launch { entry: entry.name, grid: [grid, 1, 1], block: [block, 1, 1] }
    }
}

/// How a row kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name.
    pub entry: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub block: [u32; 3],
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn divide(n: u32, divisor: Divisor) -> u32 {
        u32::try_from((u64::from(n) * u64::from(divisor.magic)) >> divisor.shift).unwrap()
    }

    #[test]
    fn kernels_start_early_where_they_are_made_for_it() {
        const EARLY: Ptx = FLOATS.starting_early();
        assert_eq!([8, 9, 10].map(|major| EARLY.starts_early(major)), [false, true, true]);
        assert_eq!([8, 9, 10].map(|major| FLOATS.starts_early(major)), [false; 3]);
    }

    #[test]
    fn the_embedded_text_has_the_entries_that_are_named() {
        for ptx in [HASH, ROWS, FLOATS, STAGE] {
            for major in [8, 9] {
                let found: Vec<&str> =
                    ptx.text(major).split(".entry ").skip(1).filter_map(|s| s.split('(').next()).collect();
                let mut named = ptx.entries.to_vec();
                named.sort_unstable();
                assert_eq!(
                    {
                        let mut found = found;
                        found.sort_unstable();
                        found
                    },
                    named
                );
                assert!(ptx.text(major).contains(".version 8.4"));
            }
        }
    }

    #[test]
    fn divisors_are_exact_at_the_edges() {
        let powers = (0..=31).flat_map(|power| [(1_u32 << power) - 1, 1 << power, (1 << power) + 1]);
        for divisor in powers.chain([24, 48, 33, 16, 20, (1 << 31) - 19]).filter(|d| (1..=1 << 31).contains(d)) {
            let last = (1 << 31) / divisor * divisor;
            for n in [0, 1, divisor - 1, divisor, last - 1, last, (1 << 31) - 1, 1 << 31] {
                assert_eq!(divide(n, Divisor::new(divisor)), n / divisor, "{n} / {divisor}");
            }
        }
    }

    fn rows(value_bytes: u32, scale_bytes: u32) -> Rows {
        let row = u64::from(value_bytes + scale_bytes);
        Rows {
            ids: 0x1000,
            token_stride: 24,
            tables: 0x2000,
            out: 0x10000,
            out_token: 24 * row,
            out_layer: 24 * row,
            out_column: row,
            tokens: 3,
            slot: 3,
            first: 0,
            layers: 1,
            columns: 24,
            share: 1,
            wide: 0,
            f16: 0,
            value_bytes,
            scale_bytes,
            units: 0,
            tile: 0,
            global_scale: 0.0,
            out_scales: 0,
            out_scales_layer: 0,
            by_across: Divisor::default(),
            by_columns: Divisor::default(),
            by_share: Divisor::default(),
            by_units: Divisor::default(),
        }
    }

    fn table(values: u64, scales: u64, value_stride: u64, scale_stride: u64) -> Table {
        Table { values, scales, value_stride, scale_stride, first: 0, rows: 9 }
    }

    /// The widest unit that divides every address and stride is taken, and one odd table of several decides.
    #[test]
    fn entries_follow_the_least_alignment() {
        let named = |entry: Entry| (entry.name, entry.units);
        let split = table(0x100, 0x8000, 256, 8);
        let copy = |rows: Rows, tables: &[Table]| named(rows.copy_entry(tables));
        assert_eq!(copy(rows(256, 0), &[split]), ("rows_copy_16", 16));
        assert_eq!(copy(rows(256, 8), &[split]), ("rows_copy_8", 33));
        assert_eq!(copy(rows(264, 0), &[table(0x100, 0x200, 264, 264)]), ("rows_copy_8", 33));
        assert_eq!(copy(rows(256, 0), &[split, table(0x104, 0, 256, 0)]), ("rows_copy_4", 64));
        assert_eq!(copy(rows(256, 0), &[split, table(0x101, 0, 256, 0)]), ("rows_copy_1", 256));
        assert_eq!(copy(rows(33, 0), &[table(0x100, 0, 33, 0)]), ("rows_copy_1", 33));

        let mut floats = rows(256, 8);
        (floats.out_token, floats.out_layer, floats.out_column) = (24 * 512, 24 * 512, 512);
        assert_eq!(named(floats.float_entry(&[table(0x100, 0x101, 264, 264)])), ("rows_float_8", 32));
        assert_eq!(named(floats.float_entry(&[table(0x104, 0x101, 264, 264)])), ("rows_float_1", 256));
        floats.out = 0x10008;
        assert_eq!(named(floats.float_entry(&[table(0x100, 0x101, 264, 264)])), ("rows_float_1", 256));

        let mut mx = rows(256, 8);
        (mx.out_token, mx.out_layer, mx.out_column) = (24 * 256, 24 * 256, 256);
        assert_eq!(named(mx.mx_entry(&[split])), ("rows_mx_8", 32));
        assert_eq!(named(mx.mx_entry(&[table(0x100, 0x200, 264, 264)])), ("rows_mx_8", 32));
        assert_eq!(named(mx.mx_entry(&[table(0x100, 0x8002, 256, 8)])), ("rows_mx_1", 256));
    }

    #[test]
    fn few_rows_are_a_thread_a_unit() {
        let mut rows = rows(256, 0);
        let entry = rows.copy_entry(&[table(0x100, 0, 256, 0)]);
        let few = Launch { entry: "few_copy_16", grid: [3, 1, 2], block: [16, 16, 1] };
        assert_eq!(rows.plan(entry, 3, 132 * ROWS_BLOCKS), few);
        // What does not fit the blocks that it may have goes round them.
        assert_eq!(rows.plan(entry, 3, 4), Launch { entry: "rows_copy_16", grid: [4, 1, 1], block: [192, 1, 1] });
        assert_eq!(rows.tile, 3);
    }

    proptest! {
        #[test]
        fn divisors_are_exact(n in 0..=1_u32 << 31, divisor in 1..=1_u32 << 31, bits in 0..31_u32) {
            let divisor: u32 = (divisor >> bits).max(1);
            prop_assert_eq!(divide(n, Divisor::new(divisor)), n / divisor);
        }

        /// All rows have a thread or a turn, and limits hold.
        #[test]
        fn plans_cover_the_rows(written in 1..=1_u32 << 31, columns in 1..=1024_u32, units in 1..2000_u32, blocks in 1..2000_u32, few: bool) {
            let written = (written / columns).max(1);
            let mut rows = rows(256, 0);
            rows.columns = columns;
            let entry = Entry { name: "rows", few: few.then_some("few"), units };
            let Launch { entry, grid, block } = rows.plan(entry, written, blocks);
            let threads: u32 = block.iter().product();
            prop_assert!((1..=ROWS_THREADS).contains(&threads));
            if entry == "few" {
                prop_assert_eq!((grid[0], grid[1], block[0]), (written, 1, units));
                prop_assert!(grid[2] * block[1] >= columns && grid[2] <= 65_535);
                return Ok(());
            }
            prop_assert!((1..=ROWS_TILE).contains(&rows.tile));
            prop_assert!((1..=blocks).contains(&grid[0]) && grid[1..] == [1, 1] && threads.is_multiple_of(32));
            let warps = grid[0] * threads / 32;
            let tiles = (written * columns).div_ceil(rows.tile);
            prop_assert!(warps >= tiles || warps == blocks * (ROWS_THREADS / 32));
            prop_assert!(u64::from(warps) * u64::from(rows.tile) <= 1 << 31);
        }
    }
}
