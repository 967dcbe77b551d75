//! Whole files read: NaN in rows, and hashes.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use engram_loader::{FaultCode, Options, Progress, validate};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use crate::sketch::{ENGRAM, PLE, Sketch, bytes, codes, file, judge, judge_with, tensor};

fn deep(sketch: &Sketch) -> engram_loader::Report {
    judge_with(sketch.write().path(), |options| options.deep = true)
}

#[test]
fn nan_is_found_in_every_format_part_and_place() {
    let shard = format!("{PLE}ngram_embedding.shard_2.weight");
    let nan: [(&str, &[u8]); 6] = [
        ("F8_E4M3", &[0x7f]),
        ("F8_E4M3", &[0xff]),
        ("BF16", &[0x81, 0x7f]),
        ("F16", &[0x01, 0xfc]),
        ("F32", &[0x01, 0x00, 0x80, 0x7f]),
        ("F32", &[0xff, 0xff, 0xff, 0xff]),
    ];
    for (dtype, code) in nan {
        for (row, column) in [(0, 0), (0, 39), (105, 39), (50, 7)] {
            let mut sketch = Sketch::ple(dtype, 4);
            let data = &mut sketch.find(&shard).data;
            data[(row * 40 + column) * code.len()..][..code.len()].copy_from_slice(code);
            assert_eq!(sketch.faults(), [""; 0], "rows are not read unless asked");
            let report = deep(&sketch);
            assert_eq!(codes(&report), ["row-nan"]);
            let fault = &report.faults[0];
            let (name, first) = (fault.tensor.as_deref(), format!("1 row, the first of them row {}", 2 * 106 + row));
            assert!(name == Some(&shard) && fault.message.contains(&first), "{fault}");
        }
    }
    // Infinity and the largest codes are numbers.
    for (dtype, code) in
        [("BF16", &[0x80, 0x7f][..]), ("F16", &[0, 0x7c]), ("F32", &[0, 0, 0x80, 0xff]), ("F8_E4M3", &[0x7e])]
    {
        let mut sketch = Sketch::ple(dtype, 4);
        sketch.find(&shard).data[..code.len()].copy_from_slice(code);
        assert_eq!(codes(&deep(&sketch)), [""; 0], "{dtype}");
    }
}

#[test]
fn nan_rows_are_counted_once_a_row_and_scales_apart() {
    let mut sketch = Sketch::engram();
    let values = &mut sketch.find(&format!("{ENGRAM}weight")).data;
    for place in [64 * 5, 64 * 5 + 1, 64 * 9 + 63, 64 * 119] {
        values[place] = 0xff;
    }
    sketch.find(&format!("{ENGRAM}scale")).data[2 * 7 + 1] = 0xff;
    // What is no number in a tensor of no table is nobody's business.
    sketch.find("layers.1.engram.q_weight").data.fill(0xff);
    let report = deep(&sketch);
    assert_eq!(codes(&report), ["row-nan", "row-nan"]);
    let messages: Vec<_> = report.faults.iter().map(|fault| fault.message.as_str()).collect();
    assert!(messages[0].contains("3 rows, the first of them row 5"), "{messages:?}");
    assert!(messages[1].contains("1 row, the first of them row 7"), "{messages:?}");
    let allowed = judge_with(sketch.write().path(), |options| {
        options.deep = true;
        options.allow = vec![FaultCode::RowNan];
    });
    assert_eq!(codes(&allowed), ["(row-nan)", "(row-nan)"]);
}

/// Rows and files that cross the blocks of a read: 20 MiB, in rows of 264 bytes apart and of 65,536 at the widest.
#[test]
fn rows_across_blocks() {
    let mut sketch = Sketch::engram();
    let rows = 120;
    let width = 65_536;
    sketch.config["engram_head_dim"] = width.into();
    sketch.files.clear();
    for (number, layer, rows) in [(1, 1, rows), (2, 3, 184)] {
        let table = format!("layers.{layer}.engram.embed.");
        // An odd number of bytes first, so that no row begins at a multiple of anything.
        sketch.add(number, tensor(format!("odd.{layer}"), "U8", &[7], bytes(7)));
        sketch.add(number, tensor(format!("{table}weight"), "F8_E4M3", &[rows, width], bytes(rows * width)));
        sketch.add(number, tensor(format!("{table}scale"), "F8_E8M0", &[rows, width / 32], bytes(rows * width / 32)));
    }
    let report = deep(&sketch);
    assert_eq!(codes(&report), [""; 0]);
    assert_eq!(report.tables[1].bytes, 184 * (width + width / 32));
    for (row, place) in [(127, 0), (127, width - 1), (128, 3), (183, width - 1)] {
        let mut broken = sketch.clone();
        let weight = "layers.3.engram.embed.weight";
        broken.find(weight).data[usize::try_from(row * width + place).unwrap()] = 0x7f;
        let report = deep(&broken);
        assert_eq!(codes(&report), ["row-nan"]);
        assert!(report.faults[0].message.contains(&format!("row {row} of")), "{}", report.faults[0]);
    }
}

#[test]
fn hashes_are_those_of_whole_files() {
    let sketch = Sketch::ple("F8_E4M3", 4);
    let folder = sketch.write();
    // A file that is no safetensors file is hashed too: its hash tells which wrong file it is.
    fs::write(folder.path().join(file(2)), "version https://git-lfs.github.com/spec/v1").unwrap();
    for sha256 in [false, true] {
        let report = judge_with(folder.path(), |options| (options.deep, options.sha256) = (!sha256, sha256));
        assert_eq!(report.files.len(), 2);
        for summary in &report.files {
            let contents = fs::read(folder.path().join(&summary.file)).unwrap();
            assert_eq!(summary.bytes, contents.len() as u64);
            assert_eq!(summary.xxh3, Some(format!("{:032x}", xxh3_128(&contents))));
            let hex = Sha256::digest(&contents).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(summary.sha256, sha256.then_some(hex));
        }
    }
    assert!(judge(folder.path()).files.iter().all(|file| file.xxh3.is_none() && file.sha256.is_none()));
    let empty = tempfile::tempdir().unwrap();
    fs::write(empty.path().join("x.safetensors"), "").unwrap();
    let report = judge_with(empty.path(), |options| options.deep = true);
    assert_eq!(report.files[0].xxh3.as_deref(), Some("99aa06d3014798d86001c324468d497f"), "of no bytes");
}

#[test]
fn progress_adds_up() {
    #[derive(Default)]
    struct Sum {
        total: AtomicU64,
        done: AtomicU64,
        ends: AtomicU64,
    }
    impl Progress for Sum {
        fn begin(&self, _what: &str, total: u64) {
            self.total.store(total, Ordering::Relaxed);
        }
        fn advance(&self, bytes: u64) {
            self.done.fetch_add(bytes, Ordering::Relaxed);
        }
        fn end(&self) {
            self.ends.fetch_add(1, Ordering::Relaxed);
        }
    }
    let folder = Sketch::engram().write();
    let sum = Sum::default();
    let mut options = Options::default();
    (options.deep, options.progress) = (true, &sum);
    let report = validate(folder.path(), &options).unwrap();
    let bytes = report.files.iter().map(|file| file.bytes).sum();
    let seen = (sum.total.into_inner(), sum.done.into_inner(), sum.ends.into_inner());
    assert_eq!(seen, (bytes, bytes, 1));
}
