//! `engram demo`: the whole way from tokens to rows, on a small checkpoint of each family.

use crate::bench::random;
use crate::meter::Meter;
use crate::tier::Tier;
use crate::{Refused, Verdict, text};
use anyhow::{Context, Result};
use engram_core::{Batch, Family, Hasher, Layout, Preset, TableConfig};
use engram_loader::{Checkpoint, Options, Pool, Synth};
use engram_ple::TableSource;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Share of the official tables' sizes: tables of 48 MiB and 24 MiB.
const SCALE: f64 = 1.0 / 4096.0;

/// Tokens that are hashed and looked up.
const TOKENS: u32 = 8192;

pub(crate) fn run() -> Result<Verdict> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "The n-gram memory of two model families: each token and those before it address rows of a large table."
    )?;
    let folder = tempfile::tempdir().context("a temporary folder")?;
    for (name, preset) in
        [("DeepSeek-V4.1-Flash", Preset::DeepseekV41Flash), ("Qwen3.8-Flash-Next", Preset::Qwen38FlashNext)]
    {
        writeln!(out, "\n{name}, tables at 1/{} of their size", 1.0 / SCALE)?;
        family(preset, &folder.path().join(preset.name()), &mut out)?;
    }
    writeln!(out, "\nAll rows came back as they were made. A checkpoint of your own:")?;
    writeln!(out, "  cargo engram inspect FOLDER           what it holds")?;
    writeln!(out, "  cargo engram validate FOLDER --deep   whether it is sound, to the last row")?;
    writeln!(out, "  cargo engram --help                   everything else")?;
    Ok(Verdict::Done)
}

/// Prints one step: what was done, and how fast.
fn step(out: &mut impl Write, name: &str, what: &str) -> Result<()> {
    writeln!(out, "  {name:<12}{what}")?;
    Ok(out.flush()?)
}

fn family(preset: Preset, folder: &Path, out: &mut impl Write) -> Result<()> {
    let (meter, pool) = (Meter::new(), Arc::new(Pool::new(0)));

    let start = Instant::now();
    let synth = Synth::new(preset, SCALE, None, 0)?;
    synth.write(folder, &pool, &meter)?;
    let sources = synth.tables()?;
    let bytes = sources.iter().map(|table| table.rows() * table.format().row_bytes() as u64).sum();
    let time = start.elapsed();
    let tables = text::counted(sources.len(), "table");
    step(out, "synthesised", &format!("{tables}, {} at {}", text::bytes(bytes), text::rate(bytes, time)))?;

    let start = Instant::now();
    let mut options = Options::default();
    options.deep = true;
    options.progress = &meter;
    let checkpoint = Checkpoint::open(folder, &options)?;
    let report = checkpoint.report();
    if let Some(fault) = report.faults.first() {
        return Err(Refused(format!("the checkpoint that was just made: {fault}")).into());
    }
    let files = text::counted(report.files.len(), "file");
    let rows: u64 = sources.iter().map(TableSource::rows).sum();
    let read: u64 = report.files.iter().map(|file| file.bytes).sum();
    let rate = text::rate(read, start.elapsed());
    step(out, "proved", &format!("{files}, {} rows, every byte, at {rate}", text::number(rows)))?;

    let layout = synth.layout();
    let (ids, what) = hash(&synth, layout)?;
    step(out, "hashed", &what)?;
    for (place, layer) in layout.layers().iter().enumerate() {
        let token = &ids[place * layout.columns()..][..layout.columns()];
        let first: Vec<String> = token.iter().take(4).map(|&id| text::number(id.unsigned_abs())).collect();
        let more = token.len() - first.len();
        step(out, "", &format!("first token, layer {}: rows {} and {more} more", layer.layer(), first.join(" ")))?;
    }

    for tier in Tier::ALL {
        let what = look_up(tier, &checkpoint, &sources, layout, &ids, &pool)?;
        step(out, if tier == Tier::Mapped { "looked up" } else { "" }, &what)?;
    }
    Ok(())
}

/// Hashes random tokens: ids `[tokens][layers][columns]`.
fn hash(synth: &Synth, layout: &Layout) -> Result<(Vec<i32>, String)> {
    let (fill, vocabulary) = match &synth.config().table {
        TableConfig::Engram(config) => (config.pad_token_id, config.compressed_vocab_size),
        TableConfig::Ple(config) => (config.eos_token_id, config.vocab_size),
    };
    let (fill, last) = (i32::try_from(fill)?, i32::try_from(vocabulary - 1)?);
    let hasher = Hasher::new(layout, fill)?;
    let mut state = 0;
    let tokens: Vec<i32> = (0..TOKENS).map(|_| random(&mut state, last)).collect();
    let before = match layout.family() {
        Family::Engram => -1,
        Family::Ple => fill,
    };
    let (starts, history) = ([0, i32::try_from(TOKENS)?], vec![before; layout.ngram_size() - 1]);
    let batch = Batch { tokens: &tokens, starts: &starts, history: &history };
    let mut ids = vec![0; tokens.len() * hasher.ids_per_token()];
    let start = Instant::now();
    hasher.ids(&batch, &mut ids)?;
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let ns = start.elapsed().as_nanos() as f64 / f64::from(TOKENS);
    let what = format!(
        "{} tokens to {} row ids each, {} a token on one thread",
        text::number(TOKENS),
        hasher.ids_per_token(),
        text::nanoseconds(ns)
    );
    Ok((ids, what))
}

/// Looks all ids up in one tier and holds the rows against those that were synthesised.
fn look_up(
    tier: Tier,
    checkpoint: &Checkpoint,
    sources: &[impl TableSource],
    layout: &Layout,
    ids: &[i32],
    pool: &Arc<Pool>,
) -> Result<String> {
    let (mut count, mut nanoseconds, mut access) = (0_u32, 0, None);
    let tables = checkpoint.catalog().tables();
    for (place, (table, made)) in tables.iter().zip(sources).enumerate() {
        let open = tier.open(table.extents(), pool, 0, &Meter::new())?;
        let tokens = ids.chunks_exact(tables.len() * layout.columns());
        let ids: Vec<i32> =
            tokens.flat_map(|token| &token[place * layout.columns()..][..layout.columns()]).copied().collect();
        let mut rows = vec![0; ids.len() * made.format().row_bytes()];
        // Once to open files and map pages, once for the clock.
        open.source().gather(&ids, &mut rows)?;
        let start = Instant::now();
        open.source().gather(&ids, &mut rows)?;
        nanoseconds += start.elapsed().as_nanos();
        count += u32::try_from(ids.len())?;
        access = open.access();
        let mut expected = vec![0; rows.len()];
        made.gather(&ids, &mut expected)?;
        if rows != expected {
            return Err(Refused(format!("tier {} gave other rows than were made", tier.name())).into());
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let ns = nanoseconds as f64 / f64::from(count);
    let access = access.map(|access| format!(" ({access})")).unwrap_or_default();
    Ok(format!("{} rows from {}{access}, {} a row", text::number(count), tier.name(), text::nanoseconds(ns)))
}
