//! `engram synth`: a made-up checkpoint.

use crate::file::check_out;
use crate::meter::Meter;
use crate::{Verdict, say, text};
use anyhow::{Context, Result};
use engram_core::Preset;
use engram_loader::{Error, Pool, Synth};
use engram_ple::{FormatKind, TableSource};
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// deepseek-v4.1-flash, qwen3.8-flash-next, tiny-engram or tiny-ple
    #[arg(long, value_name = "NAME")]
    preset: Preset,
    /// Size of the tables as a share of the preset's
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    scale: f64,
    /// The folder to make, or an empty one to fill; nothing is overwritten
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Equal seeds give equal rows
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// bf16, f16, f32, e4m3-global or e4m3-e8m0-32; by default the official one
    #[arg(long, value_name = "NAME")]
    table_format: Option<FormatKind>,
}

pub(crate) fn run(args: &Args) -> Result<Verdict> {
    let synth = match Synth::new(args.preset, args.scale, args.table_format, args.seed) {
        // Presets are sound, so it can only be the scale.
        Err(error @ Error::Config(_)) => return Err(error).with_context(|| format!("--scale {}", args.scale)),
        synth => synth?,
    };
    check_out(&args.out)?;
    let start = Instant::now();
    synth.write(&args.out, &Pool::new(0), &Meter::new())?;
    let tables = synth.tables()?;
    let bytes = tables.iter().map(|table| table.rows() * table.format().row_bytes() as u64).sum();
    let time = start.elapsed();
    say(format_args!(
        "{}: {}, {} in {} ({})",
        args.out.display(),
        text::counted(tables.len(), "table"),
        text::bytes(bytes),
        text::seconds(time),
        text::rate(bytes, time)
    ));
    Ok(Verdict::Done)
}
