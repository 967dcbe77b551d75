//! Tables: where the rows of one layer, or a rank's part of them, live.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};

use engram_ple::{TableFormat, TableSource};

use crate::device::Device;
use crate::driver;
use crate::error::Error;
use crate::gather::{HostRows, HostTable};
use crate::kernels;
use crate::load::{self, Destination, Progress};
use crate::memory::{DeviceBuffer, HostMemory, PinnedBuffer, to_usize};
use crate::nan::{FreeOfNan, Proof};
use crate::plan;
use crate::stream::{Event, Stream};

/// Where a table's rows live, and so how a lookup reaches them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Device memory: fastest.
    Device,
    /// Pinned host memory, read by kernels through unified addresses: best for few rows.
    Pinned,
    /// Host memory, read by worker threads that hand the rows over in chunks: best for many rows.
    Staged,
    /// Pinned host memory, read in whichever of the two ways is faster for the batch at hand. Never device memory.
    Auto,
}

/// A table of packed rows, or a rank's contiguous part of one: rows `rows()` of a larger whole. Clones share it.
///
/// A lookup of a row that is not in the part gives a zero row, so the packed outputs of all parts add up to the whole table's.
#[derive(Clone)]
pub struct Table {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    format: TableFormat,
    rows: Range<u64>,
    placement: Placement,
    free_of_nan: Proof,
    asleep: AtomicBool,
    /// Going to sleep and waking take turns.
    turn: Mutex<()>,
    store: RwLock<Store>,
    /// Entries of lookups that name this table on the device.
    entries: Mutex<Vec<Weak<Entry>>>,
}

enum Store {
    Device(DeviceBuffer),
    Pinned(PinnedBuffer),
    Host(HostMemory),
    Source(Arc<dyn TableSource>),
    Borrowed {
        values: u64,
        scales: u64,
        value_stride: u64,
        scale_stride: u64,
    },
    /// Device memory given back.
    Nothing,
}

/// One table's place in a lookup's array of [`kernels::Table`] in device memory. Sleeping empties it, so that a graph that is replayed
/// meanwhile finds no rows instead of memory that is gone.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) array: Arc<DeviceBuffer>,
    pub(crate) index: usize,
}

impl Entry {
    fn write(&self, table: kernels::Table) -> Result<(), Error> {
        let kernels::Table { values, scales, value_stride, scale_stride, first, rows } = table;
        let words = [values, scales, value_stride, scale_stride, u64::from(first) | u64::from(rows) << 32];
        self.array.write(self.index * size_of::<kernels::Table>(), &words)
    }
}

/// Host memory that a load uses besides the table itself, at most, over all threads.
const LOAD_BUDGET: u64 = 512 << 20;

/// Bytes of a piece that a loading thread reads at a time, at most.
const LOAD_PIECE: u64 = 16 << 20;

impl Table {
    /// Loads `rows` of the source, and only those.
    ///
    /// Rows are read straight to where they will live, or through at most 512 MiB of host memory; NaN codes and scales are looked for on the
    /// way ([`Table::is_free_of_nan`]).
    ///
    /// # Errors
    /// [`Error::RowRange`] for rows outside the source; [`Error::Unsupported`] where kernels cannot read host memory and the placement needs
    /// it; the source's errors; [`Error::Driver`] and [`Error::HostMemory`] where memory is short.
    pub fn load(
        device: &Device,
        source: &dyn TableSource,
        rows: Range<u64>,
        placement: Placement,
    ) -> Result<Self, Error> {
        Self::load_with_progress(device, source, rows, placement, &mut |_| {})
    }

