//! Replays what the fuzz targets start from and what they found, and the golden files as further inputs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "says which input a panic is about")]

use engram_tests::untrusted;
use std::fs;
use std::path::{Path, PathBuf};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data");

/// Every file in a folder and in those below it.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Runs a target on its corpus and on the golden files whose names end alike.
fn replay(target: &str, golden: &str, run: impl Fn(&[u8])) {
    let mut inputs = Vec::new();
    files(&Path::new(DATA).join("corpus").join(target), &mut inputs);
    assert!(inputs.len() >= 10, "{} files in the corpus of {target}", inputs.len());
    let mut all = Vec::new();
    files(&Path::new(DATA).join("golden"), &mut all);
    inputs.extend(all.into_iter().filter(|path| path.to_str().unwrap().ends_with(golden)));
    for input in inputs {
        println!("{}", input.display());
        run(&fs::read(input).unwrap());
    }
}

#[test]
fn header() {
    let folder = tempfile::tempdir().unwrap();
    replay("header", ".safetensors", |input| untrusted::header(input, folder.path()));
}

#[test]
fn index() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Path::new(DATA).join("golden/ckpt/ple-fp8-global");
    for name in ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        fs::copy(checkpoint.join(name), folder.path().join(name)).unwrap();
    }
    replay("index", ".index.json", |input| untrusted::index(input, folder.path()));
}

#[test]
fn config() {
    replay("config", "config.json", untrusted::config);
}

#[test]
fn requests() {
    replay("requests", "requests.json", untrusted::requests);
}

#[test]
fn quant_config() {
    replay("quant_config", "config.json", untrusted::quant_config);
}
