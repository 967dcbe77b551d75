//! The formats' golden data through the GPU.

use crate::common::*;
use engram_cuda::{IdType, Lookup, LookupOptions, Placement, RowForm, Table};
use engram_ple::{FormatKind, MemorySource, OutputType, TableFormat};
use serde_json::Value;

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
