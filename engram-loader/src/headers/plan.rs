//! The header of a safetensors file that is written front to back, or by position: where its tensors will lie.

use crate::Error;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::path::Path;

/// A tensor of a file to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorPlan {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
}

/// The start of the file, and where each tensor begins.
#[derive(Debug)]
pub(crate) struct HeaderPlan {
    /// Length prefix and header; the bytes of the first tensor follow.
    pub(crate) head: Vec<u8>,
    /// For each tensor, where it begins in the file.
    pub(crate) offsets: Vec<u64>,
    /// Length of the whole file.
    pub(crate) bytes: u64,
}

impl HeaderPlan {
    /// Lays the tensors of `path` out in the order given.
    pub(crate) fn new(path: &Path, tensors: &[TensorPlan]) -> Result<Self, Error> {
        let refuse = |message: String| Error::Layout { path: path.to_owned(), message };
        let mut infos = Vec::with_capacity(tensors.len());
        let mut end = 0;
        for TensorPlan { name, dtype, shape } in tensors {
            let bytes = shape.iter().try_fold(dtype.bitsize() / 8, |bytes, &size| bytes.checked_mul(size));
            let next = bytes.and_then(|bytes| bytes.checked_add(end));
            let next = next.ok_or_else(|| refuse(format!("{name} of shape {shape:?} has too many bytes")))?;
            infos.push((name.clone(), TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (end, next) }));
            end = next;
        }
        let starts: Vec<usize> = infos.iter().map(|(_, info)| info.data_offsets.0).collect();
        let made_for = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let metadata = Metadata::new(Some(made_for), infos).map_err(|error| refuse(error.to_string()))?;
        let mut json = serde_json::to_vec(&metadata).map_err(|error| refuse(error.to_string()))?;
        // Spaces, so that the first tensor is aligned like the largest element type.
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut head = (json.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(&json);
        let offsets = starts.iter().map(|start| (head.len() + start) as u64).collect();
        let bytes = (head.len() + end) as u64;
        Ok(Self { head, offsets, bytes })
    }
}
