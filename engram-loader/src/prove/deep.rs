//! Reading every byte once: NaN in the rows, and the files' hashes.

use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::thread;

use engram_ple::TableFormat;
use rustix::fs::Advice;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::catalog::CatalogTable;
use crate::checkpoint::folder::CheckpointFile;
use crate::error::Error;
use crate::headers::regular::{self, Opened};
use crate::options::Options;
use crate::prove::report::{Fault, FaultCode, FileSummary};

/// Bytes of one read. A block is read on one core and looked through on another, so it should stay in their caches; larger ones cost
/// more than the system calls that they save.
const BLOCK_BYTES: usize = 512 << 10;
/// Blocks that exist at once.
const BLOCKS: usize = 8;

/// A run of rows in one file, and what has been found in it.
struct RowScan<'a> {
    format: &'a TableFormat,
    part: Part,
    /// Offset of the run in its file.
    offset: u64,
    /// Bytes that a row takes here.
    row_bytes: usize,
    /// Bytes of the run that have not passed yet.
    left: u64,
    /// The row that the next byte belongs to.
    row: u64,
    /// The bytes of that row so far, where a block ended inside it.
    started: Vec<u8>,
    /// The first row with NaN, and how many there are.
    found: Option<(u64, u64)>,
}

/// What a run holds of each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Values,
    Scales,
}

/// Reads all files, hashes each and looks for NaN in the tables' rows.
///
/// One thread reads, this one hashes and looks; memory is that of [`BLOCKS`] blocks, whatever the files' sizes.
///
/// # Errors
/// A file cannot be read, or is no longer what it was when its header was read.
pub(crate) fn read(
    files: &[CheckpointFile],
    tables: &[CatalogTable],
    options: &Options<'_>,
    summaries: &mut [FileSummary],
    faults: &mut Vec<Fault>,
) -> Result<(), Error> {
    let (give_back, free) = mpsc::channel();
    let (fill, filled) = mpsc::channel();
    for _ in 0..BLOCKS {
        // The receiver is right above, so that this cannot fail.
        let _ = give_back.send(vec![0; BLOCK_BYTES]);
    }
    options.progress.begin("reading", files.iter().map(CheckpointFile::bytes).sum());
    let read = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            // Moved here, so that the other side sees when this one ends.
            let (free, fill) = (free, fill);
            files.iter().try_for_each(|file| read_file(file, &free, &fill))
        });
        for (file, summary) in files.iter().zip(summaries) {
            let mut scans = row_scans(file, tables);
            let (mut xxh3, mut sha256) = (Xxh3::new(), options.sha256.then(Sha256::new));
            let (mut position, mut next) = (0, 0);
            while position < file.bytes() {
                // The reader ends early only where it fails, which is told below.
                let Ok(Block { bytes, len }) = filled.recv() else { break };
                let block = &bytes[..len];
                xxh3.update(block);
                if let Some(sha256) = &mut sha256 {
                    sha256.update(block);
                }
                next = scan_block(block, position, &mut scans, next);
                position += len as u64;
                options.progress.advance(len as u64);
                let _ = give_back.send(bytes);
            }
            faults.extend(scans.iter().filter_map(|scan| scan.fault(file)));
            summary.xxh3 = Some(format!("{:032x}", xxh3.digest128()));
            summary.sha256 = sha256.map(|sha256| hex(&sha256.finalize()));
        }
        reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    options.progress.end();
    read
}

