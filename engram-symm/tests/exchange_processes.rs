//! Exchanges between processes. A test starts itself again, once a rank.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod suite;

use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use engram_symm::{Group, Launch, Rendezvous};
use suite::cases::random_exchanges;
use suite::host::Host;

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
                std::process::exit(DONE);
            }
            // Another group of this test.
            return Self { children: Vec::new(), what: String::new() };
        }
        let start = |rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([name, "--exact", "--nocapture", "--include-ignored"]).stdout(Stdio::null());
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
