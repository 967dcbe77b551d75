//! Tests that need a CUDA device. They are ignored by default, fail without a device, and are run by `cargo xtask test-gpu`.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;
mod early;
mod golden;
mod hash;
mod large;
mod lookup;
mod memory;
mod prefetch;
mod raw;
mod staged;
mod table;
mod two_devices;
