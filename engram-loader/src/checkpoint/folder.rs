//! The files of a checkpoint's folder.

use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::checkpoint::index;
use crate::error::Error;
use crate::headers::header::Header;
use crate::headers::regular::{self, Opened};

/// What a folder holds, by kind, each list in the order of the names.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) safetensors: Vec<(String, PathBuf)>,
    /// Indexes of safetensors files.
    pub(crate) indexes: Vec<String>,
    /// Weights in PyTorch's own format.
    pub(crate) torch: Vec<String>,
    /// What interrupted downloads leave.
    pub(crate) partial: Vec<String>,
}

impl Listing {
    pub(crate) fn read(folder: &Path) -> Result<Self, Error> {
        let io = |source: io::Error| Error::Io { path: folder.to_owned(), source };
        let mut listing = Self::default();
        for entry in fs::read_dir(folder).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            let path = folder.join(&name);
            let name = name.to_string_lossy().into_owned();
            let ends = |suffixes: &[&str]| suffixes.iter().any(|suffix| name.ends_with(suffix));
            if ends(&[".safetensors"]) {
                listing.safetensors.push((name, path));
            } else if ends(&[index::SUFFIX]) {
                listing.indexes.push(name);
            } else if ends(&[".bin", ".pt", ".pth"]) {
                listing.torch.push(name);
            } else if name.contains(".safetensors") && ends(&[".incomplete", ".part", ".tmp", ".aria2", ".crdownload"])
            {
                listing.partial.push(name);
            }
        }
        listing.safetensors.sort();
        listing.indexes.sort();
        listing.torch.sort();
        listing.partial.sort();
        Ok(listing)
    }

    /// Words on what an interrupted download of `file` left behind.
    pub(crate) fn interrupted(&self, file: &str) -> String {
        match self.partial.iter().find(|partial| partial.starts_with(file)) {
            Some(partial) => format!("; {partial} is there, so a download was interrupted"),
            None => String::new(),
        }
    }
}

/// One safetensors file of a checkpoint.
#[derive(Debug)]
pub struct CheckpointFile {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// `None` where the file cannot be read as safetensors.
    pub(crate) header: Option<Header>,
}

impl CheckpointFile {
    /// The file's path relative to the checkpoint's folder.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The header; `None` where the file cannot be read as safetensors, which the report says.
    #[must_use]
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }
}

impl CheckpointFile {
    /// Reads a few bytes of a tensor.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, Error> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        let Opened::Regular(file) = regular::open(&self.path).map_err(io)? else {
            return Err(Error::Changed { path: self.path.clone() });
        };
        let expected = range.end;
        let mut bytes = Vec::new();
        let read = file.reader(range.clone()).read_to_end(&mut bytes).map_err(io)?;
        if read as u64 != range.end - range.start {
            return Err(Error::Truncated { path: self.path.clone(), expected, found: file.len });
        }
        Ok(bytes)
    }
}
