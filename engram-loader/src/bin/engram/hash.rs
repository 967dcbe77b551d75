//! `engram hash`: the row ids of requests.

use crate::Verdict;
use crate::file::{check_out, metadata};
use crate::model::{self, Ids};
use anyhow::Result;
use engram_core::Family;
use engram_loader::write_atomically;
use serde::{Serialize, Serializer};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(after_help = model::REQUESTS_HELP)]
pub(crate) struct Args {
    /// A checkpoint's folder, or a config.json alone
    #[arg(value_name = "CKPT|CONFIG")]
    model: PathBuf,
    #[command(flatten)]
    query: model::Query,
    /// Write the JSON there instead of to stdout
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<Verdict> {
    let is_folder = metadata(&args.model)?.is_dir();
    let out = args.out.as_deref();
    out.map_or(Ok(()), check_out)?;
    let requests = args.query.requests()?;
    let ids = if is_folder {
        let checkpoint = args.query.checkpoint(&args.model)?;
        out.map_or(Ok(()), |out| args.query.check_not_of(out, &args.model, &checkpoint))?;
        args.query.hash(&requests, &checkpoint)?
    } else {
        out.map_or(Ok(()), |out| args.query.check_not_of_config(out, &args.model))?;
        args.query.hash_by_config(&requests, &args.model)?
    };
    match out {
        Some(path) => write_atomically(path, |out| print(&ids, out))?,
        None => print(&ids, &mut BufWriter::new(std::io::stdout().lock()))?,
    }
    Ok(Verdict::Done)
}

fn print(ids: &Ids, out: &mut impl Write) -> Result<()> {
    serde_json::to_writer(&mut *out, &Output::new(ids)).map_err(std::io::Error::from)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

#[derive(Serialize)]
struct Output<'a> {
    family: Family,
    layers: Vec<Layer<'a>>,
}

#[derive(Serialize)]
struct Layer<'a> {
    layer: u32,
    columns: usize,
    ids: TokenIds<'a>,
}

/// The ids of one layer, a list for each token.
struct TokenIds<'a> {
    ids: &'a [i32],
    per_token: usize,
    first: usize,
    columns: usize,
}

impl<'a> Output<'a> {
    fn new(ids: &'a Ids) -> Self {
        let (layers, columns) = (ids.layout.layers(), ids.layout.columns());
        let layer = |(place, layer): (usize, &engram_core::LayerLayout)| Layer {
            layer: layer.layer(),
            columns,
            ids: TokenIds { ids: &ids.ids, per_token: layers.len() * columns, first: place * columns, columns },
        };
        Self { family: ids.layout.family(), layers: layers.iter().enumerate().map(layer).collect() }
    }
}

impl Serialize for TokenIds<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tokens = self.ids.chunks_exact(self.per_token);
        serializer.collect_seq(tokens.map(|token| &token[self.first..][..self.columns]))
    }
}
