//! Chores of the workspace: `cargo xtask COMMAND`. Commands need nothing but cargo and what they install themselves.

mod tidy;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: cargo xtask COMMAND

  tidy    check the workspace's invariants (ARCHITECTURE.md)
";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["tidy"] => tidy::run(),
        _ => bail!("{USAGE}"),
    }
}
