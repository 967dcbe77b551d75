//! Groups of real processes. This program is both the test and, started again, each rank of it.

#![expect(clippy::print_stdout, reason = "a test program reports on its standard output")]

mod faults;
mod fleet;
mod meeting;
mod memory;
mod script;
mod stores;

use std::panic::catch_unwind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|argument| argument == "--rank") {
        let script = std::env::var("SCRIPT").expect("the test tells the rank what to do");
        let script: script::Script = serde_json::from_str(&script).expect("a script");
        println!("{}", serde_json::to_string(&script.run()).expect("plain data"));
        return ExitCode::SUCCESS;
    }
    let tests = [meeting::TESTS, faults::TESTS, memory::TESTS, stores::TESTS].concat();
    if arguments.iter().any(|argument| argument == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filters: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(*filter));
    let chosen: Vec<_> = tests.into_iter().filter(|(name, _)| chosen(name)).collect();
    let before = traces();
    // Ranks wait most of the time, so that tests can run side by side.
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some((name, test)) = chosen.get(next.fetch_add(1, Relaxed)) {
                    let start = Instant::now();
                    let passed = catch_unwind(test).is_ok();
                    failed.fetch_add(usize::from(!passed), Relaxed);
                    let verdict = if passed { "ok" } else { "FAILED" };
                    println!("test {name} ... {verdict} ({:.1} s)", start.elapsed().as_secs_f64());
                }
            });
        }
    });
    let left: Vec<_> = traces().into_iter().filter(|trace| !before.contains(trace)).collect();
    let failed = failed.into_inner();
    println!("\ntest result: {} passed; {failed} failed; left behind: {left:?}", chosen.len() - failed);
    if failed == 0 && left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

const WORKERS: usize = 4;

/// What groups might leave behind where others could see it.
fn traces() -> Vec<PathBuf> {
    let places = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let entries = places.iter().filter_map(|place| std::fs::read_dir(place).ok()).flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path.to_string_lossy().contains("engram-symm")).collect()
}
