//! Exchanges between processes. A test starts itself again, once a rank.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking; a rank speaks through a pipe"
)]

mod host;
mod suite;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engram_symm::protocol::Fault;
use engram_symm::{Algorithm, Error, Group, Launch, Rendezvous};
use host::{Host, hooked};
use suite::cases::random_exchanges;
use suite::model::{Shape, Tables};
use suite::{Exchanger, fault};

/// Tells a process that it is a rank: `RANK of WORLD in RUN`.
const RANK: &str = "ENGRAM_SYMM_TEST_RANK";

/// How a rank ends that has done its part: not as a test that found nothing to do.
const DONE: i32 = 40;

/// The ranks of a group, as processes.
struct Ranks {
    children: Vec<Child>,
    what: String,
}

impl Ranks {
    /// Starts the test `name` again as each rank of a group; or, in one of those, does its part and does not return.
    /// `run` tells the groups of one test apart.
    fn start(name: &str, world: usize, run: &str, case: impl FnOnce(Group)) -> Self {
        if let Ok(own) = std::env::var(RANK) {
            let mut words = own.splitn(3, ' ');
            let (rank, of, job) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            if of == world.to_string() && job.starts_with(&format!("{run} ")) {
                let rank = rank.parse().unwrap();
                let launch = Launch { rank, world, local_rank: rank, run: job.to_owned() };
                let group = Rendezvous::new(launch, name).timeout(Duration::from_secs(60)).join().unwrap();
                case(group);
                std::process::exit(DONE)
            }
            // Another group of this test.
            return Self { children: Vec::new(), what: String::new() };
        }
        let start = |rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([name, "--exact", "--nocapture", "--include-ignored"]).stdout(Stdio::piped());
            command.env(RANK, format!("{rank} {world} {run} {}", std::process::id())).spawn().unwrap()
        };
        Self { children: (0..world).map(start).collect(), what: format!("{name} {run}") }
    }

    /// How the ranks ended; those that have not after two minutes are killed, and the test fails.
    fn wait(mut self) -> Vec<ExitStatus> {
        let start = Instant::now();
        loop {
            let ended: Option<Vec<_>> = self.children.iter_mut().map(|child| child.try_wait().unwrap()).collect();
            if let Some(ended) = ended {
                self.children.clear();
                return ended;
            }
            assert!(start.elapsed() < Duration::from_secs(120), "{} hangs", self.what);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// Runs `case` as every rank of a group.
fn run(name: &str, world: usize, case: fn(Group)) {
    for (rank, status) in Ranks::start(name, world, "case", case).wait().into_iter().enumerate() {
        assert_eq!(status.code(), Some(DONE), "{name}: rank {rank} of {world}: {status}");
    }
}

conformance!(run, Host);

#[test]
fn ten_thousand_random_exchanges() {
    for world in 1..=8 {
        run("ten_thousand_random_exchanges", world, random_exchanges::<Host, 1250>);
    }
}

/// Deadline of the groups in which a rank dies: long enough for a busy machine.
const DEADLINE: Duration = Duration::from_millis(1500);

/// Exchanges before the ranks of such a group stop by themselves.
const STEPS: u32 = 400;

/// Runs exchanges until one fails, and ends with the number of those that did not. The rank that dies is told to, or
/// does it by itself at an access to memory.
fn exchange_until_a_rank_dies(mut group: Group, algorithm: Algorithm, dies_at: Option<u64>) {
    let (rank, accesses) = (group.rank(), AtomicU64::new(0));
    let dies_at = dies_at.filter(|_| rank == VICTIM);
    let hook = move || {
        if Some(accesses.fetch_add(1, Ordering::Relaxed)) == dies_at {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
    };
    let shape = Shape { deadline: DEADLINE, layers: 1, capacity: 2, ..Shape::new(group.world(), 5) };
    let mut rows = hooked(&mut group, &shape, Tables::Sound, 0, hook).unwrap();
    println!("ready");
    for step in 0..STEPS {
        let ids = shape.ids(rank, step.into(), 2);
        let start = Instant::now();
        match rows.run(shape.view(&ids), 2, algorithm) {
            Ok(found) => assert!(found == shape.expected(&ids, 2)),
            Err(error) => {
                let Error::Fault(Fault::Deadline { rank: VICTIM, epoch, .. }) = error else { panic!("{error:?}") };
                // This rank's exchange, or that of a rank that is one behind or ahead.
                assert!((step..=step + 2).contains(&epoch), "{error:?} in step {step}");
                assert!(start.elapsed() < 2 * DEADLINE + Duration::from_secs(2));
                assert_eq!(rows.check(), Err(fault(Err::<(), _>(error))));
                rows.close().unwrap();
                std::process::exit(i32::try_from(step % 100).unwrap() + DONE);
            }
        }
        if dies_at.is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    panic!("no rank has died");
}

/// The rank that dies: not the first, so that the others must find out that it is not a neighbour's fault.
const VICTIM: usize = 1;

/// One rank was killed, and the others failed in the same exchange or the next.
fn check_survivors(group: Ranks) {
    let what = group.what.clone();
    let ended = group.wait();
    if ended.is_empty() {
        // This process is a rank itself, of another group.
        return;
    }
    let mut failed_in = Vec::new();
    for (rank, status) in ended.into_iter().enumerate() {
        if rank == VICTIM {
            assert_eq!(status.signal(), Some(9), "{what}");
        } else {
            let code = status.code().unwrap_or(0);
            assert!((DONE..DONE + 100).contains(&code), "{what}: rank {rank}: {status}");
            failed_in.push(code);
        }
    }
    let apart = failed_in.iter().max().unwrap() - failed_in.iter().min().unwrap();
    assert!(apart <= 1 || apart == 99, "{what}: {failed_in:?}");
}

/// A rank kills itself at its n-th access to the group's memory: before, inside and after an exchange.
#[test]
fn a_rank_that_dies_at_any_access_is_named_by_all() {
    let left_before = left_behind();
    for algorithm in [Algorithm::Barrier, Algorithm::Push] {
        // An exchange is some 40 accesses of this rank's, apart from polls.
        for four in [[0, 1, 2, 5], [8, 11, 14, 17], [20, 23, 26, 29], [32, 36, 40, 200]] {
            let groups = four.map(|access| {
                let run = format!("{algorithm:?}-{access}");
                let case = move |group| exchange_until_a_rank_dies(group, algorithm, Some(access));
                Ranks::start("a_rank_that_dies_at_any_access_is_named_by_all", 3, &run, case)
            });
            groups.into_iter().for_each(check_survivors);
        }
    }
    assert_eq!(left_behind(), left_before);
}

/// A rank is killed from outside, at some time.
#[test]
fn a_rank_that_is_killed_is_named_by_all() {
    let left_before = left_behind();
    for algorithm in [Algorithm::Barrier, Algorithm::Push] {
        let groups = [(3, 3), (3, 10), (3, 31), (3, 70), (8, 20)].map(|(world, milliseconds)| {
            let run = format!("{algorithm:?}-{milliseconds}");
            let case = move |group| exchange_until_a_rank_dies(group, algorithm, None);
            let mut group = Ranks::start("a_rank_that_is_killed_is_named_by_all", world, &run, case);
            if let Some(victim) = group.children.get_mut(VICTIM) {
                // Past the rendezvous, where a death has another name.
                let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
                assert!(lines.map_while(Result::ok).any(|line| line.ends_with("ready")));
                std::thread::sleep(Duration::from_millis(milliseconds));
                victim.kill().unwrap();
            }
            group
        });
        groups.into_iter().for_each(check_survivors);
    }
    assert_eq!(left_behind(), left_before);
}

/// Names of this crate's in the places where shared memory and sockets could be left.
fn left_behind() -> Vec<std::ffi::OsString> {
    let entries = ["/dev/shm", "/tmp"].into_iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
    let mut names: Vec<_> = names.filter(|name| name.to_string_lossy().contains("engram-symm")).collect();
    names.sort();
    names
}
