//! The processes of a test.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use engram_symm::Error;

use crate::script::{Report, Script};

/// Long enough for every test; a rank that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A job: processes that a launcher would start together.
pub(crate) struct Job {
    run: String,
    /// As another user, where this process may.
    nobody: bool,
    /// In front of the program.
    wrapper: Vec<String>,
}

/// A rank's process.
pub(crate) struct Process {
    pub rank: usize,
    child: Child,
    start: Instant,
}

impl Job {
    pub(crate) fn new() -> Self {
        static JOBS: AtomicU32 = AtomicU32::new(0);
        let run = format!("{} {}", std::process::id(), JOBS.fetch_add(1, Relaxed));
        Self { run, nobody: false, wrapper: Vec::new() }
    }

    pub(crate) fn by_nobody(mut self) -> Self {
        self.nobody = rustix::process::geteuid().is_root();
        self
    }

    pub(crate) fn wrapped(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    pub(crate) fn spawn(&self, rank: usize, world: usize, script: &Script) -> Process {
        let program = std::env::current_exe().expect("this program has a path");
        let mut words = self.wrapper.iter().map(Into::into).chain([program.into_os_string()]);
        let mut command = Command::new(words.next().expect("at least the program"));
        command.args(words).arg("--rank").env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", world.to_string()).env("MASTER_ADDR", "localhost").env("MASTER_PORT", "29500");
        command.env("TORCHELASTIC_RUN_ID", &self.run).env("TORCHELASTIC_RESTART_COUNT", "0");
        command.env("SCRIPT", serde_json::to_string(script).expect("plain data"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if self.nobody {
            command.uid(65534).gid(65534);
        }
        let child = command.spawn().expect("the test's program can be started");
        Process { rank, child, start: Instant::now() }
    }

    /// Runs `script(rank)` as each rank, all at once, and returns their reports.
    pub(crate) fn run(&self, world: usize, script: impl Fn(usize) -> Script) -> Vec<Report> {
        let processes: Vec<_> = (0..world).map(|rank| self.spawn(rank, world, &script(rank))).collect();
        processes.into_iter().map(Process::report).collect()
    }

    /// The same where `victim` dies: the reports of all others.
    pub(crate) fn run_with_victim(&self, world: usize, victim: usize, script: impl Fn(usize) -> Script) -> Vec<Report> {
        let processes: Vec<_> = (0..world).map(|rank| self.spawn(rank, world, &script(rank))).collect();
        let reports = processes.into_iter().filter_map(|process| match process.rank == victim {
            true => {
                assert_eq!(process.wait(), None, "the victim survived");
                None
            }
            false => Some(process.report()),
        });
        reports.collect()
    }
}

impl Process {
    pub(crate) fn report(self) -> Report {
        let rank = self.rank;
        self.wait().unwrap_or_else(|| panic!("rank {rank} died without a report"))
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("a child can be waited for");
    }

    /// Waits for the end of the process. `None` when it was killed.
    pub(crate) fn wait(mut self) -> Option<Report> {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                break status;
            }
            if self.start.elapsed() > PATIENCE {
                self.child.kill().expect("a child can be killed");
                panic!("rank {} hangs", self.rank);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut text = String::new();
        self.child.stdout.take().expect("piped").read_to_string(&mut text).expect("text");
        match status.code() {
            Some(0) => Some(serde_json::from_str(&text).expect("a report")),
            Some(code) => panic!("rank {} failed with status {code}", self.rank),
            None => None,
        }
    }
}

impl Report {
    /// The error that ended the script, once it is certain that nothing is left of the group.
    pub(crate) fn error(&self) -> Error {
        self.nothing_left();
        self.outcome.clone().expect_err("the script must fail")
    }

    pub(crate) fn success(&self) -> &Self {
        self.nothing_left();
        assert_eq!(self.outcome, Ok(()));
        self
    }

    fn nothing_left(&self) {
        assert_eq!((self.descriptors, self.segments), (0, 0), "descriptors and segments left after {:?}", self.outcome);
    }
}

/// Asserts that all reports end with this error.
pub(crate) fn all_fail(reports: &[Report], expected: &Error) {
    for report in reports {
        assert_eq!(report.error(), *expected);
    }
}

/// Asserts that all reports succeed.
pub(crate) fn all_succeed(reports: &[Report]) {
    for report in reports {
        report.success();
    }
}
