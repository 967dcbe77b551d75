//! `cargo xtask bench-gpu`: lookups and hashes on this machine's GPU, and the row exchange between its GPUs, beside their peers, and the ratios.
//!
//! Everything is packed into a folder with a script that runs it on a machine without Rust (Python with PyTorch and Triton is what the peers
//! need): `--archive DIR` stops there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::process::{cargo, note, output, run as run_command, target};
use crate::{python, stub};

/// Benches of the workspace, by package.
const BENCHES: [(&str, &str); 2] = [("engram-cuda", "rates"), ("engram-symm", "exchange")];
/// What runs products and peers, packed as it is: `bench` runs the parts, which print a table each, and writes `gpu.json`.
const SCRIPTS: [(&str, &str); 5] = [
    ("bench", include_str!("bench_gpu/bench")),
    ("lookups.py", include_str!("bench_gpu/lookups.py")),
    ("exchange.py", include_str!("bench_gpu/exchange.py")),
    ("full-size.py", include_str!("bench_gpu/full-size.py")),
    ("figures.py", include_str!("bench_gpu/figures.py")),
];
/// Turns text into requests of raw tokens.
const TOKENISE: &str = include_str!("bench_gpu/tokenise.py");
/// The peers, packed as they are.
const PEERS: [(&str, &str); 3] = [
    ("torch_exchange.py", include_str!("../peers/torch_exchange.py")),
    ("torch_gather.py", include_str!("../peers/torch_gather.py")),
    ("torch_text.py", include_str!("../peers/torch_text.py")),
];

/// Batches of real text, and tokens of each: a prefill.
const SETS: usize = 4;
const TOKENS: usize = 8192;

/// Packs and runs. What follows `--` is for the script that runs the benches: the parts to run, and sizes.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let end = arguments.iter().position(|argument| *argument == "--").unwrap_or(arguments.len());
    let (text, rest) = arguments.split_at(end);
    let folder = target().join("gpu-bench");
    archive(&folder, text)?;
    run_command(Command::new("python3").arg(folder.join("bench")).args(rest.iter().skip(1)))
}

/// Packs the benches, their peers, the ids of real text and the scripts that run them into `folder`.
pub(crate) fn archive(folder: &Path, text: &[&str]) -> Result<()> {
    std::fs::create_dir_all(folder.join("peers"))?;
    let stub = stub::generate()?;
    for (package, name) in BENCHES {
        std::fs::copy(build(package, name, &stub)?, folder.join(name))?;
    }
    for (name, script) in SCRIPTS {
        std::fs::write(folder.join(name), script)?;
    }
    for (name, script) in PEERS {
        std::fs::write(folder.join("peers").join(name), script)?;
    }
    text_ids(folder, text)?;
    crate::print_line(&format!("python3 {} [--help] [lookups] [exchange] [full-size]", folder.join("bench").display()));
    Ok(())
}

/// Builds a bench, stripped, and returns where it is.
fn build(package: &str, name: &str, stub: &stub::Stub) -> Result<PathBuf> {
    let messages = output(
        cargo()
            .args(["bench", "--no-run", "--features=cuda", "--message-format=json-render-diagnostics"])
            .args(["--package", package, "--bench", name])
            .env("CARGO_PROFILE_BENCH_STRIP", "symbols")
            .env("CUDA_LIBRARY_PATH", &stub.loaded),
    )?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    artifacts
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .with_context(|| format!("cargo built no bench {name}"))
}

/// Row ids of real text, as DeepSeek-V4.1-Flash asks for them: `text.i32`, `[sets][tokens][layers * columns]`.
fn text_ids(folder: &Path, text: &[&str]) -> Result<()> {
    let work = target().join("bench");
    std::fs::create_dir_all(&work)?;
    let (script, requests, config, ids) =
        (work.join("tokenise.py"), work.join("text.json"), work.join("text-config.json"), work.join("text-ids.json"));
    std::fs::write(&script, TOKENISE)?;
    std::fs::write(&config, serde_json::to_string(&deepseek())?)?;
    let tokenizer = python::real_tokenizer()?;
    let own;
    let files: Vec<&str> = if text.is_empty() {
        own = output(Command::new("git").args(["ls-files", "*.rs", "*.md", "*.cu", "*.py"]))?;
        own.lines().collect()
    } else {
        text.to_vec()
    };
    run_command(
        Command::new(python::interpreter()?)
            .arg(&script)
            .args([&tokenizer, &requests])
            .args([SETS.to_string(), TOKENS.to_string()])
            .args(files),
    )?;
    run_command(
        cargo()
            .args([
                "run",
                "--release",
                "--quiet",
                "--package",
                "engram-loader",
                "--features",
                "cli",
                "--bin",
                "engram",
                "--",
            ])
            .arg("hash")
            .arg(&config)
            .arg("--requests")
            .arg(&requests)
            .arg("--tokenizer")
            .arg(&tokenizer)
            .arg("--out")
            .arg(&ids),
    )?;
    let hashed: Value = serde_json::from_slice(&std::fs::read(&ids)?)?;
    let layers = hashed["layers"].as_array().context("layers of ids")?;
    let layers: Vec<&Vec<Value>> =
        layers.iter().map(|layer| layer["ids"].as_array().context("ids")).collect::<Result<_>>()?;
    let tokens = layers.first().context("a layer")?.len();
    let mut bytes = Vec::new();
    for token in 0..tokens {
        for layer in &layers {
            for id in layer[token].as_array().context("a token's ids")? {
                bytes.extend(i32::try_from(id.as_i64().context("an id")?)?.to_le_bytes());
            }
        }
    }
    let path = folder.join("text.i32");
    note(&format!("{tokens} tokens of text, {} bytes of ids", bytes.len()));
    std::fs::write(path, bytes)?;
    Ok(())
}

/// What of DeepSeek-V4.1-Flash's config the hash depends on.
fn deepseek() -> Value {
    json!({
        "model_type": "deepseek_v41",
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384_006_168, 384_016_682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16_000_000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_compressed_vocab_size": 99_092,
        "engram_pad_token_id": 2,
    })
}
