//! The `engram` command: checkpoints of n-gram embedding tables from the command line.
//!
//! One module a subcommand; the work is the library's. Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the
//! checkpoint or the requests are at fault, 2 the command line is, or a path is not there or cannot be read.

mod bench;
mod demo;
mod file;
mod hash;
mod inspect;
mod lookup;
mod meter;
mod model;
mod synth;
mod text;
mod tier;
mod validate;

use clap::{Parser, Subcommand, ValueEnum};
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the checkpoint or the requests are at fault
  2  the command line is, or a path is not there or cannot be read

`validate` lists faults on stdout, as its result; the other commands report them on stderr, as all messages and progress.";

#[derive(Parser)]
#[command(name = "engram", version, about, infer_long_args = false, subcommand_required = true)]
#[command(after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a small checkpoint of each family, prove it, look rows up, print rates
    Demo,
    /// Show a checkpoint's family, tables, formats, bytes and layout
    Inspect(inspect::Args),
    /// Prove that a checkpoint's tables are sound; list every fault
    Validate(validate::Args),
    /// Compute the row ids of requests
    Hash(hash::Args),
    /// Look the rows of requests up and write them to a safetensors file
    Lookup(lookup::Args),
    /// Make up a checkpoint of any size
    Synth(synth::Args),
    /// Measure hashing or row lookups
    #[command(subcommand)]
    Bench(bench::Command),
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Format {
    /// For people
    #[default]
    Text,
    /// For programs
    Json,
}

/// What a command that ran to its end found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Done,
    /// The checkpoint is at fault, and everything about it was printed.
    Refused,
}

/// A checkpoint or a config that must not be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => {
            // Nothing can be done where it cannot be printed.
            let _ = message.print();
            return if message.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    let result = match cli.command {
        Command::Demo => demo::run(),
        Command::Inspect(args) => inspect::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Hash(args) => hash::run(&args),
        Command::Lookup(args) => lookup::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Bench(command) => bench::run(&command),
    };
    match result {
        Ok(Verdict::Done) => ExitCode::SUCCESS,
        Ok(Verdict::Refused) => ExitCode::FAILURE,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("engram: {}", causes(&error)));
            exit_code(&error)
        }
    }
}

/// Prints a message for the person at the terminal.
fn say(message: std::fmt::Arguments<'_>) {
    // Nothing can be done where it cannot be printed.
    let _ = writeln!(std::io::stderr().lock(), "{message}");
}

/// An error and its causes, less those that the message before quotes already.
fn causes(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .map(ToString::to_string)
        .fold(error.to_string(), |text, cause| if text.ends_with(&cause) { text } else { format!("{text}: {cause}") })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = |error: &std::io::Error| error.kind() == ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(io))
}

fn exit_code(error: &anyhow::Error) -> ExitCode {
    use engram_loader::{Error, RequestsError};
    let at_fault = |cause: &(dyn std::error::Error + 'static)| {
        let file = cause.downcast_ref::<Error>().is_some_and(|error| {
            matches!(
                error,
                Error::NotAFile { .. } | Error::Truncated { .. } | Error::Changed { .. } | Error::Extents { .. }
            )
        });
        file || cause.is::<Refused>() || cause.is::<RequestsError>() || cause.is::<engram_core::BatchError>()
    };
    if error.chain().any(at_fault) { ExitCode::FAILURE } else { ExitCode::from(2) }
}
