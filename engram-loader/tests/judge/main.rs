//! Checkpoints judged: golden ones, ones broken on purpose, and hostile bytes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod causes;
mod deep;
mod files;
mod golden;
mod hostile;
mod sketch;
mod tables;
#[cfg(feature = "tokenizers")]
mod vocabulary;
