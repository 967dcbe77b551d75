//! `cargo xtask bench-cpu`: product and peers in one run on this machine, and the ratios between them.
//!
//! Each case runs product and peer in turn, [`ROUNDS`] times, so that a machine whose speed drifts slows both; the ratio
//! is the median of the rounds' ratios.

mod exchange;
mod hash;
mod prove;
mod rows;
mod token_map;

use crate::process::{cargo, note, output, run, target};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const ROUNDS: usize = 3;

/// A benchmark: prepares its files, runs, and gives its lines of the table.
type Measure = fn(&Bench) -> Result<Vec<Case>>;

/// One line of the table: the same work by product and peer, both in `unit` (less is better).
struct Case {
    job: String,
    unit: &'static str,
    product: f64,
    peer_name: String,
    peer: f64,
    /// How many times faster the product is.
    ratio: f64,
    /// The ratio that is to be reached, where one is set.
    reach: Option<f64>,
    remark: String,
}

/// Where the benchmarks keep their files, and the command under test.
struct Bench {
    engram: PathBuf,
    folder: PathBuf,
}

pub(crate) fn run_all(only: &[&str]) -> Result<()> {
    let all: [(&str, Measure); 5] = [
        ("hash", hash::cases),
        ("token-map", token_map::cases),
        ("validate", prove::cases),
        ("rows", rows::cases),
        ("exchange", exchange::cases),
    ];
    if let Some(unknown) = only.iter().find(|name| all.iter().all(|(known, _)| known != *name)) {
        bail!("no benchmark is called {unknown}; there are {}", all.map(|(name, _)| name).join(", "));
    }
    run(cargo().args(["build", "--release", "--package", "engram-loader", "--features", "cli", "--bin", "engram"]))?;
    let bench = Bench { engram: target().join("release/engram"), folder: target().join("bench") };
    std::fs::create_dir_all(&bench.folder)?;
    let mut cases = Vec::new();
    for (name, run_case) in all.iter().filter(|(name, _)| only.is_empty() || only.contains(name)) {
        note(&format!("== {name}"));
        cases.extend(run_case(&bench)?);
    }
    let machine = machine()?;
    let path = bench.folder.join("cpu.json");
    std::fs::write(&path, serde_json::to_string_pretty(&report(&machine, &cases))?)?;
    print_table(&machine, &cases);
    note(&format!("written to {}", path.display()));
    Ok(())
}

impl Bench {
    /// Runs `engram ARGS` and parses the JSON that it prints.
    fn engram(&self, args: &[&str]) -> Result<Value> {
        let text = output(Command::new(&self.engram).args(args))?;
        serde_json::from_str(&text).with_context(|| format!("`engram {}` printed {text}", args.join(" ")))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// A field of a benchmark's JSON line.
fn number(line: &Value, field: &str) -> Result<f64> {
    line[field].as_f64().with_context(|| format!("no number `{field}` in {line}"))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Runs product and peer in turn and makes a case of the medians.
fn pair(
    job: impl Into<String>,
    unit: &'static str,
    reach: Option<f64>,
    mut product: impl FnMut() -> Result<f64>,
    peer_name: impl Into<String>,
    mut peer: impl FnMut() -> Result<f64>,
) -> Result<Case> {
    let (mut products, mut peers) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        products.push(product()?);
        peers.push(peer()?);
    }
    let ratio = median(products.iter().zip(&peers).map(|(product, peer)| peer / product).collect());
    Ok(Case {
        job: job.into(),
        unit,
        product: median(products),
        peer_name: peer_name.into(),
        peer: median(peers),
        ratio,
        reach,
        remark: String::new(),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor and number of threads, as the operating system names them.
fn machine() -> Result<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, name)| name.trim());
    let avx512 = if info.contains(" avx512dq") { "AVX-512DQ" } else { "no AVX-512DQ" };
    Ok(format!("{model}, {} threads, {avx512}", std::thread::available_parallelism()?))
}

fn report(machine: &str, cases: &[Case]) -> Value {
    let cases: Vec<Value> = cases
        .iter()
        .map(|case| {
            json!({"job": case.job, "unit": case.unit, "product": case.product, "peer_name": case.peer_name, "peer": case.peer,
                   "ratio": case.ratio, "reach": case.reach, "remark": case.remark})
        })
        .collect();
    json!({"machine": machine, "rounds": ROUNDS, "cases": cases})
}

fn print_table(machine: &str, cases: &[Case]) {
    crate::print_line(&format!("{machine}; medians of {ROUNDS} rounds\n"));
    crate::print_line(&"| job | engram | peer | ratio | to reach |\n|---|---|---|---|---|");
    for case in cases {
        let reach = case.reach.map_or_else(|| "-".to_owned(), |reach| format!("{reach:.2}x"));
        crate::print_line(&format!(
            "| {} | {:.3} {} | {:.3} ({}) | **{:.2}x** | {reach}{} |",
            case.job, case.product, case.unit, case.peer, case.peer_name, case.ratio, case.remark
        ));
    }
}
