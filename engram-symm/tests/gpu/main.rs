//! Tests that need a CUDA device. They are ignored by default, fail without a device, and are run by `cargo xtask test-gpu`.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod backend;
mod early;
mod exchange;
mod faults;
mod graphs;
mod prefetch;
mod ranks;
mod segments;
#[path = "../../../engram-cuda/tests/gpu/early.rs"]
mod starting_early;
#[expect(dead_code, reason = "tables on a GPU cannot fail to be read")]
#[path = "../suite/mod.rs"]
mod suite;
