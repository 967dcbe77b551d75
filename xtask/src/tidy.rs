//! Invariants of the workspace that a machine can check.

use anyhow::Result;

pub(crate) fn run() -> Result<()> {
    Ok(())
}
