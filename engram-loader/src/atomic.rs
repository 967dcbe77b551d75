//! Output files that are there complete, or not at all.

use crate::Error;
use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The folder that a new file or folder goes into.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Names what is not complete yet after what it will be: who ends the process half-way finds it beside the place it was meant for.
pub(crate) fn partial_name(path: &Path) -> OsString {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial-");
    name
}

/// Writes a file under another name in the same folder and renames it when `write` has succeeded, in place of what was there before.
///
/// # Errors
/// Whatever `write` fails with, and [`Error::Io`]. Nothing is left behind then.
pub fn write_atomically<E: From<Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let prefix = partial_name(path);
    let mut builder = tempfile::Builder::new();
    // What a file that is created in the usual way would get; the process's mask applies.
    builder.prefix(&prefix).permissions(Permissions::from_mode(0o666));
    let partial = builder.tempfile_in(parent(path)).map_err(io)?;
    let mut out = BufWriter::with_capacity(1 << 20, partial.as_file().try_clone().map_err(io)?);
    write(&mut out)?;
    out.flush().map_err(io)?;
    partial.persist(path).map_err(|error| io(error.error))?;
    Ok(())
}
