#![doc = include_str!("../README.md")]

mod direct;
mod error;
mod extents;
mod file;
mod gather;
mod mapped;
mod pool;
mod progress;
mod resident;

pub use direct::{Direct, FileAccess};
pub use error::Error;
pub use extents::{Extent, TableExtents};
pub use file::TableFile;
pub use mapped::Mapped;
pub use pool::Pool;
pub use progress::Progress;
pub use resident::Resident;
