//! `engram inspect`: what a checkpoint holds.

use crate::{Format, Verdict, say, text};
use anyhow::Result;
use engram_core::{Family, LayerLayout, Layout};
use engram_loader::{Checkpoint, Options, Severity, TableSummary, Tokenizer};
use serde::Serialize;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint's folder
    #[arg(value_name = "CKPT")]
    checkpoint: PathBuf,
    /// How to print it
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Serialize)]
struct Output<'a> {
    family: Option<Family>,
    tables: &'a [TableSummary],
    layout: Vec<LayoutSummary<'a>>,
}

#[derive(Serialize)]
struct LayoutSummary<'a> {
    layer: u32,
    sizes: &'a [u32],
    offsets: &'a [u32],
    multipliers: &'a [i64],
    total_rows: u32,
    /// Only PLE pads its tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    padded_rows: Option<u32>,
}

pub(crate) fn run(args: &Args) -> Result<Verdict> {
    let mut options = Options::default();
    options.tokenizer = Tokenizer::Unchecked;
    let checkpoint = Checkpoint::open(&args.checkpoint, &options)?;
    let report = checkpoint.report();
    for fault in &report.faults {
        say(format_args!("{fault}"));
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    match args.format {
        Format::Json => {
            let layout = checkpoint.layout();
            let layers = layout.iter().flat_map(|layout| layout.layers().iter().map(|layer| summary(layout, layer)));
            let output = Output { family: report.family, tables: &report.tables, layout: layers.collect() };
            serde_json::to_writer(&mut out, &output).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        Format::Text => print(&checkpoint, &args.checkpoint.display().to_string(), &mut out)?,
    }
    out.flush()?;
    let refused = report.faults.iter().any(|fault| fault.severity == Severity::Error);
    Ok(if refused { Verdict::Refused } else { Verdict::Done })
}

fn summary<'a>(layout: &Layout, layer: &'a LayerLayout) -> LayoutSummary<'a> {
    LayoutSummary {
        layer: layer.layer(),
        sizes: layer.sizes(),
        offsets: layer.offsets(),
        multipliers: layer.multipliers(),
        total_rows: layer.total_rows(),
        padded_rows: (layout.family() == Family::Ple).then_some(layer.padded_rows()),
    }
}

fn print(checkpoint: &Checkpoint, name: &str, out: &mut impl Write) -> Result<()> {
    let report = checkpoint.report();
    let Some(layout) = checkpoint.layout() else {
        writeln!(out, "{name}: no usable config")?;
        return Ok(());
    };
    writeln!(
        out,
        "{name}: {}, n-grams of 2 to {} tokens, {} each, {} a token and layer\n",
        layout.family(),
        layout.ngram_size(),
        text::counted(layout.heads(), "head"),
        text::counted(layout.columns(), "row")
    )?;
    print_tables(&report.tables, out)?;
    for layer in layout.layers() {
        write!(out, "layer {}: {} rows", layer.layer(), text::number(layer.total_rows()))?;
        if layer.padded_rows() != layer.total_rows() {
            write!(out, ", padded to {}", text::number(layer.padded_rows()))?;
        }
        writeln!(out)?;
        let multipliers: Vec<String> = layer.multipliers().iter().map(ToString::to_string).collect();
        writeln!(out, "  multipliers  {}", multipliers.join(" "))?;
        // Two lines for each n-gram order, a column for each head.
        let width = layer.total_rows().to_string().len();
        let spaced = |rows: &[u32]| rows.iter().map(|rows| format!(" {rows:>width$}")).collect::<String>();
        let orders = layer.sizes().chunks(layout.heads()).zip(layer.offsets().chunks(layout.heads()));
        for ((sizes, offsets), order) in orders.zip(2..) {
            writeln!(out, "  {order}-grams  rows{}", spaced(sizes))?;
            writeln!(out, "           from{}", spaced(offsets))?;
        }
    }
    let bytes = report.tables.iter().map(|table| table.bytes).sum();
    let all_bytes: u64 = report.files.iter().map(|file| file.bytes).sum();
    writeln!(
        out,
        "\n{} of tables in {} of {}",
        text::bytes(bytes),
        text::bytes(all_bytes),
        text::counted(report.files.len(), "file")
    )?;
    Ok(())
}

/// One line for each table.
pub(crate) fn print_tables(tables: &[TableSummary], out: &mut impl Write) -> std::io::Result<()> {
    if tables.is_empty() {
        return Ok(());
    }
    let mut rows = vec![["layer", "rows", "width", "format", "bytes", "shards"].map(String::from).to_vec()];
    for table in tables {
        rows.push(vec![
            table.layer.to_string(),
            text::number(table.rows),
            table.row_width.to_string(),
            table.format.to_string(),
            text::bytes(table.bytes),
            table.shards.to_string(),
        ]);
    }
    text::table(out, &rows, &["format"])?;
    writeln!(out)
}
