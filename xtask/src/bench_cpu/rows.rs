//! Random rows from a file: warm through the page cache, and cold (the direct tier never uses it, the peer drops it).

use super::{Bench, Case, number, pair, text};
use crate::process::note;
use crate::python::peer;
use anyhow::Result;
use std::io::{BufWriter, Write};
use std::path::Path;

const ROW_BYTES: &str = "160";
/// A table must be larger than what the translation caches of the processor reach.
const FILE_BYTES: u64 = 4 << 30;

pub(super) fn cases(bench: &Bench) -> Result<Vec<Case>> {
    let file = bench.file("rows.bin");
    make_table(&file)?;
    let file = text(&file)?;
    let measure = |tier: &str, rows: &str, more: &[&str]| {
        let args =
            ["bench", "rows", file, "--row-bytes", ROW_BYTES, "--rows", rows, "--tier", tier, "--format", "json"];
        number(&bench.engram(&[&args, more].concat())?, "ns_per_row")
    };
    let numpy = |rows: &str, more: &[&str]| {
        number(&peer("numpy_gather.py", &[&[file, ROW_BYTES, rows, "5"], more].concat())?, "ns_per_row")
    };
    Ok(vec![
        pair(
            "524288 random 160 B rows, warm, mapped, 2 threads",
            "ns/row",
            Some(4.0),
            || measure("mapped", "524288", &["--threads", "2"]),
            "numpy memmap",
            || numpy("524288", &[]),
        )?,
        pair(
            "16384 random 160 B rows, cold, direct, 32 reads in flight",
            "ns/row",
            None,
            || measure("direct", "16384", &[]),
            "numpy memmap, cold",
            || numpy("16384", &["cold"]),
        )?,
    ])
}

fn make_table(path: &Path) -> Result<()> {
    if path.metadata().is_ok_and(|found| found.len() == FILE_BYTES) {
        return Ok(());
    }
    note(&format!("writing {} ({} GiB)", path.display(), FILE_BYTES >> 30));
    let mut out = BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
    let mut word: u64 = 1;
    for _ in 0..FILE_BYTES / 8 {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        out.write_all(&word.to_le_bytes())?;
    }
    out.into_inner()?.sync_all()?;
    Ok(())
}
