#![doc = include_str!("../README.md")]

mod atomic;
mod direct;
mod error;
mod extents;
mod file;
mod gather;
mod header_plan;
mod mapped;
mod pool;
mod progress;
mod requests;
mod resident;
mod rows_file;
mod synth;

pub use atomic::write_atomically;
pub use direct::{Direct, FileAccess};
pub use error::Error;
pub use extents::{Extent, TableExtents};
pub use file::TableFile;
pub use mapped::Mapped;
pub use pool::Pool;
pub use progress::Progress;
pub use requests::{HashInput, Place, Requests, RequestsError};
pub use resident::Resident;
pub use rows_file::write_rows_file;
pub use synth::Synth;
