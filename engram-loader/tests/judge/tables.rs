//! Faults of tables: one broken thing at a time, and the one fault that must come of it.

use crate::sketch::{CONSTANTS, ENGRAM, PLE, Sketch, bytes, codes, file, judge, judge_with, longs, tensor};
use engram_loader::{Checkpoint, FaultCode, Options, Tokenizer};
use serde_json::json;

fn shard(number: impl std::fmt::Display) -> String {
    format!("{PLE}ngram_embedding.shard_{number}.weight")
}

fn scale() -> String {
    format!("{PLE}ngram_embedding.weight_scale")
}

/// Breaks a sound sketch and gives the codes of its faults.
fn after(mut sketch: Sketch, change: impl FnOnce(&mut Sketch)) -> Vec<String> {
    assert_eq!(sketch.faults(), [""; 0], "the sketch is sound before the change");
    change(&mut sketch);
    sketch.faults()
}

fn ple(change: impl FnOnce(&mut Sketch)) -> Vec<String> {
    after(Sketch::ple("F8_E4M3", 4), change)
}

fn engram(change: impl FnOnce(&mut Sketch)) -> Vec<String> {
    after(Sketch::engram(), change)
}

#[test]
fn every_prefix_suffix_layout_and_format_is_accepted() {
    for prefix in ["", "model.", "model.language_model.", "language_model.", "language_model.model."] {
        for suffix in ["scale", "weight_scale", "weight_scale_inv"] {
            for indexed in [false, true] {
                let mut sketch = Sketch::engram();
                sketch.indexed = indexed;
                for tensor in sketch.files.values_mut().flatten() {
                    tensor.name = format!("{prefix}{}", tensor.name.replace("embed.scale", &format!("embed.{suffix}")));
                }
                assert_eq!(sketch.faults(), [""; 0]);
                let mut sketch = Sketch::ple("F8_E4M3", 4);
                sketch.indexed = indexed;
                for tensor in sketch.files.values_mut().flatten() {
                    tensor.name = tensor.name.replace("model.language_model.", prefix).replace("weight_scale", suffix);
                    if suffix == "scale" {
                        tensor.name = tensor.name.replace("shard_", "shards.");
                    }
                }
                assert_eq!(sketch.faults(), [""; 0]);
            }
        }
    }
    for dtype in ["BF16", "F16", "F32"] {
        assert_eq!(Sketch::ple(dtype, 4).faults(), [""; 0]);
    }
    for (dtype, data) in [("F32", 2.0_f32.to_le_bytes().to_vec()), ("BF16", vec![0x80, 0x3f]), ("F16", vec![0, 0x3c])] {
        for shape in [&[][..], &[1]] {
            let mut sketch = Sketch::ple("F8_E4M3", 4);
            *sketch.find(&scale()) = tensor(scale(), dtype, shape, data.clone());
            assert_eq!(sketch.faults(), [""; 0], "{dtype} {shape:?}");
        }
    }
    // E8M0 codes kept as bytes, and a table in one piece.
    assert_eq!(engram(|s| s.find(&format!("{ENGRAM}scale")).dtype = "U8".into()), [""; 0]);
    let mut whole = Sketch::ple("BF16", 1);
    whole.find(&shard(0)).name = format!("{PLE}ngram_embedding.weight");
    assert_eq!(whole.faults(), [""; 0]);
}

#[test]
fn shards_are_ordered_by_number_not_by_text() {
    let sketch = Sketch::ple("F8_E4M3", 12);
    let folder = sketch.write();
    let checkpoint = Checkpoint::open(folder.path(), &Options::default()).unwrap();
    let table = checkpoint.catalog().table(1).unwrap();
    assert_eq!((table.rows(), table.extents().shards()), (424, 12));
    let report = checkpoint.report();
    let summary = serde_json::to_value(report).unwrap();
    assert_eq!(
        summary["tables"],
        json!([{"layer": 1, "rows": 424, "row_width": 40, "format": "e4m3-global", "bytes": 424 * 40, "shards": 12}])
    );
    assert_eq!(summary["family"], "ple");
    assert_eq!(summary["faults"], json!([]));
    assert_eq!(summary["files"][0].as_object().unwrap().len(), 2);
}

