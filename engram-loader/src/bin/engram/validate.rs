//! `engram validate`: every fault of a checkpoint.

use crate::inspect::print_tables;
use crate::meter::Meter;
use crate::{Format, Verdict, model, text};
use anyhow::Result;
use engram_loader::{Options, Report, Severity};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(
    after_help = "Faults go to stdout, progress to stderr.\n\nExit codes: 0 sound; 1 refused; 2 usage, or a path is not there or not readable"
)]
pub(crate) struct Args {
    /// The checkpoint's folder
    #[arg(value_name = "CKPT")]
    checkpoint: PathBuf,
    /// The model's tokenizer.json, by default the one in the checkpoint's folder
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Read every row, look for NaN, and hash every file with XXH3-128
    #[arg(long)]
    deep: bool,
    /// Hash every file with SHA-256 too; implies --deep
    #[arg(long)]
    sha256: bool,
    #[command(flatten)]
    allow: model::Allow,
    /// How to print what was found
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub(crate) fn run(args: &Args) -> Result<Verdict> {
    let meter = Meter::new();
    let mut options = Options::default();
    options.deep = args.deep || args.sha256;
    options.sha256 = args.sha256;
    options.allow.clone_from(&args.allow.codes);
    options.progress = &meter;
    if let Some(tokenizer) = &args.tokenizer {
        options.tokenizer = model::named_tokenizer(tokenizer)?;
    }
    let report = engram_loader::validate(&args.checkpoint, &options)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    match args.format {
        Format::Json => {
            serde_json::to_writer(&mut out, &report).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        Format::Text => print(&report, &args.checkpoint.display().to_string(), &mut out)?,
    }
    out.flush()?;
    Ok(if report.ok { Verdict::Done } else { Verdict::Refused })
}

fn print(report: &Report, name: &str, out: &mut impl Write) -> Result<()> {
    let family = report.family.map_or_else(|| "no known family".to_owned(), |family| family.to_string());
    writeln!(out, "{name}: {family}\n")?;
    print_tables(&report.tables, out)?;
    if report.files.iter().any(|file| file.xxh3.is_some()) {
        let mut rows = vec![["file", "bytes", "xxh3-128", "sha256"].map(String::from).to_vec()];
        for file in &report.files {
            let hash = |hash: &Option<String>| hash.clone().unwrap_or_default();
            rows.push(vec![file.file.clone(), text::number(file.bytes), hash(&file.xxh3), hash(&file.sha256)]);
        }
        if report.files.iter().all(|file| file.sha256.is_none()) {
            rows.iter_mut().for_each(|row| row.truncate(3));
        }
        text::table(out, &rows, &["file", "xxh3-128", "sha256"])?;
        writeln!(out)?;
    }
    for fault in &report.faults {
        writeln!(out, "{fault}")?;
    }
    for what in &report.not_checked {
        writeln!(out, "not checked: {what}")?;
    }
    let count = |severity| report.faults.iter().filter(|fault| fault.severity == severity).count();
    let warnings = match count(Severity::Warning) {
        0 => String::new(),
        warnings => format!(", {}", text::counted(warnings, "warning")),
    };
    let files = text::counted(report.files.len(), "file");
    if report.ok {
        writeln!(out, "sound: {} in {files}{warnings}", text::counted(report.tables.len(), "table"))?;
    } else {
        writeln!(out, "refused: {} in {files}{warnings}", text::counted(count(Severity::Error), "error"))?;
    }
    Ok(())
}
