//! `engram validate`: headers only against Python's safetensors, and every byte against one thread that merely reads the file.

use super::{Bench, Case, number, pair, text};
use crate::process::{note, run};
use crate::python::peer;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Files and tensors of the headers case: the size of a published checkpoint with all experts.
const FILES: usize = 48;
const TENSORS: usize = 100_000;
/// A warm file is read in blocks of this many bytes, by the product and by its peer.
const BLOCK_BYTES: usize = 8 << 20;
/// Share of the official table sizes for the deep case: 3.8 GiB.
const DEEP_SCALE: &str = "0.02";

pub(super) fn cases(bench: &Bench) -> Result<Vec<Case>> {
    Ok(vec![headers(bench)?, deep(bench)?])
}

fn headers(bench: &Bench) -> Result<Case> {
    let folder = bench.file("many-tensors");
    if !folder.exists() {
        make_many_tensors(bench, &folder)?;
    }
    let folder = text(&folder)?;
    let mut case = pair(
        format!("validate {FILES} files, {TENSORS} tensors"),
        "s",
        None,
        || Ok(validate(bench, &[folder])?.seconds),
        "safetensors, Python",
        || number(&peer("safetensors_headers.py", &[folder, "3"])?, "seconds"),
    )?;
    case.remark = " (to reach: 2 s)".to_owned();
    Ok(case)
}

fn deep(bench: &Bench) -> Result<Case> {
    let folder = bench.file("deep");
    if !folder.exists() {
        synth(bench, "deepseek-v4.1-flash", DEEP_SCALE, &folder)?;
    }
    let files = tables(&folder)?;
    let folder = text(&folder)?;
    let mut peak = 0;
    let mut case = pair(
        "validate --deep, a warm checkpoint",
        "s",
        Some(0.7),
        || {
            let run = validate(bench, &[folder, "--deep"])?;
            peak = peak.max(run.peak_kib);
            Ok(run.seconds)
        },
        "one thread reading the files in 8 MiB blocks",
        || read_all(&files),
    )?;
    case.remark = format!("; peak memory {} MiB (to reach: 64 MiB)", peak / 1024);
    Ok(case)
}

struct Run {
    seconds: f64,
    peak_kib: u64,
}

/// Runs `engram validate` and watches its memory; the checkpoint must pass.
fn validate(bench: &Bench, args: &[&str]) -> Result<Run> {
    let start = Instant::now();
    let mut child = Command::new(&bench.engram)
        .arg("validate")
        .args(args)
        .args(["--format", "json"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut peak_kib = 0;
    let status = loop {
        peak_kib = peak_kib.max(high_water_kib(child.id()));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        std::thread::sleep(Duration::from_micros(500));
    };
    ensure!(status.success(), "engram validate {} failed: {status}", args.join(" "));
    Ok(Run { seconds: start.elapsed().as_secs_f64(), peak_kib })
}

/// The largest resident size that a process has had; 0 once it has ended.
fn high_water_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|kib| kib.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

fn tables(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    Ok(files)
}

fn read_all(files: &[PathBuf]) -> Result<f64> {
    let start = Instant::now();
    let mut block = vec![0; BLOCK_BYTES];
    for path in files {
        let mut file = std::fs::File::open(path)?;
        while file.read(&mut block)? > 0 {}
    }
    Ok(start.elapsed().as_secs_f64())
}

fn synth(bench: &Bench, preset: &str, scale: &str, folder: &Path) -> Result<()> {
    note(&format!("synthesising {}", folder.display()));
    run(Command::new(&bench.engram)
        .args(["synth", "--preset", preset, "--scale", scale, "--out"])
        .arg(folder)
        .stdout(Stdio::null()))
}

/// A small checkpoint, with files of other tensors beside its tables until there are [`FILES`] and [`TENSORS`].
fn make_many_tensors(bench: &Bench, folder: &Path) -> Result<()> {
    synth(bench, "tiny-engram", "1", folder)?;
    let index_path = folder.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_str(&std::fs::read_to_string(&index_path)?)?;
    let Some(map) = index["weight_map"].as_object_mut() else { bail!("{} has no weight_map", index_path.display()) };
    let (files, tensors) = (FILES.checked_sub(tables(folder)?.len()), TENSORS.checked_sub(map.len()));
    let (files, tensors) = files.zip(tensors).context("the small checkpoint is larger than the case")?;
    for file in 0..files {
        let name = format!("experts-{file:05}.safetensors");
        let mut header = Map::new();
        let mut end = 0;
        for tensor in (file..tensors).step_by(files) {
            let tensor = format!("layers.{}.ffn.experts.{}.w{}.weight", tensor / 1536, tensor / 3 % 512, tensor % 3);
            header.insert(tensor.clone(), json!({"dtype": "BF16", "shape": [2, 4], "data_offsets": [end, end + 16]}));
            map.insert(tensor, name.clone().into());
            end += 16;
        }
        let header = serde_json::to_vec(&header)?;
        let mut out = std::fs::File::create(folder.join(&name))?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        out.write_all(&vec![0; end])?;
    }
    std::fs::write(index_path, serde_json::to_vec(&index)?)?;
    Ok(())
}
