#![doc = include_str!("../README.md")]

mod bootstrap;
mod error;
mod host;
mod memory;
pub mod protocol;

pub use bootstrap::{Group, Launch, Rendezvous};
pub use error::{Error, OsError, Result, Step};
pub use host::HostMemory;
pub use memory::{ALIGN, Memory};
