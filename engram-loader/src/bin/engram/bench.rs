//! `engram bench`: hashing and row lookups, measured.

use crate::file;
use crate::meter::Meter;
use crate::tier::Tier;
use crate::{Format, Refused, Verdict, text};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use engram_core::{Batch, Family, Hasher, Layout, NumpyRng, Path as HashPath, Preset, TableConfig};
use engram_loader::{Checkpoint, Options, Pool, Progress, TableExtents, TableFile, Tokenizer};
use engram_ple::{FormatKind, TableFormat, TableSource};
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs of which the median is taken.
const RUNS: usize = 5;
/// Short runs are repeated until they took this long together, but not more often than [`MOST_RUNS`].
const LEAST_TIME: Duration = Duration::from_millis(500);
const MOST_RUNS: usize = 101;
/// The most that one run may read, in bytes.
const MOST_BYTES: usize = 8 << 30;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Tokens to row ids
    Hash(HashArgs),
    /// Random rows of a table, or of a plain file
    Rows(RowsArgs),
}

#[derive(clap::Args)]
pub(crate) struct HashArgs {
    /// deepseek-v4.1-flash, qwen3.8-flash-next, tiny-engram or tiny-ple
    #[arg(long, value_name = "NAME")]
    preset: Preset,
    /// Tokens of one sequence
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: u32,
    /// Threads, by default all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// How remainders are taken
    #[arg(long, value_enum, default_value = "best")]
    path: PathChoice,
    /// How to print the result
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum PathChoice {
    /// Plain Rust
    Portable,
    /// The fastest that this processor has
    Best,
}

#[derive(clap::Args)]
pub(crate) struct RowsArgs {
    /// A checkpoint's folder, of which the first table is read, or a plain file
    #[arg(value_name = "CKPT|FILE")]
    path: PathBuf,
    /// Bytes of a row of a plain file
    #[arg(long, value_name = "N")]
    row_bytes: Option<usize>,
    /// Where rows are read from
    #[arg(long, value_enum, default_value = "mapped")]
    tier: Tier,
    /// Random rows a run, by default 524,288, or 16,384 by tier direct
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rows: Option<u32>,
    /// Threads, by default all; for tier direct the reads in flight, by default 32
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// How to print the result
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub(crate) fn run(command: &Command) -> Result<Verdict> {
    match command {
        Command::Hash(args) => hash(args),
        Command::Rows(args) => rows(args),
    }
}

#[derive(Serialize)]
struct HashResult {
    preset: &'static str,
    tokens: u32,
    path: String,
    ns_per_token: f64,
    ids_per_token: usize,
    threads: usize,
    /// The sum of all ids.
    checksum: i64,
}

fn hash(args: &HashArgs) -> Result<Verdict> {
    let config = args.preset.config();
    let layout = Layout::from_config(&config)?;
    // The pad token stands for its own compressed id: presets come without a tokenizer.
    let (fill, vocabulary) = match &config.table {
        TableConfig::Engram(config) => (config.pad_token_id, config.compressed_vocab_size),
        TableConfig::Ple(config) => (config.eos_token_id, config.vocab_size),
    };
    let fill = i32::try_from(fill)?;
    let mut hasher = Hasher::new(&layout, fill)?;
    if matches!(args.path, PathChoice::Portable) {
        hasher = hasher.with_path(HashPath::Portable)?;
    }
    // The tokens of numpy's default_rng(0).integers(0, vocabulary, tokens), so that others can check the sum.
    let mut random = NumpyRng::new(0);
    let tokens: Vec<i32> =
        (0..args.tokens).map(|_| i32::try_from(random.integer(vocabulary.into()))).collect::<Result<_, _>>()?;
    let start = match layout.family() {
        Family::Engram => -1,
        Family::Ple => fill,
    };
    let (starts, history) = ([0, i32::try_from(args.tokens)?], vec![start; layout.ngram_size() - 1]);
    let batch = Batch { tokens: &tokens, starts: &starts, history: &history };
    let mut ids = vec![0; tokens.len() * hasher.ids_per_token()];
    let threads = args.threads.map_or_else(|| Pool::new(0).threads(), usize::from);
    let time = if threads == 1 {
        median(|_| Ok(hasher.ids(&batch, &mut ids)?))?
    } else {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let part = tokens.len().div_ceil(threads * 4).max(1024);
        median(|_| {
            let parts = ids.par_chunks_mut(part * hasher.ids_per_token()).enumerate();
            Ok(pool.install(|| parts.try_for_each(|(place, ids)| hasher.ids_from(&batch, place * part, ids)))?)
        })?
    };
    let result = HashResult {
        preset: args.preset.name(),
        tokens: args.tokens,
        path: format!("{:?}", hasher.path()).to_lowercase(),
        ns_per_token: nanoseconds(time) / f64::from(args.tokens),
        ids_per_token: hasher.ids_per_token(),
        threads,
        checksum: ids.iter().map(|&id| i64::from(id)).sum(),
    };
    print(args.format, &result, |result| {
        format!(
            "{} a token, {} ids each ({}, {} tokens, path {}, {}, checksum {})",
            text::nanoseconds(result.ns_per_token),
            result.ids_per_token,
            result.preset,
            text::number(result.tokens),
            result.path,
            text::counted(result.threads, "thread"),
            result.checksum
        )
    })
}

#[derive(Serialize)]
struct RowsResult {
    tier: &'static str,
    rows: u32,
    row_bytes: usize,
    threads: usize,
    ns_per_row: f64,
    bytes_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    access: Option<String>,
}

fn rows(args: &RowsArgs) -> Result<Verdict> {
    let meter = Meter::new();
    let extents = extents(&args.path, args.row_bytes)?;
    let rows = args.rows.unwrap_or(if args.tier == Tier::Direct { 16_384 } else { 524_288 });
    let row_bytes = extents.format().row_bytes();
    let count = rows as usize;
    if count.saturating_mul(row_bytes) > MOST_BYTES {
        bail!("{count} rows of {row_bytes} bytes are more than {} a run", text::bytes(MOST_BYTES as u64));
    }
    let last = i32::try_from(extents.rows().min(1 << 31).saturating_sub(1))?;
    if extents.rows() == 0 {
        return Err(Refused(format!("{} holds no row of {row_bytes} bytes", args.path.display())).into());
    }
    let threads = usize::from(args.threads.unwrap_or(0));
    let pool = Arc::new(Pool::new(threads));
    let table = args.tier.open(&extents, &pool, threads, &meter)?;
    let source = table.source();
    if args.tier == Tier::Mapped {
        warm(source, &meter)?;
    }
    let (mut ids, mut out) = (vec![0; count], vec![0; count * row_bytes]);
    let mut state = 1;
    let time = median(|timed| {
        if !timed {
            // Other rows each time: a fixed set would sit in the caches.
            ids.fill_with(|| random(&mut state, last));
            return Ok(());
        }
        Ok(source.gather(&ids, &mut out)?)
    })?;
    let ns_per_row = nanoseconds(time) / f64::from(rows);
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let result = RowsResult {
        tier: args.tier.name(),
        rows,
        row_bytes,
        threads: table.threads(&pool),
        ns_per_row,
        bytes_per_s: row_bytes as f64 * 1e9 / ns_per_row,
        access: table.access(),
    };
    print(args.format, &result, |result| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for people")]
        let rate = text::rate(result.bytes_per_s as u64, Duration::from_secs(1));
        format!(
            "{} a row, {rate}: tier {}{}, {} random rows of {} bytes a run, {}",
            text::nanoseconds(result.ns_per_row),
            result.tier,
            result.access.as_ref().map(|access| format!(" ({access})")).unwrap_or_default(),
            text::number(result.rows),
            result.row_bytes,
            text::counted(result.threads, "thread")
        )
    })
}

/// The first table of a checkpoint, or a plain file as a table.
fn extents(path: &Path, row_bytes: Option<usize>) -> Result<TableExtents> {
    if file::metadata(path)?.is_dir() {
        if row_bytes.is_some() {
            bail!("--row-bytes is for plain files; a checkpoint tells");
        }
        let mut options = Options::default();
        options.tokenizer = Tokenizer::Unchecked;
        let checkpoint = Checkpoint::open(path, &options)?;
        if let Some(fault) = checkpoint.refusals().next() {
            return Err(Refused(format!("{}: {fault}", path.display())).into());
        }
        let table = checkpoint.catalog().tables().first();
        return Ok(table.ok_or_else(|| Refused(format!("{} has no table", path.display())))?.extents().clone());
    }
    let bytes = file::regular(path)?.len();
    let Some(row_bytes) = row_bytes else { bail!("--row-bytes is needed for a plain file") };
    let format = TableFormat::new(FormatKind::E4m3Global, row_bytes, Some(1.0)).context("--row-bytes")?;
    Ok(TableExtents::whole_file(format, TableFile { path: path.to_owned(), bytes })?)
}

/// Touches every page of a mapped table once, so that no page is read or mapped for the first time while the clock runs.
fn warm(source: &dyn TableSource, progress: &dyn Progress) -> Result<()> {
    let row_bytes = source.format().row_bytes();
    let step = (4096 / row_bytes).max(1);
    let rows: Vec<i32> = (0..source.rows()).step_by(step).map_while(|row| i32::try_from(row).ok()).collect();
    let mut out = vec![0; 4096.min(rows.len()) * row_bytes];
    let page = (step * row_bytes) as u64;
    progress.begin("warming", rows.len() as u64 * page);
    for ids in rows.chunks(4096) {
        source.gather(ids, &mut out[..ids.len() * row_bytes])?;
        progress.advance(ids.len() as u64 * page);
    }
    progress.end();
    Ok(())
}

/// A number from 0 to `last`, evenly, by SplitMix64.
pub(crate) fn random(state: &mut u64, last: i32) -> i32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let values = u64::from(last.unsigned_abs()) + 1;
    i32::try_from(((z >> 32) * values) >> 32).unwrap_or(last)
}

/// The median time of `work(true)`; before each, `work(false)` prepares it.
fn median(mut work: impl FnMut(bool) -> Result<()>) -> Result<Duration> {
    let mut times = Vec::new();
    let begin = Instant::now();
    // The first run warms up.
    for run in 0..=MOST_RUNS {
        work(false)?;
        let start = Instant::now();
        work(true)?;
        if run > 0 {
            times.push(start.elapsed());
        }
        if times.len() >= RUNS && begin.elapsed() > LEAST_TIME {
            break;
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn nanoseconds(time: Duration) -> f64 {
    time.as_nanos() as f64
}

fn print<T: Serialize>(format: Format, result: &T, line: impl Fn(&T) -> String) -> Result<Verdict> {
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => {
            serde_json::to_writer(&mut out, result).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        Format::Text => writeln!(out, "{}", line(result))?,
    }
    Ok(Verdict::Done)
}