#[test]
fn shards_missing_and_too_many() {
    assert_eq!(ple(|s| drop(s.remove(&shard(0)))), ["shard-missing"]);
    assert_eq!(ple(|s| drop(s.remove(&shard(3)))), ["shard-missing"]);
    // One run is one fault.
    assert_eq!(ple(|s| (1..3).for_each(|k| drop(s.remove(&shard(k))))), ["shard-missing"]);
    assert_eq!(ple(|s| [0, 2].iter().for_each(|k| drop(s.remove(&shard(k))))), ["shard-missing", "shard-missing"]);
    assert_eq!(ple(|s| (0..4).for_each(|k| drop(s.remove(&shard(k))))), ["table-missing"]);
    assert_eq!(
        ple(|s| {
            (0..4).for_each(|k| drop(s.remove(&shard(k))));
            s.remove(&scale());
        }),
        ["table-missing"]
    );
    for number in ["4", "11", "4294967296", "99999999999999999999999"] {
        let extra = tensor(shard(number), "F8_E4M3", &[1, 40], bytes(40));
        assert_eq!(ple(|s| s.add(1, extra.clone())), ["shard-unexpected"], "{number}");
    }
    // 424 rows in 100 shards of 5 leave the last ones empty: they may be there or not.
    let mut sketch = Sketch::ple("BF16", 100);
    assert_eq!(sketch.faults(), [""; 0]);
    sketch.remove(&shard(99));
    sketch.remove(&shard(90));
    assert_eq!(sketch.faults(), [""; 0]);
    sketch.remove(&shard(84));
    assert_eq!(sketch.faults(), ["shard-missing"]);
    // The default number of shards is not that of any real checkpoint.
    let unsaid = ple(|s| drop(s.config["text_config"].as_object_mut().unwrap().remove("split_ngram_parts")));
    assert_eq!(unsaid, ["shard-shape"]);
    assert_eq!(ple(|s| s.config["text_config"]["split_ngram_parts"] = json!(2)), ["shard-shape"]);
}

#[test]
fn names_that_are_no_shards_are_unread() {
    for name in ["shard_01.weight", "shard_x.weight", "shard_.weight", "shard_-1.weight", "notes", "shard_0.bias"] {
        let extra = tensor(format!("{PLE}ngram_embedding.{name}"), "U8", &[4], bytes(4));
        assert_eq!(ple(|s| s.add(1, extra.clone())), ["(unread-tensor)"], "{name}");
    }
    for name in [
        "ngram_embedding.shard_0.weight_scale",
        "ngram_embedding.weight_scale_2",
        "weight_scale",
        "ngram_embedding.shards.0.scales",
    ] {
        let extra = tensor(format!("{PLE}{name}"), "F32", &[1], bytes(4));
        assert_eq!(ple(|s| s.add(1, extra.clone())), ["unread-tensor"], "{name}");
    }
    for name in ["hashstats_mean", "token_lookup", "ngram_embedding.hashstats_x", "ngram_embedding.token_lookup"] {
        let extra = tensor(format!("{PLE}{name}"), "U8", &[4], bytes(4));
        assert_eq!(ple(|s| s.add(1, extra.clone())), [""; 0], "{name}");
    }
    for name in ["layers.1.engram.wkv.scale", "layers.1.engram.k_weight", "model.norm.weight"] {
        let extra = tensor(name, "U8", &[4], bytes(4));
        assert_eq!(engram(|s| s.add(1, extra.clone())), [""; 0], "{name}");
    }
    let beside_bf16 = tensor(scale(), "F32", &[1], bytes(4));
    assert_eq!(after(Sketch::ple("BF16", 4), |s| s.add(1, beside_bf16)), ["unread-tensor"]);
    // A layer that the config does not name, another family's, an unknown wrapper: one warning a table.
    for table in [
        "layers.2.engram.embed.",
        "layers.01.engram.embed.",
        "x.layers.1.engram.embed.",
        "layers.1.ple.ple_embedding.ngram_embedding.",
    ] {
        let parts = |s: &mut Sketch| {
            s.add(1, tensor(format!("{table}weight"), "F8_E4M3", &[2, 64], bytes(128)));
            s.add(2, tensor(format!("{table}scale"), "F8_E8M0", &[2, 2], bytes(4)));
        };
        assert_eq!(engram(parts), ["(unread-tensor)"], "{table}");
    }
}

