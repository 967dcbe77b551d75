//! How long an exchange between GPUs takes, one process a GPU, on the stage of its peer `torch_exchange.py`: 2 layers of 24 heads, rows of 256
//! bytes and 8 scales, tables in device memory, values and scales unpacked.
//!
//! `exchange [ROWS] [--ways WAY,...] [--multiprocessors N]`: rows of a rank and layer, 48,000,000 by default; ways are `chosen` (push, as the
//! exchange itself has chosen for each slot), `lines`, `flags` (push, one way only) and `barrier`, of which the first and the last by default.
//!
//! Prints a JSON line for the machine, one for each way's choice and one for each slot: microseconds an exchange on the slowest rank, `graph_us` the
//! median over replays of a graph of 16 exchanges over 8 sets of ids, `host_us` what an eager call takes on the host, `eager_us` until it is done. Rows
//! of some tokens are compared with the table's after each measurement; a difference ends the program.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "it prints what it measures, and ends when it cannot")]

use std::process::Command;
use std::time::Instant;

use engram_core::{HeadShards, Ownership};
use engram_cuda::{Device, DeviceBuffer, Event, Graph, IdShape, IdType, Ids, Placement, Stream, StreamRef, Table, raw};
use engram_ple::mx::ScaleLayout;
use engram_ple::{FormatKind, SynthSource, TableFormat, TableSource};
use engram_symm::cuda::{Exchange, Options, Push};
use engram_symm::{Algorithm, Config, Group, Launch, Layer, Output, Rendezvous};
use serde_json::{Value, json};

const LAYERS: usize = 2;
const HEADS: usize = 24;
const WIDTH: usize = 256;
const SLOTS: [u32; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
const SETS: usize = 8;
/// In a graph.
const EXCHANGES: usize = 16;
const REPLAYS: usize = 30;
/// Eager ones. The last set of ids is another one than a graph's last.
const CALLS: usize = 204;

/// Tells a process that it is a rank: `RANK of WORLD in RUN`.
const RANK: &str = "ENGRAM_BENCH_RANK";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let wanted = Wanted::new(&arguments);
    if let Ok(own) = std::env::var(RANK) {
        let mut words = own.splitn(3, ' ');
        let (rank, world) = (words.next().unwrap().parse().unwrap(), words.next().unwrap().parse().unwrap());
        let launch = Launch { rank, world, local_rank: rank, run: words.next().unwrap().to_owned() };
        return Bench::new(Rendezvous::new(launch, "bench").join().unwrap(), &wanted).run(&wanted);
    }
    let world = Device::count().expect("this bench needs CUDA devices");
    let start = |rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(&arguments).env(RANK, format!("{rank} {world} {}", std::process::id())).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    let ended: Vec<_> = ranks.into_iter().map(|mut rank| rank.wait().unwrap()).collect();
    assert!(ended.iter().all(|status| status.success()), "a rank failed");
}

/// What the arguments say.
struct Wanted {
    rows: u64,
    ways: Vec<Way>,
    multiprocessors: Option<u32>,
}

impl Wanted {
    fn new(arguments: &[String]) -> Self {
        let mut wanted = Self { rows: 48_000_000, ways: vec![Way::Chosen, Way::Barrier], multiprocessors: None };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} without a value"));
            match argument.as_str() {
                "--ways" => wanted.ways = value().split(',').map(Way::named).collect(),
                "--multiprocessors" => wanted.multiprocessors = Some(value().parse().unwrap()),
                rows => wanted.rows = rows.parse().expect("rows of a rank and layer"),
            }
        }
        wanted
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Chosen,
    Lines,
    Flags,
    Barrier,
}

impl Way {
    fn named(name: &str) -> Self {
        let way = [Self::Chosen, Self::Lines, Self::Flags, Self::Barrier].into_iter().find(|way| way.name() == name);
        way.unwrap_or_else(|| panic!("{name}: ways are chosen, lines, flags and barrier"))
    }

    fn name(self) -> &'static str {
        match self {
            Self::Chosen => "chosen",
            Self::Lines => "lines",
            Self::Flags => "flags",
            Self::Barrier => "barrier",
        }
    }

    fn algorithm(self) -> Algorithm {
        if self == Self::Barrier { Algorithm::Barrier } else { Algorithm::Push }
    }

    fn push(self) -> Option<Push> {
        match self {
            Self::Chosen => None,
            Self::Lines => Some(Push::Lines),
            Self::Flags | Self::Barrier => Some(Push::Flags),
        }
    }

    /// Lines take memory for every 16 bytes of the largest slot: no exchange pushes larger ones that way.
    fn capacity(self) -> u32 {
        if self == Self::Lines { 512 } else { 2048 }
    }
}

