//! Tier `mapped`: rows copied from a memory mapping of the files.

use crate::tiers::file::{OpenFiles, Stamp};
use crate::tiers::gather;
use crate::{Error, Pool, TableExtents};
use engram_ple::{SourceError, TableFormat, TableSource};
use memmap2::{Advice, Mmap, MmapOptions, UncheckedAdvice};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How often a table in use looks at its files and at its memory, in milliseconds.
const LOOK_MS: u64 = 100;

/// A table whose rows are copied from the page cache, through mappings of its files.
///
/// The fastest tier for a table that fits in memory, shared with every other process that maps the same files. A file is mapped when
/// the first of its rows is asked for.
///
/// # Files must not shrink
/// A row of a file that is truncated while it is mapped raises SIGBUS, which ends the process; so does a medium that fails. Files are
/// looked at when they are mapped, by [`check`](Self::check), and by gathers every 100 ms: one that was truncated, written to or
/// replaced in place is then an error. What happens between two looks cannot be caught. Where that is not good enough, use
/// [`Direct`](crate::Direct) or [`Resident`](crate::Resident).
#[derive(Debug)]
pub struct Mapped {
    table: TableExtents,
    maps: Box<[OnceLock<FileMap>]>,
    files: OpenFiles,
    pool: Arc<Pool>,
    resident_budget: Option<Budget>,
    born: Instant,
    /// When to look again, in milliseconds since `born`.
    next_look: AtomicU64,
}

#[derive(Debug)]
struct FileMap {
    map: Mmap,
    stamp: Stamp,
}

#[derive(Debug)]
struct Budget {
    bytes: u64,
    /// `/proc/self/statm`, kept open so that looking at it allocates nothing.
    statm: File,
}

impl Mapped {
    /// A table over its files, none of which is opened yet. Large gathers run on `pool`.
    #[must_use]
    pub fn new(table: TableExtents, pool: Arc<Pool>) -> Self {
        Self {
            maps: table.files().iter().map(|_| OnceLock::new()).collect(),
            files: OpenFiles::new(&table),
            table,
            pool,
            resident_budget: None,
            born: Instant::now(),
            next_look: AtomicU64::new(0),
        }
    }

    /// Lets go of the mapped pages whenever the process has more than `bytes` bytes of files in its memory.
    ///
    /// A random row can pull a large piece of its file into the process, so that its resident size grows towards that of the table.
    /// Pages that are let go stay in the page cache; their next use costs a fault, not a read. Checked every 100 ms.
    ///
    /// # Errors
    /// [`Error::Io`] where `/proc` is not mounted.
    pub fn with_resident_budget(mut self, bytes: u64) -> Result<Self, Error> {
        let path = "/proc/self/statm";
        let statm = File::open(path).map_err(|source| Error::Io { path: path.into(), source })?;
        self.resident_budget = Some(Budget { bytes, statm });
        Ok(self)
    }

    /// Whether all files that are mapped are still as they were then.
    ///
    /// # Errors
    /// [`Error::Truncated`] or [`Error::Changed`], naming the first file that is not.
    pub fn check(&self) -> Result<(), Error> {
        for (file, map) in self.maps.iter().enumerate() {
            if let Some(FileMap { stamp, .. }) = map.get() {
                self.table.files()[file].check_unchanged(self.files.get(&self.table, file)?, *stamp)?;
            }
        }
        Ok(())
    }

    fn map(&self, file: usize) -> Result<&FileMap, Error> {
        if let Some(map) = self.maps[file].get() {
            return Ok(map);
        }
        let (open, named) = (self.files.get(&self.table, file)?, &self.table.files()[file]);
        let stamp = named.stamp(open)?;
        // SAFETY: the mapping is private to this type, which never makes a reference to its bytes: they are copied through raw pointers,
        // so a writer changes what is copied and no more. Truncation is the documented limit of this tier.
        let map = unsafe { MmapOptions::new().map(open) }.map_err(|e| named.io(e))?;
        // Rows are random: what lies around one is not worth reading. Advice that is refused costs speed only.
        let _ = map.advise(Advice::Random);
        Ok(self.maps[file].get_or_init(|| FileMap { map, stamp }))
    }

    fn look(&self) -> Result<(), Error> {
        #[expect(clippy::cast_possible_truncation, reason = "milliseconds of a process's life")]
        let now = self.born.elapsed().as_millis() as u64;
        if now < self.next_look.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.next_look.store(now + LOOK_MS, Ordering::Relaxed);
        self.check()?;
        if let Some(budget) = &self.resident_budget
            && budget.is_exceeded()
        {
            self.let_go()?;
        }
        Ok(())
    }

    fn let_go(&self) -> Result<(), Error> {
        for (map, file) in self.maps.iter().zip(self.table.files()) {
            if let Some(FileMap { map, .. }) = map.get() {
                // SAFETY: pages of a shared file mapping that are let go come back from the page cache with the same bytes.
                unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) }.map_err(|e| file.io(e))?;
            }
        }
        Ok(())
    }
}

impl Budget {
    fn is_exceeded(&self) -> bool {
        // Pages, as words of decimal digits: size, resident, and of those the ones that belong to files.
        let mut text = [0; 128];
        let read = self.statm.read_at(&mut text, 0).unwrap_or(0);
        let pages =
            std::str::from_utf8(&text[..read]).ok().and_then(|text| text.split(' ').nth(2)?.parse::<u64>().ok());
        pages.is_some_and(|pages| pages.saturating_mul(rustix::param::page_size() as u64) > self.bytes)
    }
}

impl TableSource for Mapped {
    fn format(&self) -> &TableFormat {
        self.table.format()
    }

    fn rows(&self) -> u64 {
        self.table.rows()
    }

    /// Reads by system calls, not through the mapping: rows that follow each other gain from the kernel's read-ahead.
    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_range(self.format(), self.rows(), &rows, out)?;
        self.files.read_range(&self.table, rows.clone(), out).map_err(|error| SourceError::read(rows, error))
    }

    fn gather(&self, ids: &[i32], out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_gather(self.format(), self.rows(), ids, out)?;
        self.look().map_err(|error| SourceError::read(0..self.rows(), error))?;
        let row_bytes = self.format().row_bytes();
        gather::on_pool(&self.pool, row_bytes, ids, out, |ids, out| {
            for plane in self.table.planes() {
                let address = |row| {
                    let (file, offset) = plane.locate(row);
                    let map = self.map(file).map_err(|error| SourceError::read(row..row + 1, error))?;
                    #[expect(
                        clippy::cast_possible_truncation,
                        reason = "inside a mapping, which is no longer than usize::MAX"
                    )]
                    Ok(map.map.as_ptr().wrapping_add(offset as usize))
                };
                // SAFETY: extents lie inside their file, whose size was checked when it was mapped, so the part of a row that starts
                // here lies inside the mapping; the mapping lives as long as `self` and is not `out`, which is writable.
                unsafe { gather::copy_rows(ids, out, row_bytes, plane.part(), address) }?;
            }
            Ok(())
        })
    }
}