#[test]
fn two_tables_for_one_layer() {
    assert_eq!(
        engram(|s| s.add(2, tensor(format!("model.{ENGRAM}weight"), "F8_E4M3", &[120, 64], bytes(120 * 64)))),
        ["table-ambiguous"]
    );
    let whole = || tensor(format!("{PLE}ngram_embedding.weight"), "F8_E4M3", &[424, 40], bytes(424 * 40));
    assert_eq!(ple(|s| s.add(1, whole())), ["table-ambiguous"]);
    let dotted = || tensor(format!("{PLE}ngram_embedding.shards.0.weight"), "F8_E4M3", &[106, 40], bytes(106 * 40));
    assert_eq!(ple(|s| s.add(1, dotted())), ["table-ambiguous"]);
}

#[test]
fn shapes_and_dtypes_of_values() {
    let weight = format!("{ENGRAM}weight");
    assert_eq!(engram(|s| s.reshape(&weight, "F8_E4M3", &[119, 64], 8)), ["rows-mismatch"]);
    assert_eq!(engram(|s| s.reshape(&weight, "F8_E4M3", &[121, 64], 8)), ["rows-mismatch"]);
    assert_eq!(engram(|s| s.reshape(&weight, "F8_E4M3", &[120, 32], 8)), ["shard-shape"]);
    assert_eq!(engram(|s| s.reshape(&weight, "F8_E4M3", &[120 * 64], 8)), ["shard-shape"]);
    assert_eq!(engram(|s| s.reshape(&weight, "F8_E4M3", &[120, 64, 1], 8)), ["shard-shape"]);
    assert_eq!(engram(|s| s.reshape(&weight, "F8_E4M3", &[], 8)), ["shard-shape"]);
    for shape in [[105, 40], [107, 40], [106, 39], [106, 80]] {
        assert_eq!(ple(|s| s.reshape(&shard(2), "F8_E4M3", &shape, 8)), ["shard-shape"], "{shape:?}");
    }
    for (dtype, bits) in [("I8", 8), ("U8", 8), ("F8_E5M2", 8), ("F8_E4M3FNUZ", 8), ("BF16", 16), ("F64", 64)] {
        assert_eq!(ple(|s| s.reshape(&shard(1), dtype, &[106, 40], bits)), ["shard-dtype"], "{dtype}");
        if dtype != "BF16" {
            let all = |s: &mut Sketch| (0..4).for_each(|k| s.reshape(&shard(k), dtype, &[106, 40], bits));
            assert_eq!(ple(all), ["shard-dtype"], "{dtype}");
        }
    }
    // Packed four-bit values: half the width, and no second fault for it.
    assert_eq!(engram(|s| s.reshape(&weight, "U8", &[120, 32], 8)), ["shard-dtype"]);
    assert_eq!(engram(|s| s.reshape(&weight, "F4", &[120, 64], 4)), ["shard-dtype"]);
    let x99 = |s: &mut Sketch| s.find(&shard(0)).dtype = "X99".into();
    assert_eq!(ple(x99), ["unknown-dtype"]);
    assert_eq!(engram(|s| s.find(&format!("{ENGRAM}scale")).dtype = "f8_e8m0".into()), ["unknown-dtype"]);
    assert_eq!(engram(|s| s.find("layers.1.engram.q_weight").dtype = "X99".into()), ["(unknown-dtype)"]);
}

#[test]
fn swapped_tables_are_two_faults() {
    let swapped = |s: &mut Sketch| {
        for tensor in s.files.values_mut().flatten() {
            let other = if tensor.name.contains(".1.") { "layers.3." } else { "layers.1." };
            tensor.name = format!("{other}{}", &tensor.name["layers.1.".len()..]);
        }
    };
    assert_eq!(engram(swapped), ["rows-mismatch", "rows-mismatch"]);
}

