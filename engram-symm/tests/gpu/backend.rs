//! The backend on GPUs, as the suite drives it.

use std::marker::PhantomData;
use std::sync::OnceLock;
use std::time::Duration;

use engram_cuda::{Device, DeviceBuffer, IdShape, IdType, Placement, Stream, Table, raw};
use engram_ple::{TableSource, mx};
use engram_symm::cuda::{Exchange, Options, Push, Rows};
use engram_symm::protocol::Fault;
use engram_symm::{Algorithm, Config, Error, Group, Ids, Output, Result};

use crate::suite::model::{Random, Shape, Tables};
use crate::suite::{Backend, Exchanger, Pace};

/// This process's device.
pub(crate) static DEVICE: OnceLock<Device> = OnceLock::new();

pub(crate) fn device() -> &'static Device {
    DEVICE.get().unwrap()
}

/// One of the ways in which an exchange can go about it.
pub(crate) trait Way: Send {
    const PUSH: Option<Push>;
    const THROUGH_HOST: bool = false;
    /// As where 16 bytes may not arrive as one.
    const ONLY_FLAGS: bool = false;
    const PLACEMENT: Placement = Placement::Device;
    /// Tables of which nobody knows whether they have NaN in them, values and scales apart.
    const BORROWED: bool = false;
    const MULTIPROCESSORS: Option<u32> = None;
}

pub(crate) struct Lines;
pub(crate) struct LinesOfOneBlock;
pub(crate) struct LinesApart;
pub(crate) struct MarkedLines;
pub(crate) struct Flags;
pub(crate) struct FlaggedIds;
pub(crate) struct PinnedFlags;
pub(crate) struct PinnedLines;
pub(crate) struct ThroughHost;
pub(crate) struct Chosen;

impl Way for Lines {
    const PUSH: Option<Push> = Some(Push::Lines);
}
impl Way for LinesOfOneBlock {
    const PUSH: Option<Push> = Some(Push::Lines);
    const MULTIPROCESSORS: Option<u32> = Some(1);
}
/// Few blocks, so that warps take several turns.
impl Way for LinesApart {
    const PUSH: Option<Push> = Some(Push::LinesApart);
    const MULTIPROCESSORS: Option<u32> = Some(2);
}
impl Way for MarkedLines {
    const PUSH: Option<Push> = Some(Push::Lines);
    const BORROWED: bool = true;
}
impl Way for Flags {
    const PUSH: Option<Push> = Some(Push::Flags);
}
impl Way for FlaggedIds {
    const PUSH: Option<Push> = Some(Push::Flags);
    const ONLY_FLAGS: bool = true;
}
impl Way for PinnedFlags {
    const PUSH: Option<Push> = Some(Push::Flags);
    const PLACEMENT: Placement = Placement::Pinned;
}
impl Way for PinnedLines {
    const PUSH: Option<Push> = Some(Push::Lines);
    const PLACEMENT: Placement = Placement::Pinned;
}
impl Way for ThroughHost {
    const PUSH: Option<Push> = Some(Push::Flags);
    const THROUGH_HOST: bool = true;
}
impl Way for Chosen {
    const PUSH: Option<Push> = None;
}

pub(crate) struct Gpu<W>(PhantomData<W>);

pub(crate) struct GpuExchange<W> {
    pub(crate) exchange: Exchange,
    stream: Stream,
    /// Room for the ids of the largest slot, with gaps.
    ids: DeviceBuffer,
    pace: Pace,
    /// What borrowed tables lie in.
    memory: Vec<DeviceBuffer>,
    way: PhantomData<W>,
}

/// Layers in the ids' array besides those that are exchanged, before and after, and ids between tokens.
const GAPS: (usize, usize, usize) = (1, 1, 3);

fn tables<W: Way>(shape: &Shape, rank: usize) -> (Vec<Table>, Vec<DeviceBuffer>) {
    let owned: Vec<_> = (0..shape.layers).map(|layer| shape.owned(layer, rank)).collect();
    let mut memory = Vec::new();
    if owned.iter().all(std::ops::Range::is_empty) {
        return (Vec::new(), memory);
    }
    let mut table = |(layer, rows): (usize, std::ops::Range<u64>)| {
        let source = shape.table(layer);
        if !W::BORROWED {
            return Table::load(device(), &source, rows, W::PLACEMENT).unwrap();
        }
        let format = shape.format(layer);
        let (row, values) = (format.row_bytes(), format.value_bytes());
        let mut packed = vec![0; usize::try_from(rows.end - rows.start).unwrap() * row];
        source.read_range(rows.clone(), &mut packed).unwrap();
        let part = |from: usize, to: usize| -> Vec<u8> {
            packed.chunks_exact(row).flat_map(|row| row[from..to].to_vec()).chain([0; 16]).collect()
        };
        let values_at = DeviceBuffer::from_slice(device(), &part(0, values)).unwrap();
        let scales_at = DeviceBuffer::from_slice(device(), &part(values, row)).unwrap();
        let scales = (format.scale_bytes() > 0).then(|| scales_at.address());
        // SAFETY: the buffers live as long as the exchange.
        let table = unsafe { Table::borrow(device(), format, values_at.address(), scales, rows) }.unwrap();
        memory.extend([values_at, scales_at]);
        table
    };
    let tables = owned.into_iter().enumerate().map(&mut table).collect();
    (tables, memory)
}

