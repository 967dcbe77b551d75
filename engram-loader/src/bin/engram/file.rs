//! Files of the command line: what may be read, and where results may go.

use crate::{Refused, text};
use anyhow::{Context, Result, bail};
use rustix::fs::Access;
use std::fs::{File, FileType, Metadata};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The longest requests that are read, in bytes: enough for some forty million tokens, and an end to what has none.
const REQUESTS_CAP: u64 = 256 << 20;

/// All bytes of requests: a regular file, something that another process writes into, or `-` for stdin.
pub(crate) fn read_requests(path: &Path) -> Result<Vec<u8>> {
    if path.as_os_str() == "-" {
        return read(std::io::stdin().lock(), REQUESTS_CAP, "stdin");
    }
    let kind = metadata(path)?.file_type();
    if kind.is_char_device() || kind.is_block_device() {
        return Err(Refused(format!("{}: {}, expected a file or a pipe", path.display(), name(kind))).into());
    }
    read(open(path)?, REQUESTS_CAP, &path.display().to_string())
}

/// All bytes of a regular file; what else it may be is not even opened, since that could wait for ever.
///
/// The error is [`Refused`] for what is there but is not to be read.
pub(crate) fn read_regular(path: &Path, cap: u64) -> Result<Vec<u8>> {
    regular(path)?;
    read(open(path)?, cap, &path.display().to_string())
}

/// What the system knows about a regular file.
pub(crate) fn regular(path: &Path) -> Result<Metadata> {
    let metadata = metadata(path)?;
    if !metadata.is_file() {
        let kind = name(metadata.file_type());
        return Err(Refused(format!("{}: {kind}, expected a regular file", path.display())).into());
    }
    Ok(metadata)
}

/// What the system knows about whatever is there.
pub(crate) fn metadata(path: &Path) -> Result<Metadata> {
    std::fs::metadata(path).with_context(|| path.display().to_string())
}

/// Refuses a place for results that cannot be written to, before any work is done for it.
pub(crate) fn check_out(out: &Path) -> Result<()> {
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The dot asks for a folder.
    let found = rustix::fs::access(folder.join("."), Access::WRITE_OK | Access::EXEC_OK);
    found.map_err(std::io::Error::from).with_context(|| format!("--out {}: {}", out.display(), folder.display()))
}

/// Refuses results in place of a file that they are made from, by whatever name.
pub(crate) fn check_not_of(out: &Path, own: impl IntoIterator<Item = PathBuf>) -> Result<()> {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let Some(there) = identity(out) else { return Ok(()) };
    if let Some(file) = own.into_iter().find(|file| identity(file) == Some(there)) {
        bail!("--out {}: this is the model's own {}", out.display(), file.display());
    }
    Ok(())
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| path.display().to_string())
}

/// All bytes of `from`, of which there may be `cap`.
fn read(from: impl Read, cap: u64, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(cap + 1).read_to_end(&mut bytes).with_context(|| name.to_owned())?;
    if bytes.len() as u64 > cap {
        return Err(Refused(format!("{name}: more than {} are not read", text::bytes(cap))).into());
    }
    Ok(bytes)
}

fn name(kind: FileType) -> &'static str {
    match kind {
        _ if kind.is_file() => "a regular file",
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_char_device() => "a character device",
        _ if kind.is_block_device() => "a block device",
        _ => "a socket",
    }
}
