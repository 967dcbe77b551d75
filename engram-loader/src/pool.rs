//! Threads that share the parts of one job.

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

/// A fixed set of threads, owned by a table or passed in and shared by several. Never the program's global pool.
#[derive(Debug)]
pub struct Pool {
    /// None: the caller works alone.
    threads: Option<rayon::ThreadPool>,
}

impl Pool {
    /// A pool of `threads` threads; 0 means as many as the machine runs at once, and 1 is the calling thread itself.
    ///
    /// If the system refuses to start them, the calling thread works alone.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let builder =
            rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|thread| format!("engram-{thread}"));
        Self { threads: if threads == 1 { None } else { builder.build().ok() } }
    }

    /// How many threads take part in a job.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Calls `run(thread, part)` once for each part in `0..parts`, with `thread` below [`Pool::threads`]. Two calls at a time have the same
    /// `thread` only where several callers use a pool of one thread.
    ///
    /// # Panics
    /// With a panic of `run`, after all threads have left the job.
    pub fn run(&self, parts: usize, run: &(dyn Fn(usize, usize) + Sync)) {
        let Some(threads) = &self.threads else { return (0..parts).for_each(|part| run(0, part)) };
        let here = || rayon::current_thread_index().unwrap_or(0);
        threads.install(|| (0..parts).into_par_iter().with_max_len(1).for_each(|part| run(here(), part)));
    }

    /// Cuts `out` into chunks of `chunk_bytes` (the last one may be shorter) and calls `run(part, chunk)` once for each.
    pub(crate) fn run_on_chunks(&self, out: &mut [u8], chunk_bytes: usize, run: &(dyn Fn(usize, &mut [u8]) + Sync)) {
        let Some(threads) = &self.threads else {
            return out.chunks_mut(chunk_bytes).enumerate().for_each(|(part, chunk)| run(part, chunk));
        };
        let chunks = out.par_chunks_mut(chunk_bytes).enumerate().with_max_len(1);
        threads.install(|| chunks.for_each(|(part, chunk)| run(part, chunk)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicU32, Ordering};

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
    fn no_thread_index_is_shared_between_callers() {
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
