//! Rows gathered by threads of the host: from a table in host memory into chunks that a kernel is waiting for.

pub(crate) mod crew;
mod ids;

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, Thread};

use engram_ple::{SourceError, TableSource};

use crate::areas::Areas;
use crate::copy;
use crate::distinct::{Distinct, Key, Switch};

use ids::IdsOf;

/// Why threads could not serve a staged lookup.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// The stage kernel gave up waiting, and the lookup gave zero rows.
    #[error("the threads were too late, so it gave zero rows")]
    Late,
    /// Launches of graphs that hold the same lookup ran at the same time, so rows may be mixed up.
    #[error("two runs of one lookup overlapped: order the launches of its graphs")]
    Overlap,
    /// The table's memory was given back when the rows were to be read.
    #[error("its table was asleep: call `wake` first")]
    Asleep,
    /// The source failed that the rows are read from.
    #[error("{error}{cause}", error = .0, cause = std::error::Error::source(.0).map(|cause| format!(": {cause}")).unwrap_or_default())]
    Source(SourceError),
}

/// How rows are read on the host.
pub(crate) enum HostRows<'a> {
    /// The part's packed rows, one after the other.
    Memory(*const u8),
    /// A source of the whole table.
    Source(&'a dyn TableSource),
}

/// A table, or a part of one, that threads of the host can read.
pub(crate) trait HostTable: Send + Sync {
    /// The rows that are here.
    fn rows(&self) -> Range<u64>;

    /// Calls `read` with the rows, or with nothing where there are none now.
    fn read(&self, read: &mut dyn FnMut(Option<HostRows<'_>>));
}

/// One lookup's work for the threads: what to gather from where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) tokens: usize,
    pub(crate) first_layer: usize,
    pub(crate) layers: usize,
    /// `[tokens][layers][columns]`, i32, or i64 where `wide`.
    pub(crate) ids: *const u8,
    pub(crate) wide: bool,
    /// `[tokens][layers][groups]`, of which equal ones mean equal ids in the group's columns; null without.
    pub(crate) mixes: *const i64,
    /// Cleared when the run is over, where the ids' memory is to be used again.
    pub(crate) busy: *const AtomicBool,
}

impl Run {
    /// The power of two of its tokens.
    fn size(&self) -> usize {
        self.tokens.max(1).ilog2() as usize
    }
}

// SAFETY: the pointers name memory of the lookup that made the run, which outlives it.
unsafe impl Send for Run {}
// SAFETY: as for `Send`; the memory is only read (the flag is atomic) while the run lasts.
unsafe impl Sync for Run {}

/// A run, and the work that it belongs to: what a host function gets.
pub(crate) struct Announcement {
    pub(crate) work: Arc<Work>,
    pub(crate) run: Run,
}

/// Pinned memory that the threads write and a kernel reads.
#[derive(Clone, Copy)]
pub(crate) struct Chunks {
    /// Slots and areas.
    pub(crate) rows: *mut u8,
    /// One word a chunk: run << 32 | bytes.
    pub(crate) ready: *const AtomicU64,
    /// Runs that the kernel has finished, and the last one that it gave up waiting for.
    pub(crate) status: *const [AtomicU32; 2],
}

// SAFETY: the memory belongs to the lookup, which outlives the threads; threads write disjoint chunks of it.
unsafe impl Send for Chunks {}
// SAFETY: as for `Send`.
unsafe impl Sync for Chunks {}

/// What the threads of one lookup share.
pub(crate) struct Work {
    tables: Vec<Arc<dyn HostTable>>,
    areas: Areas,
    columns: usize,
    chunks: Chunks,
    /// Announced and not yet begun.
    next: AtomicPtr<Announcement>,
    /// The last run that the kernel gave up and that was told of.
    told: AtomicU32,
    /// The number of the run that is announced.
    next_number: AtomicU32,
    /// The number of the run begun last.
    number: AtomicU32,
    /// Whether threads may be in a run.
    active: AtomicBool,
    groups: Vec<Group>,
    next_group: AtomicUsize,
    /// Groups not yet numbered.
    open: AtomicUsize,
    next_slots: AtomicUsize,
    look: AtomicBool,
    /// What slots the device has, if the last run did not look for repeats.
    plain_slots: Mutex<Option<PlainSlots>>,
    /// By size (power of two): steps that decode do not repeat, prompts do. None where repeats are not to be looked for.
    switches: Option<Mutex<[Switch; usize::BITS as usize]>>,
    /// Share of distinct keys in the last run that looked, as f32 bits.
    distinct_share: AtomicU32,
    keys: AtomicUsize,
    distinct: AtomicUsize,
    failed: AtomicBool,
    failure: Mutex<Option<GatherError>>,
    /// Woken by announcements.
    lead: Mutex<Option<Thread>>,
}

/// Slots of a run in which every token is an entry of its own: they depend on its shape alone.
#[derive(Clone, Copy, Debug)]
struct PlainSlots {
    layers: usize,
    used: usize,
    tokens: usize,
}

impl PlainSlots {
    fn of(run: &Run, areas: &Areas) -> Self {
        Self { layers: run.layers, used: areas.used(run.tokens), tokens: run.tokens }
    }

