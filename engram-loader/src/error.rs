//! The one error type of this crate.

use std::path::PathBuf;

/// Why files could not be read or written as tables. The faults of a checkpoint are not errors but entries of a report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint, or one file of it, was read and must not be used.
    #[error("{0}")]
    Refused(Box<crate::Fault>),
    /// A path that should be a checkpoint's folder is none.
    #[error("{}: not a folder", path.display())]
    NotAFolder {
        /// What was named.
        path: PathBuf,
    },
    /// A fault that no option may turn into a warning.
    #[error("`{code}` cannot be allowed")]
    CannotAllow {
        /// The fault's code.
        code: crate::FaultCode,
    },
    /// A directory, device, FIFO or socket where a regular file was expected.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
    },
    /// A file is shorter than it was when its header was read.
    #[error("{}: truncated: expected {expected} bytes, found {found}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size in bytes when the table was opened.
        expected: u64,
        /// Its size in bytes now.
        found: u64,
    },
    /// A file was written to or replaced after its header was read.
    #[error("{}: changed while in use", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Memory that a tier needs could not be had.
    #[error("no memory for {bytes} bytes: {source}")]
    Memory {
        /// How much was asked for.
        bytes: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// Extents that do not make a table.
    #[error("extents of a table: {message}")]
    Extents {
        /// What is wrong with them.
        message: String,
    },
    /// A file or folder that would be written is there already.
    #[error("{}: already there; nothing is overwritten", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// Tensors that no safetensors file can hold.
    #[error("{}: {message}", path.display())]
    Layout {
        /// The file that was to be written.
        path: PathBuf,
        /// What is wrong with them.
        message: String,
    },
    /// A configuration that no model has.
    #[error(transparent)]
    Config(#[from] engram_core::ConfigError),
    /// A format that cannot hold the rows.
    #[error(transparent)]
    Format(#[from] engram_ple::Error),
    /// Rows could not be read from their table.
    #[error(transparent)]
    Rows(#[from] engram_ple::SourceError),
}
