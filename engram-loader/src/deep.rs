//! Reading every byte once: NaN in the rows, and the files' hashes.

use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::thread;

use engram_ple::TableFormat;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3;

use crate::catalog::CatalogTable;
use crate::error::Error;
use crate::folder::CheckpointFile;
use crate::options::Options;
use crate::regular::{self, Opened};
use crate::report::{Fault, FaultCode, FileSummary};

/// Bytes of one read.
const BLOCK_BYTES: usize = 8 << 20;
/// Blocks that exist at once: one being read, one being hashed, and two so that neither thread waits for the other's last moment.
const BLOCKS: usize = 4;

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
/// One thread reads and looks, another hashes; memory is that of [`BLOCKS`] blocks, whatever the files' sizes.
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
    options.progress.begin("reading", files.iter().map(CheckpointFile::bytes).sum());
    let (blocks, to_hash) = mpsc::sync_channel::<Message>(BLOCKS);
    let (give_back, free) = mpsc::channel::<Vec<u8>>();
    for _ in 0..BLOCKS {
        // The receiver is in this function, so that nothing can fail.
        let _ = give_back.send(vec![0; BLOCK_BYTES]);
    }
    let done = thread::scope(|scope| {
        let hasher = scope.spawn(|| hash(to_hash, give_back, options.sha256));
        let read = files.iter().try_for_each(|file| -> Result<(), Error> {
            let mut scans = row_scans(file, tables);
            read_file(file, &mut scans, &free, &blocks, options)?;
            faults.extend(scans.iter().filter_map(|scan| scan.fault(file)));
            Ok(())
        });
        drop(blocks);
        let hashes = hasher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        read.map(|()| hashes)
    });
    options.progress.end();
    for (summary, (xxh3, sha256)) in summaries.iter_mut().zip(done?) {
        (summary.xxh3, summary.sha256) = (Some(xxh3), sha256);
    }
    Ok(())
}

/// What the reading thread tells the hashing one.
enum Message {
    /// So many bytes more of the current file.
    Block(Vec<u8>, usize),
    FileEnd,
}

/// Hashes files as their blocks arrive: XXH3-128 and SHA-256 of each, in hex.
fn hash(
    blocks: mpsc::Receiver<Message>,
    give_back: mpsc::Sender<Vec<u8>>,
    sha256: bool,
) -> Vec<(String, Option<String>)> {
    let mut hashes = Vec::new();
    let (mut xxh3, mut sha) = (Xxh3::new(), sha256.then(Sha256::new));
    for message in blocks {
        match message {
            Message::Block(block, len) => {
                xxh3.update(&block[..len]);
                if let Some(sha) = &mut sha {
                    sha.update(&block[..len]);
                }
                // The reader stops taking blocks back when it fails.
                let _ = give_back.send(block);
            }
            Message::FileEnd => {
                hashes.push((format!("{:032x}", xxh3.digest128()), sha.as_mut().map(|sha| hex(&sha.finalize_reset()))));
                xxh3.reset();
            }
        }
    }
    hashes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_file(
    file: &CheckpointFile,
    scans: &mut [RowScan<'_>],
    free: &mpsc::Receiver<Vec<u8>>,
    blocks: &mpsc::SyncSender<Message>,
    options: &Options<'_>,
) -> Result<(), Error> {
    let path = || file.path().to_owned();
    let io = |source| Error::Io { path: path(), source };
    let Opened::Regular(open) = regular::open(file.path()).map_err(io)? else {
        return Err(Error::Changed { path: path() });
    };
    if open.len > file.bytes() {
        return Err(Error::Changed { path: path() });
    }
    let mut position = 0;
    let mut next = 0;
    while position < file.bytes() {
        // The hashing thread ends only after this one has, so that a block always comes back.
        let Ok(mut block) = free.recv() else { break };
        let left = file.bytes() - position;
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(BLOCK_BYTES);
        let len = open.file.read_at(&mut block[..wanted], position).map_err(io)?;
        if len == 0 {
            return Err(Error::Truncated { path: path(), expected: file.bytes(), found: position });
        }
        next = scan_block(&block[..len], position, scans, next);
        position += len as u64;
        options.progress.advance(len as u64);
        let _ = blocks.send(Message::Block(block, len));
    }
    let _ = blocks.send(Message::FileEnd);
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