/// One rank.
struct Bench {
    group: Group,
    device: Device,
    stream: Stream,
    format: TableFormat,
    rows: u64,
    sources: Vec<SynthSource>,
    tables: Vec<Table>,
}

impl Bench {
    fn new(group: Group, wanted: &Wanted) -> Self {
        let (rank, world, rows) = (group.rank(), group.world(), wanted.rows);
        let device = Device::new(u32::try_from(rank).unwrap()).unwrap();
        let format = TableFormat::new(FormatKind::E4m3E8m0x32, WIDTH, None).unwrap();
        let source = |layer| SynthSource::new(format.clone(), 7, layer, world as u64 * rows);
        let sources: Vec<_> = (0..u32::try_from(LAYERS).unwrap()).map(source).collect();
        let own = rank as u64 * rows..(rank as u64 + 1) * rows;
        let start = Instant::now();
        let table = |source: &SynthSource| Table::load(&device, source, own.clone(), Placement::Device).unwrap();
        let tables = sources.iter().map(table).collect();
        let stream = Stream::new(&device).unwrap();
        let bench = Self { group, device, stream, format, rows, sources, tables };
        let loaded_s = hundredths(start.elapsed().as_secs_f64());
        bench.print(&json!({ "gpu": bench.device.name(), "world": world, "rows": rows, "loaded_s": loaded_s }));
        bench
    }

    fn run(mut self, wanted: &Wanted) {
        for &way in &wanted.ways {
            let ownership = Ownership::Heads(HeadShards::new(HEADS, self.group.world()).unwrap());
            let layers = vec![Layer { format: self.format.clone(), ownership }; LAYERS];
            let config = Config::new(HEADS, layers, way.capacity(), Output::Mx);
            let mut options = Options::default();
            options.push = way.push();
            options.multiprocessors = wanted.multiprocessors;
            let Self { group, device, tables, .. } = &mut self;
            let mut exchange = Exchange::create(group, device, way.name(), config, tables, &options).unwrap();
            if way == Way::Chosen {
                self.print_choice(&exchange);
            }
            let us = self.barrier_us(&mut exchange);
            self.print(&json!({ "way": way.name(), "barrier_us": us }));
            for slot in SLOTS.into_iter().filter(|&slot| slot <= way.capacity()) {
                let figures = self.slot(&mut exchange, way, slot);
                self.print(&figures);
            }
            exchange.close().unwrap();
        }
        self.group.close().unwrap();
    }

    /// Rank 0 speaks for all.
    fn print(&self, line: &Value) {
        if self.group.rank() == 0 {
            println!("{line}");
        }
    }

    fn print_choice(&self, exchange: &Exchange) {
        let choice = exchange.choice();
        let ways: Vec<_> =
            choice.ways.iter().map(|way| format!("{:?}/{}", way.push, way.blocks).to_lowercase()).collect();
        let measured = choice.measured.iter().map(|measured| {
            let us: Vec<_> = measured.us.iter().map(|&us| us.is_finite().then(|| hundredths(us))).collect();
            json!({ "slot": measured.slot, "us": us })
        });
        let measured: Vec<_> = measured.collect();
        self.print(&json!({ "way": "chosen", "ways": ways, "measured": measured }));
    }

    fn barrier_us(&mut self, exchange: &mut Exchange) -> f64 {
        let mut graph = self.capture(|_, stream| exchange.barrier(stream).unwrap());
        self.replay_us(&mut graph)
    }

