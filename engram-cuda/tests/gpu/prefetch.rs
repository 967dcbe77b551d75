//! Prefetching: three modes, three dependencies, every refusal.

use crate::common::*;
use engram_cuda::{
    Dependency, DeviceBuffer, Error, Graph, IdShape, IdType, Ids, LookupOptions, Output, Placement, PrefetchError,
    PrefetchOptions, Prefetcher, RowForm, Stream, StreamRef,
};
use engram_ple::{FormatKind, OutputType, SynthSource, TableFormat, TableSource};

const FORM: RowForm = RowForm::Dense(OutputType::Bf16);

/// A prefetcher over tables of a few layers, and everything around it.
struct Round {
    format: TableFormat,
    sources: Vec<SynthSource>,
    prefetcher: Prefetcher,
    ids: DeviceBuffer,
    fresh: DeviceBuffer,
    outs: Vec<Poisoned>,
    tokens: usize,
    stream: Stream,
    rows: u64,
}

const LAYERS: usize = 3;
const COLUMNS: usize = 8;

impl Round {
    fn new(placement: Placement, tokens: usize, rows: u64) -> Self {
        scratch();
        let format = format(FormatKind::E4m3Global, 160);
        let mut options = LookupOptions::default();
        options.multiprocessors = Some(20);
        let bench = bench_with(&format, rows, LAYERS, COLUMNS, placement, &options);
        let stream = Stream::new(device()).unwrap();
        let prefetcher = Prefetcher::new(bench.lookup, PrefetchOptions::new(tokens), stream.as_ref()).unwrap();
        assert_eq!(prefetcher.supports_prefetch(), placement != Placement::Device);
        assert_eq!(prefetcher.capacity(), tokens);
        Self {
            ids: upload(&vec![-1; tokens * LAYERS * COLUMNS]),
            fresh: upload(&vec![-1; tokens * LAYERS * COLUMNS]),
            outs: (0..LAYERS).map(|_| poisoned(&format, 1, COLUMNS, FORM, tokens)).collect(),
            sources: bench.sources,
            format,
            prefetcher,
            tokens,
            stream,
            rows,
        }
    }

    fn random_ids(&self, random: &mut Random) -> Vec<i32> {
        random.ids(self.tokens * LAYERS * COLUMNS, self.rows)
    }

    /// The ids come into place on the stream, after a delay.
    fn produce(&self, stream: StreamRef<'_>) -> Result<(), Error> {
        delay(stream);
        self.ids.copy_from(&self.fresh, stream)
    }

    fn start(&mut self, stream: StreamRef<'_>) -> Result<(), Error> {
        self.prefetcher.start(&view(&self.ids, IdType::I32, self.tokens, LAYERS, COLUMNS), stream)
    }

    fn finish(&mut self, layer: usize, stream: StreamRef<'_>) -> Result<(), Error> {
        let ids = view(&self.ids, IdType::I32, self.tokens, LAYERS, COLUMNS);
        self.prefetcher.finish(layer, &ids, &self.outs[layer].output(), stream)
    }

    fn is_right(&self, ids: &[i32]) -> bool {
        (0..LAYERS).all(|layer| {
            let seen: Vec<i32> = ids
                .chunks(LAYERS * COLUMNS)
                .flat_map(|ids| ids[layer * COLUMNS..(layer + 1) * COLUMNS].to_vec())
                .collect();
            let source = &self.sources[layer];
            let expected =
                reference(&[(source, 0..source.rows())], &seen, COLUMNS, FORM, (self.tokens, self.tokens), POISON);
            self.outs[layer].rows.read::<u8>(0, expected.rows.len()).unwrap() == expected.rows
        })
    }

