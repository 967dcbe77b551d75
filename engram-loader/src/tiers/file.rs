//! Files that hold tables, opened so that nothing but a regular file of the proved size is ever read.

use crate::{Error, TableExtents};
use rustix::fs::{Advice, OFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::SystemTime;

/// Rows that one system call scatters: as many buffers as Linux takes in one `preadv(2)`.
const SCATTER_ROWS: usize = 1024;

/// A file that holds rows, and its size when its header was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableFile {
    /// Where the file is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
}

/// What tells that a file was written to, truncated or replaced since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl TableFile {
    /// Opens the file for reading with further `open(2)` flags. Only a regular file of the expected size is accepted.
    pub(crate) fn open(&self, flags: OFlags) -> Result<File, Error> {
        // Opening a FIFO would wait for a writer without NONBLOCK, which means nothing to a regular file.
        let flags = (flags | OFlags::NONBLOCK).bits();
        #[expect(clippy::cast_possible_wrap, reason = "the flags of open(2) are a C int")]
        let file = File::options().read(true).custom_flags(flags as i32).open(&self.path).map_err(|e| self.io(e))?;
        if !file.metadata().map_err(|e| self.io(e))?.is_file() {
            return Err(Error::NotAFile { path: self.path.clone() });
        }
        self.check_size(self.stamp(&file)?.bytes)?;
        Ok(file)
    }

    pub(crate) fn stamp(&self, file: &File) -> Result<Stamp, Error> {
        let metadata = file.metadata().map_err(|e| self.io(e))?;
        Ok(Stamp { bytes: metadata.len(), modified: metadata.modified().ok() })
    }

    /// An error unless the open file is as it was when `stamp` was taken.
    pub(crate) fn check_unchanged(&self, file: &File, stamp: Stamp) -> Result<(), Error> {
        let now = self.stamp(file)?;
        self.check_size(now.bytes)?;
        if now != stamp {
            return Err(Error::Changed { path: self.path.clone() });
        }
        Ok(())
    }

    /// Reads exactly `out.len()` bytes at `offset`; a file that ends before is [`Error::Truncated`].
    pub(crate) fn read_exact_at(&self, file: &File, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        file.read_exact_at(out, offset).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => self.truncated(file),
            _ => self.io(error),
        })
    }

    /// Reads the bytes from `offset` on into `part` of each row of `out`, in order.
    fn read_scattered_at(
        &self,
        file: &File,
        mut offset: u64,
        mut out: &mut [u8],
        row_bytes: usize,
        part: Range<usize>,
    ) -> Result<(), Error> {
        while !out.is_empty() {
            let mut parts: [IoSliceMut<'_>; SCATTER_ROWS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let mut rows = 0;
            for (slot, row) in parts.iter_mut().zip(out.chunks_exact_mut(row_bytes)) {
                *slot = IoSliceMut::new(&mut row[part.clone()]);
                rows += 1;
            }
            let read = match rustix::io::preadv(file, &mut parts[..rows], offset) {
                Ok(bytes) => bytes / part.len(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(self.io(error.into())),
            };
            // A short read is taken up at the last row that is complete; one without such a row is the end of the file.
            if read == 0 {
                return Err(self.truncated(file));
            }
            offset += (read * part.len()) as u64;
            out = &mut out[read * row_bytes..];
        }
        Ok(())
    }

    /// The error for bytes that were promised and are not there.
    pub(crate) fn truncated(&self, file: &File) -> Error {
        let found = file.metadata().map_or(0, |metadata| metadata.len());
        Error::Truncated { path: self.path.clone(), expected: self.bytes, found }
    }

    pub(crate) fn io(&self, source: std::io::Error) -> Error {
        Error::Io { path: self.path.clone(), source }
    }

    fn check_size(&self, found: u64) -> Result<(), Error> {
        if found < self.bytes {
            return Err(Error::Truncated { path: self.path.clone(), expected: self.bytes, found });
        }
        if found > self.bytes {
            return Err(Error::Changed { path: self.path.clone() });
        }
        Ok(())
    }
}

/// The files of a table, each opened when its first row is asked for: a file whose rows nobody wants need not even be readable.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    files: Box<[OnceLock<File>]>,
}

impl OpenFiles {
    pub(crate) fn new(table: &TableExtents) -> Self {
        Self { files: table.files().iter().map(|_| OnceLock::new()).collect() }
    }

    pub(crate) fn get(&self, table: &TableExtents, file: usize) -> Result<&File, Error> {
        if let Some(open) = self.files[file].get() {
            return Ok(open);
        }
        let open = table.files()[file].open(OFlags::empty())?;
        Ok(self.files[file].get_or_init(|| open))
    }

    /// Reads rows that follow each other, packed, through the page cache and its read-ahead. `rows` and `out` were checked.
    pub(crate) fn read_range(&self, table: &TableExtents, rows: Range<u64>, out: &mut [u8]) -> Result<(), Error> {
        let row_bytes = table.format().row_bytes();
        for plane in table.planes() {
            let mut rest = &mut *out;
            for (file, offset, run) in plane.runs(rows.clone()) {
                let open = self.get(table, file)?;
                let file = &table.files()[file];
                #[expect(clippy::cast_possible_truncation, reason = "rows that `out` has room for")]
                let (out, after) = rest.split_at_mut((run.end - run.start) as usize * row_bytes);
                rest = after;
                if plane.row_bytes == row_bytes {
                    file.read_exact_at(open, offset, out)?;
                } else {
                    file.read_scattered_at(open, offset, out, row_bytes, plane.part())?;
                }
            }
        }
        Ok(())
    }

    /// Tells the page cache that rows which were read are not needed there any more, so that loading a table does not push others out.
    pub(crate) fn forget(&self, table: &TableExtents, rows: Range<u64>) {
        for plane in table.planes() {
            for (file, offset, run) in plane.runs(rows.clone()) {
                let bytes = NonZeroU64::new((run.end - run.start) * plane.row_bytes as u64);
                if let Some(open) = self.files[file].get() {
                    // Advice: where it is refused, the pages stay.
                    let _ = rustix::fs::fadvise(open, offset, bytes, Advice::DontNeed);
                }
            }
        }
    }
}