pub(crate) fn create<W: Way>(group: &mut Group, shape: &Shape, epoch: u32, pace: Pace) -> Result<GpuExchange<W>> {
    create_as(group, "suite", shape, epoch, pace)
}

/// As [`create`], under another name.
pub(crate) fn create_as<W: Way>(
    group: &mut Group,
    name: &str,
    shape: &Shape,
    epoch: u32,
    pace: Pace,
) -> Result<GpuExchange<W>> {
    let (tables, memory) = tables::<W>(shape, group.rank());
    let mut options = Options::default();
    options.push = W::PUSH;
    options.multiprocessors = W::MULTIPROCESSORS;
    options.through_host = W::THROUGH_HOST;
    options.only_flags = W::ONLY_FLAGS;
    options.epoch = epoch;
    let exchange = Exchange::create(group, device(), name, shape.config(), &tables, &options)?;
    let stride = (shape.layers + GAPS.0 + GAPS.1) * shape.columns + GAPS.2;
    let room = (shape.capacity as usize * stride).max(1) * size_of::<i32>();
    Ok(GpuExchange {
        exchange,
        stream: Stream::new(device()).unwrap(),
        ids: DeviceBuffer::new(device(), room).unwrap(),
        pace,
        memory,
        way: PhantomData,
    })
}

/// The rows as the suite compares them.
pub(crate) fn bytes(config: &Config, rows: &Rows<'_>) -> Vec<Vec<u8>> {
    let format = &config.layers[0].format;
    let (layers, columns, slot) = (config.layers.len(), config.columns, rows.slot as usize);
    // SAFETY: outputs of the exchange, of that size.
    let read = |address: u64, bytes: usize| unsafe { raw::read::<u8>(device(), address, bytes) }.unwrap();
    if config.output == Output::Packed {
        return vec![read(rows.rows.address(), slot * layers * columns * format.row_bytes())];
    }
    let row = match config.output {
        Output::Bf16 | Output::F16 => format.width() * 2,
        _ => format.value_bytes(),
    };
    let mut parts = Vec::new();
    for layer in 0..layers {
        let stride = config.capacity as usize * columns * row;
        parts.push(read(rows.rows.address() + (layer * stride) as u64, slot * columns * row));
        if let Some(scales) = &rows.scales {
            let elements = columns * format.width();
            let stride = mx::layer_bytes(config.capacity as usize, elements);
            parts.push(read(scales.address() + (layer * stride) as u64, mx::layer_bytes(slot, elements)));
        }
    }
    parts
}

impl<W: Way> Backend for Gpu<W> {
    type Exchange = GpuExchange<W>;

    const SEES_REPORTS: bool = false;

    fn exchange(group: &mut Group, shape: &Shape, _: Tables, epoch: u32, pace: Pace) -> Result<Self::Exchange> {
        create(group, shape, epoch, pace)
    }
}

impl<W> GpuExchange<W> {
    /// The exchange, and what its tables lie in.
    pub(crate) fn into_parts(self) -> (Exchange, Vec<DeviceBuffer>) {
        (self.exchange, self.memory)
    }

    fn hold_up(&mut self) {
        match &mut self.pace {
            Pace::Steady => {}
            Pace::Slow => std::thread::sleep(Duration::from_micros(300)),
            Pace::Random(seed) => {
                let mut random = Random(*seed);
                *seed = random.next();
                if random.below(4) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(500) as u64));
                }
            }
        }
    }

    fn outcome<T>(&self, value: T) -> Result<T> {
        self.stream.synchronize().unwrap();
        self.exchange.check().map(|()| value)
    }
}

impl<W> Exchanger for GpuExchange<W> {
    fn run(&mut self, ids: Ids<'_>, slot: u32, algorithm: Algorithm) -> Result<Vec<Vec<u8>>> {
        self.hold_up();
        // The suite's view, in an array of more layers and with gaps between tokens.
        let config = self.exchange.config();
        let (tokens, columns) = (ids.tokens(), config.columns);
        let layers = if tokens > 0 { ids.token(0).len() / columns } else { config.layers.len() };
        let stride = (layers + GAPS.0 + GAPS.1) * columns + GAPS.2;
        let mut array = vec![i32::MAX; (tokens * stride).max(1)];
        for token in 0..tokens {
            array[token * stride + GAPS.0 * columns..][..layers * columns].copy_from_slice(ids.token(token));
        }
        array.truncate(self.ids.bytes() / 4);
        self.ids.write(0, &array).unwrap();
        let shape =
            IdShape { id_type: IdType::I32, tokens, token_stride: stride, first_layer: GAPS.0, layers, columns };
        let ids = engram_cuda::Ids::new(&self.ids, shape).unwrap();
        let enqueued = self.exchange.run(&ids, slot, algorithm, self.stream.as_ref()).map(drop);
        enqueued.and_then(|()| self.outcome(())).map(|()| self.rows())
    }

    fn rows(&self) -> Vec<Vec<u8>> {
        self.stream.synchronize().unwrap();
        bytes(self.exchange.config(), &self.exchange.rows())
    }

    fn check(&self) -> Result<(), Fault> {
        match self.exchange.check() {
            Err(Error::Fault(fault)) => Err(fault),
            _ => Ok(()),
        }
    }

    fn sleep(&mut self) -> Result<()> {
        self.exchange.sleep()
    }

    fn wake(&mut self, group: &mut Group) -> Result<()> {
        self.exchange.wake(group)
    }

    fn close(self) -> Result<()> {
        self.exchange.close()
    }
}
