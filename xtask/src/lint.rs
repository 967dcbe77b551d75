//! `cargo xtask clippy` and `cargo xtask docs`: both with warnings denied, over the sets of features that matter.

use crate::process::{cargo, run};
use anyhow::Result;

/// Sets of features; each is one call of cargo, over all targets.
const FEATURE_SETS: [&[&str]; 2] = [&["--workspace"], &["--workspace", "--features", "engram-loader/cli"]];

pub(crate) fn clippy() -> Result<()> {
    FEATURE_SETS
        .iter()
        .try_for_each(|set| run(cargo().arg("clippy").args(*set).args(["--all-targets", "--", "-D", "warnings"])))
}

pub(crate) fn docs() -> Result<()> {
    FEATURE_SETS
        .iter()
        .try_for_each(|set| run(cargo().arg("doc").args(*set).arg("--no-deps").env("RUSTDOCFLAGS", "-Dwarnings")))
}
