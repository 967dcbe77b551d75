//! What can go wrong, for every part of the crate.

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused an operation on the group's memory.
    #[error("{operation} on the memory of rank {rank}")]
    Memory {
        /// What was tried.
        operation: &'static str,
        /// Whose segment it was.
        rank: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}
