use std::fmt;
use std::path::PathBuf;

use crate::error::Error;
use crate::progress::Progress;
use crate::prove::report::FaultCode;

/// Headers longer than this are refused unless [`Options::header_cap`] says otherwise: 256 MiB, some three million tensors a file.
pub const DEFAULT_HEADER_CAP: u64 = 256 << 20;

/// How a checkpoint is opened and judged. The default is what `engram validate` does without options.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options<'a> {
    /// The longest header, index or tokenizer that is read, in bytes.
    pub header_cap: u64,
    /// Where the tokenizer is that the compressed vocabulary is checked against.
    pub tokenizer: Tokenizer,
    /// Read every byte of every file: look for NaN in the rows, and take each file's XXH3-128.
    pub deep: bool,
    /// Take each file's SHA-256 too; implies `deep`.
    pub sha256: bool,
    /// Errors that are to be warnings; see [`FaultCode::can_be_allowed`].
    pub allow: Vec<FaultCode>,
    /// Threads for headers; 0 for as many as the machine runs at once. Reading whole files takes two threads, whatever this says.
    pub threads: usize,
    /// Told how much of the files has been read.
    pub progress: &'a dyn Progress,
}

/// Which tokenizer.json an Engram checkpoint is checked against.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tokenizer {
    /// The one in the checkpoint's folder, if there is one.
    #[default]
    InFolder,
    /// This one.
    File(PathBuf),
    /// None.
    Unchecked,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            header_cap: DEFAULT_HEADER_CAP,
            tokenizer: Tokenizer::InFolder,
            deep: false,
            sha256: false,
            allow: Vec::new(),
            threads: 0,
            progress: &(),
        }
    }
}

impl Options<'_> {
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.allow.iter().find(|code| !code.can_be_allowed()) {
            Some(&code) => Err(Error::CannotAllow { code }),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("header_cap", &self.header_cap)
            .field("tokenizer", &self.tokenizer)
            .field("deep", &self.deep)
            .field("sha256", &self.sha256)
            .field("allow", &self.allow)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}
