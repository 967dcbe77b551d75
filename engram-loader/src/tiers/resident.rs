//! Tier `resident`: all rows in memory of the table's own.

use crate::tiers::file::OpenFiles;
use crate::tiers::gather;
use crate::tiers::gather::FirstError;
use crate::{Error, Pool, Progress, TableExtents};
use engram_ple::{SourceError, TableFormat, TableSource};
use memmap2::{Advice, MmapMut, MmapOptions};
use std::ops::Range;
use std::sync::Arc;

/// What one thread reads before it takes more, in bytes.
const LOAD_BYTES: usize = 8 << 20;

/// A table whose packed rows were read into memory of its own, in huge pages where the system has them.
///
/// Nothing that happens to the files afterwards matters to it. A row's values and scales lie side by side.
#[derive(Debug)]
pub struct Resident {
    format: TableFormat,
    rows: u64,
    /// `None` for a table without rows.
    memory: Option<MmapMut>,
    pool: Arc<Pool>,
}

impl Resident {
    /// Reads the whole table, on the threads of `pool`, which gathers will run on too.
    ///
    /// # Errors
    /// [`Error::Memory`] when the table does not fit in the memory that is available; [`Error::Truncated`], [`Error::Changed`],
    /// [`Error::NotAFile`] and [`Error::Io`] of a file that cannot be read.
    pub fn load(table: &TableExtents, pool: Arc<Pool>, progress: &dyn Progress) -> Result<Self, Error> {
        let mut memory = allocate(table.bytes())?;
        progress.begin("loading", table.bytes());
        let loaded = memory.as_mut().map_or(Ok(()), |memory| fill(table, memory, &pool, progress));
        progress.end();
        loaded?;
        Ok(Self { format: table.format().clone(), rows: table.rows(), memory, pool })
    }

    /// How many bytes of the table lie in huge pages, as the system reports it.
    #[must_use]
    pub fn huge_page_bytes(&self) -> u64 {
        let Some(memory) = &self.memory else { return 0 };
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let start = format!("{:x}-", memory.as_ptr().addr());
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let kib = lines.find_map(|line| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix(" kB")?.parse().ok());
        kib.map_or(0, |kib: u64| kib * 1024)
    }

    fn packed(&self) -> &[u8] {
        self.memory.as_deref().unwrap_or_default()
    }
}

/// Memory for a table; asks before the first page is touched, since running out later would end the process.
fn allocate(bytes: u64) -> Result<Option<MmapMut>, Error> {
    if bytes == 0 {
        return Ok(None);
    }
    let refuse = |source| Error::Memory { bytes, source };
    let available = available_memory();
    if available.is_some_and(|available| available < bytes) {
        let message = format!("{} bytes are available", available.unwrap_or_default());
        return Err(refuse(std::io::Error::new(std::io::ErrorKind::OutOfMemory, message)));
    }
    let len = usize::try_from(bytes).map_err(|e| refuse(std::io::Error::new(std::io::ErrorKind::OutOfMemory, e)))?;
    let memory = MmapOptions::new().len(len).map_anon().map_err(refuse)?;
    // One page then covers thousands of rows; where there are no huge pages, rows are found all the same.
    let _ = memory.advise(Advice::HugePage);
    Ok(Some(memory))
}

/// What the kernel thinks can be had without swapping, where it tells.
fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"))?;
    kib.parse::<u64>().ok()?.checked_mul(1024)
}

fn fill(table: &TableExtents, memory: &mut [u8], pool: &Pool, progress: &dyn Progress) -> Result<(), Error> {
    let row_bytes = table.format().row_bytes();
    let part_rows = (LOAD_BYTES / row_bytes).max(1);
    let files = OpenFiles::new(table);
    let failure = FirstError::default();
    pool.run_on_chunks(memory, part_rows * row_bytes, &|part, out| {
        if failure.is_set() {
            return;
        }
        let first = part as u64 * part_rows as u64;
        let rows = first..first + (out.len() / row_bytes) as u64;
        failure.keep(files.read_range(table, rows.clone(), out));
        files.forget(table, rows);
        progress.advance(out.len() as u64);
    });
    failure.into_result()
}

impl TableSource for Resident {
    fn format(&self) -> &TableFormat {
        &self.format
    }

    fn rows(&self) -> u64 {
        self.rows
    }

    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_range(&self.format, self.rows, &rows, out)?;
        #[expect(clippy::cast_possible_truncation, reason = "a row of a table in memory")]
        let start = rows.start as usize * self.format.row_bytes();
        out.copy_from_slice(&self.packed()[start..][..out.len()]);
        Ok(())
    }

    fn gather(&self, ids: &[i32], out: &mut [u8]) -> Result<(), SourceError> {
        SourceError::check_gather(&self.format, self.rows, ids, out)?;
        let row_bytes = self.format.row_bytes();
        let packed = self.packed();
        gather::on_pool(&self.pool, row_bytes, ids, out, |ids, out| {
            #[expect(clippy::cast_possible_truncation, reason = "a row of a table in memory")]
            let address = |row: u64| Ok(packed[row as usize * row_bytes..].as_ptr());
            // SAFETY: `check_gather` found all ids below `rows`, and the memory holds that many packed rows, so one starts here. The memory
            // is borrowed, so it is not `out`.
            unsafe { gather::copy_rows(ids, out, row_bytes, 0..row_bytes, address) }
        })
    }
}
