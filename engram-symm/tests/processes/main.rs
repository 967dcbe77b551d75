//! Groups of real processes. This program is both the test and, started again, each rank of it.

#![expect(clippy::print_stdout, reason = "a test program reports on its standard output")]

mod faults;
mod fleet;
mod meeting;
mod memory;
mod script;
mod stores;

use std::panic::{catch_unwind, resume_unwind};
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
    let tests = Choice::from_arguments(arguments.iter().map(String::as_str)).of_all();
    if arguments.iter().any(|argument| argument == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let before = traces();
    // Ranks wait most of the time, so that tests can run side by side.
    let next = AtomicUsize::new(0);
    let [passed, failed, ignored] = [const { AtomicUsize::new(0) }; 3];
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some((name, test)) = tests.get(next.fetch_add(1, Relaxed)) {
                    let start = Instant::now();
                    let (count, verdict) = match catch_unwind(test) {
                        Ok(()) => (&passed, "ok".to_owned()),
                        Err(reason) => match reason.downcast_ref::<NotHere>() {
                            Some(NotHere(reason)) => (&ignored, format!("ignored, {reason}")),
                            None => (&failed, "FAILED".to_owned()),
                        },
                    };
                    count.fetch_add(1, Relaxed);
                    println!("test {name} ... {verdict} ({:.1} s)", start.elapsed().as_secs_f64());
                }
            });
        }
    });
    let left: Vec<_> = traces().into_iter().filter(|trace| !before.contains(trace)).collect();
    let [passed, failed, ignored] = [passed, failed, ignored].map(AtomicUsize::into_inner);
    let well = failed == 0 && left.is_empty();
    if !left.is_empty() {
        println!("left behind: {left:?}");
    }
    let verdict = if well { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored");
    if well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Ends a test that cannot run on this machine or as this user.
fn not_here(reason: &'static str) -> ! {
    resume_unwind(Box::new(NotHere(reason)))
}

struct NotHere(&'static str);

/// The tests that the arguments of a usual test program ask for.
#[derive(Default)]
struct Choice<'a> {
    filters: Vec<&'a str>,
    skipped: Vec<&'a str>,
    exact: bool,
    only_ignored: bool,
}

impl<'a> Choice<'a> {
    fn from_arguments(mut arguments: impl Iterator<Item = &'a str>) -> Self {
        let mut choice = Self::default();
        while let Some(argument) = arguments.next() {
            match argument {
                "--skip" => choice.skipped.extend(arguments.next()),
                "--exact" => choice.exact = true,
                "--ignored" => choice.only_ignored = true,
                "--test-threads" | "--format" | "--color" | "--logfile" => drop(arguments.next()),
                option if option.starts_with('-') => {}
                filter => choice.filters.push(filter),
            }
        }
        choice
    }

    fn of_all(&self) -> Vec<(&'static str, fn())> {
        let all = [meeting::TESTS, faults::TESTS, memory::TESTS, stores::TESTS].concat();
        let matches = |name: &str, filter: &&str| if self.exact { name == *filter } else { name.contains(*filter) };
        let chosen = |name: &str| {
            let asked = self.filters.is_empty() || self.filters.iter().any(|filter| matches(name, filter));
            asked && !self.only_ignored && !self.skipped.iter().any(|filter| matches(name, filter))
        };
        all.into_iter().filter(|(name, _)| chosen(name)).collect()
    }
}

const WORKERS: usize = 4;

/// What groups might leave behind where others could see it.
fn traces() -> Vec<PathBuf> {
    let places = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let entries = places.iter().filter_map(|place| std::fs::read_dir(place).ok()).flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path.to_string_lossy().contains("engram-symm")).collect()
}