    /// Whether these slots begin with those of the other run.
    fn holds(&self, other: &Self) -> bool {
        (self.layers, self.used) == (other.layers, other.used) && self.tokens >= other.tokens
    }
}

/// A group of columns of one layer in the current run.
struct Group {
    /// Entries to gather, or [`Group::OPEN`] before they are numbered.
    found: AtomicU32,
    next_chunk: AtomicUsize,
    numbers: RwLock<Numbers>,
}

#[derive(Default)]
struct Numbers {
    /// The first token of each entry.
    first: Vec<u32>,
    /// The entry of each token; [`Distinct::NOTHING`] for zero rows.
    entry: Vec<u32>,
}

impl Group {
    const OPEN: u32 = u32::MAX;
}

impl Work {
    pub(crate) fn new(
        tables: Vec<Arc<dyn HostTable>>,
        areas: Areas,
        columns: usize,
        capacity: usize,
        distinct: bool,
        chunks: Chunks,
    ) -> Self {
        let groups = tables.len() * areas.groups;
        let group = || Group {
            found: AtomicU32::new(0),
            next_chunk: AtomicUsize::new(0),
            numbers: RwLock::new(Numbers { first: vec![0; capacity], entry: vec![0; capacity] }),
        };
        Self {
            tables,
            areas,
            columns,
            chunks,
            next: AtomicPtr::new(ptr::null_mut()),
            told: AtomicU32::new(0),
            next_number: AtomicU32::new(0),
            number: AtomicU32::new(0),
            active: AtomicBool::new(false),
            groups: (0..groups).map(|_| group()).collect(),
            next_group: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            next_slots: AtomicUsize::new(0),
            look: AtomicBool::new(false),
            plain_slots: Mutex::new(None),
            switches: distinct.then(|| Mutex::new(std::array::from_fn(|_| Switch::default()))),
            distinct_share: AtomicU32::new(1.0f32.to_bits()),
            keys: AtomicUsize::new(0),
            distinct: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            lead: Mutex::new(None),
        }
    }

    /// Share of distinct keys in the last run that looked for repeats.
    pub(crate) fn distinct_share(&self) -> f32 {
        f32::from_bits(self.distinct_share.load(Ordering::Relaxed))
    }

    /// Takes the failure of an earlier run, if there was one.
    pub(crate) fn failure(&self) -> Option<GatherError> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        self.failed.store(false, Ordering::Relaxed);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn fail(&self, why: GatherError) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
        self.failed.store(true, Ordering::Release);
    }

