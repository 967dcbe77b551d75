//! Tier `direct`: rows read from the device, past the page cache, by many threads at once.

use crate::tiers::extents::Plane;
use crate::tiers::gather::FirstError;
use crate::tiers::slots::Slots;
use crate::{Error, Pool, TableExtents, TableFile};
use engram_ple::{SourceError, TableFormat, TableSource};
use rustix::fs::{Advice, AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Reads in flight by default: a solid-state drive needs about this many to give what it can.
const READERS: usize = 32;

/// The longest piece of a file that one read takes, unless a row is longer.
const WINDOW_BYTES: usize = 128 << 10;

/// The largest alignment that direct reads are done with; a device that wants more is read through the page cache.
const MAX_ALIGN: usize = 4096;

/// Rows that are sorted and fetched together.
const BATCH_ROWS: usize = 1 << 20;

/// Random rows that one thread fetches before it takes more.
const PART_ROWS: usize = 64;

/// Bytes of a range of rows that one thread reads before it takes more.
const RANGE_BYTES: usize = 1 << 20;

/// A table whose rows are read from their device with O_DIRECT, and by plain `pread` where the file system refuses that.
///
/// For tables that do not fit in memory: it uses a few MiB, leaves the page cache alone, and keeps many reads in flight on threads of
/// its own. The ids of a gather are sorted, so that a row asked for twice, or rows of one block, are read once. A file is opened when the
/// first of its rows is asked for. A file that is truncated or fails is an error; it cannot harm the process.
#[derive(Debug)]
pub struct Direct {
    table: TableExtents,
    files: Box<[OnceLock<DirectFile>]>,
    pool: Pool,
    /// One per thread of the pool.
    windows: Box<[Mutex<Window>]>,
    /// Rows to fetch, as `row << 32 | position`; kept so that a gather allocates nothing.
    order: Mutex<Vec<u64>>,
}

/// How the files that a [`Direct`] table has opened are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileAccess {
    /// Files read with O_DIRECT.
    pub direct: usize,
    /// Files read by plain `pread`, because O_DIRECT was refused.
    pub buffered: usize,
}

impl fmt::Display for FileAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { direct: 0, buffered: 0 } => f.write_str("no file was read"),
            Self { buffered: 0, .. } => f.write_str("O_DIRECT"),
            Self { direct: 0, .. } => f.write_str("plain pread: O_DIRECT is refused"),
            Self { direct, buffered } => {
                write!(f, "O_DIRECT for {direct} files, plain pread for {buffered} that refuse it")
            }
        }
    }
}

#[derive(Debug)]
struct DirectFile {
    file: File,
    /// What offsets and lengths are multiples of while `direct`.
    align: usize,
    direct: AtomicBool,
}

/// A buffer for one piece of a file, aligned for direct reads.
#[derive(Debug)]
struct Window(Vec<u8>);

impl Direct {
    /// A table over its files, none of which is opened yet, read by `readers` threads at once; 0 means 32.
    #[must_use]
    pub fn new(table: TableExtents, readers: usize) -> Self {
        let pool = Pool::new(if readers == 0 { READERS } else { readers });
        let longest = table.format().row_bytes() + 2 * MAX_ALIGN;
        let windows = (0..pool.threads()).map(|_| Mutex::new(Window::new(longest.max(WINDOW_BYTES)))).collect();
        let files = table.files().iter().map(|_| OnceLock::new()).collect();
        Self { table, files, pool, windows, order: Mutex::default() }
    }

    /// Reads that a gather keeps in flight.
    #[must_use]
    pub fn readers(&self) -> usize {
        self.pool.threads()
    }

    /// How the files that were opened so far are read.
    #[must_use]
    pub fn access(&self) -> FileAccess {
        let open = self.files.iter().filter_map(OnceLock::get);
        let direct = open.clone().filter(|file| file.align() > 1).count();
        FileAccess { direct, buffered: open.count() - direct }
    }

