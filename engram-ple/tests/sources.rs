//! Tables in memory and made-up ones, and the MX form of rows.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, and its numbers are small")]

use engram_ple::{Error, FormatKind, MemorySource, SourceError, SynthSource, TableFormat, TableSource, mx};
use proptest::prelude::*;
use std::error::Error as _;
use std::ops::Range;

fn format(kind: FormatKind, width: usize) -> TableFormat {
    TableFormat::new(kind, width, (kind == FormatKind::E4m3Global).then_some(1.0 / 256.0)).unwrap()
}

fn read(table: &dyn TableSource, rows: Range<u64>) -> Vec<u8> {
    let mut out = vec![0xee; usize::try_from(rows.end - rows.start).unwrap() * table.format().row_bytes()];
    table.read_range(rows, &mut out).unwrap();
    out
}

#[test]
fn a_gather_is_the_rows_in_the_order_of_their_ids() {
    for kind in FormatKind::ALL {
        let synth = SynthSource::new(format(kind, 32), 3, 14, 100);
        let memory = MemorySource::new(synth.format().clone(), read(&synth, 0..100)).unwrap();
        assert_eq!((memory.rows(), memory.format()), (100, synth.format()));
        assert_eq!(memory.packed(), read(&synth, 0..100));
        let ids = [99, -1, 0, 50, 50, -1];
        for table in [&synth as &dyn TableSource, &memory] {
            let row_bytes = table.format().row_bytes();
            let mut found = vec![0xee; ids.len() * row_bytes];
            table.gather(&ids, &mut found).unwrap();
            for (id, row) in ids.into_iter().zip(found.chunks(row_bytes)) {
                match u64::try_from(id) {
                    Ok(id) => assert_eq!(row, read(table, id..id + 1)),
                    Err(_) => assert!(row.iter().all(|&byte| byte == 0)),
                }
            }
            table.gather(&[], &mut []).unwrap();
            table.read_range(100..100, &mut []).unwrap();
        }
    }
}

#[test]
fn requests_that_no_table_can_answer() {
    let table = SynthSource::new(format(FormatKind::E4m3Global, 4), 0, 1, 10);
    let gather = |ids: &[i32], bytes| table.gather(ids, &mut vec![0; bytes]).unwrap_err();
    for id in [-2, 10, i32::MIN, i32::MAX] {
        let error = gather(&[0, -1, id], 12);
        assert!(error.is_out_of_range() && !error.is_length() && !error.is_read(), "{id}");
        assert_eq!(error.to_string(), format!("id {id} at position 2 is no row of 10"));
    }
    assert!(gather(&[0], 3).is_length());
    assert!(gather(&[0], 8).is_length());

    let range = |rows: Range<u64>, bytes| table.read_range(rows, &mut vec![0; bytes]).unwrap_err();
    #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
    let outside = [9..11, 11..11, 0..u64::MAX, 3..2, u64::MAX..u64::MAX];
    for rows in outside {
        let error = range(rows.clone(), 0);
        assert!(error.is_out_of_range(), "{rows:?}");
        assert_eq!(error.rows(), Some(rows));
    }
    assert!(range(0..2, 7).is_length());
    assert_eq!(range(0..2, 9).to_string(), "the rows take 8 bytes, but the output has 9");
}

#[test]
fn a_row_count_whose_bytes_cannot_be_addressed_is_a_length_error() {
    let table = SynthSource::new(format(FormatKind::F32, 64), 0, 1, u64::MAX);
    assert!(table.read_range(0..u64::MAX, &mut [0; 8]).unwrap_err().is_length());
}

#[test]
fn a_source_of_ones_own_reports_its_cause() {
    struct Broken(TableFormat);
    impl TableSource for Broken {
        fn format(&self) -> &TableFormat {
            &self.0
        }
        fn rows(&self) -> u64 {
            8
        }
        fn read_range(&self, rows: Range<u64>, _: &mut [u8]) -> Result<(), SourceError> {
            Err(SourceError::read(rows, std::io::Error::other("disk on fire")))
        }
    }
    let error = Broken(format(FormatKind::Bf16, 1)).gather(&[-1, 7], &mut [0; 4]).unwrap_err();
    assert!(error.is_read());
    assert_eq!(error.rows(), Some(7..8));
    assert_eq!(error.to_string(), "rows 7..8 could not be read");
    assert_eq!(error.source().unwrap().to_string(), "disk on fire");
}

#[test]
fn a_table_in_memory_has_whole_rows() {
    let format = format(FormatKind::E4m3E8m0x32, 256);
    let error = MemorySource::new(format.clone(), vec![0; 265]).unwrap_err();
    assert_eq!(error, Error::PartialRow { bytes: 265, row_bytes: 264 });
    assert_eq!(MemorySource::new(format, Vec::new()).unwrap().rows(), 0);
}

#[test]
fn made_up_rows_are_sane() {
    for kind in FormatKind::ALL {
        for width in [32, 160, 256] {
            let table = SynthSource::new(format(kind, width), 1, 2, 400);
            let rows = read(&table, 0..400);
            assert!(!table.format().has_nan(&rows), "{kind}");
            let mut numbers = vec![0.0; 400 * width];
            table.format().decode_f32(&rows, &mut numbers);
            assert!(numbers.iter().all(|number| number.abs() < 2.0), "{kind}");
            // Not all the same, signs balanced, few zeros.
            let negative = numbers.iter().filter(|&&number| number < 0.0).count();
            assert!((negative * 2).abs_diff(numbers.len()) < numbers.len() / 10, "{kind}: {negative}");
            let zeros = numbers.iter().filter(|&&number| number == 0.0).count();
            assert!(zeros < numbers.len() / 50, "{kind}: {zeros}");
        }
    }
}

