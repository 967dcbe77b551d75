//! Progress of long work on stderr: how much is done, how fast, and how long it will still take.

use crate::text::{bytes, rate, seconds};
use engram_loader::Progress;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks of the same line on a terminal.
const REDRAW: Duration = Duration::from_millis(100);
/// Work that is over by then needs no line in a log.
const FIRST_LINE: Duration = Duration::from_secs(1);
/// Lines in a log come at doubling intervals up to this one.
const SPARSEST: Duration = Duration::from_secs(30);

/// One line that is redrawn on a terminal; elsewhere, a line now and then.
pub(crate) struct Meter {
    terminal: bool,
    job: Mutex<Option<Job>>,
}

struct Job {
    what: String,
    total: u64,
    done: u64,
    start: Instant,
    next: Instant,
    interval: Duration,
    shown: bool,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), job: Mutex::new(None) }
    }

    fn job(&self) -> std::sync::MutexGuard<'_, Option<Job>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for Meter {
    fn begin(&self, what: &str, total: u64) {
        let start = Instant::now();
        let interval = if self.terminal { REDRAW } else { FIRST_LINE };
        let what = what.to_owned();
        *self.job() = Some(Job { what, total, done: 0, start, next: start + interval, interval, shown: false });
    }

    fn advance(&self, bytes: u64) {
        if let Some(job) = &mut *self.job() {
            job.done += bytes;
            let now = Instant::now();
            if now >= job.next {
                job.next = now + job.interval;
                job.shown = true;
                let line = job.line(now);
                let mut err = std::io::stderr().lock();
                // A message that cannot be written is no reason to stop working.
                let _ = if self.terminal {
                    write!(err, "\r{line:<79}")
                } else {
                    job.interval = (job.interval * 2).min(SPARSEST);
                    writeln!(err, "{line}")
                };
            }
        }
    }

    fn end(&self) {
        if let Some(job) = self.job().take().filter(|job| job.shown && self.terminal) {
            // What follows is printed where the line was.
            let _ = write!(std::io::stderr().lock(), "\r{:<79}\r", "");
            drop(job);
        }
    }
}

impl Job {
    fn line(&self, now: Instant) -> String {
        let elapsed = now.duration_since(self.start);
        #[expect(clippy::cast_precision_loss, reason = "for people")]
        let (done, total) = (self.done as f64, (self.total as f64).max(1.0));
        let left = elapsed.mul_f64((total / done.max(1.0) - 1.0).clamp(0.0, 1e6));
        format!(
            "{} {} of {}  {:.0} %  {}  {} left",
            self.what,
            bytes(self.done),
            bytes(self.total),
            100.0 * done / total,
            rate(self.done, elapsed),
            seconds(left)
        )
    }
}