#[test]
fn scales() {
    let block = format!("{ENGRAM}scale");
    assert_eq!(engram(|s| drop(s.remove(&block))), ["scale-missing"]);
    assert_eq!(ple(|s| drop(s.remove(&scale()))), ["scale-missing"]);
    assert_eq!(
        engram(|s| s.add(2, tensor(format!("{ENGRAM}weight_scale"), "F8_E8M0", &[120, 2], bytes(240)))),
        ["scale-ambiguous"]
    );
    for shape in [&[120, 3][..], &[119, 2], &[240], &[2, 120], &[120, 64], &[120, 2, 1]] {
        assert_eq!(engram(|s| s.reshape(&block, "F8_E8M0", shape, 8)), ["scale-shape"], "{shape:?}");
    }
    for (dtype, bits) in [("F32", 32), ("BF16", 16), ("I8", 8), ("F8_E4M3", 8), ("I64", 64)] {
        assert_eq!(engram(|s| s.reshape(&block, dtype, &[120, 2], bits)), ["scale-dtype"], "{dtype}");
    }
    for shape in [&[424, 1][..], &[424], &[2], &[1, 1], &[0]] {
        assert_eq!(ple(|s| s.reshape(&scale(), "F32", shape, 32)), ["scale-shape"], "{shape:?}");
    }
    for (dtype, bits) in [("F64", 64), ("I32", 32), ("F8_E8M0", 8), ("U8", 8)] {
        assert_eq!(ple(|s| s.reshape(&scale(), dtype, &[1], bits)), ["scale-dtype"], "{dtype}");
    }
    let bad = [0.0, -0.0, -0.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN];
    for value in bad {
        let set = |s: &mut Sketch| s.find(&scale()).data = value.to_le_bytes().to_vec();
        assert_eq!(ple(set), ["scale-value"], "{value}");
    }
    for (dtype, data) in
        [("BF16", [0x80, 0x7f]), ("BF16", [0x7f, 0xff]), ("F16", [0, 0x7c]), ("F16", [0xff, 0xfb]), ("F16", [0, 0])]
    {
        let set = |s: &mut Sketch| *s.find(&scale()) = tensor(scale(), dtype, &[1], data.to_vec());
        assert_eq!(ple(set), ["scale-value"], "{dtype} {data:?}");
    }
    for value in [f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, 1.0] {
        let set = |s: &mut Sketch| s.find(&scale()).data = value.to_le_bytes().to_vec();
        assert_eq!(ple(set), [""; 0], "{value}");
    }
}

#[test]
fn stored_constants() {
    let name = |constant: &str| format!("{PLE}{constant}");
    for gone in [&CONSTANTS[..], &CONSTANTS[..1], &CONSTANTS[1..2], &CONSTANTS[2..]] {
        assert_eq!(ple(|s| gone.iter().for_each(|c| drop(s.remove(&name(c))))), [""; 0], "{gone:?}");
    }
    let layout = Sketch::ple("BF16", 4).layout();
    let layer = &layout.layers()[0];
    let wide = |list: &[u32]| list.iter().map(|&value| i64::from(value)).collect::<Vec<_>>();
    let sound = [layer.multipliers().to_vec(), wide(layer.sizes()), wide(layer.offsets())];
    let with = |which: usize, place: usize, value: i64| {
        let mut values = sound[which].clone();
        values[place] = value;
        ple(|s| s.find(&name(CONSTANTS[which])).data = longs(&values))
    };
    assert_eq!(with(0, 0, sound[0][0] + 2), ["constants-mismatch"]);
    assert_eq!(with(0, 2, 1), ["constants-mismatch"]);
    assert_eq!(with(0, 1, -sound[0][1]), ["constants-mismatch"]);
    assert_eq!(with(0, 0, sound[0][0] + 1), ["constants-invalid"], "even");
    assert_eq!(with(0, 0, 0), ["constants-invalid"], "zero is even");
    assert_eq!(with(1, 0, sound[1][0] - 1), ["constants-mismatch"]);
    assert_eq!(with(1, 0, sound[1][0] + 2), ["constants-mismatch"], "shares rows with the next");
    for value in [0, -1, i64::MIN, i64::MAX, 1 << 32, 425] {
        assert_eq!(with(1, 0, value), ["constants-invalid"], "size {value}");
    }
    assert_eq!(with(1, 3, 424 - sound[2][3]), ["constants-mismatch"]);
    assert_eq!(with(1, 3, 425 - sound[2][3]), ["constants-invalid"], "one past the table");
    assert_eq!(with(2, 3, sound[2][3] - 1), ["constants-mismatch"]);
    for value in [-1, 424, 1 << 31, 1 << 32, i64::MAX, i64::MIN] {
        assert_eq!(with(2, 3, value), ["constants-invalid"], "offset {value}");
    }
    for (which, constant) in CONSTANTS.iter().enumerate() {
        let shape = [sound[which].len() as u64];
        assert_eq!(ple(|s| s.reshape(&name(constant), "I32", &shape, 32)), ["constants-invalid"], "{constant}");
        assert_eq!(ple(|s| s.reshape(&name(constant), "F64", &shape, 64)), ["constants-invalid"], "{constant}");
        for shape in [&[shape[0] - 1][..], &[shape[0] + 1], &[1, shape[0]], &[], &[0]] {
            assert_eq!(
                ple(|s| s.reshape(&name(constant), "I64", shape, 64)),
                ["constants-invalid"],
                "{constant} {shape:?}"
            );
        }
    }
    // Two causes, two faults.
    let both = |s: &mut Sketch| {
        s.find(&name(CONSTANTS[0])).data = longs(&[2, 3, 5]);
        s.find(&name(CONSTANTS[1])).data = longs(&[0, 1, 1, 1]);
    };
    assert_eq!(ple(both), ["constants-invalid", "constants-invalid"]);
    // A seed other than the stored one, and one that is null, which is the default.
    assert_eq!(ple(|s| s.config["text_config"]["seed"] = json!(0)), ["constants-mismatch"]);
    assert_eq!(ple(|s| s.config["text_config"]["seed"] = json!(null)), [""; 0]);
}

