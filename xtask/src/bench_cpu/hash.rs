//! Token ids to row ids, 48 a token, against vectorised numpy.

use super::{Bench, Case, number, pair};
use crate::python::peer;
use anyhow::{Result, ensure};

const TOKENS: &str = "100000";
const LAYOUTS: &str = "tests/data/golden/layouts.json";

pub(super) fn cases(bench: &Bench) -> Result<Vec<Case>> {
    let measure = |path: &str, threads: &str| {
        let args = [
            "bench",
            "hash",
            "--preset",
            "deepseek-v4.1-flash",
            "--tokens",
            TOKENS,
            "--threads",
            threads,
            "--path",
            path,
            "--format",
            "json",
        ];
        bench.engram(&args)
    };
    let numpy = || peer("numpy_hash.py", &[TOKENS, "5", LAYOUTS]);
    // Same tokens on both sides: equal sums of all ids show that both did the same work.
    ensure!(measure("best", "1")?["checksum"] == numpy()?["checksum"], "product and peer hash to different ids");
    let avx512 = std::arch::is_x86_feature_detected!("avx512dq");
    let case = |path: &'static str, threads: &'static str, reach: Option<f64>| {
        pair(
            format!("hash {TOKENS} tokens, path {path}, {threads} thread(s)"),
            "ns/token",
            reach,
            || number(&measure(path, threads)?, "ns_per_token"),
            "numpy, one thread",
            || number(&numpy()?, "ns_per_token"),
        )
    };
    Ok(vec![
        case("best", "1", avx512.then_some(20.0))?,
        case("portable", "1", Some(6.0))?,
        case("best", "2", None)?,
        case("portable", "2", None)?,
    ])
}
