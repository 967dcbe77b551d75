//! Waiting on the CPU.

use std::time::{Duration, Instant};

use super::{Phase, Wait};

/// A wait that spins briefly, then yields, then sleeps for short spans, so that many ranks can share few cores.
///
/// The deadline counts for each phase of a step by itself.
#[derive(Debug)]
pub struct Patience {
    deadline: Duration,
    /// The phase that is waited for, since when, and how often a poll has failed.
    current: Option<(Phase, Instant)>,
    rounds: u32,
}

impl Patience {
    /// Rounds of spinning: a few microseconds, about what a store to another core takes.
    const SPINS: u32 = 200;
    /// Rounds of yielding after that: the others may be waiting for this core.
    const YIELDS: u32 = 2_000;
    /// Naps after that, of microseconds that grow by 1 each time up to a millisecond: whoever is still not there is late
    /// already, and is kept waiting by a small part of that.
    const LONGEST_NAP: u32 = 1_000;

    /// Waits up to `deadline` for each phase.
    pub fn new(deadline: Duration) -> Self {
        Self { deadline, current: None, rounds: 0 }
    }
}

impl Wait for Patience {
    fn pause(&mut self, phase: Phase) -> bool {
        let since = match self.current {
            Some((current, since)) if current == phase => since,
            _ => {
                self.rounds = 0;
                self.current.insert((phase, Instant::now())).1
            }
        };
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds <= Self::SPINS {
            std::hint::spin_loop();
            return true;
        }
        if self.rounds <= Self::SPINS + Self::YIELDS {
            std::thread::yield_now();
        } else {
            let naps = self.rounds - (Self::SPINS + Self::YIELDS);
            std::thread::sleep(Duration::from_micros(naps.min(Self::LONGEST_NAP).into()));
        }
        since.elapsed() < self.deadline
    }
}
