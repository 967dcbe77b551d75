//! `cargo xtask loom`: the exchange protocol under a model checker.

use crate::process::{cargo, stream, target};
use anyhow::{Result, bail};

/// Seconds, or with `deep` minutes: three ranks at two preemptions as well.
pub(crate) fn run(deep: bool) -> Result<()> {
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" --cfg loom");
    let mut command = cargo();
    // The flag rebuilds all that it is given to, so it gets a folder of its own.
    command.env("RUSTFLAGS", flags.trim_start()).env("CARGO_TARGET_DIR", target().join("loom"));
    command.args(["test", "--package", "engram-symm", "--test", "loom"]);
    if deep {
        // Millions of executions: worth a fifth. That each model ended, and how large it was, is in its output.
        command.args(["--release", "--", "--include-ignored", "--show-output"]);
    }
    let mut passed = false;
    stream(&mut command, |line| passed |= line.starts_with("test result: ok.") && !line.contains(" 0 passed"))?;
    if !passed {
        bail!("the model checker ran no test");
    }
    Ok(())
}
