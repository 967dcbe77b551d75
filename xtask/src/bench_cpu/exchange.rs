//! The row exchange between two processes, against pipes and UNIX sockets that carry the same bytes.

use super::{Bench, Case, ROUNDS, number, pair};
use crate::process::{cargo, output, run, target};
use anyhow::{Context, Result};
use serde_json::Value;
use std::process::Command;

pub(super) fn cases(_: &Bench) -> Result<Vec<Case>> {
    run(cargo().args(["build", "--release", "--package", "engram-symm", "--example", "latency"]))?;
    // A run measures all ways, one after the other; the rounds of a case are those of the runs.
    let rounds = (0..ROUNDS).map(|_| measure()).collect::<Result<Vec<_>>>()?;
    let find = |round: &[Value], way: &str, tokens: u64| {
        let line = round.iter().find(|line| line["way"] == way && line["tokens"] == tokens);
        number(line.with_context(|| format!("no line for {way} of {tokens} tokens"))?, "microseconds")
    };
    let mut cases = Vec::new();
    for tokens in [1, 32, 128] {
        for product in ["push", "barrier"] {
            for peer in ["pipe", "unix socket"] {
                let (mut products, mut peers) = (rounds.iter(), rounds.iter());
                cases.push(pair(
                    format!("exchange of {tokens} token(s) a process, {product}"),
                    "us/exchange",
                    None,
                    || find(products.next().context("a round")?, product, tokens),
                    peer,
                    || find(peers.next().context("a round")?, peer, tokens),
                )?);
            }
        }
    }
    Ok(cases)
}

fn measure() -> Result<Vec<Value>> {
    let text = output(&mut Command::new(target().join("release/examples/latency")))?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| format!("line {line:?}"))).collect()
}
