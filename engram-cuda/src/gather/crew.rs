//! The threads that gather.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::{Announcement, Scratch, Work};

/// The threads of one lookup: a lead that takes announcements, and others that it wakes. They are parked between runs.
pub(crate) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    work: Arc<Work>,
    /// The number of the run that threads may enter, counted by the crew; 0 between runs.
    open: AtomicU64,
    /// The announcement of that run.
    run: AtomicPtr<Announcement>,
    /// Threads that are in a run, or about to see that it is closed.
    inside: AtomicUsize,
    stop: AtomicBool,
    /// All but the lead, in the order in which they wake each other.
    others: RwLock<Vec<Thread>>,
}

impl Crew {
    /// How long a thread looks for the next run before it parks: the time that it takes to be woken.
    const LINGER: Duration = Duration::from_micros(50);

    pub(crate) fn new(work: &Arc<Work>, threads: usize, capacity: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            work: work.clone(),
            open: AtomicU64::new(0),
            run: AtomicPtr::new(ptr::null_mut()),
            inside: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            others: RwLock::default(),
        });
        // From here on an error ends the threads that are there, through drop.
        let mut crew = Self { shared: shared.clone(), threads: Vec::new() };
        for index in 0..threads.max(1) {
            let (own, mut scratch) = (shared.clone(), Scratch::new(work, capacity));
            let body = move || if index == 0 { own.lead(&mut scratch) } else { own.follow(index - 1, &mut scratch) };
            let thread = thread::Builder::new().name(format!("engram-gather-{index}")).spawn(body)?;
            if index == 0 {
                *work.lead.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread.thread().clone());
            } else {
                shared.others.write().unwrap_or_else(PoisonError::into_inner).push(thread.thread().clone());
            }
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        *self.shared.work.lead.lock().unwrap_or_else(PoisonError::into_inner) = None;
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A thread that panicked has said so already; a destructor adds nothing.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Waits until `ready`, first awake, then parked. False when the crew is to end.
    fn wait(&self, ready: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            if start.elapsed() > Crew::LINGER {
                thread::park();
            }
        }
    }

    fn wake(&self, index: usize) {
        if let Some(thread) = self.others.read().unwrap_or_else(PoisonError::into_inner).get(index) {
            thread.unpark();
        }
    }

    fn lead(&self, scratch: &mut Scratch) {
        let work = &*self.work;
        let mut count = 0;
        while self.wait(|| !work.next.load(Ordering::Acquire).is_null()) {
            work.active.store(true, Ordering::Release);
            let announcement = work.next.swap(ptr::null_mut(), Ordering::AcqRel);
            // SAFETY: announcements stay where they are until their run is over, which is below.
            let run = unsafe { (*announcement).run };
            work.begin(&run);
            count += 1;
            self.run.store(announcement, Ordering::Relaxed);
            self.open.store(count, Ordering::SeqCst);
            // Each thread that wakes wakes two more.
            self.wake(0);
            self.wake(1);
            work.gather(&run, scratch);
            // Nothing is left to take: threads that wake only now stay out, and those inside are about to leave.
            self.open.store(0, Ordering::SeqCst);
            while self.inside.load(Ordering::SeqCst) > 0 {
                std::hint::spin_loop();
            }
            work.end(&run);
            work.active.store(false, Ordering::Release);
        }
    }

    fn follow(&self, index: usize, scratch: &mut Scratch) {
        let mut seen = 0;
        let new = |seen| {
            let open = self.open.load(Ordering::Acquire);
            open != 0 && open != seen
        };
        while self.wait(|| new(seen)) {
            // Entered first and looked at second, while the lead closes first and looks at second: one of the two sees the other.
            self.inside.fetch_add(1, Ordering::SeqCst);
            let open = self.open.load(Ordering::SeqCst);
            if open != 0 && open != seen {
                seen = open;
                self.wake(2 * index + 2);
                self.wake(2 * index + 3);
                // SAFETY: the lead waits for this thread before the run is over.
                let run = unsafe { (*self.run.load(Ordering::Relaxed)).run };
                self.work.gather(&run, scratch);
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
