#![doc = include_str!("../README.md")]

mod bootstrap;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod exchange;
mod host;
mod memory;
pub mod protocol;

pub use bootstrap::access;
pub use bootstrap::{
    Group, Launch, MemoryStore, PeerAccess, Registration, Rendezvous, Store, TcpStore, TcpStoreServer,
};
pub use error::{Error, OsError, Result, Step, TableError};
pub use exchange::{Algorithm, Config, Exchange, Ids, Layer, Output, Part, Rows, segment_bytes};
pub use host::HostMemory;
pub use memory::{ALIGN, Memory};