    fn file(&self, file: usize) -> Result<&DirectFile, Error> {
        if let Some(open) = self.files[file].get() {
            return Ok(open);
        }
        let open = DirectFile::open(&self.table.files()[file])?;
        Ok(self.files[file].get_or_init(|| open))
    }

    fn order(&self) -> MutexGuard<'_, Vec<u64>> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches the rows `base + (key >> 32)` of sorted keys into their places in `out`, which are the lower halves of the keys.
    ///
    /// `part_rows` is how many rows a thread takes at a time. All positions differ.
    fn fetch(&self, base: u64, order: &[u64], part_rows: usize, out: &mut [u8]) -> Result<(), SourceError> {
        let parts = order.len().div_ceil(part_rows);
        let rows = Slots::new(out, self.format().row_bytes());
        let failure = FirstError::default();
        self.pool.run(parts * self.table.planes().len(), &|thread, part| {
            if failure.is_set() {
                return;
            }
            let plane = &self.table.planes()[part / parts];
            let mut window = self.windows[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let mut keys = order[part % parts * part_rows..].chunks(part_rows).next().unwrap_or_default();
            while !keys.is_empty() && !failure.is_set() {
                let row = base + (keys[0] >> 32);
                let read = self.read_run(plane, base, keys, &mut window, |position, bytes| {
                    // SAFETY: the pool gives each part to one call alone, no other part has this plane and position, and nobody else
                    // has `out`, so no other slice of these bytes exists.
                    let row = unsafe { rows.get(position, plane.part()) };
                    row.copy_from_slice(bytes);
                });
                match read {
                    Ok(taken) => keys = &keys[taken..],
                    Err(error) => return failure.keep(Err(SourceError::read(row..row + 1, error))),
                }
            }
        });
        failure.into_result()
    }

    /// Reads the first of `keys`, with as many of those after it as lie in the same blocks or in the next ones, and puts each in its
    /// position. Gives how many they are.
    fn read_run(
        &self,
        plane: &Plane,
        base: u64,
        keys: &[u64],
        window: &mut Window,
        mut put: impl FnMut(usize, &[u8]),
    ) -> Result<usize, Error> {
        let extent = plane.find(base + (keys[0] >> 32));
        let named = &self.table.files()[extent.file];
        let file = self.file(extent.file)?;
        let align = file.align() as u64;
        let place = |key: u64| {
            let start = extent.offset + (base + (key >> 32) - extent.rows.start) * plane.row_bytes as u64;
            start..start + plane.row_bytes as u64
        };
        let Range { start, mut end } = place(keys[0]);
        let first_block = start - start % align;
        let mut taken = 1;
        for &key in &keys[1..] {
            let next = place(key);
            let joins = base + (key >> 32) < extent.rows.end
                && next.start <= end.next_multiple_of(align)
                && next.end.next_multiple_of(align) - first_block <= window.len() as u64;
            if !joins {
                break;
            }
            end = next.end;
            taken += 1;
        }
        let bytes = window.read(named, file, start..end)?;
        for &key in &keys[..taken] {
            #[expect(clippy::cast_possible_truncation, reason = "inside a window")]
            let at = (place(key).start - start) as usize;
            #[expect(clippy::cast_possible_truncation, reason = "the lower half is the position")]
            put(key as u32 as usize, &bytes[at..at + plane.row_bytes]);
        }
        Ok(taken)
    }
}

impl DirectFile {
    fn open(named: &TableFile) -> Result<Self, Error> {
        let align = match named.open(OFlags::DIRECT) {
            Ok(file) => match direct_alignment(&file) {
                Some(align) => return Ok(Self { file, align, direct: AtomicBool::new(true) }),
                None => 1,
            },
            Err(Error::Io { source, .. }) if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => 1,
            Err(error) => return Err(error),
        };
        let file = named.open(OFlags::empty())?;
        // Rows are random. Advice that is refused costs speed only.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        Ok(Self { file, align, direct: AtomicBool::new(false) })
    }

