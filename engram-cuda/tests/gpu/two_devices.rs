//! Memory, streams and tables of another device than the one that a call is for: refused by name, and nothing is touched.

use crate::common::*;
use engram_core::{Layout, Preset};
use engram_cuda::{
    Device, DeviceBatch, DeviceBuffer, Error, Hasher, IdShape, IdType, Ids, Lookup, LookupOptions, Output, Placement,
    PrefetchOptions, Prefetcher, Stream, Table,
};
use engram_ple::{FormatKind, OutputType, SynthSource};
use std::io::Write as _;

/// The device beside [`device`]; says so where there is none, past the test harness, which keeps what a test that passes prints.
fn other(test: &str) -> Option<Device> {
    if Device::count().unwrap() > 1 {
        return Some(Device::new(1).unwrap());
    }
    let _ = writeln!(std::io::stderr(), "{test} NOT RUN: it needs two GPUs, and one is visible");
    None
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, part: &str) {
    match result.unwrap_err() {
        Error::WrongDevice { what, expected: 0, .. } => assert_eq!(what, part),
        error => panic!("{error}"),
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn another_device_is_refused_by_name() {
    let Some(other) = other("another_device_is_refused_by_name") else { return };
    let (rows, columns, tokens) = (500, 4, 10);
    let format = format(FormatKind::E4m3E8m0x32, 64);
    let source = SynthSource::new(format.clone(), 7, 0, rows);
    let elsewhere = |bytes: usize| DeviceBuffer::new(&other, bytes).unwrap();
    let theirs = Table::load(&other, &source, 0..rows, Placement::Device).unwrap();
    let their_stream = Stream::new(&other).unwrap();
    let (their_ids, their_rows) = (DeviceBuffer::from_slice(&other, &[0i32; 40]).unwrap(), elsewhere(1 << 16));

    // Tables, and the parts of one.
    let ours = Table::load(device(), &source, 0..rows, Placement::Device).unwrap();
    refused(Lookup::new(&[ours, theirs], columns, &LookupOptions::default()), "a table");
    let (values, scales) =
        (DeviceBuffer::new(device(), 64 * 500).unwrap(), DeviceBuffer::new(device(), 2 * 500).unwrap());
    let (their_values, their_scales) = (elsewhere(64 * 500), elsewhere(2 * 500));
    for (values, scales, part) in
        [(&their_values, &scales, "the table's values"), (&values, &their_scales, "the table's scales")]
    {
        let (values, scales) = (values.address(), Some(scales.address()));
        // SAFETY: the call refuses them.
        refused(unsafe { Table::borrow(device(), format.clone(), values, scales, 0..rows) }, part);
    }

    // Whatever a call brings, however the table is read.
    let ids = Random(3).ids(tokens * columns, rows);
    for placement in [Placement::Device, Placement::Pinned, Placement::Staged, Placement::Auto] {
        let mut bench = crate::common::bench(&format, rows, 1, columns, placement);
        let memory = upload(&ids);
        let out = poisoned(&format, 1, columns, engram_cuda::RowForm::Packed, tokens);
        let stream = Stream::new(device()).unwrap();
        let view_of = |memory| Ids::new(memory, IdShape::dense(IdType::I32, tokens, 1, columns)).unwrap();
        let lookup = &mut bench.lookup;
        refused(lookup.run(&view_of(&their_ids), &out.output(), stream.as_ref()), "the ids");
        refused(lookup.run(&view_of(&memory), &Output::packed(&their_rows), stream.as_ref()), "the output");
        let scales = Output::mx(&out.rows, &their_rows, tokens);
        refused(lookup.run(&view_of(&memory), &scales, stream.as_ref()), "the output of MX scales");
        refused(lookup.run(&view_of(&memory), &out.output(), their_stream.as_ref()), "the stream");
        // And it goes on as if nothing had been.
        run(lookup, &view_of(&memory), &out.output()).unwrap();
        out.assert(&bench.expected(&ids, engram_cuda::RowForm::Packed, tokens, tokens, POISON));

        let options = PrefetchOptions::new(tokens);
        let mut prefetcher = Prefetcher::new(bench.lookup, options, stream.as_ref()).unwrap();
        let (dense, ids) = (DeviceBuffer::new(device(), tokens * columns * 128).unwrap(), view_of(&memory));
        refused(prefetcher.start(&view_of(&their_ids), stream.as_ref()), "the ids");
        refused(prefetcher.start(&ids, their_stream.as_ref()), "the stream");
        prefetcher.start(&ids, stream.as_ref()).unwrap();
        let out = |memory| Output::dense(memory, OutputType::Bf16, tokens);
        refused(prefetcher.finish(0, &ids, &out(&their_rows), stream.as_ref()), "the output");
        refused(prefetcher.finish(0, &ids, &out(&dense), their_stream.as_ref()), "the stream");
        prefetcher.finish(0, &ids, &out(&dense), stream.as_ref()).unwrap();
        stream.synchronize().unwrap();
    }

    // The hash.
    let layout = Layout::from_config(&Preset::DeepseekV41Flash.config()).unwrap();
    let hasher = Hasher::new(device(), &layout, 2).unwrap();
    let (starts, history) = (upload(&[0, 1]), upload(&[-2; 3]));
    let mine = upload(&[5]);
    let ids = DeviceBuffer::new(device(), hasher.ids_per_token() * 4).unwrap();
    let stream = Stream::new(device()).unwrap();
    let shape = (&starts, &history);
    refused(hasher.ids(&batch(&their_ids, shape), (&ids).into(), None, stream.as_ref()), "the tokens");
    refused(hasher.ids(&batch(&mine, shape), (&their_rows).into(), None, stream.as_ref()), "the ids");
    refused(hasher.ids(&batch(&mine, shape), (&ids).into(), None, their_stream.as_ref()), "the stream");
    hasher.ids(&batch(&mine, shape), (&ids).into(), None, stream.as_ref()).unwrap();
    stream.synchronize().unwrap();
}

/// One token.
fn batch<'a>(tokens: &'a DeviceBuffer, (starts, history): (&'a DeviceBuffer, &'a DeviceBuffer)) -> DeviceBatch<'a> {
    DeviceBatch { tokens: tokens.into(), len: 1, starts: starts.into(), requests: 1, history: history.into() }
}

