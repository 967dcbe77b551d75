//! The backend on GPUs.

mod choose;
mod exchange;
mod kernels;
mod layout;
mod measure;
mod prefetch;
mod reach;
mod segments;

pub use choose::{Choice, Measured, Way};
pub use exchange::{Exchange, Options, Push, Rows};
pub use prefetch::Prefetcher;
pub use reach::{DeviceReach, peer_access};
pub use segments::Segments;

use crate::Error;

impl Error {
    /// What the driver of this rank's GPU refused while `doing` this.
    pub(crate) fn cuda(rank: usize, doing: impl Into<String>, error: &engram_cuda::Error) -> Self {
        let code = match error {
            engram_cuda::Error::Driver(error) => Some(error.code.0),
            _ => None,
        };
        Self::Cuda { rank, doing: doing.into(), code, reason: error.to_string() }
    }
}
