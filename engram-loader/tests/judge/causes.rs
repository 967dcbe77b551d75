//! One cause gives one fault, and faults that have nothing to do with each other are all told.

use std::fs;

use engram_core::Family;
use engram_loader::{Checkpoint, FaultCode, Options};
use serde_json::{Value, json};

use crate::sketch::{ENGRAM, PLE, Sketch, codes, file, judge, judge_with, longs, raw, tensor};

/// Shifts the announced bytes of all tensors from the `from`th on by `shift`, and puts as many bytes there if `moved`.
fn shift_offsets(bytes: &[u8], from: usize, shift: usize, moved: bool) -> Vec<u8> {
    let (prefix, rest) = bytes.split_at(8);
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(prefix.try_into().unwrap())).unwrap());
    let mut header: Value = serde_json::from_slice(header).unwrap();
    let mut entries: Vec<&mut Value> = header.as_object_mut().unwrap().values_mut().collect();
    let start = |entry: &Value| entry["data_offsets"][0].as_u64().unwrap();
    entries.sort_by_key(|entry| start(entry));
    let at = usize::try_from(start(entries[from])).unwrap();
    for entry in &mut entries[from..] {
        for end in entry["data_offsets"].as_array_mut().unwrap() {
            *end = json!(end.as_u64().unwrap() + shift as u64);
        }
    }
    let gap = vec![0; if moved { shift } else { 0 }];
    raw(&header.to_string(), &[&data[..at], &gap, &data[at..]].concat())
}

#[test]
fn a_gap_is_one_fault_wherever_it_is_and_whatever_lies_behind_it() {
    for sketch in [Sketch::ple("F8_E4M3", 4), Sketch::ple("BF16", 4), Sketch::engram()] {
        for number in [1, 2] {
            let name = file(number);
            for from in 0..sketch.files[&name].len() {
                for (shift, moved) in [(1, true), (8, true), (1, false), (8, false), (64, false), (1 << 40, false)] {
                    let folder = sketch.write();
                    let path = folder.path().join(&name);
                    fs::write(&path, shift_offsets(&fs::read(&path).unwrap(), from, shift, moved)).unwrap();
                    for deep in [false, true] {
                        let report = judge_with(folder.path(), |options| options.deep = deep);
                        assert_eq!(codes(&report), ["bad-offsets"], "{name} from {from} by {shift}, {moved}");
                    }
                }
            }
        }
    }
}

#[test]
fn constants_are_judged_one_by_one() {
    let name = |constant: &str| format!("{PLE}{constant}");
    let with = |lists: &[(&str, &[i64])]| {
        let mut sketch = Sketch::ple("F8_E4M3", 4);
        for (constant, values) in lists {
            sketch.find(&name(constant)).data = longs(values);
        }
        sketch.faults()
    };
    let (multipliers, sizes, offsets) = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets");
    assert_eq!(
        with(&[(multipliers, &[2, 3, 5]), (offsets, &[0, 1, 2, 3])]),
        ["constants-invalid", "constants-mismatch"]
    );
    assert_eq!(
        with(&[(multipliers, &[1, 3, 5]), (offsets, &[0, 1, 2, 999])]),
        ["constants-invalid", "constants-mismatch"]
    );
    assert_eq!(with(&[(sizes, &[0, 103, 107, 109]), (offsets, &[0, 1, 2, 999])]), ["constants-invalid"; 2]);
    assert_eq!(
        with(&[(sizes, &[0, 103, 107, 109]), (multipliers, &[1, 3, 5])]),
        ["constants-invalid", "constants-mismatch"]
    );
}

#[test]
fn stored_constants_may_share_rows_where_they_may_differ() {
    let mut sketch = Sketch::ple("F8_E4M3", 4);
    sketch.find(&format!("{PLE}ngram_heads_offsets")).data = longs(&[0, 1, 2, 3]);
    let folder = sketch.write();
    let mut options = Options::default();
    options.allow = vec![FaultCode::ConstantsMismatch];
    let allowed = Checkpoint::open(folder.path(), &options).unwrap();
    assert!(allowed.report().ok);
    assert_eq!(allowed.layout().unwrap().layers()[0].offsets(), [0, 1, 2, 3]);
}

