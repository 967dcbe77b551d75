//! Opening what may be no file at all, and reading it by position.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// A regular file, open for reading, with the length it had when opened.
#[derive(Debug)]
pub(crate) struct RegularFile {
    pub(crate) file: File,
    pub(crate) len: u64,
}

/// What a path turned out to be.
#[derive(Debug)]
pub(crate) enum Opened {
    Regular(RegularFile),
    /// Nothing that bytes should be read from, in words.
    Special(&'static str),
    /// Nothing is there: no entry, or a link that leads nowhere.
    Absent,
}

/// Opens `path` without ever waiting for another process, as a FIFO or a device would make us do.
pub(crate) fn open(path: &Path) -> io::Result<Opened> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(descriptor) => File::from(descriptor),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::INVAL) => {
            return Ok(Opened::Absent);
        }
        // Sockets cannot be opened at all, nor devices without a driver.
        Err(Errno::NXIO | Errno::NODEV) => return Ok(Opened::Special("a socket or device")),
        Err(error) => return Err(error.into()),
    };
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    Ok(if kind.is_file() {
        Opened::Regular(RegularFile { file, len: metadata.len() })
    } else if kind.is_dir() {
        Opened::Special("a folder")
    } else if kind.is_fifo() {
        Opened::Special("a FIFO")
    } else {
        Opened::Special("a device")
    })
}

impl RegularFile {
    /// The first bytes, at most `N`, fewer when the file is shorter.
    pub(crate) fn head<const N: usize>(&self) -> io::Result<Vec<u8>> {
        let mut head = Vec::with_capacity(N);
        self.reader(0..self.len.min(N as u64)).read_to_end(&mut head)?;
        Ok(head)
    }

    /// Reads a byte range front to back, by positioned reads.
    pub(crate) fn reader(&self, range: std::ops::Range<u64>) -> RangeReader<'_> {
        RangeReader { file: &self.file, position: range.start, end: range.end }
    }

    /// The whole file.
    pub(crate) fn read_all(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.reader(0..self.len).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// Reads a byte range of a file by `pread`, so that the file needs no shared position and no mapping.
#[derive(Debug)]
pub(crate) struct RangeReader<'a> {
    file: &'a File,
    position: u64,
    end: u64,
}

impl Read for RangeReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end - self.position;
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(&mut buffer[..wanted], self.position)?;
        self.position += read as u64;
        Ok(read)
    }
}

/// What the first bytes of a file that is no safetensors file look like.
///
/// To be asked only after the file failed as safetensors: a valid length prefix may equal any of these magic numbers.
pub(crate) fn looks_like(head: &[u8]) -> Option<&'static str> {
    const MAGIC: &[(&[u8], &str)] = &[
        (b"version https://git-lfs", "a Git LFS pointer: fetch the real file with `git lfs pull`"),
        (b"oid sha256:", "a Git LFS pointer: fetch the real file with `git lfs pull`"),
        (b"PK\x03\x04", "a ZIP archive, as PyTorch writes"),
        (b"PK\x05\x06", "an empty ZIP archive"),
        (b"\x1f\x8b", "gzip data"),
        (b"BZh", "bzip2 data"),
        (b"\xfd7zXZ\0", "xz data"),
        (b"\x28\xb5\x2f\xfd", "Zstandard data"),
        (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
        (b"\x80\x02", "a Python pickle"),
        (b"\x80\x03", "a Python pickle"),
        (b"\x80\x04", "a Python pickle"),
        (b"\x80\x05", "a Python pickle"),
        (b"GGUF", "a GGUF file"),
        (b"\x93NUMPY", "a NumPy array"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    ];
    const MARKUP: &[&[u8]] = &[b"<!doctype", b"<html", b"<head", b"<?xml", b"<error", b"<!--"];

    if head.is_empty() {
        return Some("an empty file");
    }
    if let Some((_, name)) = MAGIC.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Some(name);
    }
    if head.get(257..262) == Some(b"ustar") {
        return Some("a tar archive");
    }
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    let markup = MARKUP.iter().any(|tag| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag)));
    markup.then_some("an HTML or XML page, as a server sends instead of a file")
}
