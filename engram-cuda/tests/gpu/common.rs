//! Devices, tables and the slow obvious reference.

use std::sync::OnceLock;

use engram_cuda::{
    Device, DeviceBuffer, DeviceView, Error, IdShape, IdType, Ids, Lookup, LookupOptions, Output, Placement, RowForm,
    Stream, StreamRef, Table,
};
use engram_ple::{FormatKind, OutputType, SynthSource, TableFormat, TableSource, mx};

pub(crate) fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::new(0).expect("these tests need a CUDA device"))
}

pub(crate) const FORMATS: [(FormatKind, Option<f32>); 5] = [
    (FormatKind::Bf16, None),
    (FormatKind::F16, None),
    (FormatKind::F32, None),
    (FormatKind::E4m3Global, Some(0.000_199)),
    (FormatKind::E4m3E8m0x32, None),
];

pub(crate) fn format(kind: FormatKind, width: usize) -> TableFormat {
    let scale = FORMATS.iter().find(|(other, _)| *other == kind).and_then(|(_, scale)| *scale);
    TableFormat::new(kind, width, scale).unwrap()
}

/// A random number generator (SplitMix64): seeded, so that failures repeat.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Ids of which some are -1, some outside the table, and the first and last row occur.
    pub(crate) fn ids(&mut self, count: usize, rows: u64) -> Vec<i32> {
        (0..count)
            .map(|_| match self.below(16) {
                0 => -1,
                1 => i32::try_from(rows).unwrap(),
                2 => i32::MAX,
                3 => 0,
                4 => i32::try_from(rows - 1).unwrap(),
                _ => i32::try_from(self.below(rows)).unwrap(),
            })
            .collect()
    }
}

/// Keeps a stream busy for a few milliseconds, so that work which fails to wait for it runs too early.
pub(crate) fn delay(stream: StreamRef<'_>) {
    for byte in 0..6 {
        scratch().fill(byte, stream).unwrap();
    }
}

/// What [`delay`] fills; to be called once before a capture that delays.
pub(crate) fn scratch() -> &'static DeviceBuffer {
    static SCRATCH: OnceLock<DeviceBuffer> = OnceLock::new();
    SCRATCH.get_or_init(|| DeviceBuffer::new(device(), 2 << 30).unwrap())
}

/// The forms that a format can be had in.
pub(crate) fn forms(kind: FormatKind) -> Vec<RowForm> {
    match kind.unquantized() {
        Some(stored) => vec![RowForm::Packed, RowForm::Dense(stored)],
        None => {
            let mut forms =
                vec![RowForm::Packed, RowForm::Dense(OutputType::Bf16), RowForm::Dense(OutputType::F16), RowForm::Mx];
            forms.truncate(if kind == FormatKind::E4m3E8m0x32 { 4 } else { 3 });
            forms
        }
    }
}

/// What a lookup has to write, by the definitions: rows, and MX scales.
pub(crate) struct Expected {
    pub(crate) rows: Vec<u8>,
    pub(crate) scales: Vec<u8>,
}

/// `ids` is `[tokens][layers][columns]`, one source and range of owned rows a layer. Bytes that a lookup must leave alone are `poison`.
pub(crate) fn reference(
    layers: &[(&dyn TableSource, std::ops::Range<u64>)],
    ids: &[i32],
    columns: usize,
    form: RowForm,
    (capacity, slot): (usize, usize),
    poison: u8,
) -> Expected {
    let format = layers[0].0.format();
    let tokens = ids.len() / (layers.len() * columns);
    let capacity = if form == RowForm::Packed { slot } else { capacity };
    let element = match form {
        RowForm::Packed => format.row_bytes(),
        RowForm::Dense(output) => format.width() * output.bytes(),
        _ => format.value_bytes(),
    };
    let scale_layer = if form == RowForm::Mx { mx::layer_bytes(capacity, columns * format.width()) } else { 0 };
    let mut rows = vec![poison; layers.len() * capacity * columns * element];
    let mut scales = vec![poison; layers.len() * scale_layer];
    for (layer, (source, owned)) in layers.iter().enumerate() {
        if form == RowForm::Mx {
            // Zeros as far as tiles of written tokens reach.
            let written = mx::layer_bytes(slot, columns * format.width());
            scales[layer * scale_layer..][..written].fill(0);
        }
        for token in 0..slot {
            for column in 0..columns {
                let mut row = vec![0; format.row_bytes()];
                if token < tokens {
                    let id = i64::from(ids[(token * layers.len() + layer) * columns + column]);
                    if let Ok(id) = u64::try_from(id)
                        && owned.contains(&id)
                    {
                        source.read_range(id..id + 1, &mut row).unwrap();
                    }
                }
                let at = match form {
                    RowForm::Packed => (token * layers.len() + layer) * columns + column,
                    _ => (layer * capacity + token) * columns + column,
                };
                let out = &mut rows[at * element..(at + 1) * element];
                match form {
                    RowForm::Packed => out.copy_from_slice(&row),
                    RowForm::Mx => {
                        let (values, codes) = row.split_at(format.value_bytes());
                        out.copy_from_slice(values);
                        let layout = mx::ScaleLayout::new(format, columns).unwrap();
                        layout.write_row(&mut scales[layer * scale_layer..][..scale_layer], token, column, codes);
                    }
                    RowForm::Dense(output) => out.copy_from_slice(&decode(format, &row, output)),
                    _ => unreachable!(),
                }
            }
        }
    }
    Expected { rows, scales }
}