#[test]
fn stored_constants_are_used_when_allowed() {
    let mut sketch = Sketch::ple("F8_E4M3", 4);
    let computed = sketch.layout();
    let stored = [3, 5, 7];
    sketch.find(&format!("{PLE}layer_multipliers")).data = longs(&stored);
    let folder = sketch.write();
    let mut options = Options::default();
    let refused = Checkpoint::open(folder.path(), &options).unwrap();
    assert_eq!(refused.refusals().count(), 1);
    assert_eq!(refused.layout(), Some(&computed));
    options.allow = vec![FaultCode::ConstantsMismatch];
    let allowed = Checkpoint::open(folder.path(), &options).unwrap();
    assert_eq!(codes(allowed.report()), ["(constants-mismatch)"]);
    assert_eq!(allowed.layout().unwrap().layers()[0].multipliers(), stored);
    assert_eq!(allowed.layout().unwrap().layers()[0].sizes(), computed.layers()[0].sizes());
}

#[test]
fn only_some_codes_can_be_allowed() {
    let can: Vec<_> = FaultCode::ALL.iter().filter(|code| code.can_be_allowed()).map(|code| code.name()).collect();
    assert_eq!(can, ["scale-value", "constants-mismatch", "vocab-mismatch", "row-nan", "unread-tensor"]);
    let folder = Sketch::ple("BF16", 4).write();
    for &code in FaultCode::ALL {
        assert_eq!(code.name().parse(), Ok(code));
        let mut options = Options::default();
        options.allow = vec![code];
        assert_eq!(Checkpoint::open(folder.path(), &options).is_ok(), code.can_be_allowed(), "{code}");
    }
    let mut sketch = Sketch::ple("F8_E4M3", 4);
    sketch.find(&scale()).data = 0.0_f32.to_le_bytes().to_vec();
    let report = judge_with(sketch.write().path(), |options| options.allow = vec![FaultCode::ScaleValue]);
    assert_eq!(codes(&report), ["(scale-value)"]);
    assert_eq!(report.tables.len(), 1);
}

#[test]
fn formats_other_than_announced() {
    let config = |s: &mut Sketch, quantization| s.config["quantization_config"] = quantization;
    assert_eq!(ple(|s| config(s, json!(null))), ["(format-mismatch)"]);
    assert_eq!(ple(|s| config(s, json!({"quant_method": "awq"}))), ["(format-mismatch)"]);
    assert_eq!(ple(|s| config(s, json!({"quant_method": 5}))), ["(format-mismatch)"]);
    let declared = |s: &mut Sketch| {
        config(s, json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}));
        s.config["text_config"]["ple_embedding_dtype"] = json!("float8_e4m3fn");
    };
    assert_eq!(ple(declared), [""; 0]);
    let bf16 = Sketch::ple("BF16", 4);
    assert_eq!(after(bf16.clone(), |s| config(s, json!({"quant_method": "fp8"}))), ["(format-mismatch)"]);
    let ignored = json!({"quant_method": "fp8", "ignored_layers": [shard(0).trim_end_matches(".weight")]});
    assert_eq!(after(bf16, |s| config(s, ignored)), [""; 0]);
    let weight = format!("{ENGRAM}weight");
    let to_bf16 = |s: &mut Sketch| {
        s.reshape(&weight, "BF16", &[120, 64], 16);
        s.remove(&format!("{ENGRAM}scale"));
    };
    assert_eq!(engram(to_bf16), ["(format-mismatch)"]);
    let said = |s: &mut Sketch| {
        to_bf16(s);
        config(s, json!({"engram_dtype": "bf16"}));
    };
    assert_eq!(engram(said), [""; 0]);
    // ModelOpt may keep its config in a file of its own.
    let mut sketch = Sketch::ple("F8_E4M3", 4);
    config(&mut sketch, json!(null));
    let folder = sketch.write();
    let quant = json!({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        format!("{PLE}ngram_embedding"): {"quant_algo": "FP8"}
    }}});
    std::fs::write(folder.path().join("hf_quant_config.json"), quant.to_string()).unwrap();
    assert_eq!(codes(&judge(folder.path())), [""; 0]);
}

