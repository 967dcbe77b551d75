//! `engram lookup`: the rows of requests, decoded, in a safetensors file.

use crate::file::check_out;
use crate::meter::Meter;
use crate::tier::Tier;
use crate::{Refused, Verdict, model, say, text};
use anyhow::Result;
use engram_loader::{Pool, write_rows_file};
use engram_ple::OutputType;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(clap::Args)]
#[command(after_help = model::REQUESTS_HELP)]
pub(crate) struct Args {
    /// The checkpoint's folder
    #[arg(value_name = "CKPT")]
    checkpoint: PathBuf,
    #[command(flatten)]
    query: model::Query,
    /// Where the rows go, no file of the checkpoint: for each layer a tensor `layer.L.rows`, [tokens, columns, row width]
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// What rows are decoded to
    #[arg(long, default_value = "bf16", value_name = "bf16|f16|f32")]
    dtype: OutputType,
    /// Where rows are read from
    #[arg(long, value_enum, default_value = "mapped")]
    tier: Tier,
}

pub(crate) fn run(args: &Args) -> Result<Verdict> {
    check_out(&args.out)?;
    let requests = args.query.requests()?;
    let checkpoint = args.query.checkpoint(&args.checkpoint)?;
    args.query.check_not_of(&args.out, &args.checkpoint, &checkpoint)?;
    let ids = args.query.hash(&requests, &checkpoint)?;
    let (meter, pool) = (Meter::new(), Arc::new(Pool::new(0)));
    let mut tables = Vec::new();
    for layer in ids.layout.layers() {
        let table = checkpoint.catalog().table(layer.layer());
        let table = table.ok_or_else(|| Refused(format!("layer {} has no usable table", layer.layer())))?;
        tables.push((layer.layer(), args.tier.open(table.extents(), &pool, 0, &meter)?));
    }
    let sources: Vec<_> = tables.iter().map(|(layer, table)| (*layer, table.source())).collect();
    write_rows_file(&args.out, &sources, ids.layout.columns(), &ids.ids, args.dtype, &meter)?;
    let access = tables.iter().find_map(|(_, table)| table.access());
    say(format_args!(
        "{} rows by tier {}{}, written to {}",
        text::number(ids.ids.len() as u64),
        args.tier.name(),
        access.map(|access| format!(" ({access})")).unwrap_or_default(),
        args.out.display()
    ));
    Ok(Verdict::Done)
}