#[test]
fn made_up_rows_differ_by_seed_layer_and_row() {
    let table = |seed, layer| read(&SynthSource::new(format(FormatKind::E4m3E8m0x32, 256), seed, layer, 8), 0..8);
    let tables = [table(0, 0), table(0, 1), table(1, 0), table(1, 1), table(u64::MAX, 0)];
    let mut rows: Vec<&[u8]> = tables.iter().flat_map(|table| table.chunks(264)).collect();
    rows.sort_unstable();
    rows.dedup();
    assert_eq!(rows.len(), 5 * 8);
}

#[test]
fn every_value_code_but_nan_turns_up() {
    let rows = read(&SynthSource::new(format(FormatKind::E4m3E8m0x32, 256), 9, 9, 200), 0..200);
    let mut seen = [[false; 256]; 2];
    for row in rows.chunks(264) {
        for (at, &byte) in row.iter().enumerate() {
            seen[usize::from(at >= 256)][usize::from(byte)] = true;
        }
    }
    let missing: Vec<usize> = (0..256).filter(|&code| !seen[0][code]).collect();
    assert_eq!(missing, [0x7f, 0xff]);
    let scales: Vec<usize> = (0..256).filter(|&code| seen[1][code]).collect();
    assert_eq!(scales, (0x70..0x78).collect::<Vec<_>>());
}

proptest! {
    #[test]
    fn made_up_rows_do_not_depend_on_the_range(kind in 0..FormatKind::ALL.len(), start in 0u64..1 << 40, length in 1u64..40, cut in 0u64..40, layer in any::<u32>()) {
        let table = SynthSource::new(format(FormatKind::ALL[kind], 160), 5, layer, 1 << 41);
        let whole = read(&table, start..start + length);
        let cut = start + cut.min(length);
        prop_assert_eq!([read(&table, start..cut), read(&table, cut..start + length)].concat(), whole);
    }

    #[test]
    fn mx_scales_have_a_place_each(tokens in 1usize..300, columns in 1usize..5, groups in 1usize..6) {
        let format = format(FormatKind::E4m3E8m0x32, groups * 32);
        let layout = mx::ScaleLayout::new(&format, columns).unwrap();
        prop_assert_eq!(layout.groups(), columns * groups);
        prop_assert_eq!(layout.tiles(), (columns * groups).div_ceil(4));
        let bytes = layout.layer_bytes(tokens);
        prop_assert_eq!(bytes, tokens.next_multiple_of(128) * (columns * groups).next_multiple_of(4));
        prop_assert_eq!(bytes, mx::layer_bytes(tokens, columns * format.width()));

        let mut layer = vec![0u8; bytes];
        let scale = |token: usize, group: usize| u8::try_from((token * 7 + group) % 254 + 1).unwrap();
        for token in 0..tokens {
            for column in 0..columns {
                let scales: Vec<u8> = (0..groups).map(|group| scale(token, column * groups + group)).collect();
                layout.write_row(&mut layer, token, column, &scales);
            }
        }
        // Tiles of 128 tokens by 4 groups, row by row; inside, [32][4][4] of (token % 32, token / 32, group).
        let mut expected = Vec::with_capacity(bytes);
        for tile in 0..tokens.div_ceil(128) {
            for four in 0..layout.tiles() {
                for low in 0..32 {
                    for high in 0..4 {
                        for group in four * 4..four * 4 + 4 {
                            let token = tile * 128 + high * 32 + low;
                            let inside = token < tokens && group < columns * groups;
                            expected.push(if inside { scale(token, group) } else { 0 });
                        }
                    }
                }
            }
        }
        prop_assert_eq!(layer, expected);
    }
}

#[test]
fn mx_places_by_hand() {
    let layout = mx::ScaleLayout::new(&format(FormatKind::E4m3E8m0x32, 256), 24).unwrap();
    assert_eq!((layout.groups(), layout.tiles()), (192, 48));
    assert_eq!(layout.layer_bytes(1), 128 * 192);
    assert_eq!(layout.layer_bytes(0), 0);
    assert_eq!(layout.offset(0, 0), 0);
    assert_eq!(layout.offset(0, 3), 3);
    assert_eq!(layout.offset(0, 4), 512);
    assert_eq!(layout.offset(1, 0), 16);
    assert_eq!(layout.offset(32, 0), 4);
    assert_eq!(layout.offset(127, 3), 511);
    assert_eq!(layout.offset(128, 0), 48 * 512);
    assert_eq!(layout.offset(130, 191), (48 + 47) * 512 + 32 + 3);
    assert_eq!(mx::scale_offset(130, 191, 48), layout.offset(130, 191));
}

#[test]
fn formats_without_block_scales_have_no_mx_form() {
    for kind in FormatKind::ALL {
        let layout = mx::ScaleLayout::new(&format(kind, 32), 4);
        assert_eq!(layout.is_ok(), kind == FormatKind::E4m3E8m0x32);
        if let Err(error) = layout {
            assert_eq!(error, Error::NoMxScales { kind });
        }
    }
}

#[test]
fn sources_can_be_shared() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Box<dyn TableSource>>();
    shared::<SourceError>();
    shared::<SynthSource>();
}
