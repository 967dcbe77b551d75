//! The tables, ids of their rows, and whether the right rows come.

use std::ops::Range;
use std::time::Instant;

use engram_core::{HeadShards, Layout, Preset};
use engram_cuda::{Device, DeviceBuffer, IdShape, IdType, Ids, Placement, Stream, StreamRef, Table, raw};
use engram_ple::mx::ScaleLayout;
use engram_ple::{FormatKind, SynthSource, TableFormat, TableSource};
use engram_symm::Group;
use serde_json::{Value, json};

use crate::clock::{BARRIERS, CALLS, EXCHANGES, capture, eager_us, hundredths, replay_us, slowest};
use crate::fetch::{Fetch, Way};
use crate::wanted::Wanted;
use crate::{HEADS, LAYERS, WIDTH};

/// Of ids.
const SETS: usize = 8;

/// The rows of each layer that a rank owns.
type Part = [Range<u64>; LAYERS];

/// One rank.
pub(crate) struct Stage {
    pub(crate) group: Group,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) format: TableFormat,
    pub(crate) shards: HeadShards,
    sources: [SynthSource; LAYERS],
    /// What each rank owns.
    owned: Vec<Part>,
    /// What each rank has loaded of that.
    loaded: Vec<Part>,
    pub(crate) tables: Vec<Table>,
}

impl Stage {
    pub(crate) fn new(group: Group, wanted: &Wanted) -> Self {
        let (rank, world) = (group.rank(), group.world());
        let device = Device::new(u32::try_from(rank).unwrap()).unwrap();
        let format = TableFormat::new(FormatKind::E4m3E8m0x32, WIDTH, None).unwrap();
        let shards = HeadShards::new(HEADS, world).unwrap();
        let owned = if wanted.full_size { full_size(shards) } else { alike(world, wanted.rows) };
        let rows = |layer: usize| owned.iter().map(|part| part[layer].end).max().unwrap_or(0);
        let source = |layer: usize| SynthSource::new(format.clone(), 7, u32::try_from(layer).unwrap(), rows(layer));
        let sources = std::array::from_fn(source);
        let stream = Stream::new(&device).unwrap();
        Self { group, device, stream, format, shards, sources, loaded: owned.clone(), owned, tables: Vec::new() }
    }

    /// Loads what this rank owns, all ranks at once. Of pinned memory all together take at most `most` bytes, or as much as there is room for.
    pub(crate) fn load(&mut self, placement: Placement, most: Option<u64>) {
        // What was loaded before goes first.
        self.tables.clear();
        let row = self.format.row_bytes() as u64;
        let all = row * count(self.owned.iter().flatten());
        let taken = if placement == Placement::Pinned { self.pinned_bytes(most, all) } else { all };
        let share = |rows: &Range<u64>| rows.start..rows.start + scaled(rows.end - rows.start, taken, all);
        self.loaded = self.owned.iter().map(|part| part.each_ref().map(share)).collect();
        let own = &self.loaded[self.group.rank()];
        if placement == Placement::Device {
            let (needed, free) = (row * count(own), self.device.memory().unwrap().0);
            assert!(needed < free, "{} GiB of rows, and {} GiB of the GPU's memory are free", gib(needed), gib(free));
        }
        self.group.barrier().unwrap();
        let start = Instant::now();
        let table = |(source, rows): (&SynthSource, &Range<u64>)| {
            Table::load(&self.device, source, rows.clone(), placement).unwrap()
        };
        self.tables = self.sources.iter().zip(own).map(table).collect();
        let loaded_s = slowest(&mut self.group, start.elapsed().as_secs_f64());
        let (rows, gib) = (count([&self.loaded[0][0]]), gib(row * count(self.loaded.iter().flatten())));
        let (gpu, world) = (self.device.name().to_owned(), self.group.world());
        self.print(json!({ "gpu": gpu, "world": world, "rows": rows, "gib": gib, "loaded_s": loaded_s }));
    }

    /// How much of `all` bytes the ranks pin.
    fn pinned_bytes(&mut self, most: Option<u64>, all: u64) -> u64 {
        let rooms = self.group.all_gather(&room().to_le_bytes()).unwrap();
        let room = rooms.iter().map(|room| u64::from_le_bytes(room.as_slice().try_into().unwrap())).min().unwrap_or(0);
        let wanted = most.unwrap_or(room).min(all);
        let fits = (1..=room).contains(&wanted);
        assert!(fits, "{} GiB to be pinned, and the host has room for {} GiB", gib(wanted), gib(room));
        wanted
    }

    /// Rank 0 speaks for all, and says where the tables are.
    pub(crate) fn print(&self, mut line: Value) {
        if self.group.rank() == 0 {
            let placement = self.tables.first().map(Table::placement);
            line["table"] = format!("{:?}", placement.unwrap_or(Placement::Device)).to_lowercase().into();
            println!("{line}");
        }
    }

    /// Measures all slots one way. Collective.
    pub(crate) fn measure(&mut self, way: Way, wanted: &Wanted) {
        let mut fetch = Fetch::new(self, way, wanted);
        if let Fetch::Exchange { exchange, .. } = &mut fetch {
            let mut us = |calls| {
                let mut graph = capture(self, calls, |_, stream| exchange.barrier(stream).unwrap());
                replay_us(self, &mut graph, calls)
            };
            let (of_few, of_many) = (us(EXCHANGES), us(BARRIERS));
            self.print(json!({ "way": way.name(), "barrier_us": of_few, "barrier_of_many_us": of_many }));
        }
        for slot in wanted.slots() {
            let figures = self.slot(&mut fetch, way, slot, usize::try_from(wanted.capacity()).unwrap());
            self.print(figures);
        }
        fetch.close();
    }

