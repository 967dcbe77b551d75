//! Offsets past 2^31 and 2^32 bytes, in tables and outputs.

use crate::common::*;
use engram_cuda::{IdType, Lookup, LookupOptions, Placement, RowForm, Table};
use engram_ple::{FormatKind, OutputType, SynthSource, TableSource};

#[test]
#[ignore = "needs a CUDA device"]
fn rows_around_byte_2_to_the_31_and_32_and_the_last_row() {
    for (kind, width) in [(FormatKind::E4m3Global, 256), (FormatKind::E4m3E8m0x32, 256), (FormatKind::E4m3Global, 160)]
    {
        let format = format(kind, width);
        let row_bytes = format.row_bytes() as u64;
        let rows = (1u64 << 32).div_ceil(row_bytes) + 1000;
        let source = SynthSource::new(format.clone(), 5, 0, rows);
        let around = [1u64 << 31, 1 << 32].map(|byte| byte / row_bytes);
        let ids: Vec<i32> = around
            .iter()
            .flat_map(|&row| [row - 1, row, row + 1])
            .chain([0, rows - 1])
            .map(|row| i32::try_from(row).unwrap())
            .collect();
        let columns = ids.len();
        for placement in [Placement::Device, Placement::Pinned, Placement::Staged] {
            let table = Table::load(device(), &source, 0..rows, placement).unwrap();
            assert!(table.is_free_of_nan());
            let mut lookup = Lookup::new(&[table], columns, &LookupOptions::default()).unwrap();
            for form in forms(kind) {
                let out = poisoned(&format, 1, columns, form, 1);
                run(&mut lookup, &view(&upload(&ids), IdType::I32, 1, 1, columns), &out.output()).unwrap();
                out.assert(&reference(&[(&source, 0..rows)], &ids, columns, form, (1, 1), POISON));
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn outputs_beyond_2_to_the_31_bytes() {
    let format = format(FormatKind::E4m3E8m0x32, 256);
    let (rows, layers, columns) = (5000u64, 2, 24);
    let tokens = (5usize << 30) / (layers * columns * 512);
    let mut bench = bench(&format, rows, layers, columns, Placement::Device);
    let ids = Random(6).ids(tokens * layers * columns, rows);
    let memory = upload(&ids);
    for form in [RowForm::Dense(OutputType::Bf16), RowForm::Packed, RowForm::Mx] {
        let out = poisoned(&format, layers, columns, form, tokens);
        run(&mut bench.lookup, &view(&memory, IdType::I32, tokens, layers, columns), &out.output()).unwrap();
        let element = match form {
            RowForm::Dense(_) => 512,
            RowForm::Packed => 264,
            _ => 256,
        };
        let mut random = Random(7);
        for k in 0..3000 {
            // The last token, and others anywhere.
            let token = if k < 100 { tokens - 1 } else { usize::try_from(random.below(tokens as u64)).unwrap() };
            let (layer, column) = (k % layers, k % columns);
            let at = match form {
                RowForm::Packed => (token * layers + layer) * columns + column,
                _ => (layer * tokens + token) * columns + column,
            };
            let mut row = vec![0; format.row_bytes()];
            let id = ids[(token * layers + layer) * columns + column];
            if (0..5000).contains(&id) {
                let id = u64::try_from(id).unwrap();
                bench.sources[layer].read_range(id..id + 1, &mut row).unwrap();
            }
            let expected = match form {
                RowForm::Dense(output) => decode(&format, &row, output),
                RowForm::Packed => row,
                _ => row[..256].to_vec(),
            };
            assert_same(
                &out.rows.read::<u8>(at * element, element).unwrap(),
                &expected,
                &format!("{form:?}, token {token}"),
            );
        }
    }
}
