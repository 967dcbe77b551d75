//! Threads that share the parts of one job: what gathers run on.
//!
//! A pool is owned by a table or passed in and shared by several. Running a job allocates nothing, so that a lookup on the serving path
//! does not either; that is why this is not rayon's pool, whose queue allocates a block for every 63 jobs that come from outside.

use crate::tiers::slots::Slots;
use std::any::Any;
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A fixed set of threads on which one job at a time runs; a second caller waits for its turn.
///
/// The calling thread takes part, so a pool of one thread spawns none.
pub struct Pool {
    turn: Mutex<()>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    idle: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Spawned threads that hold the current job.
    active: usize,
    closing: bool,
}

/// A [`Task`] on the stack of the thread inside [`Pool::run`].
#[derive(Clone, Copy)]
struct Job(*const Task<'static>);

// SAFETY: a Job is only dereferenced to a shared `Task`, whose fields are all Sync, and only while `Pool::run` keeps that task alive.
unsafe impl Send for Job {}

struct Task<'a> {
    run: &'a (dyn Fn(usize, usize) + Sync),
    parts: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Task<'_> {
    /// Takes parts until none is left. A panic ends the task for everybody and is kept for the caller.
    fn work(&self, thread: usize) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.run)(thread, part))) {
                self.next.store(self.parts, Ordering::Relaxed);
                lock(&self.panic).get_or_insert(panic);
                return;
            }
        }
    }
}

/// A poisoned lock of this module guards plain values that are valid at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool of `threads` threads, the calling one included. Zero means as many as the machine runs at once.
    ///
    /// Threads that the system refuses are done without: the pool is then smaller.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            n => n,
        };
        let shared = Arc::new(Shared::default());
        let spawn = |thread| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("engram-{thread}")).spawn(move || shared.serve(thread)).ok()
        };
        let threads = (1..threads).map_while(spawn).collect();
        Self { turn: Mutex::new(()), shared, threads }
    }

    /// How many threads take part in a job, the calling one included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `run(thread, part)` once for each part in `0..parts`, with `thread` below [`Pool::threads`] and never the same twice at a time.
    ///
    /// A job that runs another one on the same pool waits for itself.
    ///
    /// # Panics
    /// With the first panic of `run`, after all threads have left the job.
    pub fn run(&self, parts: usize, run: &(dyn Fn(usize, usize) + Sync)) {
        let _turn = lock(&self.turn);
        let task = Task { run, parts, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        let helpers = self.threads.len().min(parts.saturating_sub(1));
        if helpers > 0 {
            lock(&self.shared.state).job = Some(Job((&raw const task).cast()));
            for _ in 0..helpers {
                self.shared.work.notify_one();
            }
        }
        task.work(0);
        if helpers > 0 {
            // Nobody can take the job up from here on; whoever holds it is waited for.
            let mut state = lock(&self.shared.state);
            state.job = None;
            while state.active > 0 {
                state = self.shared.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        if let Some(panic) = task.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    /// Cuts `out` into chunks of `chunk_bytes` (the last one may be shorter) and calls `run(part, chunk)` once for each.
    pub(crate) fn run_on_chunks(&self, out: &mut [u8], chunk_bytes: usize, run: &(dyn Fn(usize, &mut [u8]) + Sync)) {
        let slots = Slots::new(out, chunk_bytes);
        self.run(slots.len(), &|_, part| {
            // SAFETY: `Pool::run` gives each part to one call alone.
            run(part, unsafe { slots.get(part, 0..chunk_bytes) });
        });
    }
}

impl Shared {
    fn serve(&self, thread: usize) {
        let mut state = lock(&self.state);
        while !state.closing {
            let Some(Job(task)) = state.job else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.active += 1;
            drop(state);
            // SAFETY: the task lives on the stack of `Pool::run`, which leaves only after it has taken the job back under the lock and seen
            // `active == 0` there. This thread read the job and raised `active` under one hold of that lock, so the task outlives this use.
            unsafe { &*task }.work(thread);
            state = lock(&self.state);
            // All parts are taken: no later waker needs to look at this job.
            state.job = None;
            state.active -= 1;
            if state.active == 0 {
                self.idle.notify_one();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread's own panic was handed to the caller of `run`.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_part_runs_once_whatever_the_sizes() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for parts in [0, 1, 2, 3, 1000] {
                let seen: Vec<AtomicU32> = (0..parts).map(|_| AtomicU32::new(0)).collect();
                pool.run(parts, &|thread, part| {
                    assert!(thread < threads);
                    seen[part].fetch_add(1, Ordering::Relaxed);
                });
                assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads} threads, {parts} parts");
            }
        }
    }

    #[test]
    fn callers_take_turns_and_no_thread_index_is_shared() {
        let pool = Pool::new(3);
        let busy: Vec<AtomicU32> = (0..3).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(7, &|thread, _| {
                            assert_eq!(busy[thread].fetch_add(1, Ordering::SeqCst), 0);
                            busy[thread].fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = Pool::new(2);
        for _ in 0..50 {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|_, part| assert_ne!(part, 40, "part 40"))));
            assert!(caught.is_err());
            let done = AtomicU32::new(0);
            pool.run(9, &|_, _| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 9);
        }
    }
}
