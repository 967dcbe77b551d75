#![no_main]

use std::sync::LazyLock;
use tempfile::TempDir;

/// Left behind when the process ends; `TMPDIR=/dev/shm` is fast, and its files do not last.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder can be made"));

libfuzzer_sys::fuzz_target!(|input: &[u8]| engram_tests::untrusted::header(input, FOLDER.path()));
