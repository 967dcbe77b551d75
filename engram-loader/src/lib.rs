#![doc = include_str!("../README.md")]

mod atomic;
mod checkpoint;
mod error;
mod headers;
mod options;
mod pool;
mod progress;
mod prove;
mod requests;
mod rows_file;
mod synth;
mod tiers;

pub use atomic::write_atomically;
pub use checkpoint::catalog::{Catalog, CatalogTable};
pub use checkpoint::folder::CheckpointFile;
pub use checkpoint::{Checkpoint, validate};
pub use error::Error;
pub use headers::dtype::Dtype;
pub use headers::header::{Header, TensorInfo};
pub use options::{DEFAULT_HEADER_CAP, Options, Tokenizer};
pub use pool::Pool;
pub use progress::Progress;
pub use prove::report::{Fault, FaultCode, FileSummary, Report, Severity, TableSummary, UnknownFaultCode};
pub use requests::{HashInput, Place, Requests, RequestsError};
pub use rows_file::write_rows_file;
pub use synth::Synth;
pub use tiers::direct::{Direct, FileAccess};
pub use tiers::extents::{Extent, TableExtents};
pub use tiers::file::TableFile;
pub use tiers::mapped::Mapped;
pub use tiers::resident::Resident;