    /// Measures one slot, and compares rows.
    fn slot(&mut self, exchange: &mut Exchange, way: Way, slot: u32) -> Value {
        let tokens = usize::try_from(slot).unwrap();
        let sets = self.ids(tokens);
        let buffers: Vec<_> = sets.iter().map(|ids| DeviceBuffer::from_slice(&self.device, ids).unwrap()).collect();
        let shape = IdShape::dense(IdType::I32, tokens, LAYERS, HEADS);
        let run = |exchange: &mut Exchange, call: usize, stream: StreamRef<'_>| {
            let ids = Ids::new(&buffers[call % SETS], shape).unwrap();
            exchange.run(&ids, slot, way.algorithm(), stream).unwrap();
        };
        let mut graph = self.capture(|call, stream| run(exchange, call, stream));
        let graph_us = self.replay_us(&mut graph);
        self.compare(exchange, &sets[(EXCHANGES - 1) % SETS], tokens);
        let (host_us, eager_us) = self.eager_us(|call, stream| run(exchange, call, stream));
        self.compare(exchange, &sets[(CALLS - 1) % SETS], tokens);
        json!({ "way": way.name(), "slot": slot, "graph_us": graph_us, "host_us": host_us, "eager_us": eager_us, "correct": true })
    }

    /// Sets of random ids `[tokens][layers][heads]`, each of the rank that owns its column.
    fn ids(&self, tokens: usize) -> Vec<Vec<i32>> {
        let shards = HeadShards::new(HEADS, self.group.world()).unwrap();
        let mut random = (tokens * 77 + self.group.rank()) as u64;
        let mut id = |index: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let owner = shards.owner_of_column(index % HEADS).unwrap() as u64;
            i32::try_from(owner * self.rows + (random >> 32) % self.rows).unwrap()
        };
        (0..SETS).map(|_| (0..tokens * LAYERS * HEADS).map(&mut id).collect()).collect()
    }

    fn capture(&self, mut enqueue: impl FnMut(usize, StreamRef<'_>)) -> Graph {
        let all = |stream: StreamRef<'_>| {
            (0..EXCHANGES).for_each(|call| enqueue(call, stream));
            Ok(())
        };
        self.stream.capture(all).unwrap()
    }

    /// The slowest rank's median over replays, in microseconds an exchange.
    fn replay_us(&mut self, graph: &mut Graph) -> f64 {
        let clocks = [Event::with_time(&self.device).unwrap(), Event::with_time(&self.device).unwrap()];
        let stream = self.stream.as_ref();
        let mut times = Vec::new();
        for round in 0..REPLAYS + 3 {
            self.group.barrier().unwrap();
            clocks[0].record(stream).unwrap();
            // SAFETY: all that the graph uses outlives it.
            unsafe { graph.launch(stream) }.unwrap();
            clocks[1].record(stream).unwrap();
            self.stream.synchronize().unwrap();
            if round >= 3 {
                times.push(clocks[1].elapsed_us(&clocks[0]).unwrap() / EXCHANGES as f64);
            }
        }
        times.sort_by(f64::total_cmp);
        slowest(&mut self.group, times[times.len() / 2])
    }

    /// Microseconds an eager call, on the host and until it is done.
    fn eager_us(&mut self, mut enqueue: impl FnMut(usize, StreamRef<'_>)) -> (f64, f64) {
        (0..20).for_each(|call| enqueue(call, self.stream.as_ref()));
        self.stream.synchronize().unwrap();
        self.group.barrier().unwrap();
        let start = Instant::now();
        (0..CALLS).for_each(|call| enqueue(call, self.stream.as_ref()));
        let host = start.elapsed();
        self.stream.synchronize().unwrap();
        let [host, done] = [host, start.elapsed()].map(|time| time.as_secs_f64() * 1e6 / CALLS as f64);
        (slowest(&mut self.group, host), slowest(&mut self.group, done))
    }

    /// Compares the rows of the first, a middle and the last token with those of the tables.
    fn compare(&self, exchange: &Exchange, ids: &[i32], tokens: usize) {
        exchange.check().unwrap();
        let (rows, capacity) = (exchange.rows(), usize::try_from(exchange.config().capacity).unwrap());
        let layout = ScaleLayout::new(&self.format, HEADS).unwrap();
        let read = |address: u64, bytes: usize| {
            // SAFETY: within the exchange's outputs; the stream's work is done.
            unsafe { raw::read::<u8>(&self.device, address, bytes) }.unwrap()
        };
        for (layer, source) in self.sources.iter().enumerate() {
            let scales_bytes = layout.layer_bytes(capacity);
            let scales = read(rows.scales.unwrap().address() + (layer * scales_bytes) as u64, scales_bytes);
            for token in [0, tokens / 2, tokens - 1] {
                let first = (layer * capacity + token) * HEADS * WIDTH;
                let values = read(rows.rows.address() + first as u64, HEADS * WIDTH);
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
}

/// The largest of all ranks' figures, to hundredths.
fn slowest(group: &mut Group, own: f64) -> f64 {
    let all = group.all_gather(&own.to_le_bytes()).unwrap();
    let of = |bytes: &Vec<u8>| f64::from_le_bytes(bytes.as_slice().try_into().unwrap());
    hundredths(all.iter().map(of).fold(0.0, f64::max))
}

fn hundredths(figure: f64) -> f64 {
    (figure * 100.0).round() / 100.0
}
