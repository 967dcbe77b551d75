//! Waiting on the CPU.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::signals::bell;
use super::{Phase, Wait};
use crate::Memory;

/// A wait that spins briefly, then sleeps until another rank stores a signal into this rank's memory, so that many ranks
/// can share few cores.
///
/// The deadline counts for each phase of a step by itself.
#[derive(Debug)]
pub struct Patience<'a, M: Memory + ?Sized> {
    memory: &'a M,
    deadline: Duration,
    spins: &'a mut Spins,
    /// What is waited for.
    phase: Option<Phase>,
    /// Rounds of polls that found nothing.
    rounds: u32,
    /// When the spinning ended.
    since: Option<Instant>,
    /// Whether the others know that this rank is about to sleep.
    armed: bool,
}

/// How many rounds of polls are worth spinning for, learned from one wait to the next: where ranks share a core, nothing
/// ever arrives meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Spins(u32);

impl Spins {
    const LEAST: u32 = 16;
    /// Some tens of microseconds, about what it costs to fall asleep and wake up.
    const MOST: u32 = 1024;
}

impl Default for Spins {
    fn default() -> Self {
        Self(Self::MOST)
    }
}

impl<'a, M: Memory + ?Sized> Patience<'a, M> {
    /// Waits in `memory`, up to `deadline` for each phase.
    pub fn new(memory: &'a M, deadline: Duration, spins: &'a mut Spins) -> Self {
        Self { memory, deadline, spins, phase: None, rounds: 0, since: None, armed: false }
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            bell(self.memory, self.memory.rank()).store(0, Relaxed);
        }
    }

    /// The wait for a phase is over.
    fn settle(&mut self) {
        self.disarm();
        if self.since.is_some() {
            self.spins.0 = (self.spins.0 / 2).max(Spins::LEAST);
        } else if self.rounds > 0 {
            self.spins.0 = (self.spins.0 * 2).min(Spins::MOST);
        }
    }
}

impl<M: Memory + ?Sized> Drop for Patience<'_, M> {
    fn drop(&mut self) {
        self.settle();
    }
}

impl<M: Memory + ?Sized> Wait for Patience<'_, M> {
    fn pause(&mut self, phase: Phase) -> bool {
        if self.phase != Some(phase) {
            self.settle();
            (self.phase, self.rounds, self.since) = (Some(phase), 0, None);
        }
        if self.rounds < self.spins.0 {
            self.rounds += 1;
            std::hint::spin_loop();
            return true;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let Some(left) = self.deadline.checked_sub(since.elapsed()).filter(|left| !left.is_zero()) else {
            return false;
        };
        let bell = bell(self.memory, self.memory.rank());
        if !self.armed {
            bell.store(1, Relaxed);
            // Pairs with the fence in `ring`: either the polls that follow see the signal, or its writer sees the bell.
            fence(SeqCst);
            self.armed = true;
            return true;
        }
        let limit = futex::Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // Returns at once when the bell has been rung since; any other return is as good a reason to poll again.
        let _ = futex::wait(bell, futex::Flags::empty(), 1, Some(&limit));
        self.disarm();
        true
    }
}