/// Bytes of a file, of which the first `len` count.
struct Block {
    bytes: Vec<u8>,
    len: usize,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a file front to back into blocks as they come free.
fn read_file(file: &CheckpointFile, free: &mpsc::Receiver<Vec<u8>>, fill: &mpsc::Sender<Block>) -> Result<(), Error> {
    let path = || file.path().to_owned();
    let io = |source| Error::Io { path: path(), source };
    let Opened::Regular(open) = regular::open(file.path()).map_err(io)? else {
        return Err(Error::Changed { path: path() });
    };
    if open.len > file.bytes() {
        return Err(Error::Changed { path: path() });
    }
    // Far read-ahead. And pages that only this pass touches must not displace those that others look rows up in; dropping them
    // behind the pass would also drop what was in the cache before it. Both are hints: a system may refuse them.
    let _ = rustix::fs::fadvise(&open.file, 0, None, Advice::Sequential);
    let _ = rustix::fs::fadvise(&open.file, 0, None, Advice::NoReuse);
    let mut position = 0;
    while position < file.bytes() {
        // Blocks stop coming only where the other thread has panicked.
        let Ok(mut bytes) = free.recv() else { break };
        let left = usize::try_from(file.bytes() - position).unwrap_or(usize::MAX);
        let len = open.file.read_at(&mut bytes[..left.min(BLOCK_BYTES)], position).map_err(io)?;
        if len == 0 {
            return Err(Error::Truncated { path: path(), expected: file.bytes(), found: position });
        }
        position += len as u64;
        let _ = fill.send(Block { bytes, len });
    }
    Ok(())
}

/// Shows a block to the runs that it holds parts of; `next` is the first that has not passed, and so is what comes back.
fn scan_block(block: &[u8], position: u64, scans: &mut [RowScan<'_>], mut next: usize) -> usize {
    let mut taken = 0;
    while let Some(scan) = scans.get_mut(next) {
        let Ok(start) = usize::try_from(scan.offset.saturating_sub(position)) else { break };
        let Some(bytes) = block.get(start.max(taken)..).filter(|bytes| !bytes.is_empty()) else { break };
        taken = start.max(taken) + scan.feed(bytes);
        if scan.left > 0 {
            break;
        }
        next += 1;
    }
    next
}

/// The runs of one file, in the order of their places in it.
fn row_scans<'a>(file: &CheckpointFile, tables: &'a [CatalogTable]) -> Vec<RowScan<'a>> {
    let mut scans = Vec::new();
    for table in tables {
        let (extents, format) = (table.extents(), table.format());
        let Some(here) = extents.files().iter().position(|known| known.path == file.path()) else { continue };
        for (plane, part) in extents.planes().iter().zip([Part::Values, Part::Scales]) {
            let runs = plane.runs(0..extents.rows()).filter(|(file, ..)| *file == here);
            scans.extend(runs.map(|(_, offset, rows)| RowScan {
                format,
                part,
                offset,
                row_bytes: plane.row_bytes,
                left: (rows.end - rows.start) * plane.row_bytes as u64,
                row: rows.start,
                started: Vec::new(),
                found: None,
            }));
        }
    }
    scans.sort_by_key(|scan| scan.offset);
    scans
}

impl RowScan<'_> {
    /// Looks at the bytes that come next in the file, as far as they belong to this run; gives how many did.
    fn feed(&mut self, bytes: &[u8]) -> usize {
        let len = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        self.left -= len as u64;
        let mut bytes = &bytes[..len];
        if !self.started.is_empty() {
            let (head, rest) = bytes.split_at((self.row_bytes - self.started.len()).min(bytes.len()));
            self.started.extend_from_slice(head);
            bytes = rest;
            if self.started.len() == self.row_bytes {
                let row = std::mem::take(&mut self.started);
                self.look(&row);
            }
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % self.row_bytes);
        self.look(whole);
        self.started.extend_from_slice(rest);
        len
    }

    /// Looks for NaN in whole rows.
    fn look(&mut self, rows: &[u8]) {
        let nan = match self.part {
            Part::Values => self.format.nan_value_rows(rows),
            Part::Scales => self.format.nan_scale_rows(rows),
        };
        for row in nan {
            let (_, count) = self.found.get_or_insert((self.row + row as u64, 0));
            *count += 1;
        }
        self.row += (rows.len() / self.row_bytes) as u64;
    }

    fn fault(&self, file: &CheckpointFile) -> Option<Fault> {
        let (first, count) = self.found?;
        let tensors = file.header().map_or(&[][..], |header| header.tensors());
        let here = |range: std::ops::Range<u64>| range.start == self.offset && !range.is_empty();
        let tensor = tensors.iter().find(|tensor| here(tensor.byte_range())).map_or("", |tensor| tensor.name());
        let what = match self.part {
            Part::Values => "values",
            Part::Scales => "scales",
        };
        let rows = if count == 1 { "1 row".to_owned() } else { format!("{count} rows") };
        let message = format!(
            "expected {what} that are numbers, found NaN in {rows}, the first of them row {first} of the table"
        );
        Some(Fault::new(FaultCode::RowNan, message).file(file.name()).tensor(tensor))
    }
}