    /// As [`Table::load`], telling `progress` how far it has come after every piece, on the calling thread.
    ///
    /// # Errors
    /// As [`Table::load`].
    pub fn load_with_progress(
        device: &Device,
        source: &dyn TableSource,
        rows: Range<u64>,
        placement: Placement,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, Error> {
        check_rows(&rows, source.rows())?;
        let bytes = part_bytes(source.format(), &rows);
        let store = match placement {
            Placement::Device => Store::Device(DeviceBuffer::new(device, bytes)?),
            Placement::Pinned | Placement::Auto => Store::Pinned(PinnedBuffer::new(device, bytes)?),
            Placement::Staged => Store::Host(HostMemory::new(bytes)?),
        };
        let table = Self::from_store(device, source.format().clone(), rows, placement, store);
        table.fill(source, progress)?;
        Ok(table)
    }

    /// A staged table whose rows stay where the source has them (in a mapped checkpoint, say): worker threads read each row when a lookup
    /// asks for it.
    ///
    /// # Errors
    /// [`Error::RowRange`] for rows outside the source.
    pub fn over(device: &Device, source: Arc<dyn TableSource>, rows: Range<u64>) -> Result<Self, Error> {
        check_rows(&rows, source.rows())?;
        let format = source.format().clone();
        Ok(Self::from_store(device, format, rows, Placement::Staged, Store::Source(source)))
    }

    /// A table over memory of the caller's: values `[rows][value_bytes]` and, where the format has scales in its rows, scales
    /// `[rows][scale_bytes]`, at device addresses. Pinned host memory is read through unified addresses.
    ///
    /// # Safety
    /// The memory holds that many bytes and stays allocated until the table, all that was made from it and all enqueued work are gone.
    ///
    /// # Errors
    /// [`Error::Invalid`] when scales are missing or not wanted; [`Error::WrongDevice`] when one of the two lies elsewhere.
    pub unsafe fn borrow(
        device: &Device,
        format: TableFormat,
        values: u64,
        scales: Option<u64>,
        rows: Range<u64>,
    ) -> Result<Self, Error> {
        check_rows(&rows, u64::MAX)?;
        if (format.scale_bytes() > 0) != scales.is_some() {
            let why = if scales.is_some() {
                format!("a {} table has none in its rows", format.kind())
            } else {
                format!("a {} table needs {} scale bytes a row", format.kind(), format.scale_bytes())
            };
            return Err(Error::Invalid { what: "the table's scales", why });
        }
        if rows.end > rows.start {
            device.check_home("the table's values", values, true)?;
            if let Some(scales) = scales {
                device.check_home("the table's scales", scales, true)?;
            }
        }
        let store = Store::Borrowed {
            values,
            scales: scales.unwrap_or(values),
            value_stride: format.value_bytes() as u64,
            scale_stride: format.scale_bytes() as u64,
        };
        Ok(Self::from_store(device, format, rows, Placement::Device, store))
    }

    fn from_store(device: &Device, format: TableFormat, rows: Range<u64>, placement: Placement, store: Store) -> Self {
        Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                format,
                rows,
                placement,
                free_of_nan: Proof::default(),
                asleep: AtomicBool::new(false),
                turn: Mutex::new(()),
                store: RwLock::new(store),
                entries: Mutex::new(Vec::new()),
            }),
        }
    }

    /// The device that looks rows up.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The format of the rows.
    #[must_use]
    pub fn format(&self) -> &TableFormat {
        &self.inner.format
    }

    /// Which rows of the whole table are here.
    #[must_use]
    pub fn rows(&self) -> Range<u64> {
        self.inner.rows.clone()
    }

    /// Where the rows live.
    #[must_use]
    pub fn placement(&self) -> Placement {
        self.inner.placement
    }

    /// Whether loading proved that no row has a NaN code or a NaN scale, so that such bytes can serve as a mark for "not here yet". False
    /// where nobody looked: borrowed memory, and sources that are read in place.
    #[must_use]
    pub fn is_free_of_nan(&self) -> bool {
        self.inner.free_of_nan.holds()
    }

    /// A promise that the table [is free of NaN](Table::is_free_of_nan) and stays so, if it is: as long as it is held, [`Table::wake`] refuses rows
    /// with NaN.
    #[must_use]
    pub fn keep_free_of_nan(&self) -> Option<FreeOfNan> {
        self.inner.free_of_nan.keep()
    }

    /// Whether the memory was given back by [`Table::sleep`].
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.inner.asleep.load(Ordering::Acquire)
    }

    /// Gives the table's memory back, after the device has done what was enqueued before. From then on calls are refused with
    /// [`Error::Asleep`], and replays of captured lookups find no rows.
    ///
    /// # Errors
    /// [`Error::Invalid`] for borrowed memory and sources, which are not this table's to give; [`Error::Driver`].
    pub fn sleep(&self) -> Result<(), Error> {
        let _turn = self.turn();
        if matches!(*self.store(), Store::Borrowed { .. } | Store::Source(_)) {
            return Err(Error::Invalid { what: "sleep", why: "the table does not own its memory".to_owned() });
        }
        if self.is_asleep() {
            return Ok(());
        }
        // What was enqueued before still finds its rows.
        self.inner.device.synchronize()?;
        self.inner.asleep.store(true, Ordering::Release);
        self.give_back()
    }

    /// Takes memory again and loads the table's rows from the source, which has the format that the first one had. Lookups, prefetchers and
    /// captured graphs go on as before.
    ///
    /// # Errors
    /// As [`Table::load`], [`Error::FormatMismatch`], and [`Error::Nan`] for rows with NaN where the table was
    /// [promised](Table::keep_free_of_nan) to have none. After an error the table is still asleep, without memory.
    pub fn wake(&self, source: &dyn TableSource) -> Result<(), Error> {
        let inner = &*self.inner;
        check_rows(&inner.rows, source.rows())?;
        if source.format() != &inner.format {
            return Err(format_mismatch("the source that wakes a table", source.format(), &inner.format));
        }
        let _turn = self.turn();
        if !self.is_asleep() {
            return Ok(());
        }
        if let Err(error) = self.take_back(source) {
            // The error that is told is the first one.
            let _ = self.give_back();
            return Err(error);
        }
        inner.asleep.store(false, Ordering::Release);
        Ok(())
    }

    /// Empties the entries and gives the memory back.
    fn give_back(&self) -> Result<(), Error> {
        let inner = &*self.inner;
        let nothing = kernels::Table { values: 0, scales: 0, value_stride: 0, scale_stride: 0, first: 0, rows: 0 };
        self.entries().iter().try_for_each(|entry| entry.write(nothing))?;
        // What was enqueued while the entries were emptied has to end before the memory goes.
        inner.device.synchronize()?;
        let mut store = inner.store.write().unwrap_or_else(PoisonError::into_inner);
        match &mut *store {
            Store::Device(_) => *store = Store::Nothing,
            Store::Pinned(memory) => memory.give_back(),
            Store::Host(memory) => memory.give_back(),
            Store::Source(_) | Store::Borrowed { .. } | Store::Nothing => {}
        }
        Ok(())
    }

    /// Takes memory, loads the rows into it, and enters it where lookups find it.
    fn take_back(&self, source: &dyn TableSource) -> Result<(), Error> {
        let inner = &*self.inner;
        {
            let mut store = inner.store.write().unwrap_or_else(PoisonError::into_inner);
            match &mut *store {
                Store::Nothing => {
                    *store = Store::Device(DeviceBuffer::new(&inner.device, part_bytes(&inner.format, &inner.rows))?);
                }
                Store::Pinned(memory) => memory.take_back()?,
                Store::Host(memory) => memory.take_back()?,
                Store::Device(_) | Store::Source(_) | Store::Borrowed { .. } => {}
            }
        }
        self.fill(source, &mut |_| {})?;
        self.entries().iter().try_for_each(|entry| entry.write(self.device_table()))
    }

    fn fill(&self, source: &dyn TableSource, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        let inner = &*self.inner;
        let row_bytes = inner.format.row_bytes();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
        let store = self.store();
        let nan = match &*store {
            Store::Device(memory) => {
                // Two buffers a thread: one is read into while the other is copied to the device.
                let budget = (LOAD_BUDGET / (2 * threads as u64)).min(LOAD_PIECE);
                let piece = plan::rows_within(budget, row_bytes).min(inner.rows.end - inner.rows.start).max(1);
                let bytes = to_usize(piece) * row_bytes;
                let destination = || ThroughHost::new(&inner.device, memory, row_bytes, bytes);
                load::load(source, inner.rows.clone(), piece, threads, destination, progress)?
            }
            Store::Pinned(memory) => {
                let destination = || Ok(InPlace { memory: Sending(memory.as_ptr()), row_bytes });
                let piece = plan::rows_within(LOAD_PIECE, row_bytes);
                load::load(source, inner.rows.clone(), piece, threads, destination, progress)?
            }
            Store::Host(memory) => {
                let destination = || Ok(InPlace { memory: Sending(memory.as_ptr()), row_bytes });
                let piece = plan::rows_within(LOAD_PIECE, row_bytes);
                load::load(source, inner.rows.clone(), piece, threads, destination, progress)?
            }
            Store::Source(_) | Store::Borrowed { .. } | Store::Nothing => return Ok(()),
        };
        let Range { start, end } = inner.rows;
        inner.free_of_nan.loaded(nan).map_err(|row| Error::Nan { row, start, end })
    }

    /// Registers a lookup's entry and writes it.
    pub(crate) fn enter(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let mut entries = self.inner.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.strong_count() > 0);
        entries.push(Arc::downgrade(entry));
        drop(entries);
        entry.write(self.device_table())
    }

    fn entries(&self) -> Vec<Arc<Entry>> {
        let entries = self.inner.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().filter_map(Weak::upgrade).collect()
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.inner.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self) -> RwLockReadGuard<'_, Store> {
        self.inner.store.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table as kernels read it; no rows where kernels cannot.
    pub(crate) fn device_table(&self) -> kernels::Table {
        let Inner { format, rows, .. } = &*self.inner;
        let packed = |values: u64| {
            let stride = format.row_bytes() as u64;
            (values, values + format.value_bytes() as u64, stride, stride)
        };
        let place = match &*self.store() {
            Store::Device(memory) => Some(packed(memory.address())),
            Store::Pinned(memory) => Some(packed(memory.address())),
            Store::Borrowed { values, scales, value_stride, scale_stride } => {
                Some((*values, *scales, *value_stride, *scale_stride))
            }
            Store::Host(_) | Store::Source(_) | Store::Nothing => None,
        };
        let (values, scales, value_stride, scale_stride) = place.unwrap_or_default();
        // `check_rows` keeps both below 2^31.
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let count = if place.is_some() { narrow(rows.end - rows.start) } else { 0 };
        kernels::Table { values, scales, value_stride, scale_stride, first: narrow(rows.start), rows: count }
    }
}

