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
    /// Rows may be pushed by lines, which takes room for them to land.
    pub(super) landing: bool,
    /// Kernels start early, where the device can do that.
    pub(super) early: bool,
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

/// Tokens of the largest slot that is pushed by lines, which take memory for all its rows.
const LINE_TOKENS: u32 = 8192;

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

        let line_tokens = if agreed.landing { config.capacity.min(LINE_TOKENS) } else { 0 };
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

#[cfg(test)]
mod tests {
    use engram_core::{HeadShards, RowShards};
    use engram_ple::TableFormat;
    use proptest::prelude::*;

    use super::*;
    use crate::exchange::Layer;

    fn config(kind: FormatKind, heads: bool, world: usize, columns: usize, capacity: u32, output: Output) -> Config {
        let scale = (kind == FormatKind::E4m3Global).then_some(0.5);
        let format = TableFormat::new(kind, 96, scale).unwrap();
        let ownership = match heads {
            true => Ownership::Heads(HeadShards::new(columns, world).unwrap()),
            false => Ownership::Rows(RowShards::new(1000, world).unwrap()),
        };
        Config::new(
            columns,
            vec![Layer { format: format.clone(), ownership }, Layer { format, ownership }],
            capacity,
            output,
        )
    }

    fn of(config: &Config, world: usize, agreed: Agreed) -> Layout {
        Layout::new(config, world, agreed).unwrap()
    }

    const AGREED: Agreed = Agreed { blocks: 132, marked: false, direct: true, lines: true, landing: true, early: true };

    #[test]
    fn rows_land_only_where_they_must() {
        let mx = config(FormatKind::E4m3E8m0x32, true, 2, 24, 256, Output::Mx);
        let bf16 = config(FormatKind::E4m3E8m0x32, true, 2, 24, 256, Output::Bf16);
        let packed = config(FormatKind::Bf16, true, 2, 24, 256, Output::Packed);
        let pushed = |config| {
            let layout = of(config, 2, AGREED);
            (layout.straight, layout.out - layout.pushed_rows)
        };
        // Of rows of 7 chunks, the one with the scales; all of them; none.
        assert_eq!(pushed(&mx), (true, 256 * 48 * 16));
        assert_eq!(pushed(&bf16), (false, 256 * 48 * 7 * 16));
        assert_eq!(pushed(&packed), (true, 0));
        // Through the host outputs are elsewhere, so that everything lands, and nothing by lines.
        let through_host = of(&mx, 2, Agreed { direct: false, lines: false, landing: false, ..AGREED });
        assert_eq!((through_host.straight, through_host.line_tokens), (false, 0));
        assert_eq!(through_host.out_scales, through_host.data_bytes);
        // Where nothing goes by lines, it has no room to, but all that went straight still does.
        let flags = of(&mx, 2, Agreed { landing: false, ..AGREED });
        assert_eq!((flags.straight, flags.line_tokens, flags.pushed_rows), (true, 0, flags.landing));
    }

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        let large = config(FormatKind::E4m3E8m0x32, true, 2, 24, (1 << 24) - 1, Output::Packed);
        assert!(Layout::new(&large, 2, AGREED).is_err());
        assert!(Layout::new(&Config { capacity: 1 << 20, ..large }, 2, AGREED).is_ok());
    }

    #[test]
    fn units_divide_all_numbers() {
        assert_eq!(unit([264, 256, 8]), 8);
        assert_eq!(unit([256, 4096]), 16);
        assert_eq!(unit([0]), 16);
        assert_eq!(unit([33, 64]), 1);
    }

    proptest! {
        /// Parts follow each other without overlap, each as large as what lies in it, and aligned.
        #[test]
        fn parts_are_apart(world in 1..9_usize, columns in 1..40_usize, capacity in 1..3000_u32, heads: bool, marked: bool, direct: bool, landing: bool) {
            let config = config(FormatKind::E4m3E8m0x32, heads, world, columns, capacity, Output::Mx);
            let layout = of(&config, world, Agreed { blocks: 7, marked, direct, lines: direct, landing: direct && landing, early: true });
            let (tokens, across) = (capacity as usize, 2 * columns);
            let row = layout.row;
            let own = if heads { columns.div_ceil(world) } else { columns };
            let landing = layout.line_tokens as usize * across * row.chunks * CHUNK * if marked { 2 } else { 1 };
            let sizes = [
                (layout.shared_ids, tokens * across * 4),
                (layout.shared_rows, world * tokens * 2 * own * (96 + 3)),
                (layout.lines, 2 * world * tokens * 2 * own.div_ceil(2) * 16),
                (layout.landing, landing),
                (layout.pushed_rows, tokens * across * CHUNK * if direct { 1 } else { row.chunks }),
                (layout.out, if direct { row.out_bytes } else { 0 }),
                (layout.out_scales, if direct { row.scales_bytes } else { 0 }),
            ];
            let ends = sizes.iter().map(|&(start, bytes)| start + bytes);
            let nexts = sizes.iter().skip(1).map(|&(start, _)| start).chain([layout.data_bytes]);
            for (end, next) in ends.zip(nexts) {
                prop_assert!(end <= next, "{sizes:?}");
            }
            prop_assert!(sizes.iter().all(|&(start, _)| start.is_multiple_of(ALIGN)));
            prop_assert!(layout.flags >= signal_bytes(world) && layout.signal_bytes == layout.flags + 2 * world * 7 * 8);
        }
    }
}
