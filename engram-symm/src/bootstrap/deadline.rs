use std::time::{Duration, Instant};

use rustix::event::Timespec;

/// The end of a wait, and how long it was to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    /// The length of the whole wait.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// What is left of it; `None` once it has passed.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.limit.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }

    /// The same end, or an earlier one `limit` from now.
    pub(crate) fn at_most(&self, limit: Duration) -> Self {
        Self::after(self.left().unwrap_or_default().min(limit))
    }
}

/// `wait` as the system takes it, rounded up so that a poll does not spin through the last nanoseconds.
pub(crate) fn timespec(wait: Duration) -> Timespec {
    let wait = wait.saturating_add(Duration::from_micros(1));
    Timespec { tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(wait.subsec_nanos()) }
}