#[test]
fn configs() {
    let text = |text: &str| {
        let folder = Sketch::engram().write();
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        let report = judge(folder.path());
        assert!(report.tables.is_empty());
        codes(&report)
    };
    assert_eq!(text(""), ["config-missing"]);
    assert_eq!(text("[]"), ["config-missing"]);
    assert_eq!(text("{\"model_type\": \"deepseek_v41\""), ["config-missing"]);
    assert_eq!(text("{\"model_type\": \"llama\"}"), ["family-unknown"]);
    assert_eq!(text("{}"), ["family-unknown"]);
    assert_eq!(text("{\"model_type\": \"deepseek_v41\"}"), ["config-field"]);
    assert_eq!(text("{\"model_type\": \"deepseek_v41\", \"model_type\": \"deepseek_v41\"}"), ["config-field"]);
    assert_eq!(engram(|s| s.config["engram_num_embeddings"][1] = json!(185)), ["config-field"]);
    assert_eq!(engram(|s| s.config["engram_max_ngram_size"] = json!(9)), ["config-field"]);
    let folder = Sketch::engram().write();
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    let report = judge(folder.path());
    assert_eq!((codes(&report), report.family), (vec!["config-missing".to_owned()], None));
    assert!(serde_json::to_value(&report).unwrap()["family"].is_null());
    std::fs::create_dir(folder.path().join("config.json")).unwrap();
    assert_eq!(codes(&judge(folder.path())), ["config-missing"]);
}

#[test]
fn tables_are_named_when_there_are_only_torch_files() {
    let folder = Sketch::engram().write();
    for number in [1, 2] {
        std::fs::remove_file(folder.path().join(file(number))).unwrap();
    }
    std::fs::remove_file(folder.path().join("model.safetensors.index.json")).unwrap();
    std::fs::write(folder.path().join("pytorch_model.bin"), "PK").unwrap();
    let report = judge(folder.path());
    assert_eq!(codes(&report), ["table-missing", "table-missing"]);
    assert!(report.faults[0].message.contains("pytorch_model.bin"));
}

#[test]
fn a_scale_in_another_file_than_every_shard_and_tensors_between() {
    let mut sketch = Sketch::ple("F8_E4M3", 4);
    let moved = sketch.remove(&scale());
    sketch.files.entry("scales.safetensors".into()).or_default().push(moved);
    sketch.files.get_mut(&file(1)).unwrap().insert(1, tensor("between", "U8", &[3], bytes(3)));
    for indexed in [true, false] {
        sketch.indexed = indexed;
        let report = judge(sketch.write().path());
        assert_eq!((codes(&report), report.files.len(), report.tables.len()), (vec![], 3, 1));
    }
    // Any order of the tensors gives the same report.
    let mut reversed = sketch.clone();
    reversed.files.values_mut().for_each(|tensors| tensors.reverse());
    assert_eq!(judge(sketch.write().path()).tables, judge(reversed.write().path()).tables);
}

#[test]
fn what_was_not_checked_is_listed() {
    let folder = Sketch::engram().write();
    let listed = judge(folder.path()).not_checked.join("\n");
    assert!(listed.contains("compressed vocabulary") && listed.contains("rows"), "{listed}");
    let unchecked = judge_with(folder.path(), |options| options.tokenizer = Tokenizer::Unchecked);
    assert!(unchecked.not_checked[0].contains("not to be read"));
    let deep = judge_with(Sketch::ple("BF16", 4).write().path(), |options| options.deep = true);
    assert_eq!(deep.not_checked, [""; 0]);
}
