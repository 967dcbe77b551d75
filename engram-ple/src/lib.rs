#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod dispatch;
mod e4m3;
mod e8m0;
mod error;
mod format;
pub mod mx;
mod nan;
mod quant;
mod rows;
mod select;
mod source;
mod synth;

pub use error::Error;
pub use format::{FormatKind, MAX_WIDTH, OutputType, TableFormat};
pub use nan::NanRows;
pub use quant::QuantConfig;
pub use select::{Matching, Selection, Selector, select};
pub use source::{MemorySource, SourceError, TableSource};
pub use synth::SynthSource;