/// Both devices at work in one process, each with a context, kernels and threads of its own.
#[test]
#[ignore = "needs a CUDA device"]
fn two_devices_work_side_by_side() {
    let Some(other) = other("two_devices_work_side_by_side") else { return };
    let (rows, columns, tokens) = (40_000, 8, 2000);
    let format = format(FormatKind::E4m3Global, 160);
    let source = SynthSource::new(format.clone(), 9, 0, rows);
    let ids = Random(4).ids(tokens * columns, rows);
    let right = reference(&[(&source, 0..rows)], &ids, columns, engram_cuda::RowForm::Packed, (tokens, tokens), POISON);
    for placement in [Placement::Device, Placement::Pinned, Placement::Staged, Placement::Auto] {
        let mut sides = [device(), &other].map(|device| {
            let table = Table::load(device, &source, 0..rows, placement).unwrap();
            let lookup = Lookup::new(&[table], columns, &LookupOptions::default()).unwrap();
            let out = DeviceBuffer::new(device, tokens * columns * 160).unwrap();
            (lookup, DeviceBuffer::from_slice(device, &ids).unwrap(), out, Stream::new(device).unwrap())
        });
        for _ in 0..10 {
            for (lookup, ids, out, stream) in &mut sides {
                lookup
                    .run(&view(ids, IdType::I32, tokens, 1, columns), &Output::packed(&*out), stream.as_ref())
                    .unwrap();
            }
        }
        for (_, _, out, stream) in &sides {
            stream.synchronize().unwrap();
            assert_same(&out.read::<u8>(0, out.bytes()).unwrap(), &right.rows, "rows");
        }
    }
}
