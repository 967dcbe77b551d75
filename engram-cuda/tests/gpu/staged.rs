//! Tables that threads read, alone and beside a kernel.

use crate::common::*;
use engram_core::{Batch, Hasher as HostHasher, LayerLayout, Layout};
use engram_cuda::{
    DeviceBatch, DeviceBuffer, Error, Hasher, HostIds, IdShape, IdType, Ids, Lookup, LookupOptions, Measured,
    Placement, RowForm, Stream, Table,
};
use engram_ple::{FormatKind, OutputType, SourceError, SynthSource, TableFormat, TableSource};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PLACEMENTS: [Placement; 2] = [Placement::Staged, Placement::Auto];

fn options(max_tokens: usize) -> LookupOptions {
    let mut options = LookupOptions::default();
    options.max_tokens = max_tokens;
    options
}

#[test]
#[ignore = "needs a CUDA device"]
fn batches_of_any_size_with_and_without_repeats() {
    let mut random = Random(1);
    for (kind, width) in [(FormatKind::E4m3E8m0x32, 256), (FormatKind::E4m3Global, 160), (FormatKind::Bf16, 37)] {
        let format = format(kind, width);
        let (rows, layers, columns) = (60_000, 2, 6);
        for placement in PLACEMENTS {
            let mut bench = bench_with(&format, rows, layers, columns, placement, &options(3000));
            for round in 0..30 {
                let tokens = if round == 0 { 3000 } else { 1 + usize::try_from(random.below(3000)).unwrap() };
                // Some batches draw from few rows, so they repeat; some batches come with 64-bit ids.
                let variety = if random.below(2) == 0 { 40 } else { rows };
                let ids = random.ids(tokens * layers * columns, variety);
                let forms = forms(kind);
                let form = forms[round % forms.len()];
                let out = poisoned(&format, layers, columns, form, tokens + 9);
                let expected = bench.expected(&ids, form, tokens + 9, tokens + 5, POISON);
                let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
                let (narrow, wide) = (upload(&ids), DeviceBuffer::from_slice(device(), &wide).unwrap());
                let view = if round % 3 == 0 {
                    view(&wide, IdType::I64, tokens, layers, columns)
                } else {
                    view(&narrow, IdType::I32, tokens, layers, columns)
                };
                run(&mut bench.lookup, &view, &out.output().padded_to(tokens + 5)).unwrap();
                out.assert(&expected);
            }
        }
    }
}

/// An Engram layout over tables of `rows` rows.
fn layout(layers: usize, orders: usize, heads: usize, size: u32) -> Layout {
    let sizes: Vec<i64> = (0..orders * heads).map(|column| i64::from(size) + i64::try_from(column).unwrap()).collect();
    let offsets: Vec<i64> = sizes.iter().scan(0, |next, &size| Some(std::mem::replace(next, *next + size))).collect();
    let rows = u32::try_from(sizes.iter().sum::<i64>()).unwrap();
    let layer = |number: usize| {
        let multipliers: Vec<i64> =
            (0..=orders).map(|place| 1_000_003 * i64::try_from(number * 8 + place).unwrap() * 2 + 1).collect();
        LayerLayout::from_constants(u32::try_from(number).unwrap(), &multipliers, &sizes, &offsets, rows).unwrap()
    };
    Layout::from_layers(engram_core::Family::Engram, orders + 1, heads, 4096, (0..layers).map(layer).collect()).unwrap()
}

