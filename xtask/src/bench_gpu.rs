//! `cargo xtask bench-gpu`: lookups and hashes beside their peers on this machine's GPU, and the ratios between them.
//!
//! Everything is packed into a folder with a script that runs it on a machine without Rust (Python with PyTorch and Triton is what the peers
//! need): `--archive DIR` stops there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::process::{cargo, note, output, run as run_command, target};
use crate::{python, stub};

/// Runs product and peers, prints the table and writes `gpu.json`.
const RUNNER: &str = include_str!("bench_gpu/run");
/// Turns text into requests of raw tokens.
const TOKENISE: &str = include_str!("bench_gpu/tokenise.py");
/// The peers, packed as they are.
const PEERS: [(&str, &str); 2] = [
    ("torch_gather.py", include_str!("../peers/torch_gather.py")),
    ("torch_text.py", include_str!("../peers/torch_text.py")),
];

/// Batches of real text, and tokens of each: a prefill.
const SETS: usize = 4;
const TOKENS: usize = 8192;

pub(crate) fn run(text: &[&str]) -> Result<()> {
    let folder = target().join("gpu-bench");
    archive(&folder, text)?;
    run_command(Command::new("python3").arg(folder.join("bench")))
}

/// Packs the bench, its peers, the ids of real text and the script that runs them into `folder`.
pub(crate) fn archive(folder: &Path, text: &[&str]) -> Result<()> {
    std::fs::create_dir_all(folder.join("peers"))?;
    let stub = stub::generate()?;
    let messages = output(
        cargo()
            .args(["bench", "--no-run", "--package=engram-cuda", "--features=cuda", "--bench=rates"])
            .arg("--message-format=json-render-diagnostics")
            .env("CARGO_PROFILE_BENCH_STRIP", "symbols")
            .env("CUDA_LIBRARY_PATH", &stub.loaded),
    )?;
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = artifacts
        .filter(|message| message["target"]["name"] == "rates")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo built no bench")?;
    std::fs::copy(program, folder.join("rates"))?;
    for (name, script) in PEERS {
        std::fs::write(folder.join("peers").join(name), script)?;
    }
    std::fs::write(folder.join("bench"), RUNNER)?;
    text_ids(folder, text)?;
    crate::print_line(&format!("python3 {} [DEVICE_GIB] [PINNED_GIB]", folder.join("bench").display()));
    Ok(())
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