    /// What offsets and lengths of reads are multiples of.
    fn align(&self) -> usize {
        if self.direct.load(Ordering::Relaxed) { self.align } else { 1 }
    }

    /// Some file systems take O_DIRECT when a file is opened and refuse it when it is read.
    fn give_up_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
            && rustix::fs::fcntl_setfl(&self.file, OFlags::NONBLOCK).is_ok()
            && self.direct.swap(false, Ordering::Relaxed)
    }
}

/// What the file system wants offsets and lengths of direct reads to be multiples of; `None` where it does no such reads.
fn direct_alignment(file: &File) -> Option<usize> {
    let Ok(status) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Some(MAX_ALIGN);
    };
    // Before Linux 6.1 nobody tells; a page suits every device in use.
    if status.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some(MAX_ALIGN);
    }
    let (memory, offset) = (status.stx_dio_mem_align as usize, status.stx_dio_offset_align as usize);
    (memory > 0 && memory <= MAX_ALIGN && offset > 1 && offset <= MAX_ALIGN).then_some(offset)
}

impl Window {
    fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.next_multiple_of(MAX_ALIGN) + MAX_ALIGN])
    }

    fn len(&self) -> usize {
        self.0.len() - MAX_ALIGN
    }

    /// Reads `bytes` of a file, which with the alignment of its reads are no more than the window's length.
    fn read(&mut self, named: &TableFile, file: &DirectFile, bytes: Range<u64>) -> Result<&[u8], Error> {
        let len = self.len();
        let aligned = self.0.as_ptr().align_offset(MAX_ALIGN);
        let buffer = &mut self.0[aligned..aligned + len];
        let align = file.align();
        let from = bytes.start - bytes.start % align as u64;
        #[expect(clippy::cast_possible_truncation, reason = "no longer than a window")]
        let (skipped, wanted) = ((bytes.start - from) as usize, (bytes.end - from) as usize);
        let mut have = 0;
        while have < wanted {
            let read = match file.file.read_at(&mut buffer[have..wanted.next_multiple_of(align)], from + have as u64) {
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) && file.give_up_direct() => {
                    continue;
                }
                Err(error) => return Err(named.io(error)),
            };
            let before = have;
            have += read;
            if have < wanted {
                // A read that ends inside a block is the end of the file; one that ends between two is only short.
                have -= have % align;
                if have <= before {
                    return Err(named.truncated(&file.file));
                }
            }
        }
        Ok(&buffer[skipped..wanted])
    }
}

impl TableSource for Direct {
    fn format(&self) -> &TableFormat {
        self.table.format()
    }

    fn rows(&self) -> u64 {
        self.table.rows()
    }

    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_range(self.format(), self.rows(), &rows, out)?;
        let row_bytes = self.format().row_bytes();
        let mut order = self.order();
        for (base, out) in rows.step_by(BATCH_ROWS).zip(out.chunks_mut(BATCH_ROWS * row_bytes)) {
            order.clear();
            order.extend((0..(out.len() / row_bytes) as u64).map(|position| position << 32 | position));
            self.fetch(base, &order, (RANGE_BYTES / row_bytes).max(1), out)?;
        }
        Ok(())
    }

    fn gather(&self, ids: &[i32], out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_gather(self.format(), self.rows(), ids, out)?;
        let row_bytes = self.format().row_bytes();
        let mut order = self.order();
        for (ids, out) in ids.chunks(BATCH_ROWS).zip(out.chunks_mut(BATCH_ROWS * row_bytes)) {
            order.clear();
            for (position, (&id, row)) in (0u64..).zip(ids.iter().zip(out.chunks_exact_mut(row_bytes))) {
                match u64::try_from(id) {
                    Ok(id) => order.push(id << 32 | position),
                    Err(_) => row.fill(0),
                }
            }
            order.sort_unstable();
            let part_rows = order.len().div_ceil(self.pool.threads()).clamp(1, PART_ROWS);
            self.fetch(0, &order, part_rows, out)?;
        }
        Ok(())
    }
}
