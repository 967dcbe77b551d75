//! The formats' golden data through the GPU.

use crate::common::*;
use engram_cuda::{IdType, Lookup, LookupOptions, Placement, RowForm, Table};
use engram_loader::{Checkpoint, Mapped, Options, Pool};
use engram_ple::{FormatKind, MemorySource, OutputType, TableFormat, TableSource};
use serde_json::Value;
use std::sync::Arc;

/// The golden checkpoints travel inside the test program, which may run where the repository is not.
macro_rules! checkpoints {
    ($($folder:literal: $($file:literal),*;)*) => {
        const CHECKPOINTS: &[(&str, &[(&str, &[u8])])] = &[$(($folder, &[$((
            $file,
            include_bytes!(concat!("../../../tests/data/golden/ckpt/", $folder, "/", $file)),
        )),*])),*];
    };
}
checkpoints! {
    "engram-fp8-block32": "config.json", "expected.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json";
    "engram-nested-config": "config.json", "expected.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json";
    "engram-unpadded-header": "config.json", "expected.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json";
    "ple-bf16": "config.json", "expected.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json";
    "ple-fp8-global": "config.json", "expected.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json";
    "ple-fp8-two-layers": "config.json", "expected.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json";
    "ple-text-only-no-index": "config.json", "expected.json", "model-00001-of-00001.safetensors";
    "ple-uneven-shards-f16-scale": "config.json", "expected.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json";
}

fn is_nan_bf16(bits: u16) -> bool {
    bits & 0x7fff > 0x7f80
}

/// Looks up the rows of `bytes` as bf16; a NaN is any NaN.
fn assert_decodes(format: &TableFormat, bytes: Vec<u8>, expected: &[u16], what: &str) {
    let count = bytes.len() / format.row_bytes();
    let source = MemorySource::new(format.clone(), bytes).unwrap();
    for placement in [Placement::Device, Placement::Pinned] {
        let table = Table::load(device(), &source, 0..count as u64, placement).unwrap();
        let mut lookup = Lookup::new(&[table], 1, &LookupOptions::default()).unwrap();
        let ids = upload(&(0..i32::try_from(count).unwrap()).collect::<Vec<_>>());
        let out = poisoned(format, 1, 1, RowForm::Dense(OutputType::Bf16), count);
        run(&mut lookup, &view(&ids, IdType::I32, count, 1, 1), &out.output()).unwrap();
        let found: Vec<u16> = out.rows.read(0, expected.len()).unwrap();
        for (place, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            assert!(
                found == expected || is_nan_bf16(found) && is_nan_bf16(expected),
                "{what}, {placement:?}, code {place}: {found:#06x} for {expected:#06x}"
            );
        }
    }
}

fn bits(value: &Value) -> Vec<u16> {
    value.as_array().unwrap().iter().map(|x| u16::try_from(x.as_u64().unwrap()).unwrap()).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_code_under_every_golden_scale() {
    let golden: Value = serde_json::from_str(include_str!("../../../tests/data/golden/formats.json")).unwrap();
    let codes: Vec<u8> = (0..=255).collect();
    for case in golden["fp8_global_bf16"].as_array().unwrap() {
        let scale = f32::from_bits(u32::try_from(case["scale_f32_bits"].as_u64().unwrap()).unwrap());
        let format = TableFormat::new(FormatKind::E4m3Global, 256, Some(scale)).unwrap();
        assert_decodes(&format, codes.clone(), &bits(&case["bf16_bits"]), &format!("global scale {scale:e}"));
    }
    let format = TableFormat::new(FormatKind::E4m3E8m0x32, 256, None).unwrap();
    for case in golden["fp8_block32_bf16"].as_array().unwrap() {
        let scale = u8::try_from(case["scale_code"].as_u64().unwrap()).unwrap();
        let mut row = codes.clone();
        row.extend([scale; 8]);
        assert_decodes(&format, row, &bits(&case["bf16_bits"]), &format!("scale code {scale}"));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_code_under_every_e8m0_scale_equals_the_host() {
    let format = TableFormat::new(FormatKind::E4m3E8m0x32, 256, None).unwrap();
    let mut rows = Vec::new();
    for scale in 0..=255u8 {
        rows.extend(0..=255u8);
        rows.extend([scale; 8]);
    }
    let mut expected = vec![half::bf16::ZERO; 256 * 256];
    format.decode_bf16(&rows, &mut expected);
    let expected: Vec<u16> = expected.iter().map(|x| x.to_bits()).collect();
    assert_decodes(&format, rows, &expected, "all scales");
}

fn flatten(value: &Value, out: &mut Vec<i64>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| flatten(value, out)),
        number => out.push(number.as_i64().unwrap()),
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_golden_checkpoint_loaded_and_read_in_place() {
    let pool = Arc::new(Pool::new(2));
    let mut checked = 0;
    for (name, files) in CHECKPOINTS {
        let folder = tempfile::tempdir().unwrap();
        for (file, bytes) in *files {
            std::fs::write(folder.path().join(file), bytes).unwrap();
        }
        let expected: Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("expected.json")).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(folder.path(), &Options::default()).unwrap();
        assert_eq!(checkpoint.refusals().count(), 0, "{name}");
        for layer in expected["layers"].as_array().unwrap() {
            let number = u32::try_from(layer["layer"].as_u64().unwrap()).unwrap();
            let (mut ids, mut bits) = (Vec::new(), Vec::new());
            flatten(&layer["ids"], &mut ids);
            flatten(&layer["bf16_bits"], &mut bits);
            let ids: Vec<i32> = ids.iter().map(|&id| i32::try_from(id).unwrap()).collect();
            let bits: Vec<u16> = bits.iter().map(|&bits| u16::try_from(bits).unwrap()).collect();
            let tokens = layer["ids"].as_array().unwrap().len();
            let columns = ids.len() / tokens;
            let table = checkpoint.catalog().table(number).unwrap();
            let source = Arc::new(Mapped::new(table.extents().clone(), pool.clone()));
            let rows = 0..source.rows();
            let load = |placement| Table::load(device(), &*source, rows.clone(), placement).unwrap();
            let places = [
                load(Placement::Device),
                load(Placement::Pinned),
                load(Placement::Staged),
                Table::over(device(), source.clone(), rows.clone()).unwrap(),
            ];
            for place in places {
                let placement = place.placement();
                let mut lookup = Lookup::new(&[place], columns, &LookupOptions::default()).unwrap();
                let out = poisoned(table.format(), 1, columns, RowForm::Dense(OutputType::Bf16), tokens);
                run(&mut lookup, &view(&upload(&ids), IdType::I32, tokens, 1, columns), &out.output()).unwrap();
                let found: Vec<u16> = out.rows.read(0, bits.len()).unwrap();
                for (place, (&found, &expected)) in found.iter().zip(&bits).enumerate() {
                    assert!(
                        found == expected || is_nan_bf16(found) && is_nan_bf16(expected),
                        "{name}, layer {number}, {placement:?}, element {place}: {found:#06x} for {expected:#06x}"
                    );
                }
                checked += found.len();
            }
        }
    }
    assert!(checked > 10_000, "{checked} golden elements");
}
