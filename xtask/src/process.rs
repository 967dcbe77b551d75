//! Commands run from the root of the workspace, each printed before it starts.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}

/// Cargo's build folder.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// The cargo that runs this xtask.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Prints a note about what is going on.
#[expect(clippy::print_stderr, reason = "progress goes to standard error")]
pub(crate) fn note(line: &str) {
    eprintln!("{line}");
}

/// Runs a command to its end; a failure names the whole command line.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = announce(command);
    let status = command.status().with_context(|| format!("starting `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Runs a command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = announce(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("starting `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}\n{}", output.status, String::from_utf8_lossy(&output.stdout));
    }
    String::from_utf8(output.stdout).with_context(|| format!("output of `{line}`"))
}

/// Runs a command, shows its standard output as it comes, and hands every line to `each`.
pub(crate) fn stream(command: &mut Command, mut each: impl FnMut(&str)) -> Result<()> {
    let line = announce(command);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("starting `{line}`"))?;
    for text in BufReader::new(child.stdout.take().context("piped")?).lines() {
        let text = text?;
        crate::print_line(&text);
        each(&text);
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

fn announce(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    note(&format!("$ {line}"));
    line
}
