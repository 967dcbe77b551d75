//! `cargo xtask clippy` and `cargo xtask docs`: both with warnings denied, over the sets of features that matter.

use crate::process::{cargo, run};
use crate::stub;
use anyhow::Result;
use std::process::Command;

/// Sets of features; each is one call of cargo, over all targets.
const FEATURE_SETS: [&[&str]; 2] =
    [&["--workspace"], &["--workspace", "--features", "engram-loader/cli,engram-symm/fault-injection"]];

pub(crate) fn clippy() -> Result<()> {
    for_each_set(|set| {
        let mut command = cargo();
        command.arg("clippy").args(set).args(["--all-targets", "--", "-D", "warnings"]);
        command
    })
}

pub(crate) fn docs() -> Result<()> {
    for_each_set(|set| {
        let mut command = cargo();
        command.arg("doc").args(set).arg("--no-deps").env("RUSTDOCFLAGS", "-Dwarnings");
        command
    })
}

fn for_each_set(command: impl Fn(&[&str]) -> Command) -> Result<()> {
    let stub = stub::generate()?;
    FEATURE_SETS.iter().try_for_each(|set| run(command(set).env("CUDA_LIBRARY_PATH", &stub.linked_in)))
}
