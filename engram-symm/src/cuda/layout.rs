//! Where things lie in a rank's memory.

use engram_core::Ownership;
use engram_ple::{FormatKind, mx};

use super::kernels::{CHUNK, Form};
use crate::Result;
use crate::exchange::{Config, Output, invalid};
use crate::protocol::signal_bytes;

/// What ranks agree on before they allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    /// Most blocks of a kernel.
    pub(super) blocks: u32,
    /// Some table may have NaN in it, so that rows need marks.
    pub(super) marked: bool,
    /// Ranks map each other's device memory.
    pub(super) direct: bool,
    /// 16 bytes arrive as one.
    pub(super) lines: bool,
}

/// Bytes of rows on their way, and of rows that have arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowShape {
    pub(super) value_bytes: usize,
    pub(super) scale_bytes: usize,
    pub(super) value_chunks: usize,
    pub(super) chunks: usize,
    pub(super) form: Form,
    /// Bytes of a row in the output; with MX, of its values.
    pub(super) out_column: usize,
    pub(super) out_token: usize,
    pub(super) out_layer: usize,
    pub(super) out_bytes: usize,
    /// MX: scales, of a layer and in all.
    pub(super) scales_layer: usize,
    pub(super) scales_bytes: usize,
    pub(super) scale_tiles: usize,
}

impl RowShape {
    /// `None` for outputs that cannot be addressed. The config has been checked.
    fn new(config: &Config) -> Option<Self> {
        let format = &config.layers[0].format;
        let quantised = matches!(format.kind(), FormatKind::E4m3Global | FormatKind::E4m3E8m0x32);
        let (value_bytes, scale_bytes) = (format.value_bytes(), format.scale_bytes());
        let form = match config.output {
            Output::Mx => Form::Mx,
            Output::Bf16 if quantised => Form::Bf16,
            Output::F16 if quantised => Form::F16,
            _ => Form::Copy,
        };
        let (layers, columns, capacity) = (config.layers.len(), config.columns, usize::try_from(config.capacity).ok()?);
        let out_column = match form {
            Form::Copy => format.row_bytes(),
            Form::Mx => value_bytes,
            Form::Bf16 | Form::F16 => format.width() * 2,
        };
        let (token, layer) =
            (columns.checked_mul(out_column)?, capacity.checked_mul(columns)?.checked_mul(out_column)?);
        let (out_token, out_layer) = match config.output {
            Output::Packed => (layers.checked_mul(token)?, token),
            _ => (token, layer),
        };
        let elements = columns * format.width();
        let scales_layer = if form == Form::Mx { mx::layer_bytes(capacity, elements) } else { 0 };
        let value_chunks = value_bytes.div_ceil(CHUNK);
        Some(Self {
            value_bytes,
            scale_bytes,
            value_chunks,
            chunks: value_chunks + scale_bytes.div_ceil(CHUNK),
            form,
            out_column,
            out_token,
            out_layer,
            out_bytes: layer.checked_mul(layers)?,
            scales_layer,
            scales_bytes: scales_layer.checked_mul(layers)?,
            scale_tiles: if form == Form::Mx { elements.div_ceil(mx::GROUP * mx::TILE_GROUPS) } else { 0 },
        })
    }
}

/// Tokens of the largest slot that is pushed by lines: far more than pay.
const LINE_TOKENS: u32 = 1024;

/// Alignment of the parts, in bytes.
const ALIGN: usize = 256;

/// Offsets in a rank's signals and data, in bytes; alike on all ranks.
///
/// Signals: a control line, a line a rank, then the flags, u64 `[2][world][blocks]`.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) row: RowShape,
    /// Lines of a layer's ids, for the most columns that a rank owns.
    pub(super) pairs: usize,
    /// Largest slot that may be pushed by lines; 0 for none.
    pub(super) line_tokens: u32,
    /// Rows pushed by flags go straight into the output.
    pub(super) straight: bool,
    pub(super) flags: usize,
    pub(super) signal_bytes: usize,
    pub(super) shared_ids: usize,
    pub(super) shared_rows: usize,
    pub(super) lines: usize,
    pub(super) landing: usize,
    pub(super) pushed_rows: usize,
    /// The outputs, where ranks map each other's device memory.
    pub(super) out: usize,
    pub(super) out_scales: usize,
    pub(super) data_bytes: usize,
}