    /// Measures one slot, and compares rows.
    fn slot(&mut self, fetch: &mut Fetch, way: Way, slot: u32, capacity: usize) -> Value {
        let tokens = usize::try_from(slot).unwrap();
        let sets = self.ids(tokens, way);
        let buffers: Vec<_> = sets.iter().map(|ids| DeviceBuffer::from_slice(&self.device, ids).unwrap()).collect();
        let shape = IdShape::dense(IdType::I32, tokens, LAYERS, HEADS);
        let run = |fetch: &mut Fetch, call: usize, stream: StreamRef<'_>| {
            fetch.enqueue(&Ids::new(&buffers[call % SETS], shape).unwrap(), slot, stream);
        };
        let mut graph = capture(self, EXCHANGES, |call, stream| run(fetch, call, stream));
        let graph_us = replay_us(self, &mut graph, EXCHANGES);
        self.compare(fetch, &sets[(EXCHANGES - 1) % SETS], tokens, capacity);
        let (host_us, eager_us) = eager_us(self, |call, stream| run(fetch, call, stream));
        self.compare(fetch, &sets[(CALLS - 1) % SETS], tokens, capacity);
        json!({ "way": way.name(), "slot": slot, "graph_us": graph_us, "host_us": host_us, "eager_us": eager_us, "correct": true })
    }

    /// Sets of random ids `[tokens][layers][heads]`, each any row of the rank that looks it up: the owner of its column, or this one.
    fn ids(&self, tokens: usize, way: Way) -> Vec<Vec<i32>> {
        let mut random = (tokens * 77 + self.group.rank()) as u64;
        let mut id = |index: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (layer, head) = (index / HEADS % LAYERS, index % HEADS);
            let owner = if way == Way::Alone { self.group.rank() } else { self.shards.owner_of_column(head).unwrap() };
            let rows = &self.loaded[owner][layer];
            i32::try_from(rows.start + (random >> 32) % (rows.end - rows.start)).unwrap()
        };
        (0..SETS).map(|_| (0..tokens * LAYERS * HEADS).map(&mut id).collect()).collect()
    }

    /// Compares the rows of the first, a middle and the last token with those of the tables.
    fn compare(&self, fetch: &Fetch, ids: &[i32], tokens: usize, capacity: usize) {
        let (values, scales) = fetch.outputs();
        let layout = ScaleLayout::new(&self.format, HEADS).unwrap();
        let read = |address: u64, bytes: usize| {
            // SAFETY: within the outputs; the stream's work is done.
            unsafe { raw::read::<u8>(&self.device, address, bytes) }.unwrap()
        };
        for (layer, source) in self.sources.iter().enumerate() {
            let scales_bytes = layout.layer_bytes(capacity);
            let scales = read(scales + (layer * scales_bytes) as u64, scales_bytes);
            for token in [0, tokens / 2, tokens - 1] {
                let first = (layer * capacity + token) * HEADS * WIDTH;
                let values = read(values + first as u64, HEADS * WIDTH);
                let ids = &ids[(token * LAYERS + layer) * HEADS..][..HEADS];
                let mut expected = vec![0; HEADS * self.format.row_bytes()];
                source.gather(ids, &mut expected).unwrap();
                for (head, expected) in expected.chunks_exact(self.format.row_bytes()).enumerate() {
                    let groups = head * self.format.scale_bytes()..(head + 1) * self.format.scale_bytes();
                    let scales = groups.map(|group| scales[layout.offset(token, group)]);
                    let row: Vec<u8> = values[head * WIDTH..][..WIDTH].iter().copied().chain(scales).collect();
                    assert_eq!(row, expected, "the row of token {token} of {tokens}, layer {layer}, head {head}");
                }
            }
        }
    }

    pub(crate) fn close(self) {
        self.group.close().unwrap();
    }
}

/// So many rows of each rank and layer.
fn alike(world: usize, rows: u64) -> Vec<Part> {
    (0..world as u64).map(|rank| [(); LAYERS].map(|()| rank * rows..(rank + 1) * rows)).collect()
}

/// The rows of DeepSeek-V4.1-Flash that each rank owns.
fn full_size(shards: HeadShards) -> Vec<Part> {
    let layout = Layout::from_config(&Preset::DeepseekV41Flash.config()).unwrap();
    assert_eq!((layout.layers().len(), layout.columns()), (LAYERS, HEADS), "another model");
    let rows = |rank: usize, layer: usize| {
        let rows = shards.row_range(&layout.layers()[layer], rank);
        u64::from(rows.start)..u64::from(rows.end)
    };
    (0..shards.ranks()).map(|rank| std::array::from_fn(|layer| rows(rank, layer))).collect()
}

fn count<'a>(rows: impl IntoIterator<Item = &'a Range<u64>>) -> u64 {
    rows.into_iter().map(|rows| rows.end - rows.start).sum()
}

/// `count * part / whole`, where `part` is no more than `whole`.
fn scaled(count: u64, part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(count) * u128::from(part) / u128::from(whole)).unwrap()
}

/// Bytes that can be pinned: what the system calls available, within the limit of this process's control group; a sixteenth is left to others.
fn room() -> u64 {
    let system = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = system.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let available = kib.unwrap().parse::<u64>().unwrap() << 10;
    let group = |file: &str| {
        let text = std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{file}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let limit = group("max").zip(group("current")).map_or(u64::MAX, |(max, current)| max.saturating_sub(current));
    let room = available.min(limit);
    room - room / 16
}

fn gib(bytes: u64) -> f64 {
    hundredths(bytes as f64 / f64::from(1 << 30))
}