#[test]
fn a_whole_table_of_other_rows_still_has_its_scale_judged() {
    let weight = format!("{ENGRAM}weight");
    let scale = format!("{ENGRAM}scale");
    let with = |rows: u64, dtype: &str, shape: &[u64]| {
        let mut sketch = Sketch::engram();
        sketch.reshape(&weight, "F8_E4M3", &[rows, 64], 8);
        sketch.reshape(&scale, dtype, shape, if dtype == "F32" { 32 } else { 8 });
        sketch.faults()
    };
    assert_eq!(with(110, "F8_E8M0", &[110, 2]), ["rows-mismatch"], "scales to match");
    assert_eq!(with(110, "F8_E8M0", &[120, 2]), ["rows-mismatch"], "scales of the config's table");
    assert_eq!(with(110, "F8_E8M0", &[100, 2]), ["rows-mismatch", "scale-shape"]);
    assert_eq!(with(110, "F32", &[110, 2]), ["rows-mismatch", "scale-dtype"]);
}

#[test]
fn shards_of_another_table_are_one_fault() {
    // The shards of a table of another size, as after a swap of two layers or under a wrong ngram_vocab_size_base.
    let mut sketch = Sketch::ple("BF16", 4);
    for shard in 0..4 {
        sketch.reshape(&format!("{PLE}ngram_embedding.shard_{shard}.weight"), "BF16", &[120 - shard / 3, 40], 16);
    }
    let report = judge(sketch.write().path());
    assert_eq!(codes(&report), ["shard-shape"]);
    assert!(report.faults[0].message.contains("479"), "{}", report.faults[0]);
    // Two shards that fit no table are two.
    for shard in [1, 2] {
        sketch.reshape(&format!("{PLE}ngram_embedding.shard_{shard}.weight"), "BF16", &[90 + shard, 40], 16);
    }
    assert!(sketch.faults().len() > 1);
}

#[test]
fn files_that_hold_no_table_refuse_nothing() {
    for (place, content) in [("absent", None), ("html", Some("<!DOCTYPE html>"))] {
        let sketch = Sketch::engram();
        let folder = sketch.write();
        let mut index = sketch.index();
        index["weight_map"]["model.norm.weight"] = json!("other.safetensors");
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        if let Some(content) = content {
            fs::write(folder.path().join("other.safetensors"), content).unwrap();
        }
        let checkpoint = Checkpoint::open(folder.path(), &Options::default()).unwrap();
        assert!(!checkpoint.report().ok, "{place}");
        assert_eq!(checkpoint.refusals().count(), 0, "{place}");
        // A table placed there is another matter.
        index["weight_map"][format!("{ENGRAM}weight")] = json!("other.safetensors");
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        assert!(Checkpoint::open(folder.path(), &Options::default()).unwrap().refusals().count() > 0, "{place}");
    }
}

#[test]
fn names_from_files_stay_on_their_line() {
    let mut sketch = Sketch::ple("BF16", 4);
    sketch.indexed = false;
    let name = format!("{PLE}ngram_embedding.x\n\nsound: 1 table\u{1b}[2J");
    sketch.add(1, tensor(name, "U8", &[1], vec![0]));
    let report = judge(sketch.write().path());
    assert_eq!(codes(&report), ["(unread-tensor)"]);
    let line = report.faults[0].to_string();
    assert!(line.chars().all(|c| !c.is_control()), "{line:?}");
}

#[test]
fn the_family_is_told_where_another_field_is_at_fault() {
    let mut sketch = Sketch::ple("BF16", 4);
    sketch.config["text_config"]["ngram_size"] = json!(99);
    let report = judge(sketch.write().path());
    assert_eq!((codes(&report), report.family), (vec!["config-field".to_owned()], Some(Family::Ple)));
}
