//! Loading, borrowing, sleeping and waking.

use crate::common::*;
use engram_cuda::{DeviceBuffer, Error, IdType, Lookup, LookupOptions, Placement, Progress, RowForm, Stream, Table};
use engram_ple::{FormatKind, MemorySource, SynthSource, TableFormat, TableSource};

#[test]
#[ignore = "needs a CUDA device"]
fn a_part_is_loaded_with_progress_and_proven_free_of_nan() {
    let format = format(FormatKind::E4m3E8m0x32, 256);
    let source = SynthSource::new(format.clone(), 3, 0, 400_000);
    for placement in [Placement::Device, Placement::Pinned, Placement::Staged] {
        let mut seen: Vec<Progress> = Vec::new();
        let part = 100_000..390_001;
        let table =
            Table::load_with_progress(device(), &source, part.clone(), placement, &mut |p| seen.push(p)).unwrap();
        assert!(table.is_free_of_nan());
        assert_eq!(seen.last(), Some(&Progress { rows_done: 290_001, rows: 290_001 }));
        assert!(seen.len() > 2, "{placement:?}: {} reports", seen.len());
        let ids = [99_999, 100_000, 250_000, 390_000, 390_001];
        let mut lookup = Lookup::new(&[table], 5, &LookupOptions::default()).unwrap();
        let out = poisoned(&format, 1, 5, RowForm::Packed, 1);
        run(&mut lookup, &view(&upload(&ids), IdType::I32, 1, 1, 5), &out.output()).unwrap();
        out.assert(&reference(&[(&source, part)], &ids, 5, RowForm::Packed, (1, 1), POISON));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_nan_code_is_seen_and_impossible_ranges_are_refused() {
    let format = TableFormat::new(FormatKind::E4m3E8m0x32, 32, None).unwrap();
    let mut bytes = vec![0x20; 33 * 1000];
    bytes[33 * 777 + 5] = 0xff;
    let source = MemorySource::new(format, bytes).unwrap();
    let load = |rows| Table::load(device(), &source, rows, Placement::Device);
    assert!(!load(0..1000).unwrap().is_free_of_nan());
    assert!(load(0..777).unwrap().is_free_of_nan());
    assert!(load(500..500).is_ok());
    assert!(matches!(load(0..1001), Err(Error::RowRange { start: 0, end: 1001, rows: 1000 })));
    #[expect(clippy::reversed_empty_ranges, reason = "the case under test")]
    let reversed = 5..4;
    assert!(load(reversed).is_err());
}

#[test]
#[ignore = "needs a CUDA device"]
fn borrowed_scales_must_be_there_and_on_the_device() {
    let format = format(FormatKind::E4m3E8m0x32, 64);
    let memory = DeviceBuffer::new(device(), 10_000).unwrap();
    let host = vec![0u8; 1000];
    let borrow = |scales: Option<u64>| {
        // SAFETY: nothing is looked up.
        unsafe { Table::borrow(device(), format.clone(), memory.address(), scales, 0..100) }
    };
    assert!(matches!(borrow(None), Err(Error::Invalid { .. })));
    let error = borrow(Some(host.as_ptr().expose_provenance() as u64)).unwrap_err();
    assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
    borrow(Some(memory.address() + 6400)).unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_table_sleeps_and_wakes_under_a_captured_lookup() {
    let format = format(FormatKind::E4m3Global, 160);
    let source = SynthSource::new(format.clone(), 3, 0, 200_000);
    for placement in [Placement::Device, Placement::Pinned] {
        let table = Table::load(device(), &source, 0..200_000, placement).unwrap();
        let mut lookup = Lookup::new(std::slice::from_ref(&table), 4, &LookupOptions::default()).unwrap();
        let ids = Random(8).ids(400, 200_000);
        let memory = upload(&ids);
        let out = poisoned(&format, 1, 4, RowForm::Packed, 100);
        let ids_view = view(&memory, IdType::I32, 100, 1, 4);
        let stream = Stream::new(device()).unwrap();
        let mut graph = stream.capture(|stream| lookup.run(&ids_view, &out.output(), stream)).unwrap();
        let expected = reference(&[(&source, 0..200_000)], &ids, 4, RowForm::Packed, (100, 100), POISON);
        for _ in 0..3 {
            // SAFETY: all that the graph uses lives.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
            let (free, _) = device().memory().unwrap();
            table.sleep().unwrap();
            table.sleep().unwrap();
            // The launch was before.
            out.assert(&expected);
            if placement == Placement::Device {
                assert!(device().memory().unwrap().0 >= free + 30_000_000, "memory came back");
            }
            assert!(matches!(lookup.run(&ids_view, &out.output(), stream.as_ref()), Err(Error::Asleep)));
            // SAFETY: as above; while the table sleeps, its entries name no rows.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
            stream.synchronize().unwrap();
            assert!(out.rows.read::<u8>(0, out.rows.bytes()).unwrap().iter().all(|&byte| byte == 0));

            let other =
                SynthSource::new(TableFormat::new(FormatKind::E4m3Global, 160, Some(0.5)).unwrap(), 3, 0, 200_000);
            assert!(matches!(table.wake(&other), Err(Error::FormatMismatch { .. })));
            table.wake(&source).unwrap();
            out.poison();
            run(&mut lookup, &ids_view, &out.output()).unwrap();
            out.assert(&expected);
        }
    }
    let memory = DeviceBuffer::new(device(), 1600).unwrap();
    // SAFETY: the memory outlives the table.
    let borrowed = unsafe { Table::borrow(device(), format, memory.address(), None, 0..10) }.unwrap();
    assert!(matches!(borrowed.sleep(), Err(Error::Invalid { .. })));
    assert_eq!(source.rows(), 200_000);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_promise_to_stay_free_of_nan_is_kept_by_waking() {
    let format = format(FormatKind::E4m3E8m0x32, 64);
    let (rows, row_bytes) = (300_000, format.row_bytes());
    let clean = MemorySource::new(format.clone(), vec![0x11; rows * row_bytes]).unwrap();
    let mut bytes = clean.packed().to_vec();
    bytes[200_000 * row_bytes + 5] = 0x7f;
    let unclean = MemorySource::new(format.clone(), bytes).unwrap();
    let part = 100_000..300_000;
    for placement in [Placement::Device, Placement::Pinned, Placement::Staged] {
        let load = |source: &MemorySource| Table::load(device(), source, part.clone(), placement).unwrap();
        assert!(load(&unclean).keep_free_of_nan().is_none());
        let table = load(&clean);
        let promise = table.keep_free_of_nan().unwrap();
        let (free, _) = device().memory().unwrap();
        table.sleep().unwrap();
        for _ in 0..2 {
            let error = table.wake(&unclean).unwrap_err();
            assert!(matches!(error, Error::Nan { row: 200_000, start: 100_000, end: 300_000 }), "{error}");
            assert!(table.is_asleep() && table.is_free_of_nan());
            if placement == Placement::Device {
                assert!(device().memory().unwrap().0 >= free + 10_000_000, "memory came back");
            }
        }
        table.wake(&clean).unwrap();
        let ids = [100_000, 200_000, 299_999];
        let mut lookup = Lookup::new(std::slice::from_ref(&table), 3, &LookupOptions::default()).unwrap();
        let out = poisoned(&format, 1, 3, RowForm::Packed, 1);
        run(&mut lookup, &view(&upload(&ids), IdType::I32, 1, 1, 3), &out.output()).unwrap();
        out.assert(&reference(&[(&clean, part.clone())], &ids, 3, RowForm::Packed, (1, 1), POISON));

        drop(promise);
        table.sleep().unwrap();
        table.wake(&unclean).unwrap();
        assert!(!table.is_free_of_nan());
    }
}