impl HostTable for Table {
    fn rows(&self) -> Range<u64> {
        self.inner.rows.clone()
    }

    fn read(&self, read: &mut dyn FnMut(Option<HostRows<'_>>)) {
        // Held while the rows are read, so that `sleep` waits for that.
        let store = self.store();
        if self.is_asleep() {
            return read(None);
        }
        match &*store {
            Store::Pinned(memory) => read(Some(HostRows::Memory(memory.as_ptr()))),
            Store::Host(memory) => read(Some(HostRows::Memory(memory.as_ptr()))),
            Store::Source(source) => read(Some(HostRows::Source(&**source))),
            Store::Device(_) | Store::Borrowed { .. } | Store::Nothing => read(None),
        }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { device, format, rows, placement, .. } = &*self.inner;
        f.debug_struct("Table")
            .field("device", &device.ordinal())
            .field("format", format)
            .field("rows", rows)
            .field("placement", placement)
            .finish_non_exhaustive()
    }
}

pub(crate) fn format_mismatch(what: &'static str, found: &TableFormat, expected: &TableFormat) -> Error {
    let text = |format: &TableFormat| {
        let scale = format.global_scale().map(|scale| format!(", scale {scale}")).unwrap_or_default();
        format!("{} of width {}{scale}", format.kind(), format.width())
    };
    Error::FormatMismatch { what, found: text(found), expected: text(expected) }
}

fn check_rows(rows: &Range<u64>, all: u64) -> Result<(), Error> {
    const MOST: u64 = i32::MAX as u64;
    if rows.start > rows.end || rows.end > all.min(MOST) {
        return Err(Error::RowRange { start: rows.start, end: rows.end, rows: all.min(MOST) });
    }
    Ok(())
}

fn part_bytes(format: &TableFormat, rows: &Range<u64>) -> usize {
    // Both factors are bounded (2^31 rows, 2^20 elements a row), so the product fits.
    to_usize(rows.end - rows.start) * format.row_bytes()
}

/// A raw address that threads share; each writes rows of its own.
#[derive(Clone, Copy)]
struct Sending(*mut u8);

// SAFETY: an address; the loads that use it write disjoint ranges.
unsafe impl Send for Sending {}
// SAFETY: as for `Send`.
unsafe impl Sync for Sending {}

/// Rows read straight into the host memory that they stay in.
struct InPlace {
    memory: Sending,
    row_bytes: usize,
}

impl Destination for InPlace {
    fn put(&mut self, at: Range<u64>, fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Error>) -> Result<(), Error> {
        let len = to_usize(at.end - at.start) * self.row_bytes;
        // SAFETY: the piece lies inside the table's memory.
        let start = unsafe { self.memory.0.add(to_usize(at.start) * self.row_bytes) };
        // SAFETY: pieces are disjoint, the memory is initialised (anonymous pages), and no kernel reads a table that is being loaded: no
        // lookup exists yet, or it is asleep.
        fill(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// Rows read into pinned memory and copied to the device from there, by one thread.
struct ThroughHost<'a> {
    to: &'a DeviceBuffer,
    row_bytes: usize,
    stream: Stream,
    buffers: [(PinnedBuffer, Event); 2],
    turn: usize,
}

impl<'a> ThroughHost<'a> {
    fn new(device: &Device, to: &'a DeviceBuffer, row_bytes: usize, bytes: usize) -> Result<Self, Error> {
        let buffer = || Ok::<_, Error>((PinnedBuffer::new(device, bytes)?, Event::new(device)?));
        Ok(Self { to, row_bytes, stream: Stream::new(device)?, buffers: [buffer()?, buffer()?], turn: 0 })
    }
}

impl Destination for ThroughHost<'_> {
    fn put(&mut self, at: Range<u64>, fill: &mut dyn FnMut(&mut [u8]) -> Result<(), Error>) -> Result<(), Error> {
        let (buffer, copied) = &self.buffers[self.turn];
        self.turn ^= 1;
        copied.synchronize()?;
        let len = to_usize(at.end - at.start) * self.row_bytes;
        assert!(len <= buffer.bytes(), "a piece fits the buffer made for it");
        // SAFETY: the memory is initialised and this thread's own, and the device has finished its last copy out of it.
        fill(unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), len) })?;
        let _bound = self.to.device().bind()?;
        let to = self.to.address() + at.start * self.row_bytes as u64;
        // SAFETY: the rows lie inside the table; the buffer is not touched before `copied` is reached, and outlives the copy.
        unsafe { driver::copy_to_device(to, buffer.as_ptr().cast(), len, self.stream.as_ref().handle()) }?;
        copied.record(self.stream.as_ref())
    }

    fn finish(&mut self) -> Result<(), Error> {
        self.stream.synchronize()
    }
}

impl Drop for ThroughHost<'_> {
    fn drop(&mut self) {
        // After an error a copy may still read the buffers, which go next.
        let _ = self.stream.synchronize();
    }
}
