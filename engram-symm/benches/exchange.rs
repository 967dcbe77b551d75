//! How long an exchange between GPUs takes, one process a GPU, on the stage of its peer `torch_exchange.py`: 2 layers of 24 heads, rows of 256
//! bytes and 8 scales, tables in device memory, values and scales unpacked.
//!
//! Prints a JSON line for each slot: microseconds an exchange, median over replays of a graph of 16 exchanges over 8 sets of ids, on the slowest
//! rank. `exchange [ROWS_PER_RANK_AND_LAYER]`.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "it prints what it measures, and ends when it cannot"
)]

use std::process::Command;
use std::time::Instant;

use engram_core::{HeadShards, Ownership};
use engram_cuda::{Device, DeviceBuffer, Event, Graph, IdShape, IdType, Ids, Placement, Stream, Table};
use engram_ple::{FormatKind, SynthSource, TableFormat};
use engram_symm::cuda::{Exchange, Options, Push};
use engram_symm::{Algorithm, Config, Group, Launch, Layer, Output, Rendezvous};

const LAYERS: usize = 2;
const HEADS: usize = 24;
const WIDTH: usize = 256;
const SLOTS: [usize; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
const SETS: usize = 8;
const EXCHANGES: usize = 16;
const REPLAYS: usize = 30;

/// Tells a process that it is a rank: `RANK of WORLD in RUN`.
const RANK: &str = "ENGRAM_BENCH_RANK";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let rows = arguments.first().map_or(48_000_000, |rows| rows.parse().unwrap());
    if let Ok(own) = std::env::var(RANK) {
        let mut words = own.splitn(3, ' ');
        let (rank, world) = (words.next().unwrap().parse().unwrap(), words.next().unwrap().parse().unwrap());
        let launch = Launch { rank, world, local_rank: rank, run: words.next().unwrap().to_owned() };
        return measure(Rendezvous::new(launch, "bench").join().unwrap(), rows);
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

/// Random ids, each of the rank that owns its column.
fn ids(random: &mut u64, world: usize, rows: u64, tokens: usize) -> Vec<i32> {
    let shards = HeadShards::new(HEADS, world).unwrap();
    let id = |index: usize| {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let owner = shards.owner_of_column(index % HEADS).unwrap() as u64;
        i32::try_from(owner * rows + (*random >> 32) % rows).unwrap()
    };
    (0..tokens * LAYERS * HEADS).map(id).collect()
}

/// The slowest rank's median over replays, in microseconds an exchange.
fn replay(group: &mut Group, stream: &Stream, graph: &mut Graph, device: &Device) -> f64 {
    let clocks = [Event::with_time(device).unwrap(), Event::with_time(device).unwrap()];
    let mut times = Vec::new();
    for round in 0..REPLAYS + 3 {
        group.barrier().unwrap();
        clocks[0].record(stream.as_ref()).unwrap();
        // SAFETY: all that the graph uses outlives it.
        unsafe { graph.launch(stream.as_ref()) }.unwrap();
        clocks[1].record(stream.as_ref()).unwrap();
        stream.synchronize().unwrap();
        if round >= 3 {
            times.push(clocks[1].elapsed_us(&clocks[0]).unwrap() / EXCHANGES as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    slowest(group, times[times.len() / 2])
}

fn slowest(group: &mut Group, own: f64) -> f64 {
    let all = group.all_gather(&own.to_le_bytes()).unwrap();
    all.iter().map(|bytes| f64::from_le_bytes(bytes.as_slice().try_into().unwrap())).fold(0.0, f64::max)
}

fn measure(mut group: Group, rows: u64) {
    let (rank, world) = (group.rank(), group.world());
    let device = Device::new(u32::try_from(rank).unwrap()).unwrap();
    let format = TableFormat::new(FormatKind::E4m3E8m0x32, WIDTH, None).unwrap();
    let ownership = Ownership::Heads(HeadShards::new(HEADS, world).unwrap());
    let layers = vec![Layer { format: format.clone(), ownership }; LAYERS];
    let own = rank as u64 * rows..(rank as u64 + 1) * rows;
    let start = Instant::now();
    let table = |layer| {
        let source = SynthSource::new(format.clone(), 7, u32::try_from(layer).unwrap(), world as u64 * rows);
        Table::load(&device, &source, own.clone(), Placement::Device).unwrap()
    };
    let tables: Vec<Table> = (0..LAYERS).map(table).collect();
    if rank == 0 {
        eprintln!("tables loaded in {:.1} s", start.elapsed().as_secs_f64());
    }
    let ways = std::env::var("ENGRAM_BENCH_WAYS").unwrap_or_else(|_| "chosen".to_owned());
    for way in ways.split(',') {
        let mut options = Options::default();
        options.push = match way {
            "lines" => Some(Push::Lines),
            "flags" => Some(Push::Flags),
            _ => None,
        };
        if let Ok(blocks) = std::env::var("ENGRAM_BENCH_BLOCKS") {
            options.multiprocessors = Some(blocks.parse().unwrap());
        }
        let capacity = if way == "lines" { 512 } else { 2048 };
        let config = Config::new(HEADS, layers.clone(), capacity, Output::Mx);
        let mut exchange = Exchange::create(&mut group, &device, way, config, &tables, &options).unwrap();
        if rank == 0 {
            println!("{{\"way\":\"{way}\",\"choice\":\"{:?}\"}}", exchange.choice());
        }
        let stream = Stream::new(&device).unwrap();
        let mut graph = stream
            .capture(|stream| {
                (0..EXCHANGES).for_each(|_| exchange.barrier(stream).unwrap());
                Ok(())
            })
            .unwrap();
        let us = replay(&mut group, &stream, &mut graph, &device);
        if rank == 0 {
            println!("{{\"way\":\"{way}\",\"barrier_us\":{us:.2}}}");
        }
        for algorithm in [Algorithm::Push, Algorithm::Barrier] {
            if algorithm == Algorithm::Barrier && way != "flags" && way != "chosen" {
                continue;
            }
            for slot in SLOTS.into_iter().filter(|&slot| slot <= capacity as usize) {
                let mut random = slot as u64 * 77 + rank as u64;
                let buffers: Vec<_> = (0..SETS)
                    .map(|_| DeviceBuffer::from_slice(&device, &ids(&mut random, world, rows, slot)).unwrap())
                    .collect();
                let shape = IdShape::dense(IdType::I32, slot, LAYERS, HEADS);
                let slot = u32::try_from(slot).unwrap();
                let mut graph = stream
                    .capture(|stream| {
                        for set in 0..EXCHANGES {
                            let ids = Ids::new(&buffers[set % SETS], shape)?;
                            exchange.run(&ids, slot, algorithm, stream).unwrap();
                        }
                        Ok(())
                    })
                    .unwrap();
                let graph_us = replay(&mut group, &stream, &mut graph, &device);
                group.barrier().unwrap();
                let calls = 200;
                let start = Instant::now();
                for set in 0..calls {
                    let ids = Ids::new(&buffers[set % SETS], shape).unwrap();
                    exchange.run(&ids, slot, algorithm, stream.as_ref()).unwrap();
                }
                let host_us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
                stream.synchronize().unwrap();
                let eager_us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
                let (host_us, eager_us) = (slowest(&mut group, host_us), slowest(&mut group, eager_us));
                exchange.check().unwrap();
                if rank == 0 {
                    println!(
                        "{{\"way\":\"{way}\",\"algorithm\":\"{algorithm:?}\",\"world\":{world},\"slot\":{slot},\"graph_us\":{graph_us:.2},\"host_us\":{host_us:.1},\"eager_us\":{eager_us:.1}}}"
                    );
                }
            }
        }
        exchange.close().unwrap();
    }
}
