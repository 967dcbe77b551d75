//! Tests over the whole workspace live in `tests/tests`; the golden data that they and the crates read in `tests/data`.
