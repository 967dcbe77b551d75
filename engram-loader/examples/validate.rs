//! Judges a checkpoint's folder: `cargo run --release -p engram-loader --example validate -- FOLDER [--deep]`.

#![expect(clippy::print_stdout, reason = "what an example is for")]

use std::path::PathBuf;
use std::time::Instant;

use engram_loader::{Error, Options, validate};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().unwrap_or_else(|| ".".to_owned()));
    let mut options = Options::default();
    options.deep = arguments.any(|argument| argument == "--deep");

    let start = Instant::now();
    let report = validate(&folder, &options)?;
    for fault in &report.faults {
        println!("{fault}");
    }
    for table in &report.tables {
        println!("layer {}: {} rows of {} elements, {}", table.layer, table.rows, table.row_width, table.format);
    }
    let bytes: u64 = report.files.iter().map(|file| file.bytes).sum();
    println!("{} files, {bytes} bytes, {:.3} s: {}", report.files.len(), start.elapsed().as_secs_f64(), report.ok);
    Ok(())
}
