#![doc = include_str!("../README.md")]

mod error;
mod memory;
pub mod protocol;

pub use error::{Error, Result};
pub use memory::{ALIGN, Memory};
