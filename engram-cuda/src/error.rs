//! The crate's one error type.

use std::fmt;

use engram_ple::{FormatKind, SourceError};

use crate::gather::GatherError;
use crate::ids::IdsError;
use crate::prefetch_state::PrefetchError;

/// Why a call of this crate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The CUDA driver refused something.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver is older than the kernels of this crate need.
    #[error("the CUDA driver supports CUDA {found}, but the kernels need CUDA {needed} (driver r550) or newer")]
    DriverTooOld {
        /// What the driver supports.
        found: CudaVersion,
        /// What this crate needs.
        needed: CudaVersion,
    },
    /// The device lacks something that the call needs.
    #[error("device {ordinal} {missing}")]
    Unsupported {
        /// The device's ordinal.
        ordinal: i32,
        /// What it lacks, as a clause.
        missing: &'static str,
    },
    /// A table source failed while rows were read from it.
    #[error("reading the table: {0}")]
    Source(#[from] SourceError),
    /// A range of rows does not lie inside a table.
    #[error("rows {start}..{end} do not lie inside a table of {rows} rows")]
    RowRange {
        /// First row asked for.
        start: u64,
        /// One past the last row asked for.
        end: u64,
        /// Rows that the table has.
        rows: u64,
    },
    /// Two tables, or a table and a source, that must have one format and width differ.
    #[error("{what} is {found}, expected {expected}")]
    FormatMismatch {
        /// What was compared.
        what: &'static str,
        /// The format found, with its row width.
        found: String,
        /// The format expected, with its row width.
        expected: String,
    },
    /// Rows that a table would wake with have NaN, while it was promised to stay without (`Table::keep_free_of_nan`).
    #[error(
        "row {row} of the source has NaN, but an exchange counts on rows {start}..{end} being free of it: wake the table with such rows, or \
         drop the exchange first and create a new one afterwards"
    )]
    Nan {
        /// A row with NaN.
        row: u64,
        /// The table's first row.
        start: u64,
        /// One past the table's last row.
        end: u64,
    },
    /// An output form that the table's format cannot give.
    #[error("a {format} table cannot give {output} rows: {why}")]
    Output {
        /// The table's format.
        format: FormatKind,
        /// The output asked for.
        output: &'static str,
        /// The reason, and the way out where there is one.
        why: &'static str,
    },
    /// Memory handed in is smaller than the call's output or input.
    #[error("{what} holds {found} bytes, but {needed} are needed")]
    TooSmall {
        /// Which memory.
        what: &'static str,
        /// Bytes it holds.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// More rows or tokens than a buffer was made for.
    #[error("{found} {what}, but capacity is {capacity}")]
    Capacity {
        /// What was counted.
        what: &'static str,
        /// How many came.
        found: usize,
        /// How many fit.
        capacity: usize,
    },
    /// An argument that makes no sense by itself.
    #[error("{what}: {why}")]
    Invalid {
        /// Which argument.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A layout or a `fill` that the hash cannot have.
    #[error(transparent)]
    Batch(#[from] engram_core::BatchError),
    /// Ids whose shape, type or address cannot be used.
    #[error(transparent)]
    Ids(#[from] IdsError),
    /// Prefetch calls in an order that cannot work.
    #[error(transparent)]
    Prefetch(#[from] PrefetchError),
    /// Memory of another device, or host memory where device memory is needed.
    #[error("{what} lies on {found}, but the call runs on device {expected}")]
    WrongDevice {
        /// Which memory or stream.
        what: &'static str,
        /// Where it lies.
        found: String,
        /// The device of the call.
        expected: i32,
    },
    /// The call allocates or waits, which a stream capture forbids.
    #[error("{what} cannot run while a stream is being captured: {remedy}")]
    Capturing {
        /// The call.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The table's memory was given back by `sleep`.
    #[error("the table is asleep: call `wake` first")]
    Asleep,
    /// An earlier staged lookup failed; its rows, or some of them, are zero rows.
    #[error("an earlier staged lookup failed: {0}")]
    Gather(#[from] GatherError),
    /// The system gave no thread to gather with.
    #[error("starting a thread: {0}")]
    Threads(std::io::Error),
    /// The system refused a descriptor of device memory.
    #[error("a descriptor of device memory: {0}")]
    Descriptor(std::io::Error),
    /// Memory of the host could not be mapped.
    #[error("mapping {bytes} bytes of host memory: {source}")]
    HostMemory {
        /// Bytes asked for.
        bytes: usize,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// A refusal of the CUDA driver: which function, which code, and what it was called for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{doing}: {api} answered {code}")]
pub struct DriverError {
    /// The driver function.
    pub api: &'static str,
    /// Its answer.
    pub code: DriverCode,
    /// What was being done.
    pub doing: String,
}

/// A result code of the CUDA driver. Codes of drivers newer than this crate are representable, and shown by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DriverCode(pub i32);

impl DriverCode {
    /// Out of device memory, or of what the driver counts as such.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// libcuda is a stub library: no driver is installed, or the stub was linked statically.
    pub const STUB_LIBRARY: Self = Self(34);
    /// No CUDA device is visible.
    pub const NO_DEVICE: Self = Self(100);

    /// The driver's name of the code, for codes that callers meet.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "CUDA_SUCCESS",
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            200 => "CUDA_ERROR_INVALID_IMAGE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            209 => "CUDA_ERROR_NO_BINARY_FOR_GPU",
            218 => "CUDA_ERROR_INVALID_PTX",
            222 => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            400 => "CUDA_ERROR_INVALID_HANDLE",
            401 => "CUDA_ERROR_ILLEGAL_STATE",
            500 => "CUDA_ERROR_NOT_FOUND",
            600 => "CUDA_ERROR_NOT_READY",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
            712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            902 => "CUDA_ERROR_STREAM_CAPTURE_MERGE",
            903 => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            904 => "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            905 => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            906 => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            907 => "CUDA_ERROR_CAPTURED_EVENT",
            908 => "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            999 => "CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "code {}", self.0),
        }
    }
}

/// A CUDA version, as `cuDriverGetVersion` counts: 1000 a major, 10 a minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(pub i32);

impl CudaVersion {
    /// What the embedded PTX (8.4) needs: CUDA 12.4, driver r550.
    pub const NEEDED: Self = Self(12_040);

    /// Refuses a driver that cannot read the embedded kernels.
    ///
    /// # Errors
    /// [`Error::DriverTooOld`] with both versions.
    pub fn check(self) -> Result<(), Error> {
        if self < Self::NEEDED { Err(Error::DriverTooOld { found: self, needed: Self::NEEDED }) } else { Ok(()) }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_codes_keep_their_number() {
        assert_eq!(DriverCode(2).to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
        assert_eq!(DriverCode(916).to_string(), "code 916");
        assert_eq!(DriverCode(-7).to_string(), "code -7");
    }

    #[test]
    fn an_old_driver_is_refused_with_both_versions() {
        assert!(CudaVersion(12_040).check().is_ok());
        assert!(CudaVersion(13_000).check().is_ok());
        let text = CudaVersion(12_020).check().unwrap_err().to_string();
        assert!(text.contains("12.2") && text.contains("12.4"), "{text}");
    }
}
