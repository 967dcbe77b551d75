//! Groups of processes. A test starts itself again, once a rank.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use engram_cuda::Device;
use engram_symm::{Group, Launch, Rendezvous};

use crate::backend::DEVICE;

/// Tells a process that it is a rank: `RANK of WORLD in RUN`.
const RANK: &str = "ENGRAM_SYMM_TEST_RANK";

/// How a rank ends that has done its part: not as a test that found nothing to do.
const DONE: i32 = 40;

/// How long the ranks of a test may take: several on one GPU take turns.
const LIMIT: Duration = Duration::from_secs(240);

/// Which device each rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// All the first one.
    One,
    /// Each its own.
    Each,
    /// All that there are in turn, so that some share one.
    InTurn,
}

fn devices() -> usize {
    usize::try_from(Device::count().expect("these tests need a CUDA device")).unwrap()
}

impl Spread {
    /// Those that this machine has devices for.
    pub(crate) fn all(world: usize) -> Vec<Self> {
        if world > 1 && devices() >= world { vec![Self::One, Self::Each] } else { vec![Self::One] }
    }

    /// Over as many devices as there are.
    pub(crate) fn widest(world: usize) -> Self {
        if devices() >= world { Self::Each } else { Self::InTurn }
    }

    fn device(self, rank: usize) -> Device {
        let ordinal = match self {
            Self::One => 0,
            Self::Each => rank,
            Self::InTurn => rank % devices(),
        };
        Device::new(u32::try_from(ordinal).unwrap()).expect("these tests need a CUDA device")
    }
}

/// A rank, in its process.
pub(crate) struct Rank {
    launch: Launch,
    spread: Spread,
    pub(crate) device: Device,
}

impl Rank {
    /// The group of all ranks that has this name; another one at each call.
    pub(crate) fn group(&self, name: &str) -> Group {
        Rendezvous::new(self.launch.clone(), name).timeout(Duration::from_secs(120)).join().unwrap()
    }

    pub(crate) fn number(&self) -> usize {
        self.launch.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.launch.world
    }

    /// Whether ranks take turns on a device: then an exchange takes some time slices of each, milliseconds every one.
    pub(crate) fn takes_turns(&self) -> bool {
        self.spread != Spread::Each && self.launch.world > 1
    }
}

/// Runs `case` as every rank of a group of processes, as [`start`] does.
pub(crate) fn run(name: &str, world: usize, spread: Spread, run: &str, case: impl FnOnce(Group, Device)) {
    run_with_victim(name, world, spread, run, None, case);
}

/// As [`run`], but `victim` has to [`die`].
pub(crate) fn run_with_victim(
    name: &str,
    world: usize,
    spread: Spread,
    run: &str,
    victim: Option<usize>,
    case: impl FnOnce(Group, Device),
) {
    start_with_victim(name, world, spread, run, victim, |rank| case(rank.group(name), rank.device.clone()));
}

/// Runs `case` as every rank of some processes; all ranks have to come to its end. The test is called `name`, and starts one group at a
/// time, of which `run` says what it is.
pub(crate) fn start(name: &str, world: usize, spread: Spread, run: &str, case: impl FnOnce(Rank)) {
    start_with_victim(name, world, spread, run, None, case);
}

/// As [`start`], but `victim` has to [`die`].
pub(crate) fn start_with_victim(
    name: &str,
    world: usize,
    spread: Spread,
    run: &str,
    victim: Option<usize>,
    case: impl FnOnce(Rank),
) {
    let run = format!("{run}-{spread:?}");
    if let Ok(own) = std::env::var(RANK) {
        let mut words = own.splitn(3, ' ');
        let (rank, of, job) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
        if of == world.to_string() && job.starts_with(&format!("{run} ")) {
            let rank = rank.parse().unwrap();
            let launch = Launch { rank, world, local_rank: rank, run: job.to_owned() };
            let device = spread.device(rank);
            DEVICE.set(device.clone()).unwrap();
            case(Rank { launch, spread, device });
            std::process::exit(DONE)
        }
        // Another group of this test.
        return;
    }
    let start = |rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture", "--include-ignored"]);
        // A queue for each stream: kernels that wait for other ranks are not to be in the way of another exchange's.
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        command.env(RANK, format!("{rank} {world} {run} {}", std::process::id())).spawn().unwrap()
    };
    for (rank, status) in Ranks((0..world).map(start).collect()).wait(&run).into_iter().enumerate() {
        let well = if Some(rank) == victim { status.signal() == Some(9) } else { status.code() == Some(DONE) };
        assert!(well, "{name}, {run}: rank {rank} of {world}: {status}");
    }
}

/// Ends this process, which can do nothing about it.
pub(crate) fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("nobody survives that")
}

/// Processes that end with the test.
struct Ranks(Vec<Child>);

impl Ranks {
    /// How they ended.
    fn wait(mut self, what: &str) -> Vec<ExitStatus> {
        let start = Instant::now();
        loop {
            let ended: Option<Vec<_>> = self.0.iter_mut().map(|child| child.try_wait().unwrap()).collect();
            if let Some(ended) = ended {
                return ended;
            }
            assert!(start.elapsed() < LIMIT, "{what} hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            child.kill().ok();
            child.wait().ok();
        }
    }
}