    /// Hands a run to the threads. Called when the stream reaches it, so one at a time unless graphs of one lookup overlap.
    ///
    /// # Safety
    /// The announcement stays where it is until the run is over.
    pub(crate) unsafe fn announce(&self, announcement: *const Announcement) {
        let status = self.status();
        let finished = status[0].load(Ordering::Acquire);
        let expired = status[1].load(Ordering::Relaxed);
        if expired == finished && self.told.swap(expired, Ordering::Relaxed) != expired {
            self.fail(GatherError::Late);
        }
        // A run is numbered by what the kernel has finished, so a run that came too late leaves no trace in the next one.
        self.next_number.store(finished.wrapping_add(1), Ordering::Relaxed);
        let unfinished = self.number.load(Ordering::Acquire).wrapping_sub(finished);
        let waiting = self.next.swap(announcement.cast_mut(), Ordering::AcqRel);
        if !waiting.is_null() || unfinished != 0 && unfinished <= u32::MAX / 2 {
            self.fail(GatherError::Overlap);
        }
        if let Some(lead) = self.lead.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            lead.unpark();
        }
    }

    /// Waits until the threads are out of every run that was announced.
    pub(crate) fn settle(&self) {
        while !self.next.load(Ordering::Acquire).is_null() || self.active.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }

    fn status(&self) -> &[AtomicU32; 2] {
        // SAFETY: the pinned words outlive the threads, and every access of the host's to them is atomic.
        unsafe { &*self.chunks.status }
    }

    /// Prepares a run; the threads then call [`Work::gather`].
    fn begin(&self, run: &Run) {
        let number = self.next_number.load(Ordering::Relaxed);
        self.number.store(number, Ordering::Release);
        if self.status()[1].load(Ordering::Relaxed) == number.wrapping_sub(1) {
            // The kernel gave the run before up, and its slots with it.
            *self.plain_slots.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        let groups = run.layers * self.areas.groups;
        let switches = self.switches.as_ref().map(|all| all.lock().unwrap_or_else(PoisonError::into_inner));
        self.look.store(switches.is_some_and(|mut all| all[run.size()].look()), Ordering::Relaxed);
        self.keys.store(0, Ordering::Relaxed);
        self.distinct.store(0, Ordering::Relaxed);
        for group in &self.groups[..groups] {
            group.found.store(Group::OPEN, Ordering::Relaxed);
            group.next_chunk.store(0, Ordering::Relaxed);
        }
        self.open.store(groups, Ordering::Relaxed);
        self.next_group.store(0, Ordering::Relaxed);
        self.next_slots.store(0, Ordering::Release);
    }

    /// Closes a run that all threads have left.
    fn end(&self, run: &Run) {
        if let Some(switches) = self.switches.as_ref().filter(|_| self.look.load(Ordering::Relaxed)) {
            let keys = self.keys.load(Ordering::Relaxed).max(1);
            #[expect(clippy::cast_precision_loss, reason = "a share")]
            let share = self.distinct.load(Ordering::Relaxed) as f32 / keys as f32;
            self.distinct_share.store(share.to_bits(), Ordering::Relaxed);
            switches.lock().unwrap_or_else(PoisonError::into_inner)[run.size()].found(share);
        } else {
            self.distinct_share.store(1.0f32.to_bits(), Ordering::Relaxed);
        }
        let mut known = self.plain_slots.lock().unwrap_or_else(PoisonError::into_inner);
        *known = if self.look.load(Ordering::Relaxed) {
            None
        } else {
            let new = PlainSlots::of(run, &self.areas);
            let more = known.filter(|known| known.holds(&new));
            more.or(Some(new))
        };
        drop(known);
        if !run.busy.is_null() {
            // SAFETY: the flag outlives the run.
            unsafe { &*run.busy }.store(false, Ordering::Release);
        }
    }

    /// One thread's part of a run: it numbers groups, fills slots and gathers chunks until nothing is left to take.
    fn gather(&self, run: &Run, thread: &mut Scratch) {
        let areas = &self.areas;
        let groups = run.layers * areas.groups;
        if !self.look.load(Ordering::Relaxed) {
            self.fill_slots(run, areas);
            for layer in 0..run.layers {
                let next = &self.groups[layer * areas.groups].next_chunk;
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    if k >= areas.groups * areas.used(run.tokens) {
                        break;
                    }
                    self.gather_plain(run, areas, layer, k, thread);
                }
            }
            return;
        }
        loop {
            let group = self.next_group.fetch_add(1, Ordering::Relaxed);
            if group >= groups {
                break;
            }
            self.number_group(run, areas, group, &mut thread.distinct);
        }
        loop {
            let mut waiting = false;
            if self.open.load(Ordering::Acquire) == 0 {
                self.fill_slots(run, areas);
            } else {
                waiting = true;
            }
            for (index, group) in self.groups[..groups].iter().enumerate() {
                let found = group.found.load(Ordering::Acquire);
                if found == Group::OPEN {
                    waiting = true;
                    continue;
                }
                let used = areas.used(run.tokens);
                loop {
                    let k = group.next_chunk.fetch_add(1, Ordering::Relaxed);
                    if k >= used {
                        break;
                    }
                    self.gather_chunk(run, areas, index, k, found as usize, thread);
                }
            }
            if !waiting {
                break;
            }
            std::hint::spin_loop();
        }
    }

    /// Numbers the distinct n-grams (or ids) of a group.
    fn number_group(&self, run: &Run, areas: &Areas, group: usize, distinct: &mut Distinct) {
        let mut numbers = self.groups[group].numbers.write().unwrap_or_else(PoisonError::into_inner);
        let Numbers { first, entry } = &mut *numbers;
        let ids = self.ids_of(run, areas, group);
        let number = |token: usize, number| entry[token] = number;
        let found = if run.mixes.is_null() {
            let key = |token| if ids.is_dead(token) { Key::Nothing } else { Key::Like(ids.hash(token)) };
            distinct.number(run.tokens, key, |a, b| ids.equal(a, b), first, number)
        } else {
            let per_token = run.layers * areas.groups;
            // SAFETY: mixes are `[tokens][layers][groups]`.
            let mix = |token: usize| unsafe { run.mixes.wrapping_add(token * per_token + group).read() };
            let key = |token| match ids.get(token, 0) {
                0.. => Key::Like(mix(token).cast_unsigned()),
                // Past the end, mixes say nothing.
                _ if ids.is_dead(token) => Key::Nothing,
                _ => Key::Alone,
            };
            distinct.number(run.tokens, key, |a, b| mix(a) == mix(b), first, number)
        };
        drop(numbers);
        self.keys.fetch_add(run.tokens, Ordering::Relaxed);
        self.distinct.fetch_add(found, Ordering::Relaxed);
        self.groups[group].found.store(u32::try_from(found).unwrap_or(u32::MAX - 1), Ordering::Release);
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// Writes and publishes slots, a chunk at a time, when all groups are numbered.
    fn fill_slots(&self, run: &Run, areas: &Areas) {
        let per_token = run.layers * areas.groups;
        let slots = run.tokens * per_token;
        let per_chunk = areas.chunk_bytes() / 4;
        let looked = self.look.load(Ordering::Relaxed);
        // The device still has them from the last run, if neither looked for repeats and both are of one shape.
        let known = !looked && {
            let known = self.plain_slots.lock().unwrap_or_else(PoisonError::into_inner);
            known.is_some_and(|known| known.holds(&PlainSlots::of(run, areas)))
        };
        loop {
            let k = self.next_slots.fetch_add(1, Ordering::Relaxed);
            if k >= areas.slot_chunks {
                return;
            }
            let range = (k * per_chunk).min(slots)..((k + 1) * per_chunk).min(slots);
            let bytes = if known { 0 } else { range.len() * 4 };
            if bytes > 0 {
                // SAFETY: slots lie at the start of the rows' memory.
                let to = unsafe { self.chunks.rows.cast::<i32>().add(range.start) };
                let write = |at: usize, slot: usize| {
                    // SAFETY: inside this thread's chunk. Slots are below 2^31, as rows are.
                    unsafe { to.wrapping_add(at).write(i32::try_from(slot).unwrap_or(-1)) }
                };
                let mut token = range.start / per_token;
                let mut group = range.start % per_token;
                if looked {
                    let numbers: Vec<_> = self.groups[..per_token]
                        .iter()
                        .map(|group| group.numbers.read().unwrap_or_else(PoisonError::into_inner))
                        .collect();
                    for at in 0..range.len() {
                        match numbers[group].entry[token] {
                            Distinct::NOTHING => write(at, usize::MAX),
                            entry => write(at, areas.slot(group % areas.groups, entry as usize)),
                        }
                        group += 1;
                        if group == per_token {
                            (group, token) = (0, token + 1);
                        }
                    }
                } else {
                    let used = areas.used(run.tokens);
                    for at in 0..range.len() {
                        write(at, areas.plain_slot(token * areas.groups + group % areas.groups, used));
                        group += 1;
                        if group == per_token {
                            (group, token) = (0, token + 1);
                        }
                    }
                }
            }
            self.publish(k, bytes);
        }
    }

    /// Copies the rows of one chunk of a layer whose entries are all tokens' groups in their own order, and publishes it.
    fn gather_plain(&self, run: &Run, areas: &Areas, layer: usize, k: usize, thread: &mut Scratch) {
        let chunk = areas.plain_chunk(layer, k, areas.used(run.tokens));
        let entries = areas.entries_of(k, run.tokens * areas.groups);
        let bytes = entries.len() * areas.share * areas.row_bytes;
        if bytes > 0 {
            // SAFETY: the chunk lies inside the rows' memory.
            let to = unsafe { self.chunks.rows.add(chunk * areas.chunk_bytes()) };
            let ids =
                IdsOf { run, stride: run.layers * self.columns, first: layer * self.columns, columns: self.columns };
            thread.ids.clear();
            let (mut token, mut column) = (entries.start / areas.groups, entries.start % areas.groups * areas.share);
            for _ in 0..entries.len() * areas.share {
                thread.ids.push(ids.get(token, column));
                column += 1;
                if column == self.columns {
                    (token, column) = (token + 1, 0);
                }
            }
            self.copy_rows(&*self.tables[run.first_layer + layer], areas.row_bytes, to, bytes, thread);
        }
        self.publish(chunk, bytes);
    }

    /// Copies the rows of one chunk of a group's distinct entries, and publishes it.
    fn gather_chunk(&self, run: &Run, areas: &Areas, group: usize, k: usize, found: usize, thread: &mut Scratch) {
        let chunk = areas.first_chunk(group) + k;
        let entries = areas.entries_of(k, found);
        let bytes = entries.len() * areas.share * areas.row_bytes;
        if bytes > 0 {
            // SAFETY: the chunk lies inside the rows' memory.
            let to = unsafe { self.chunks.rows.add(chunk * areas.chunk_bytes()) };
            let table = &self.tables[run.first_layer + group / areas.groups];
            let numbers = self.groups[group].numbers.read().unwrap_or_else(PoisonError::into_inner);
            let ids = self.ids_of(run, areas, group);
            thread.ids.clear();
            for entry in entries {
                let token = numbers.first[entry] as usize;
                thread.ids.extend((0..areas.share).map(|column| ids.get(token, column)));
            }
            drop(numbers);
            self.copy_rows(&**table, areas.row_bytes, to, bytes, thread);
        }
        self.publish(chunk, bytes);
    }

    fn copy_rows(&self, table: &dyn HostTable, row_bytes: usize, to: *mut u8, bytes: usize, thread: &mut Scratch) {
        let Scratch { ids, sources, narrow, .. } = thread;
        let rows = table.rows();
        let row = |id: i64| u64::try_from(id).ok().filter(|id| rows.contains(id));
        table.read(&mut |host| match host {
            Some(HostRows::Memory(base)) => {
                sources.clear();
                sources.extend(ids.iter().map(|&id| match row(id) {
                    // Rows that are here lie inside the table's memory, so the offset fits.
                    Some(row) => base.wrapping_add(usize::try_from(row - rows.start).unwrap_or(0) * row_bytes),
                    None => ptr::null(),
                }));
                // SAFETY: the sources are rows of the table, which `read` keeps alive; the chunk is this thread's own.
                unsafe { copy::rows(sources, row_bytes, to) };
            }
            Some(HostRows::Source(source)) => {
                narrow.clear();
                narrow.extend(ids.iter().map(|&id| row(id).and_then(|row| i32::try_from(row).ok()).unwrap_or(-1)));
                // SAFETY: the chunk is this thread's own, and no kernel reads it before it is published.
                let out = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
                if let Err(error) = source.gather(narrow, out) {
                    out.fill(0);
                    self.fail(GatherError::Source(error));
                }
            }
            None => {
                // SAFETY: as above.
                unsafe { ptr::write_bytes(to, 0, bytes) };
                self.fail(GatherError::Asleep);
            }
        });
    }

    /// Hands a chunk over. All that this thread wrote before is visible to whoever sees this.
    fn publish(&self, chunk: usize, bytes: usize) {
        let run = u64::from(self.number.load(Ordering::Relaxed));
        // SAFETY: one word a chunk.
        let ready = unsafe { &*self.chunks.ready.wrapping_add(chunk) };
        ready.store(run << 32 | bytes as u64, Ordering::Release);
    }

    fn ids_of<'a>(&'a self, run: &'a Run, areas: &Areas, group: usize) -> IdsOf<'a> {
        let first = group / areas.groups * self.columns + group % areas.groups * areas.share;
        IdsOf { run, stride: run.layers * self.columns, first, columns: areas.share }
    }
}