impl Layout {
    /// # Errors
    /// [`Error::Invalid`] for more rows than kernels can count, and buffers that cannot be addressed.
    pub(super) fn new(config: &Config, world: usize, agreed: Agreed) -> Result<Self> {
        let refused = || invalid("capacity", &config.capacity, "one of which rows and bytes can be counted");
        Self::sized(config, world, agreed).ok_or_else(refused)
    }

    fn sized(config: &Config, world: usize, agreed: Agreed) -> Option<Self> {
        let row = RowShape::new(config)?;
        let (layers, columns) = (config.layers.len(), config.columns);
        let capacity = usize::try_from(config.capacity).ok()?;
        let own_columns = match config.layers[0].ownership {
            Ownership::Heads(shards) => shards.per_rank(),
            Ownership::Rows(_) => columns,
        };
        let product = |factors: &[usize]| factors.iter().try_fold(1_usize, |all, &factor| all.checked_mul(factor));
        // Kernels count the chunks of a slot, and the rows of all requesters, in 31 bits.
        let padded = capacity.checked_next_multiple_of(mx::TILE_TOKENS)?;
        product(&[padded, layers, columns, row.chunks.max(world)]).filter(|&count| count < 1 << 31)?;

        let line_tokens = if agreed.lines { config.capacity.min(LINE_TOKENS) } else { 0 };
        let line_slots = usize::try_from(line_tokens).ok()?;
        let pairs = own_columns.div_ceil(2);
        let landing_chunks = if agreed.marked { 2 * row.chunks } else { row.chunks };
        let straight = agreed.direct && matches!(row.form, Form::Copy | Form::Mx);
        let row_bytes = row.value_bytes + row.scale_bytes;

        let mut end = 0_usize;
        let mut part = |bytes: Option<usize>| {
            let start = end.checked_next_multiple_of(ALIGN)?;
            end = start.checked_add(bytes?)?;
            Some(start)
        };
        let shared_ids = part(product(&[capacity, layers, columns, 4]))?;
        let shared_rows = part(product(&[world, capacity, layers, own_columns, row_bytes]))?;
        let lines = part(product(&[2, world, capacity, layers, pairs, 16]))?;
        let landing = part(product(&[line_slots, layers, columns, landing_chunks, CHUNK]))?;
        let pushed_chunks = match (straight, row.form) {
            (false, _) => row.chunks,
            (true, Form::Mx) => row.chunks - row.value_chunks,
            (true, _) => 0,
        };
        let pushed_rows = part(product(&[capacity, layers, columns, pushed_chunks, CHUNK]))?;
        let out = part(Some(if agreed.direct { row.out_bytes } else { 0 }))?;
        let out_scales = part(Some(if agreed.direct { row.scales_bytes } else { 0 }))?;
        let flags = signal_bytes(world).next_multiple_of(ALIGN);
        let blocks = usize::try_from(agreed.blocks).ok()?;
        Some(Self {
            row,
            pairs,
            line_tokens,
            straight,
            flags,
            signal_bytes: flags + 2 * world * blocks * 8,
            shared_ids,
            shared_rows,
            lines,
            landing,
            pushed_rows,
            out,
            out_scales,
            data_bytes: end.max(1),
        })
    }
}

/// The largest power of two, 16 at most, that divides all of `numbers`.
pub(super) fn unit(numbers: impl IntoIterator<Item = u64>) -> u32 {
    let bits = numbers.into_iter().fold(CHUNK as u64, |bits, number| bits | number);
    1 << bits.trailing_zeros()
}