pub(crate) fn decode(format: &TableFormat, row: &[u8], output: OutputType) -> Vec<u8> {
    match output {
        OutputType::Bf16 => {
            let mut out = vec![half::bf16::ZERO; format.width()];
            format.decode_bf16(row, &mut out);
            out.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
        }
        OutputType::F16 => {
            let mut out = vec![half::f16::ZERO; format.width()];
            format.decode_f16(row, &mut out);
            out.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
        }
        _ => {
            let mut out = vec![0f32; format.width()];
            format.decode_f32(row, &mut out);
            out.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
        }
    }
}

/// Tables of one layer each, and the lookup over them.
pub(crate) struct Bench {
    pub(crate) sources: Vec<SynthSource>,
    pub(crate) lookup: Lookup,
    pub(crate) columns: usize,
}

pub(crate) fn bench(format: &TableFormat, rows: u64, layers: usize, columns: usize, placement: Placement) -> Bench {
    bench_with(format, rows, layers, columns, placement, &LookupOptions::default())
}

pub(crate) fn bench_with(
    format: &TableFormat,
    rows: u64,
    layers: usize,
    columns: usize,
    placement: Placement,
    options: &LookupOptions,
) -> Bench {
    let sources: Vec<_> =
        (0..layers).map(|layer| SynthSource::new(format.clone(), 7, u32::try_from(layer).unwrap(), rows)).collect();
    let tables: Vec<_> =
        sources.iter().map(|source| Table::load(device(), source, 0..rows, placement).unwrap()).collect();
    Bench { sources, lookup: Lookup::new(&tables, columns, options).unwrap(), columns }
}

impl Bench {
    pub(crate) fn layers(&self) -> Vec<(&dyn TableSource, std::ops::Range<u64>)> {
        self.sources.iter().map(|source| (source as &dyn TableSource, 0..source.rows())).collect()
    }

    pub(crate) fn expected(&self, ids: &[i32], form: RowForm, capacity: usize, slot: usize, poison: u8) -> Expected {
        reference(&self.layers(), ids, self.columns, form, (capacity, slot), poison)
    }
}

/// Device memory for an output, poisoned.
pub(crate) struct Poisoned {
    pub(crate) form: RowForm,
    pub(crate) rows: DeviceBuffer,
    pub(crate) scales: DeviceBuffer,
    pub(crate) capacity: usize,
}

pub(crate) const POISON: u8 = 0xa5;

pub(crate) fn poisoned(
    format: &TableFormat,
    layers: usize,
    columns: usize,
    form: RowForm,
    capacity: usize,
) -> Poisoned {
    let element = match form {
        RowForm::Packed => format.row_bytes(),
        RowForm::Dense(output) => format.width() * output.bytes(),
        _ => format.value_bytes(),
    };
    let scales = if form == RowForm::Mx { layers * mx::layer_bytes(capacity, columns * format.width()) } else { 0 };
    let rows = DeviceBuffer::new(device(), layers * capacity * columns * element).unwrap();
    let scales = DeviceBuffer::new(device(), scales).unwrap();
    let poisoned = Poisoned { form, rows, scales, capacity };
    poisoned.poison();
    poisoned
}

impl Poisoned {
    pub(crate) fn poison(&self) {
        let stream = Stream::new(device()).unwrap();
        self.rows.fill(POISON, stream.as_ref()).unwrap();
        self.scales.fill(POISON, stream.as_ref()).unwrap();
        stream.synchronize().unwrap();
    }

    pub(crate) fn output(&self) -> Output<'_> {
        match self.form {
            RowForm::Packed => Output::packed(&self.rows),
            RowForm::Dense(output) => Output::dense(&self.rows, output, self.capacity),
            RowForm::Mx => Output::mx(&self.rows, &self.scales, self.capacity),
            _ => unreachable!(),
        }
    }

    #[track_caller]
    pub(crate) fn assert(&self, expected: &Expected) {
        let rows: Vec<u8> = self.rows.read(0, expected.rows.len()).unwrap();
        assert_same(&rows, &expected.rows, "rows");
        let scales: Vec<u8> = self.scales.read(0, expected.scales.len()).unwrap();
        assert_same(&scales, &expected.scales, "scales");
    }
}

#[track_caller]
pub(crate) fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len());
    if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
        let wrong = found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
        panic!("{what}: {wrong} of {} bytes differ, first byte {at}: {} for {}", found.len(), found[at], expected[at]);
    }
}

pub(crate) fn view(buffer: &DeviceBuffer, id_type: IdType, tokens: usize, layers: usize, columns: usize) -> Ids<'_> {
    Ids::new(buffer, IdShape::dense(id_type, tokens, layers, columns)).unwrap()
}

pub(crate) fn upload(ids: &[i32]) -> DeviceBuffer {
    DeviceBuffer::from_slice(device(), ids).unwrap()
}

/// The bytes from `offset` on of a buffer, as foreign memory.
pub(crate) fn part(buffer: &DeviceBuffer, offset: usize) -> DeviceView<'_> {
    // SAFETY: a part of a live buffer, whose drop waits for the device.
    unsafe { DeviceView::from_raw(buffer.address() + offset as u64, (buffer.bytes() - offset) as u64) }
}

/// Runs a lookup on a stream of its own and waits for it.
pub(crate) fn run(lookup: &mut Lookup, ids: &Ids<'_>, out: &Output<'_>) -> Result<(), Error> {
    let stream = Stream::new(device())?;
    lookup.run(ids, out, stream.as_ref())?;
    stream.synchronize()
}
