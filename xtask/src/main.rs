//! Chores of the workspace: `cargo xtask COMMAND`. Commands need nothing but cargo and what they install under `target/`.

mod bench_cpu;
mod bench_gpu;
mod kernels;
mod lint;
mod loom;
mod nvrtc;
mod process;
mod python;
mod stub;
mod test;
mod test_gpu;
mod tidy;

use std::path::Path;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test              run every suite of the workspace; a suite that runs no test is a failure
  loom [--deep]     the exchange protocol under a model checker: seconds, or minutes
  clippy, docs      lints and documentation, warnings denied
  kernels [--check] compile the CUDA kernels to the PTX that is committed; or compare it
  stub              make libcuda stubs to link against, and print their folders
  test-gpu          build and run the tests that need a CUDA device; without one, or when none ran, this fails
  test-gpu --archive DIR   pack them with a script that runs them on a machine without Rust
  tidy              check the workspace's invariants (ARCHITECTURE.md)
  bench-cpu [NAME]  product and peers in one run, ratios printed; NAME is hash, token-map, validate, rows or exchange
  bench-gpu [FILE...] [-- PART...]   lookups, and the exchange between GPUs, beside their peers; FILEs give the text of the text case.
                    PARTs are lookups, exchange and, only where it is named, full-size; `-- --help` lists sizes
  bench-gpu --archive DIR [FILE...]  pack them with a script that runs them on a machine without Rust
  real-tokenizer    fetch DeepSeek-V4.1's tokenizer.json and print its path, for ENGRAM_REAL_TOKENIZER
";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    std::env::set_current_dir(process::workspace())?;
    match args.as_slice() {
        ["test"] => test::run(),
        ["bench-cpu", only @ ..] => bench_cpu::run_all(only),
        ["bench-gpu", "--archive", folder, text @ ..] => bench_gpu::archive(Path::new(folder), text),
        ["bench-gpu", arguments @ ..] => bench_gpu::run(arguments),
        ["loom"] => loom::run(false),
        ["loom", "--deep"] => loom::run(true),
        ["clippy"] => lint::clippy(),
        ["docs"] => lint::docs(),
        ["kernels"] => kernels::run(false),
        ["kernels", "--check"] => kernels::run(true),
        ["stub"] => stub::run(),
        ["test-gpu"] => test_gpu::run(),
        ["test-gpu", "--archive", folder] => test_gpu::archive(Path::new(folder)),
        ["tidy"] => tidy::run(),
        ["real-tokenizer"] => {
            print_line(&python::real_tokenizer()?.display());
            Ok(())
        }
        _ => bail!("{USAGE}"),
    }
}

#[expect(clippy::print_stdout, reason = "the results of a command go to standard output")]
fn print_line(line: &dyn std::fmt::Display) {
    println!("{line}");
}
