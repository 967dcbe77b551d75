#![doc = include_str!("../README.md")]

mod error;
mod progress;

pub use error::Error;
pub use progress::Progress;
