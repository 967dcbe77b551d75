//! The compressed vocabulary of the real tokenizer.

use super::{Bench, Case, number, pair, text};
use crate::process::{cargo, output};
use crate::python::{peer, real_tokenizer};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub(super) fn cases(_: &Bench) -> Result<Vec<Case>> {
    let tokenizer = real_tokenizer()?;
    let tokenizer = text(&tokenizer)?;
    let product = || -> Result<Value> {
        let mut build = cargo();
        build.args([
            "run",
            "--quiet",
            "--release",
            "--package",
            "engram-core",
            "--features",
            "tokenizers",
            "--example",
            "token_map",
            "--",
            tokenizer,
            "5",
        ]);
        let line = output(&mut build)?;
        serde_json::from_str(&line).with_context(|| format!("the example printed {line}"))
    };
    let python = || peer("tokenizer_map.py", &[tokenizer, "3"]);
    ensure!(product()?["sha256"] == python()?["sha256"], "product and peer build different maps");
    Ok(vec![pair(
        "token map of 129280 tokens",
        "s",
        None,
        || number(&product()?, "seconds"),
        "tokenizers, Python",
        || number(&python()?, "seconds"),
    )?])
}
