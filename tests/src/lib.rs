//! Tests over the whole workspace live in `tests/tests`; the golden data that they and the crates read in `tests/data`.
//!
//! [`untrusted`] is here because two need it: the fuzz targets in `fuzz`, and the test that replays what they found.

pub mod untrusted;

/// The examples of the workspace's README compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
