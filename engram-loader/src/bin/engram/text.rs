//! Numbers and tables for people.

use std::io::{Result, Write};
use std::time::Duration;

/// Bytes in the unit that leaves one to four digits before the point.
pub(crate) fn bytes(count: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    scaled(count as f64)
}

/// Bytes a second.
pub(crate) fn rate(bytes: u64, time: Duration) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let rate = bytes as f64 / time.as_secs_f64().max(1e-9);
    format!("{}/s", scaled(rate))
}

fn scaled(count: f64) -> String {
    let mut count = count;
    for unit in ["B", "KiB", "MiB"] {
        if count < 1024.0 {
            return if unit == "B" { format!("{count:.0} B") } else { format!("{count:.1} {unit}") };
        }
        count /= 1024.0;
    }
    format!("{count:.2} GiB")
}

/// A duration, coarser the longer it is.
pub(crate) fn seconds(time: Duration) -> String {
    let whole = time.as_secs();
    match whole {
        0..=9 => format!("{:.2} s", time.as_secs_f64()),
        10..=599 => format!("{whole} s"),
        600..=35_999 => format!("{} min", whole / 60),
        _ => format!("{} h", whole / 3600),
    }
}

/// Nanoseconds in the unit that leaves one to three digits before the point.
pub(crate) fn nanoseconds(ns: f64) -> String {
    match ns {
        _ if ns < 1_000.0 => format!("{ns:.1} ns"),
        _ if ns < 1_000_000.0 => format!("{:.1} us", ns / 1e3),
        _ => format!("{:.1} ms", ns / 1e6),
    }
}

/// A whole number with its thousands apart: `1,234,567`.
pub(crate) fn number(value: impl Into<u64>) -> String {
    let digits = value.into().to_string();
    let mut out = String::new();
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 file`, `2 files`.
pub(crate) fn counted(count: usize, one: &str) -> String {
    format!("{} {one}{}", number(count as u64), if count == 1 { "" } else { "s" })
}

/// Prints rows in columns, the first row as a heading; columns named in `left` are aligned to the left.
pub(crate) fn table(out: &mut impl Write, rows: &[Vec<String>], left: &[&str]) -> Result<()> {
    let Some(heading) = rows.first() else { return Ok(()) };
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).zip(heading);
        let line: Vec<String> = cells
            .map(
                |((cell, &width), name)| {
                    if left.contains(&name.as_str()) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                },
            )
            .collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}
