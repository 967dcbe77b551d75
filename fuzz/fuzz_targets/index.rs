#![no_main]

use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

/// A checkpoint without its index. Left behind when the process ends; `TMPDIR=/dev/shm` is fast, and its files do not last.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let checkpoint = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden/ckpt/ple-fp8-global"));
    for name in ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        std::fs::copy(checkpoint.join(name), folder.path().join(name)).expect("the golden data are there");
    }
    folder
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| engram_tests::untrusted::index(input, FOLDER.path()));
