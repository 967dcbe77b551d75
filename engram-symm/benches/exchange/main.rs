//! How long an exchange between GPUs takes, one process a GPU, on the stage of its peer `torch_exchange.py`: 2 layers of 24 heads, rows of 256
//! bytes and 8 scales, values and scales unpacked.
//!
//! `exchange [ROWS] [--ways WAY,...] [--multiprocessors N] [--ranks N]`: tables in device memory, of so many rows of each rank and layer, 48,000,000
//! by default; as many ranks as there are GPUs.
//!
//! `exchange --full-size [--pinned-gib N]`: the tables of DeepSeek-V4.1-Flash, whole heads of them in each GPU's memory; then in pinned memory of
//! the host, where each rank pins what it owns: all of it, or as much as there is room for; N is the most that all ranks pin together, refused
//! where there is no room for it. Slots go up to a prefill of 8,192 tokens. From pinned memory each rank also looks up by itself, without the
//! others (`alone`), as many rows as it asks for in an exchange. They come from its own part, since processes do not share one pinned table;
//! across the bus go as many as in an exchange.
//!
//! Ways are `chosen` (push, as the exchange itself has chosen for each slot), `lines`, `apart`, `flags` (push, one way only) and `barrier`, of which
//! the first and the last by default.
//!
//! Prints a JSON line for each placement of the tables, one for each way's choice, one for a barrier (`barrier_us` in a graph of 16,
//! `barrier_of_many_us` in one of 256) and one for each slot: microseconds on the slowest rank, `graph_us` an exchange, the median over replays of
//! a graph of 16 over 8 sets of ids, `host_us` what an eager call takes on the host, `eager_us` until it is done. Rows of some tokens are compared with the table's after each measurement; a difference ends the program.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "it prints what it measures, and ends when it cannot")]

mod clock;
mod fetch;
mod stage;
mod wanted;

use std::process::Command;

use engram_cuda::{Device, Placement};
use engram_symm::{Launch, Rendezvous};

use crate::fetch::Way;
use crate::stage::Stage;
use crate::wanted::Wanted;

const LAYERS: usize = 2;
const HEADS: usize = 24;
const WIDTH: usize = 256;

/// Tells a process that it is a rank: `RANK of WORLD in RUN`.
const RANK: &str = "ENGRAM_BENCH_RANK";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let wanted = Wanted::new(&arguments);
    if let Ok(own) = std::env::var(RANK) {
        let mut words = own.splitn(3, ' ');
        let (rank, world) = (words.next().unwrap().parse().unwrap(), words.next().unwrap().parse().unwrap());
        let launch = Launch { rank, world, local_rank: rank, run: words.next().unwrap().to_owned() };
        return measure(Stage::new(Rendezvous::new(launch, "bench").join().unwrap(), &wanted), &wanted);
    }
    let world = wanted.ranks.unwrap_or_else(|| Device::count().expect("this bench needs CUDA devices"));
    let start = |rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(&arguments).env(RANK, format!("{rank} {world} {}", std::process::id())).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    let ended: Vec<_> = ranks.into_iter().map(|mut rank| rank.wait().unwrap()).collect();
    assert!(ended.iter().all(|status| status.success()), "a rank failed");
}

/// What each rank does.
fn measure(mut stage: Stage, wanted: &Wanted) {
    stage.load(Placement::Device, None);
    wanted.ways.iter().for_each(|&way| stage.measure(way, wanted));
    if wanted.full_size {
        stage.load(Placement::Pinned, wanted.pinned_bytes);
        wanted.ways.iter().chain([&Way::Alone]).for_each(|&way| stage.measure(way, wanted));
    }
    stage.close();
}
