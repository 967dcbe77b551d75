//! Lookups against the reference: formats, forms, id types, alignments, ownership.

use crate::common::*;
use engram_cuda::{
    DeviceBuffer, Error, IdShape, IdType, Ids, Lookup, LookupOptions, Output, Placement, RowForm, Stream, Table,
};
use engram_ple::{FormatKind, OutputType, SynthSource, TableSource};

const PLACEMENTS: [Placement; 3] = [Placement::Device, Placement::Pinned, Placement::Staged];

#[test]
#[ignore = "needs a CUDA device"]
fn every_format_in_every_form_from_every_placement() {
    let mut random = Random(1);
    for (kind, _) in FORMATS {
        let widths = if kind == FormatKind::E4m3E8m0x32 { [32, 96, 256] } else { [1, 37, 160] };
        for width in widths {
            let format = format(kind, width);
            for placement in PLACEMENTS {
                let (rows, layers, columns) = (500, 2, 3);
                let mut bench = bench(&format, rows, layers, columns, placement);
                for form in forms(kind) {
                    for tokens in [1, 5, 129, 700] {
                        let ids = random.ids(tokens * layers * columns, rows);
                        let (capacity, slot) = (tokens + 7, tokens + 3);
                        let out = poisoned(&format, layers, columns, form, capacity);
                        let memory = upload(&ids);
                        let ids_view = view(&memory, IdType::I32, tokens, layers, columns);
                        run(&mut bench.lookup, &ids_view, &out.output().padded_to(slot)).unwrap();
                        out.assert(&bench.expected(&ids, form, capacity, slot, POISON));
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn wide_ids_strides_and_layer_ranges() {
    let mut random = Random(2);
    let format = format(FormatKind::E4m3E8m0x32, 64);
    let (rows, layers, columns, tokens) = (300, 3, 4, 33);
    let mut bench = bench(&format, rows, layers, columns, Placement::Device);
    let ids = random.ids(tokens * layers * columns, rows);
    // A token's ids lie 5 ids further apart than they need to; in between lies what must not be read.
    let stride = layers * columns + 5;
    let mut wide = vec![i64::from(i32::MAX) * 3; tokens * stride];
    for (token, ids) in ids.chunks(layers * columns).enumerate() {
        for (place, &id) in ids.iter().enumerate() {
            wide[token * stride + place] = if id == i32::MAX { 1 << 40 | 3 } else { i64::from(id) };
        }
    }
    let memory = DeviceBuffer::from_slice(device(), &wide).unwrap();
    for (first_layer, view_layers) in [(0, 3), (1, 2), (2, 1)] {
        let shape =
            IdShape { id_type: IdType::I64, tokens, token_stride: stride, first_layer, layers: view_layers, columns };
        let out = poisoned(&format, view_layers, columns, RowForm::Packed, tokens);
        run(&mut bench.lookup, &Ids::new(&memory, shape).unwrap(), &out.output()).unwrap();
        let seen: Vec<i32> = ids
            .chunks(layers * columns)
            .flat_map(|ids| ids[first_layer * columns..(first_layer + view_layers) * columns].to_vec())
            .collect();
        let sources = &bench.layers()[first_layer..first_layer + view_layers];
        out.assert(&reference(sources, &seen, columns, RowForm::Packed, (tokens, tokens), POISON));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn borrowed_tables_of_any_alignment() {
    let mut random = Random(3);
    for (kind, _) in FORMATS {
        let width = if kind == FormatKind::E4m3E8m0x32 { 64 } else { 40 };
        let format = format(kind, width);
        let (rows, columns, tokens) = (200u64, 3, 50);
        let source = SynthSource::new(format.clone(), 5, 0, rows);
        let mut packed = vec![0; usize::try_from(rows).unwrap() * format.row_bytes()];
        source.read_range(0..rows, &mut packed).unwrap();
        for offset in [0usize, 1, 2, 4, 8] {
            let split = |keep: fn(&[u8], usize) -> Vec<u8>| -> Vec<u8> {
                packed.chunks(format.row_bytes()).flat_map(|row| keep(row, format.value_bytes())).collect()
            };
            let mut values = vec![0x77; offset];
            values.extend(split(|row, at| row[..at].to_vec()));
            let mut scales = vec![0x77; offset];
            scales.extend(split(|row, at| row[at..].to_vec()));
            let (values, scales) = (
                DeviceBuffer::from_slice(device(), &values).unwrap(),
                DeviceBuffer::from_slice(device(), &scales).unwrap(),
            );
            let scales_at = (format.scale_bytes() > 0).then_some(scales.address() + offset as u64);
            // SAFETY: both buffers outlive the table.
            let table = unsafe {
                Table::borrow(device(), format.clone(), values.address() + offset as u64, scales_at, 0..rows)
            }
            .unwrap();
            let mut lookup = Lookup::new(&[table], columns, &LookupOptions::default()).unwrap();
            let ids = random.ids(tokens * columns, rows);
            let memory = upload(&ids);
            for form in forms(kind) {
                let out = poisoned(&format, 1, columns, form, tokens);
                run(&mut lookup, &view(&memory, IdType::I32, tokens, 1, columns), &out.output()).unwrap();
                out.assert(&reference(&[(&source, 0..rows)], &ids, columns, form, (tokens, tokens), POISON));
                // An output at an odd place.
                if matches!(form, RowForm::Packed) {
                    let odd = DeviceBuffer::new(device(), out.rows.bytes() + offset).unwrap();
                    let view_out = Output::packed(part(&odd, offset));
                    run(&mut lookup, &view(&memory, IdType::I32, tokens, 1, columns), &view_out).unwrap();
                    let expected = out.rows.read::<u8>(0, out.rows.bytes()).unwrap();
                    assert_same(&odd.read::<u8>(offset, expected.len()).unwrap(), &expected, "odd output");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn packed_rows_of_all_ranks_add_up_to_the_whole_tables() {
    let mut random = Random(4);
    let format = format(FormatKind::E4m3E8m0x32, 256);
    let (rows, columns, tokens) = (1001u64, 4, 300);
    let source = SynthSource::new(format.clone(), 9, 0, rows);
    let ids = random.ids(tokens * columns, rows);
    let memory = upload(&ids);
    let whole = reference(&[(&source, 0..rows)], &ids, columns, RowForm::Packed, (tokens, tokens), POISON);
    for ranks in [1u64, 3, 8] {
        let mut sum = vec![0u8; whole.rows.len()];
        for rank in 0..ranks {
            let part = rows.div_ceil(ranks);
            let own = (rank * part).min(rows)..((rank + 1) * part).min(rows);
            let table = Table::load(device(), &source, own, Placement::Device).unwrap();
            let mut lookup = Lookup::new(&[table], columns, &LookupOptions::default()).unwrap();
            let out = poisoned(&format, 1, columns, RowForm::Packed, tokens);
            run(&mut lookup, &view(&memory, IdType::I32, tokens, 1, columns), &out.output()).unwrap();
            for (sum, byte) in sum.iter_mut().zip(out.rows.read::<u8>(0, whole.rows.len()).unwrap()) {
                *sum = sum.checked_add(byte).unwrap();
            }
        }
        assert_same(&sum, &whole.rows, "sum over ranks");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_lookup_sees_new_ids_and_a_limited_one_is_right() {
    let mut random = Random(5);
    let format = format(FormatKind::E4m3Global, 160);
    let (rows, columns, tokens) = (5000, 16, 400);
    let mut options = LookupOptions::default();
    options.multiprocessors = Some(3);
    for placement in PLACEMENTS {
        let mut bench = bench_with(&format, rows, 1, columns, placement, &options);
        let memory = upload(&vec![0; tokens * columns]);
        let form = RowForm::Dense(OutputType::Bf16);
        let out = poisoned(&format, 1, columns, form, tokens);
        let stream = Stream::new(device()).unwrap();
        let ids_view = view(&memory, IdType::I32, tokens, 1, columns);
        let mut graph = stream.capture(|stream| bench.lookup.run(&ids_view, &out.output(), stream)).unwrap();
        for _ in 0..3 {
            let ids = random.ids(tokens * columns, rows);
            memory.write(0, &ids).unwrap();
            out.poison();
            // SAFETY: all that the graph uses lives.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
            stream.synchronize().unwrap();
            out.assert(&bench.expected(&ids, form, tokens, tokens, POISON));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_cannot_be_looked_up_is_refused_and_touches_nothing() {
    let plain = format(FormatKind::Bf16, 160);
    let mut bench = bench(&plain, 100, 2, 4, Placement::Device);
    let memory = upload(&[0; 80]);
    let (tokens, layers, columns) = (10, 2, 4);
    let out = poisoned(&plain, layers, columns, RowForm::Packed, tokens);
    let ids = view(&memory, IdType::I32, tokens, layers, columns);
    let mut refuse = |ids: &Ids<'_>, out: &Output<'_>| run(&mut bench.lookup, ids, out).unwrap_err();
    let error = refuse(&ids, &Output::dense(&out.rows, OutputType::F16, tokens));
    assert!(matches!(error, Error::Output { .. }), "{error}");
    let error = refuse(&ids, &Output::mx(&out.rows, &out.rows, tokens));
    assert!(matches!(error, Error::Output { .. }), "{error}");
    let error = refuse(&ids, &Output::packed(part(&out.rows, 1)));
    assert!(matches!(error, Error::TooSmall { .. }), "{error}");
    let error = refuse(&ids, &Output::dense(&out.rows, OutputType::Bf16, tokens - 1));
    assert!(matches!(error, Error::Capacity { found: 10, capacity: 9, .. }), "{error}");
    let error = refuse(&view(&memory, IdType::I32, 5, 4, 4), &out.output());
    assert!(matches!(error, Error::Ids(_)), "{error}");
    let error = Ids::new(&memory, IdShape::dense(IdType::I64, tokens, layers, columns)).unwrap_err();
    assert!(matches!(error, Error::Ids(_)), "{error}");
    assert!(matches!(Lookup::new(&[], 1, &LookupOptions::default()), Err(Error::Invalid { .. })));
    assert!(out.rows.read::<u8>(0, out.rows.bytes()).unwrap().iter().all(|&byte| byte == POISON));
    run(&mut bench.lookup, &view(&memory, IdType::I32, 0, layers, columns), &out.output()).unwrap();
    run(&mut bench.lookup, &ids, &out.output()).unwrap();
}