/// Memory that a thread works in, allocated once.
struct Scratch {
    distinct: Distinct,
    ids: Vec<i64>,
    sources: Vec<*const u8>,
    narrow: Vec<i32>,
}

// SAFETY: the pointers are used only while they are fresh, by the thread that made them.
unsafe impl Send for Scratch {}

impl Scratch {
    fn new(work: &Work, capacity: usize) -> Self {
        let rows = work.areas.entries * work.areas.share;
        Self {
            distinct: Distinct::new(capacity),
            ids: Vec::with_capacity(rows),
            sources: Vec::with_capacity(rows),
            narrow: Vec::with_capacity(rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::crew::Crew;
    use super::*;
    use engram_ple::{FormatKind, MemorySource, TableFormat};
    use proptest::prelude::*;

    /// A layer's packed rows, owned from some row on.
    struct Layer {
        source: MemorySource,
        bytes: Vec<u8>,
        rows: Range<u64>,
        in_memory: bool,
    }

    impl HostTable for Layer {
        fn rows(&self) -> Range<u64> {
            self.rows.clone()
        }

        fn read(&self, read: &mut dyn FnMut(Option<HostRows<'_>>)) {
            let start = usize::try_from(self.rows.start).unwrap() * ROW;
            read(Some(if self.in_memory {
                HostRows::Memory(self.bytes[start..].as_ptr())
            } else {
                HostRows::Source(&self.source)
            }));
        }
    }

    const ROW: usize = 24;
    const ROWS: u64 = 500;
    const CAPACITY: usize = 300;
    const LAYERS: usize = 3;
    const COLUMNS: usize = 6;
    const HEADS: usize = 3;

    fn layer(index: usize) -> Layer {
        let bytes: Vec<u8> =
            (0..500 * ROW).map(|at| u8::try_from((at * 7 + index * 31 + at / ROW) % 251).unwrap()).collect();
        let format = TableFormat::new(FormatKind::Bf16, ROW / 2, None).unwrap();
        let source = MemorySource::new(format, bytes.clone()).unwrap();
        Layer { source, bytes, rows: 20..ROWS, in_memory: index != 1 }
    }

    /// Memory as a lookup has it, and a stand-in for the kernel.
    struct Stage {
        rows: Vec<u64>,
        device: Vec<u8>,
        ready: Vec<AtomicU64>,
        status: Box<[AtomicU32; 2]>,
    }

    impl Stage {
        /// Takes one run as the kernel does: waits for every chunk of the run, copies it, and closes the run.
        fn take(&mut self, areas: &Areas, run: &Run) {
            let number = self.status[0].load(Ordering::Relaxed) + 1;
            let slots = 0..areas.slot_chunks;
            let rows = (0..run.layers * areas.groups)
                .flat_map(|area| (0..areas.used(run.tokens)).map(move |k| areas.first_chunk(area) + k));
            for chunk in slots.chain(rows) {
                let bytes = loop {
                    let ready = self.ready[chunk].load(Ordering::Acquire);
                    if ready >> 32 == u64::from(number) {
                        break usize::try_from(ready & 0xffff_ffff).unwrap();
                    }
                    std::thread::yield_now();
                };
                let at = chunk * areas.chunk_bytes();
                assert!(bytes <= areas.chunk_bytes());
                // SAFETY: the chunk is published, so its bytes are written and stay so until the run is closed.
                let chunk =
                    unsafe { std::slice::from_raw_parts(self.rows.as_ptr().cast::<u8>().wrapping_add(at), bytes) };
                self.device[at..at + bytes].copy_from_slice(chunk);
            }
            self.status[0].store(number, Ordering::Release);
        }

        fn row(&self, areas: &Areas, run: &Run, token: usize, layer: usize, column: usize) -> Vec<u8> {
            let at = (token * run.layers * areas.groups + layer * areas.groups + column / areas.share) * 4;
            let slot = i32::from_le_bytes(self.device[at..at + 4].try_into().unwrap());
            let Ok(slot) = usize::try_from(slot) else { return vec![0; ROW] };
            let row = slot * areas.share + column % areas.share;
            self.device[areas.layer_start(layer) + row * ROW..][..ROW].to_vec()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn every_token_finds_its_rows_through_its_slots(
            seed: u64,
            runs in prop::collection::vec((0usize..=CAPACITY, 0usize..LAYERS, 1usize..=LAYERS, any::<[bool; 2]>(), 1u64..800), 1..6),
            (share, distinct, threads) in (prop::sample::select(vec![1, 2, HEADS, COLUMNS]), prop::bool::weighted(0.8), 1usize..4),
        ) {
            let tables: Vec<Arc<dyn HostTable>> = (0..LAYERS).map(|index| Arc::new(layer(index)) as _).collect();
            let areas = Areas::new(LAYERS, COLUMNS, share, CAPACITY, ROW);
            let mut stage = Stage {
                rows: vec![u64::MAX; areas.bytes().div_ceil(8)],
                device: vec![0xee; areas.bytes()],
                ready: (0..areas.chunks()).map(|_| AtomicU64::new(0)).collect(),
                status: Box::default(),
            };
            let chunks =
                Chunks { rows: stage.rows.as_mut_ptr().cast(), ready: stage.ready.as_ptr(), status: &raw const *stage.status };
            let work = Arc::new(Work::new(tables, areas, COLUMNS, CAPACITY, distinct, chunks));
            let _crew = Crew::new(&work, threads, CAPACITY).unwrap();
            let mut state = seed;
            let mut random = move |bound: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % bound
            };
            for (tokens, first_layer, layers, [by_mix, wide], variety) in runs {
                let layers = layers.min(LAYERS - first_layer);
                // N-grams by number; ids follow from the number, and so does the mix.
                let orders = COLUMNS / HEADS;
                let grams: Vec<u64> = (0..tokens * layers * orders).map(|_| random(variety)).collect();
                let ids: Vec<i64> = grams.iter().flat_map(|&gram| (0..HEADS as u64).map(move |head| {
                    let dead = gram % 13 == 5 || (gram % 13, head) == (6, 0);
                    if dead { -1 } else { i64::try_from((gram * 37 + head * 101) % (ROWS + 9)).unwrap() }
                })).collect();
                let narrow: Vec<i32> = ids.iter().map(|&id| i32::try_from(id).unwrap()).collect();
                let by_mix = by_mix && share == HEADS;
                let mixes: Vec<i64> = grams.iter().map(|&gram| i64::try_from(gram).unwrap() - 3).collect();
                let announcement = Announcement {
                    work: work.clone(),
                    run: Run {
                        tokens,
                        first_layer,
                        layers,
                        ids: if wide { ids.as_ptr().cast() } else { narrow.as_ptr().cast() },
                        wide,
                        mixes: if by_mix { mixes.as_ptr() } else { ptr::null() },
                        busy: ptr::null(),
                    },
                };
                let run = &announcement.run;
                // SAFETY: the announcement lives until the run is taken.
                unsafe { work.announce(&raw const announcement) };
                stage.take(&areas, run);
                for token in 0..tokens {
                    for layer in 0..layers {
                        for column in 0..COLUMNS {
                            let id = ids[(token * layers + layer) * COLUMNS + column];
                            let table = super::tests::layer(first_layer + layer);
                            let expected = match u64::try_from(id) {
                                Ok(id) if table.rows.contains(&id) => {
                                    let at = usize::try_from(id).unwrap() * ROW;
                                    table.bytes[at..at + ROW].to_vec()
                                }
                                _ => vec![0; ROW],
                            };
                            prop_assert_eq!(stage.row(&areas, run, token, layer, column), expected);
                        }
                    }
                }
                prop_assert!(work.failure().is_none());
                // The announcement and the ids go now: the threads must be out of the run.
                work.settle();
            }
        }
    }
}
