//! `cargo xtask test`: every suite that runs without a GPU.

use crate::process::{cargo, note, stream};
use crate::stub;
use anyhow::{Result, bail};

/// A suite: its name and the arguments of `cargo test`.
const SUITES: [(&str, &[&str]); 8] = [
    ("engram-core", &["-p", "engram-core", "--features", "tokenizers"]),
    ("engram-ple", &["-p", "engram-ple"]),
    ("engram-loader", &["-p", "engram-loader", "--features", "cli"]),
    ("engram-cuda", &["-p", "engram-cuda", "--features", "fault-injection"]),
    ("engram-symm", &["-p", "engram-symm"]),
    ("engram-symm, cuda", &["-p", "engram-symm", "--features", "fault-injection", "--lib", "--test", "gpu"]),
    ("xtask", &["-p", "xtask"]),
    ("workspace", &["-p", "engram-tests"]),
];

pub(crate) fn run() -> Result<()> {
    let stub = stub::generate()?;
    let mut total = 0;
    for (name, args) in SUITES {
        let (mut passed, mut ignored) = (0, 0);
        stream(cargo().arg("test").args(args).env("CUDA_LIBRARY_PATH", &stub.linked_in), |line| {
            passed += count(line, "passed");
            ignored += count(line, "ignored");
        })?;
        if passed == 0 {
            bail!("the suite {name} ran no test");
        }
        note(&format!("{name}: {passed} passed, {ignored} not run here"));
        total += passed;
    }
    if std::env::var_os("ENGRAM_REAL_TOKENIZER").is_none() {
        note("the real tokenizer was not checked: set ENGRAM_REAL_TOKENIZER=$(cargo xtask real-tokenizer)");
    }
    crate::print_line(&format!("{total} passed, 0 failed"));
    Ok(())
}

/// The number before `word` in a closing line of the test runner, 0 in any other line.
fn count(line: &str, word: &str) -> u64 {
    let Some(counts) = line.strip_prefix("test result: ") else { return 0 };
    let mut words = counts.split([' ', ';', '.']).filter(|w| !w.is_empty());
    let mut before = "";
    words
        .find_map(|w| {
            if w == word {
                before.parse().ok()
            } else {
                before = w;
                None
            }
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn closing_lines_are_counted_and_others_are_not() {
        let line = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        assert_eq!((count(line, "passed"), count(line, "ignored")), (12, 3));
        assert_eq!(count("12 passed", "passed"), 0);
    }
}