#[test]
#[ignore = "needs a CUDA device"]
fn repeated_ngrams_are_found_by_their_mixes() {
    let (layers, orders, heads) = (2, 3, 4);
    let columns = orders * heads;
    let layout = layout(layers, orders, heads, 5003);
    let rows = u64::from(layout.layers()[0].total_rows());
    let format = format(FormatKind::E4m3E8m0x32, 256);
    let hasher = Hasher::new(device(), &layout, 7).unwrap();
    let host = HostHasher::new(&layout, 7).unwrap();
    let mut random = Random(2);
    for placement in PLACEMENTS {
        let mut options = options(2000);
        options.heads = Some(heads);
        let mut bench = bench_with(&format, rows, layers, columns, placement, &options);
        let stream = Stream::new(device()).unwrap();
        for vocabulary in [20u64, 3, 4096] {
            let len = 1800;
            let tokens: Vec<i32> = (0..len)
                .map(|_| if random.below(30) == 0 { -1 } else { i32::try_from(random.below(vocabulary)).unwrap() })
                .collect();
            // The last tokens belong to no request.
            let starts = [0, 700, 1790];
            let history = vec![-2; 2 * orders];
            let (mut ids, mut mixes) = (vec![0; len * layers * columns], vec![0; len * layers * orders]);
            host.ids_and_mixes(&Batch { tokens: &tokens, starts: &starts, history: &history }, &mut ids, &mut mixes)
                .unwrap();
            let (token_memory, start_memory, history_memory) = (upload(&tokens), upload(&starts), upload(&history));
            let id_memory = DeviceBuffer::new(device(), ids.len() * 4).unwrap();
            let mix_memory = DeviceBuffer::new(device(), mixes.len() * 8).unwrap();
            let batch = DeviceBatch {
                tokens: (&token_memory).into(),
                len,
                starts: (&start_memory).into(),
                requests: 2,
                history: (&history_memory).into(),
            };
            for form in forms(FormatKind::E4m3E8m0x32) {
                let out = poisoned(&format, layers, columns, form, len);
                hasher.ids(&batch, (&id_memory).into(), Some((&mix_memory).into()), stream.as_ref()).unwrap();
                let view = view(&id_memory, IdType::I32, len, layers, columns).with_mixes(&mix_memory, layers * orders);
                bench.lookup.run(&view, &out.output(), stream.as_ref()).unwrap();
                stream.synchronize().unwrap();
                out.assert(&bench.expected(&ids, form, len, len, POISON));
                // One layer by itself, the second one.
                let out = poisoned(&format, 1, columns, RowForm::Packed, len);
                let shape = IdShape { first_layer: 1, layers: 1, ..*view.shape() };
                let one = Ids::new(&id_memory, shape).unwrap().with_mixes(&mix_memory, layers * orders);
                bench.lookup.run(&one, &out.output(), stream.as_ref()).unwrap();
                stream.synchronize().unwrap();
                let seen: Vec<i32> = ids.chunks(layers * columns).flat_map(|ids| ids[columns..].to_vec()).collect();
                out.assert(&reference(&bench.layers()[1..], &seen, columns, RowForm::Packed, (len, len), POISON));
            }
            if placement == Placement::Staged {
                let share = bench.lookup.distinct_share().unwrap();
                assert_eq!(share < 0.9, vocabulary < 100, "{share} distinct of {vocabulary} tokens");
                // Ids that are on the host.
                let out = poisoned(&format, layers, columns, RowForm::Packed, len);
                for mixes in [None, Some(&mixes[..])] {
                    let host_ids = HostIds { ids: &ids, mixes, tokens: len };
                    bench.lookup.run_host(&host_ids, &out.output(), stream.as_ref()).unwrap();
                    stream.synchronize().unwrap();
                    out.assert(&bench.expected(&ids, RowForm::Packed, len, len, POISON));
                    out.poison();
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_staged_lookup_sees_new_ids_and_is_never_waited_for() {
    let mut random = Random(3);
    let format = format(FormatKind::E4m3Global, 160);
    let (rows, layers, columns, tokens) = (100_000, 1, 16, 1500);
    for placement in PLACEMENTS {
        let mut bench = bench_with(&format, rows, layers, columns, placement, &options(tokens));
        let memory = upload(&vec![0; tokens * columns]);
        let form = RowForm::Dense(OutputType::Bf16);
        let out = poisoned(&format, layers, columns, form, tokens);
        let stream = Stream::new(device()).unwrap();
        scratch();
        let ids_view = view(&memory, IdType::I32, tokens, layers, columns);
        let mut graph = stream.capture(|stream| bench.lookup.run(&ids_view, &out.output(), stream)).unwrap();
        for round in 0..6 {
            let ids = random.ids(tokens * columns, if round % 2 == 0 { rows } else { 50 });
            memory.write(0, &ids).unwrap();
            out.poison();
            delay(stream.as_ref());
            let start = Instant::now();
            // SAFETY: all that the graph uses lives.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
            assert!(!stream.as_ref().is_idle(device()).unwrap(), "the launch waited ({:?})", start.elapsed());
            stream.synchronize().unwrap();
            out.assert(&bench.expected(&ids, form, tokens, tokens, POISON));
        }
        // Eager calls return while the stream is busy, and follow each other on two streams.
        let other = Stream::new(device()).unwrap();
        delay(stream.as_ref());
        let ids = random.ids(tokens * columns, rows);
        memory.write(0, &ids).unwrap();
        let second = poisoned(&format, layers, columns, form, tokens);
        bench.lookup.run(&ids_view, &out.output(), stream.as_ref()).unwrap();
        bench.lookup.run(&ids_view, &second.output(), other.as_ref()).unwrap();
        assert!(!stream.as_ref().is_idle(device()).unwrap());
        other.synchronize().unwrap();
        for out in [&out, &second] {
            out.assert(&bench.expected(&ids, form, tokens, tokens, POISON));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn two_staged_lookups_run_side_by_side() {
    let format = format(FormatKind::E4m3E8m0x32, 256);
    let (rows, columns, tokens) = (50_000u64, 8, 1000);
    let source = SynthSource::new(format.clone(), 4, 0, rows);
    let table = Table::load(device(), &source, 0..rows, Placement::Staged).unwrap();
    let mut random = Random(4);
    let mut lanes: Vec<_> = (0..3)
        .map(|_| {
            let lookup = Lookup::new(std::slice::from_ref(&table), columns, &options(tokens)).unwrap();
            let ids = random.ids(tokens * columns, rows);
            let out = poisoned(&format, 1, columns, RowForm::Packed, tokens);
            (lookup, upload(&ids), ids, out, Stream::new(device()).unwrap())
        })
        .collect();
    for _ in 0..50 {
        for (lookup, memory, _, out, stream) in &mut lanes {
            lookup.run(&view(memory, IdType::I32, tokens, 1, columns), &out.output(), stream.as_ref()).unwrap();
        }
    }
    for (lookup, _, ids, out, stream) in lanes {
        // Dropped while it may still be running.
        drop(lookup);
        stream.synchronize().unwrap();
        out.assert(&reference(&[(&source, 0..rows)], &ids, columns, RowForm::Packed, (tokens, tokens), POISON));
    }
}

/// A source that can be told to fail, or to take its time.
struct Moody {
    inner: SynthSource,
    broken: AtomicBool,
    slow: AtomicBool,
}

impl TableSource for Moody {
    fn format(&self) -> &TableFormat {
        self.inner.format()
    }

    fn rows(&self) -> u64 {
        self.inner.rows()
    }

    fn read_range(&self, rows: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(SourceError::read(rows, "the disk is gone"));
        }
        if self.slow.swap(false, Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(400));
        }
        self.inner.read_range(rows, out)
    }
}

fn moody(format: &TableFormat) -> Arc<Moody> {
    let inner = SynthSource::new(format.clone(), 4, 0, 10_000);
    Arc::new(Moody { inner, broken: AtomicBool::new(false), slow: AtomicBool::new(false) })
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_are_read_where_a_source_has_them_and_its_failure_is_told() {
    let format = format(FormatKind::E4m3E8m0x32, 64);
    let source = moody(&format);
    let table = Table::over(device(), source.clone(), 2000..9000).unwrap();
    assert_eq!((table.placement(), table.is_free_of_nan()), (Placement::Staged, false));
    let mut lookup = Lookup::new(&[table], 4, &options(100)).unwrap();
    let ids = Random(5).ids(400, 10_000);
    let memory = upload(&ids);
    let out = poisoned(&format, 1, 4, RowForm::Packed, 100);
    let ids_view = view(&memory, IdType::I32, 100, 1, 4);
    let right = reference(&[(&source.inner, 2000..9000)], &ids, 4, RowForm::Packed, (100, 100), POISON);
    run(&mut lookup, &ids_view, &out.output()).unwrap();
    out.assert(&right);
    source.broken.store(true, Ordering::Relaxed);
    run(&mut lookup, &ids_view, &out.output()).unwrap();
    assert!(out.rows.read::<u8>(0, out.rows.bytes()).unwrap().iter().all(|&byte| byte == 0));
    let error = run(&mut lookup, &ids_view, &out.output()).unwrap_err();
    assert!(matches!(error, Error::Gather(_)) && error.to_string().contains("disk is gone"), "{error}");
    source.broken.store(false, Ordering::Relaxed);
    run(&mut lookup, &ids_view, &out.output()).unwrap();
    out.assert(&right);
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_staged_table_sleeps_and_wakes() {
    let format = format(FormatKind::Bf16, 160);
    let source = SynthSource::new(format.clone(), 3, 0, 20_000);
    for placement in PLACEMENTS {
        let table = Table::load(device(), &source, 0..20_000, placement).unwrap();
        let mut lookup = Lookup::new(std::slice::from_ref(&table), 4, &options(6000)).unwrap();
        let ids = Random(8).ids(24_000, 20_000);
        let memory = upload(&ids);
        let out = poisoned(&format, 1, 4, RowForm::Packed, 6000);
        let ids_view = view(&memory, IdType::I32, 6000, 1, 4);
        let right = reference(&[(&source, 0..20_000)], &ids, 4, RowForm::Packed, (6000, 6000), POISON);
        let stream = Stream::new(device()).unwrap();
        let mut graph = stream.capture(|stream| lookup.run(&ids_view, &out.output(), stream)).unwrap();
        for _ in 0..2 {
            out.poison();
            // SAFETY: all that the graph uses lives.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
            table.sleep().unwrap();
            // The launch was before.
            out.assert(&right);
            assert!(matches!(lookup.run(&ids_view, &out.output(), stream.as_ref()), Err(Error::Asleep)));
            assert!(matches!(lookup.check(), Err(Error::Asleep)));
            // SAFETY: as above.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
            stream.synchronize().unwrap();
            assert!(out.rows.read::<u8>(0, out.rows.bytes()).unwrap().iter().all(|&byte| byte == 0));
            table.wake(&source).unwrap();
            // The replay was asked for rows that were not there; that is told once.
            let _ = lookup.check();
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn auto_shows_its_calibration_and_stays_within_its_time() {
    let format = format(FormatKind::E4m3Global, 256);
    let rows = 4_000_000;
    let source = SynthSource::new(format, 3, 0, rows);
    let table = Table::load(device(), &source, 0..rows, Placement::Auto).unwrap();
    let plain = Instant::now();
    drop(
        Lookup::new(&[Table::load(device(), &source, 0..100, Placement::Staged).unwrap()], 16, &options(8192)).unwrap(),
    );
    let plain = plain.elapsed();
    let start = Instant::now();
    let lookup = Lookup::new(&[table], 16, &options(8192)).unwrap();
    let took = start.elapsed().saturating_sub(plain);
    assert!(took < Duration::from_millis(200), "{took:?}");
    let crossover = lookup.crossover().unwrap();
    println!("calibrated in {took:?} with {:?} threads: {crossover:?}", lookup.threads());
    assert!(crossover.measured.len() >= 4);
    let times = |m: &Measured| {
        [m.kernel_us, m.again_us, m.staged_us]
            .into_iter()
            .chain(m.shared_us.iter().map(|(_, us)| *us))
            .collect::<Vec<_>>()
    };
    assert!(crossover.measured.iter().all(|m| times(m).len() >= 5 && times(m).into_iter().all(|us| us > 0.0)));
}

#[test]
#[ignore = "needs a CUDA device"]
fn staged_refusals() {
    let format = format(FormatKind::Bf16, 32);
    let mut bench = bench_with(&format, 100, 1, 4, Placement::Staged, &options(10));
    let memory = upload(&[0; 80]);
    let out = poisoned(&format, 1, 4, RowForm::Packed, 20);
    let error = run(&mut bench.lookup, &view(&memory, IdType::I32, 11, 1, 4), &out.output()).unwrap_err();
    assert!(matches!(error, Error::Capacity { found: 11, capacity: 10, .. }), "{error}");
    let mixes = DeviceBuffer::from_slice(device(), &[0i64; 40]).unwrap();
    let error =
        run(&mut bench.lookup, &view(&memory, IdType::I32, 10, 1, 4).with_mixes(&mixes, 1), &out.output()).unwrap_err();
    assert!(error.to_string().contains("heads"), "{error}");
    let host = HostIds { ids: &[0; 39], mixes: None, tokens: 10 };
    let stream = Stream::new(device()).unwrap();
    let error = bench.lookup.run_host(&host, &out.output(), stream.as_ref()).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let host = HostIds { ids: &[0; 40], mixes: None, tokens: 10 };
    let error = stream.capture(|stream| bench.lookup.run_host(&host, &out.output(), stream)).unwrap_err();
    assert!(matches!(error, Error::Capturing { .. }), "{error}");
    scratch();
    delay(stream.as_ref());
    for _ in 0..4 {
        bench.lookup.run_host(&host, &out.output(), stream.as_ref()).unwrap();
    }
    let error = bench.lookup.run_host(&host, &out.output(), stream.as_ref()).unwrap_err();
    assert!(matches!(error, Error::Capacity { capacity: 4, .. }), "{error}");
    stream.synchronize().unwrap();
    bench.lookup.run_host(&host, &out.output(), stream.as_ref()).unwrap();
    let pinned = Table::load(device(), &SynthSource::new(format.clone(), 1, 0, 10), 0..10, Placement::Pinned).unwrap();
    let staged = Table::load(device(), &SynthSource::new(format, 1, 0, 10), 0..10, Placement::Staged).unwrap();
    assert!(matches!(Lookup::new(&[pinned, staged], 4, &options(10)), Err(Error::Invalid { .. })));
}

#[test]
#[ignore = "needs a CUDA device"]
fn graphs_of_one_lookup_that_overlap_are_told_and_leave_no_trace() {
    let format = format(FormatKind::E4m3Global, 256);
    let (rows, columns, tokens) = (400_000u64, 16, 6000);
    let mut bench = bench_with(&format, rows, 1, columns, Placement::Staged, &options(tokens));
    let ids = Random(9).ids(tokens * columns, rows);
    let memory = upload(&ids);
    let streams = [Stream::new(device()).unwrap(), Stream::new(device()).unwrap()];
    let outs = [0, 1].map(|_| poisoned(&format, 1, columns, RowForm::Packed, tokens));
    let ids_view = view(&memory, IdType::I32, tokens, 1, columns);
    let mut graphs =
        [0, 1].map(|k| streams[k].capture(|stream| bench.lookup.run(&ids_view, &outs[k].output(), stream)).unwrap());
    for _ in 0..5 {
        for (graph, stream) in graphs.iter_mut().zip(&streams) {
            // SAFETY: all that the graphs use lives.
            unsafe { graph.launch(stream.as_ref()) }.unwrap();
        }
    }
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    let error = bench.lookup.check().unwrap_err();
    assert!(error.to_string().contains("overlapped"), "{error}");
    for out in &outs {
        out.poison();
        run(&mut bench.lookup, &ids_view, &out.output()).unwrap();
        out.assert(&bench.expected(&ids, RowForm::Packed, tokens, tokens, POISON));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn threads_that_are_late_cost_rows_and_are_told_but_nothing_hangs() {
    let format = format(FormatKind::Bf16, 64);
    let source = moody(&format);
    let mut options = options(200);
    options.deadline = Duration::from_millis(100);
    let table = Table::over(device(), source.clone(), 0..10_000).unwrap();
    let mut lookup = Lookup::new(&[table], 4, &options).unwrap();
    let ids = Random(10).ids(800, 10_000);
    let memory = upload(&ids);
    let out = poisoned(&format, 1, 4, RowForm::Packed, 200);
    let ids_view = view(&memory, IdType::I32, 200, 1, 4);
    let right = reference(&[(&source.inner, 0..10_000)], &ids, 4, RowForm::Packed, (200, 200), POISON);
    for _ in 0..2 {
        run(&mut lookup, &ids_view, &out.output()).unwrap();
        out.assert(&right);
        source.slow.store(true, Ordering::Relaxed);
        let start = Instant::now();
        run(&mut lookup, &ids_view, &out.output()).unwrap();
        assert!(start.elapsed() < Duration::from_millis(350), "{:?}", start.elapsed());
        assert!(out.rows.read::<u8>(0, out.rows.bytes()).unwrap().iter().all(|&byte| byte == 0));
        // The next run tells, when the stream reaches it; the threads have come back by then.
        std::thread::sleep(Duration::from_millis(500));
        run(&mut lookup, &ids_view, &out.output()).unwrap();
        out.assert(&right);
        let error = lookup.check().unwrap_err();
        assert!(matches!(error, Error::Gather(engram_cuda::GatherError::Late)), "{error}");
    }
}
