//! Launching the row kernels: from where rows are to where and how they are wanted.

use engram_ple::TableFormat;

use crate::device::Device;
use crate::error::Error;
use crate::ids::{IdsError, RowForm};
use crate::kernels::{self, Divisor, Rows};
use crate::stream::StreamRef;
use crate::view::Output;

/// Which rows a launch fetches: the ids, and the tables they count in.
pub(crate) struct Fetch<'a> {
    /// Address of the ids, and whether they have 64 bits.
    pub(crate) ids: (u64, bool),
    /// From a token's ids to the next token's, in ids.
    pub(crate) token_stride: usize,
    /// First column of the view, counted through all layers.
    pub(crate) first: usize,
    /// Columns that have one id in common.
    pub(crate) share: usize,
    /// Tokens that have ids.
    pub(crate) tokens: usize,
    /// Columns a layer.
    pub(crate) columns: usize,
    /// Address of the view's first [`kernels::Table`] in device memory.
    pub(crate) tables: u64,
    /// The same tables, for their alignment: one a layer.
    pub(crate) layers: &'a [kernels::Table],
}

/// What limits a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks(pub(crate) u32);

impl Blocks {
    /// As many blocks as run at a time on that many multiprocessors, all of the device's by default.
    pub(crate) fn on(device: &Device, multiprocessors: Option<u32>) -> Self {
        let count = multiprocessors.unwrap_or(u32::MAX).clamp(1, device.multiprocessors());
        Self(count * kernels::ROWS_BLOCKS)
    }
}

/// Refuses what [`enqueue`] would refuse.
pub(crate) fn check(format: &TableFormat, fetch: &Fetch<'_>, out: &Output<'_>) -> Result<(), Error> {
    let slot = out.slot(fetch.tokens);
    check_output(format, fetch, out, slot)?;
    written(fetch, out, slot).map(|_| ())
}

/// Tokens that are written, padding included; refused where their rows are too many.
fn written(fetch: &Fetch<'_>, out: &Output<'_>, slot: usize) -> Result<u32, Error> {
    let tokens = if out.form == RowForm::Mx { slot.next_multiple_of(128) } else { slot };
    let rows = (tokens as u64).saturating_mul((fetch.layers.len() * fetch.columns) as u64);
    u32::try_from(tokens).ok().filter(|_| rows <= 1 << 31).ok_or_else(|| IdsError::TooMany { rows }.into())
}

/// Refuses outputs that cannot hold the rows, and gives the tokens that one layer has room for.
fn check_output(format: &TableFormat, fetch: &Fetch<'_>, out: &Output<'_>, slot: usize) -> Result<usize, Error> {
    out.form.check(format)?;
    let (layers, columns) = (fetch.layers.len(), fetch.columns);
    let end = out.skip + slot;
    let capacity = if out.form == RowForm::Packed { end } else { out.capacity };
    if end > capacity {
        return Err(Error::Capacity { what: "tokens are written", found: end, capacity });
    }
    let (rows, scales) = out.form.bytes(format, layers, columns, capacity);
    if rows > out.rows.bytes() {
        return Err(Error::TooSmall { what: "the output", found: out.rows.bytes(), needed: rows });
    }
    if let Some(memory) = out.scales.filter(|memory| memory.bytes() < scales) {
        return Err(Error::TooSmall { what: "the output of MX scales", found: memory.bytes(), needed: scales });
    }
    let element = match out.form {
        RowForm::Dense(output) => output.bytes() as u64,
        RowForm::Packed | RowForm::Mx => 1,
    };
    if !out.rows.address().is_multiple_of(element) {
        let why = format!("address {:#x} is not a multiple of its elements' {element} bytes", out.rows.address());
        return Err(Error::Invalid { what: "the output", why });
    }
    Ok(capacity)
}

/// Enqueues one lookup.
///
/// # Safety
/// The ids and the tables' memory are what `fetch` says until the work is done.
pub(crate) unsafe fn enqueue(
    device: &Device,
    format: &TableFormat,
    fetch: &Fetch<'_>,
    out: &Output<'_>,
    blocks: Blocks,
    stream: StreamRef<'_>,
) -> Result<(), Error> {
    let slot = out.slot(fetch.tokens);
    let capacity = check_output(format, fetch, out, slot)?;
    let (layers, columns) = (fetch.layers.len(), fetch.columns);
    let written = written(fetch, out, slot)?;
    if written == 0 {
        return Ok(());
    }

    // Packed rows in one piece are copied as one.
    let (value_bytes, scale_bytes) = (format.value_bytes(), format.scale_bytes());
    let in_one_piece = fetch
        .layers
        .iter()
        .all(|t| t.rows == 0 || (t.scales == t.values + value_bytes as u64 && t.value_stride == t.scale_stride));
    let (value_bytes, scale_bytes) = match out.form {
        RowForm::Packed if in_one_piece => (value_bytes + scale_bytes, 0),
        _ => (value_bytes, scale_bytes),
    };
    let (out_token, out_layer, out_column) = match out.form {
        RowForm::Packed => {
            let row = format.row_bytes();
            (layers * columns * row, columns * row, row)
        }
        RowForm::Dense(output) => {
            let row = format.width() * output.bytes();
            (columns * row, capacity * columns * row, row)
        }
        RowForm::Mx => (columns * value_bytes, capacity * columns * value_bytes, value_bytes),
    };
    // A whole number of tiles of 128 tokens.
    let skipped_scales = out.form.scale_stride(format, columns, out.skip);
    // Everything below is bounded by the 2^31 rows of a call and the 2^20 elements of a row.
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let mut param = Rows {
        ids: fetch.ids.0,
        token_stride: i64::try_from(fetch.token_stride).unwrap_or(i64::MAX),
        tables: fetch.tables,
        out: out.rows.address() + (out.skip * out_token) as u64,
        out_token: out_token as u64,
        out_layer: out_layer as u64,
        out_column: out_column as u64,
        tokens: narrow(fetch.tokens),
        slot: narrow(slot),
        first: narrow(fetch.first),
        layers: narrow(layers),
        columns: narrow(columns),
        share: narrow(fetch.share),
        wide: u16::from(fetch.ids.1),
        f16: u16::from(out.form == RowForm::Dense(engram_ple::OutputType::F16)),
        value_bytes: narrow(value_bytes),
        scale_bytes: narrow(scale_bytes),
        units: 0,
        tile: 0,
        global_scale: format.global_scale().unwrap_or(0.0),
        out_scales: out.scales.map_or(0, |scales| scales.address() + skipped_scales),
        out_scales_layer: out.form.scale_stride(format, columns, capacity),
        by_across: Divisor::default(),
        by_columns: Divisor::default(),
        by_share: Divisor::default(),
        by_units: Divisor::default(),
    };
    let entry = match out.form {
        RowForm::Packed => param.copy_entry(fetch.layers),
        RowForm::Dense(_) if format.kind().unquantized().is_some() => param.copy_entry(fetch.layers),
        RowForm::Dense(_) => param.float_entry(fetch.layers),
        RowForm::Mx => param.mx_entry(fetch.layers),
    };
    let launch = param.plan(entry, written, blocks.0);
    let _bound = device.bind()?;
    // SAFETY: every row entry takes `Rows`; its addresses are the caller's promise, the output was checked against its size, and the entry
    // was chosen for the alignment that they have.
    unsafe { device.kernels().launch(launch.entry, launch.grid, launch.block, stream.handle(), &param) }?;
    Ok(())
}