    fn step(&mut self, ids: &[i32]) -> Result<bool, Error> {
        self.fresh.write(0, ids)?;
        self.outs.iter().for_each(Poisoned::poison);
        let stream = Stream::new(device())?;
        self.produce(stream.as_ref())?;
        self.start(stream.as_ref())?;
        // The ids may go as soon as the start is enqueued (a table in device memory reads them at the finish).
        if self.prefetcher.supports_prefetch() {
            self.ids.fill(0, stream.as_ref())?;
        }
        for layer in 0..LAYERS {
            self.finish(layer, stream.as_ref())?;
        }
        stream.synchronize()?;
        device().synchronize()?;
        Ok(self.is_right(ids))
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn eager_rounds_are_right_wherever_the_table_is() {
    for placement in [Placement::Device, Placement::Pinned, Placement::Staged, Placement::Auto] {
        let mut round = Round::new(placement, 200, 50_000);
        let mut random = Random(1);
        for _ in 0..5 {
            let ids = round.random_ids(&mut random);
            assert!(round.step(&ids).unwrap());
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn each_dependency_is_needed() {
    // Each layer's rows take the side stream about a millisecond.
    let mut round = Round::new(Placement::Pinned, 4096, 2_000_000);
    let mut random = Random(2);
    for omitted in [None, Some(Dependency::Producer), Some(Dependency::IdLifetime), Some(Dependency::Consumer), None] {
        round.prefetcher.omit(omitted);
        let rights: Vec<bool> = (0..4)
            .map(|_| {
                let ids = round.random_ids(&mut random);
                round.step(&ids).unwrap()
            })
            .collect();
        match omitted {
            None => assert_eq!(rights, [true; 4]),
            Some(_) => assert!(rights.contains(&false), "without {omitted:?} nothing went wrong"),
        }
    }
}

fn launch(graph: &mut Graph, stream: &Stream) {
    // SAFETY: all that the graphs of these tests use lives.
    unsafe { graph.launch(stream.as_ref()) }.unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn both_in_one_graph_whose_replays_see_new_ids() {
    let mut random = Random(3);
    for placement in [Placement::Device, Placement::Pinned, Placement::Staged] {
        // The first start ever is a captured one.
        let mut round = Round::new(placement, 64, 10_000);
        let stream = Stream::new(device()).unwrap();
        let mut graph = stream
            .capture(|stream| {
                for _ in 0..2 {
                    round.produce(stream)?;
                    round.start(stream)?;
                    for layer in 0..LAYERS {
                        round.finish(layer, stream)?;
                    }
                }
                Ok(())
            })
            .unwrap();
        for _ in 0..5 {
            let ids = round.random_ids(&mut random);
            round.fresh.write(0, &ids).unwrap();
            round.outs.iter().for_each(Poisoned::poison);
            launch(&mut graph, &stream);
            stream.synchronize().unwrap();
            assert!(round.is_right(&ids));
        }
        let ids = round.random_ids(&mut random);
        assert!(round.step(&ids).unwrap(), "an eager round after captured ones");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn eager_calls_between_graph_segments() {
    let mut random = Random(4);
    let mut round = Round::new(Placement::Pinned, 64, 10_000);
    let stream = Stream::new(device()).unwrap();
    let mut before = stream.capture(|stream| round.produce(stream)).unwrap();
    let mut between = stream
        .capture(|stream| {
            delay(stream);
            Ok(())
        })
        .unwrap();
    for _ in 0..5 {
        let ids = round.random_ids(&mut random);
        round.fresh.write(0, &ids).unwrap();
        round.outs.iter().for_each(Poisoned::poison);
        launch(&mut before, &stream);
        round.start(stream.as_ref()).unwrap();
        for layer in 0..LAYERS {
            launch(&mut between, &stream);
            round.finish(layer, stream.as_ref()).unwrap();
        }
        stream.synchronize().unwrap();
        assert!(round.is_right(&ids));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_are_lent_in_place_and_looked_up_without_a_start() {
    let mut round = Round::new(Placement::Pinned, 32, 1000);
    let ids = round.random_ids(&mut Random(5));
    round.ids.write(0, &ids).unwrap();
    let stream = Stream::new(device()).unwrap();
    let shape = view(&round.ids, IdType::I32, 32, LAYERS, COLUMNS);
    round.prefetcher.start(&shape, stream.as_ref()).unwrap();
    let row_bytes = round.format.row_bytes();
    for layer in 0..LAYERS {
        let lent = round.prefetcher.finish_in_place(layer, &shape, stream.as_ref()).unwrap();
        assert_eq!(lent.bytes(), (32 * COLUMNS * row_bytes) as u64);
    }
    for layer in 0..LAYERS {
        round.prefetcher.lookup(layer, &shape, &round.outs[layer].output(), stream.as_ref()).unwrap();
    }
    stream.synchronize().unwrap();
    assert!(round.is_right(&ids));
    let mut direct = Round::new(Placement::Device, 32, 1000);
    direct.start(stream.as_ref()).unwrap();
    let shape = view(&direct.ids, IdType::I32, 32, LAYERS, COLUMNS);
    assert!(matches!(direct.prefetcher.finish_in_place(0, &shape, stream.as_ref()), Err(Error::Invalid { .. })));
}

#[test]
#[ignore = "needs a CUDA device"]
fn wrong_orders_and_shapes_are_refused_with_their_numbers() {
    let mut round = Round::new(Placement::Pinned, 16, 1000);
    let stream = Stream::new(device()).unwrap();
    let s = stream.as_ref();
    let prefetch = |result: Result<(), Error>| match result.unwrap_err() {
        Error::Prefetch(error) => error,
        error => panic!("{error}"),
    };
    assert_eq!(prefetch(round.finish(1, s)), PrefetchError::NotStarted { layer: 1 });
    round.start(s).unwrap();
    round.finish(1, s).unwrap();
    assert_eq!(prefetch(round.start(s)), PrefetchError::Started { unfinished: 2, layers: 3 });
    assert_eq!(prefetch(round.finish(1, s)), PrefetchError::Finished { layer: 1 });
    round.prefetcher.abandon(s).unwrap();
    assert_eq!(prefetch(round.finish(2, s)), PrefetchError::NotStarted { layer: 2 });

    let many = upload(&vec![0; 17 * LAYERS * COLUMNS]);
    let error = round.prefetcher.start(&view(&many, IdType::I32, 17, LAYERS, COLUMNS), s).unwrap_err();
    assert!(matches!(error, Error::Capacity { found: 17, capacity: 16, .. }), "{error}");
    let error = round.prefetcher.start(&view(&many, IdType::I32, 16, LAYERS - 1, COLUMNS), s).unwrap_err();
    assert!(matches!(error, Error::Ids(_)), "{error}");
    let error = round.prefetcher.start(&view(&many, IdType::I64, 8, LAYERS, COLUMNS), s).unwrap_err();
    assert!(error.to_string().contains("I64"), "{error}");
    let host = vec![0i32; 16 * LAYERS * COLUMNS];
    // SAFETY: the call under test refuses the address before anything reads it.
    let foreign = unsafe { engram_cuda::DeviceView::from_raw(host.as_ptr().expose_provenance() as u64, 1 << 20) };
    let foreign = Ids::new(foreign, IdShape::dense(IdType::I32, 16, LAYERS, COLUMNS)).unwrap();
    let error = round.prefetcher.start(&foreign, s).unwrap_err();
    assert!(matches!(error, Error::WrongDevice { .. }), "{error}");

    round.start(s).unwrap();
    let ids = view(&round.ids, IdType::I32, 16, LAYERS, COLUMNS);
    let out = &round.outs[0].rows;
    let error = round.prefetcher.finish(0, &ids, &Output::dense(out, OutputType::F32, 16), s).unwrap_err();
    assert!(matches!(error, Error::Output { .. }), "{error}");
    for layer in 0..LAYERS {
        round.finish(layer, s).unwrap();
    }
    // No ids, no launch: nothing else changes.
    let none = view(&round.ids, IdType::I32, 0, LAYERS, COLUMNS);
    round.prefetcher.start(&none, s).unwrap();
    for layer in 0..LAYERS {
        round.prefetcher.finish(layer, &none, &round.outs[layer].output(), s).unwrap();
    }
    stream.synchronize().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn captures_that_cannot_work_are_refused_with_the_remedy() {
    let mut round = Round::new(Placement::Pinned, 16, 1000);
    let stream = Stream::new(device()).unwrap();
    let eager = Stream::new(device()).unwrap();

    // Construction inside a capture.
    let lookup = bench(&round.format, 100, LAYERS, COLUMNS, Placement::Pinned).lookup;
    let mut lookup = Some(lookup);
    let error = stream
        .capture(|stream| Prefetcher::new(lookup.take().unwrap(), PrefetchOptions::new(16), stream).map(|_| ()))
        .unwrap_err();
    assert!(matches!(error, Error::Capturing { .. }) && error.to_string().contains("before the capture"), "{error}");

    // A finish outside the capture of its start; then the capture fails as unjoined, and the next start says why.
    let error = stream
        .capture(|stream| {
            round.start(stream)?;
            let error = round.finish(0, eager.as_ref()).unwrap_err();
            assert!(error.to_string().contains("same capture"), "{error}");
            round.finish(0, stream)
        })
        .unwrap_err();
    assert!(error.to_string().contains("UNJOINED"), "{error}");
    let error = round.start(eager.as_ref()).unwrap_err();
    assert!(error.to_string().contains("unjoined"), "{error}");
    let ids = round.random_ids(&mut Random(6));
    assert!(round.step(&ids).unwrap());

    // A finish inside a capture of a start outside it.
    round.start(eager.as_ref()).unwrap();
    stream
        .capture(|stream| {
            let error = round.finish(0, stream).unwrap_err();
            assert!(matches!(error, Error::Prefetch(PrefetchError::OtherScope { .. })), "{error}");
            Ok(())
        })
        .unwrap();
    round.prefetcher.abandon(eager.as_ref()).unwrap();

    // An abandoned start joins its side stream.
    stream
        .capture(|stream| {
            round.start(stream)?;
            round.prefetcher.abandon(stream)
        })
        .unwrap();
    assert!(round.step(&ids).unwrap());
}

#[test]
#[ignore = "needs a CUDA device"]
fn ten_thousand_rounds_with_random_delays() {
    let mut round = Round::new(Placement::Pinned, 4, 1000);
    let mut random = Random(7);
    let all: Vec<Vec<i32>> = (0..16).map(|_| round.random_ids(&mut random)).collect();
    let fresh: Vec<DeviceBuffer> = all.iter().map(|ids| upload(ids)).collect();
    // What each set of ids gives, computed once; a round's outputs are compared on the device by reading them back every so often.
    let streams = [Stream::new(device()).unwrap(), Stream::new(device()).unwrap()];
    let scratch = DeviceBuffer::new(device(), 64 << 20).unwrap();
    for k in 0..10_000u64 {
        let set = usize::try_from(random.below(16)).unwrap();
        // Steps mostly come on one stream; sometimes the other takes over, after the first.
        let stream = &streams[usize::from(k % 97 > 90)];
        if k % 97 == 91 || k % 97 == 0 {
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
        }
        for _ in 0..random.below(3) {
            scratch.fill(1, stream.as_ref()).unwrap();
        }
        round.ids.copy_from(&fresh[set], stream.as_ref()).unwrap();
        round.start(stream.as_ref()).unwrap();
        round.ids.fill(0, stream.as_ref()).unwrap();
        if random.below(4) == 0 {
            scratch.fill(2, stream.as_ref()).unwrap();
        }
        for layer in 0..LAYERS {
            round.finish(layer, stream.as_ref()).unwrap();
        }
        if k % 50 == 0 || random.below(50) == 0 {
            stream.synchronize().unwrap();
            assert!(round.is_right(&all[set]), "round {k}");
        }
    }
    round.stream.synchronize().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn mixes_travel_with_the_ids() {
    let format = format(FormatKind::E4m3Global, 160);
    let (rows, heads, orders, tokens) = (9000u64, 4, 2, 500);
    let mut options = LookupOptions::default();
    options.heads = Some(heads);
    let bench = bench_with(&format, rows, LAYERS, heads * orders, Placement::Staged, &options);
    let sources: Vec<(&dyn TableSource, std::ops::Range<u64>)> =
        bench.sources.iter().map(|s| (s as _, 0..rows)).collect();
    let stream = Stream::new(device()).unwrap();
    let mut random = Random(8);
    // Few n-grams, each with ids and a mix of its own.
    let grams: Vec<u64> = (0..tokens * LAYERS * orders).map(|_| random.below(60)).collect();
    let ids: Vec<i32> = grams
        .iter()
        .flat_map(|gram| (0..heads as u64).map(move |head| i32::try_from(gram * 149 + head).unwrap()))
        .collect();
    let mixes: Vec<i64> = grams.iter().map(|&gram| i64::try_from(gram).unwrap() - 30).collect();
    let (id_memory, mix_memory) = (upload(&ids), DeviceBuffer::from_slice(device(), &mixes).unwrap());
    let mut prefetcher = Prefetcher::new(bench.lookup, PrefetchOptions::new(tokens), stream.as_ref()).unwrap();
    let view = view(&id_memory, IdType::I32, tokens, LAYERS, heads * orders).with_mixes(&mix_memory, LAYERS * orders);
    for _ in 0..3 {
        prefetcher.start(&view, stream.as_ref()).unwrap();
        for layer in 0..LAYERS {
            let out = poisoned(&format, 1, heads * orders, FORM, tokens);
            prefetcher.finish(layer, &view, &out.output(), stream.as_ref()).unwrap();
            stream.synchronize().unwrap();
            let width = heads * orders;
            let seen: Vec<i32> =
                ids.chunks(LAYERS * width).flat_map(|ids| ids[layer * width..(layer + 1) * width].to_vec()).collect();
            out.assert(&reference(&sources[layer..=layer], &seen, width, FORM, (tokens, tokens), POISON));
        }
    }
}
