//! Exchanges made ahead: three modes, three dependencies, every refusal.

use engram_cuda::raw::{self, Mark};
use engram_cuda::{DeviceBuffer, DeviceView, Graph, IdShape, IdType, Ids, Placement, PrefetchError, Stream, StreamRef};
use engram_ple::mx;
use engram_symm::cuda::{Prefetcher, Push};
use engram_symm::{Algorithm, Error, Group, Output, Result};

use crate::backend::{Flags, Lines, PinnedFlags, ThroughHost, Way, bytes, create, device};
use crate::ranks::{Rank, Spread, start};
use crate::suite::Pace;
use crate::suite::model::{Random, Shape};

/// Pinned tables, and the way to push that is measured.
struct PinnedChosen;

impl Way for PinnedChosen {
    const PUSH: Option<Push> = None;
    const PLACEMENT: Placement = Placement::Pinned;
}

/// A prefetcher, and everything around it.
struct Round {
    group: Group,
    prefetcher: Prefetcher,
    _tables: Vec<DeviceBuffer>,
    shape: Shape,
    stream: Stream,
    /// Tokens of a step, and those that each rank has room for.
    tokens: usize,
    slot: u32,
    algorithm: Algorithm,
    ids: DeviceBuffer,
    fresh: DeviceBuffer,
    /// Of each layer, rows and scales.
    outs: Vec<[DeviceBuffer; 2]>,
    scratch: DeviceBuffer,
}

const POISON: u8 = 0xa5;

/// Memory for each layer's rows and scales, as large as any form needs.
fn outs(shape: &Shape) -> Vec<[DeviceBuffer; 2]> {
    let capacity = shape.capacity as usize;
    let rows = capacity * shape.columns * shape.width * 4;
    let scales = mx::layer_bytes(capacity, shape.columns * shape.width);
    (0..shape.layers).map(|_| [rows, scales].map(|bytes| DeviceBuffer::new(device(), bytes).unwrap())).collect()
}

impl Round {
    fn new<W: Way>(rank: &Rank, shape: Shape) -> Self {
        let mut group = rank.group("prefetch");
        let stream = Stream::new(device()).unwrap();
        let (exchange, tables) = create::<W>(&mut group, &shape, 0, Pace::Steady).unwrap().into_parts();
        let prefetcher = Prefetcher::create(&mut group, exchange, stream.as_ref()).unwrap();
        let capacity = shape.capacity as usize;
        let ids = || DeviceBuffer::from_slice(device(), &vec![-1; capacity * shape.layers * shape.columns]).unwrap();
        Self {
            outs: outs(&shape),
            ids: ids(),
            fresh: ids(),
            scratch: DeviceBuffer::new(device(), 256 << 20).unwrap(),
            tokens: capacity,
            slot: shape.capacity,
            algorithm: Algorithm::Push,
            group,
            prefetcher,
            _tables: tables,
            shape,
            stream,
        }
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    /// New ids for the next step, which only come into place on the stream.
    fn draw(&self, step: u64) -> Vec<i32> {
        let ids = self.shape.ids(self.rank(), step, self.tokens);
        self.fresh.write(0, &ids).unwrap();
        for out in self.outs.iter().flatten() {
            out.fill(POISON, self.stream.as_ref()).unwrap();
        }
        self.stream.synchronize().unwrap();
        ids
    }

    /// Keeps a stream busy for a few milliseconds.
    fn delay(&self, stream: StreamRef<'_>) {
        for byte in 0..40 {
            self.scratch.fill(byte, stream).unwrap();
        }
    }

    fn produce(&self, stream: StreamRef<'_>) {
        self.delay(stream);
        self.ids.copy_from(&self.fresh, stream).unwrap();
    }

    fn start(&mut self, stream: StreamRef<'_>) -> Result<()> {
        let shape = IdShape::dense(IdType::I32, self.tokens, self.shape.layers, self.shape.columns);
        self.prefetcher.start(&Ids::new(&self.ids, shape).unwrap(), self.slot, self.algorithm, stream)
    }

    fn finish(&mut self, layer: usize, stream: StreamRef<'_>) -> Result<()> {
        let [rows, scales] = &self.outs[layer];
        let scales = (self.shape.output == Output::Mx).then(|| scales.into());
        self.prefetcher.finish(layer, rows.into(), scales, stream)
    }

    /// Holds up the exchange of the next start: a plain run comes before it, late.
    fn hold_up(&mut self, stream: StreamRef<'_>) {
        self.delay(stream);
        self.delay(stream);
        let shape = IdShape::dense(IdType::I32, 0, self.shape.layers, self.shape.columns);
        let none = Ids::new(&self.scratch, shape).unwrap();
        let exchange = self.prefetcher.exchange_mut(stream).unwrap();
        exchange.run(&none, 1, Algorithm::Barrier, stream).unwrap();
    }

    /// All of a step; the ids are gone as soon as it has started.
    fn enqueue(&mut self, stream: StreamRef<'_>) {
        self.produce(stream);
        self.start(stream).unwrap();
        self.ids.fill(0xff, stream).unwrap();
        for layer in (0..self.shape.layers).rev() {
            self.finish(layer, stream).unwrap();
        }
    }

    /// Rows and scales of a layer as they have to be, of as many tokens as `ids` have.
    fn expected(&self, ids: &[i32], layer: usize) -> [Vec<u8>; 2] {
        let shape = &self.shape;
        if self.tokens == 0 {
            return [Vec::new(), Vec::new()];
        }
        let mut parts = shape.expected(ids, u32::try_from(self.tokens).unwrap());
        match shape.output {
            Output::Packed => {
                let width = shape.columns * shape.format(layer).row_bytes();
                let token = |token: &[u8]| token[layer * width..(layer + 1) * width].to_vec();
                [parts[0].chunks(shape.layers * width).flat_map(token).collect(), Vec::new()]
            }
            Output::Mx => [2 * layer, 2 * layer + 1].map(|part| std::mem::take(&mut parts[part])),
            _ => [std::mem::take(&mut parts[layer]), Vec::new()],
        }
    }

    fn is_right(&self, ids: &[i32]) -> bool {
        self.stream.synchronize().unwrap();
        device().synchronize().unwrap();
        self.prefetcher.exchange().check().unwrap();
        (0..self.shape.layers).all(|layer| {
            let expected = self.expected(ids, layer);
            self.outs[layer].iter().zip(expected).all(|(out, expected)| {
                // Nothing past them is written.
                let all: Vec<u8> = out.read(0, out.bytes()).unwrap();
                all[..expected.len()] == expected && all[expected.len()..].iter().all(|&byte| byte == POISON)
            })
        })
    }

    fn step(&mut self, step: u64) -> bool {
        let ids = self.draw(step);
        let stream = Stream::new(device()).unwrap();
        self.enqueue(stream.as_ref());
        self.is_right(&ids)
    }

    fn close(mut self) {
        self.prefetcher.into_exchange().close().unwrap();
        self.group.barrier().unwrap();
    }
}

fn everywhere(name: &str, case: fn(&Rank)) {
    for spread in Spread::all(2) {
        start(name, 2, spread, "ahead", |rank| case(&rank));
    }
}

fn shape(output: Output) -> Shape {
    // Two tiles of MX scales, the second one not full.
    let capacity = if output == Output::Mx { 130 } else { 8 };
    Shape { width: 64, layers: 3, capacity, output, ..Shape::new(2, 5) }
}

const BOTH: [Algorithm; 2] = [Algorithm::Barrier, Algorithm::Push];

#[test]
#[ignore = "needs a CUDA device"]
fn eager_rounds_are_right_whatever_the_tables_and_the_rows_are() {
    everywhere("prefetch::eager_rounds_are_right_whatever_the_tables_and_the_rows_are", |rank| {
        for output in [Output::Packed, Output::Bf16, Output::Mx] {
            eager::<Lines>(rank, output);
            eager::<Flags>(rank, output);
            eager::<PinnedFlags>(rank, output);
        }
        eager::<PinnedChosen>(rank, Output::F16);
        eager::<ThroughHost>(rank, Output::Mx);
    });
}

fn eager<W: Way>(rank: &Rank, output: Output) {
    for heads in [true, false] {
        let mut round = Round::new::<W>(rank, Shape { heads, ..shape(output) });
        // Alike on all ranks, but for the tokens.
        let mut random = Random(1);
        for step in 0..6 {
            round.slot = 1 + u32::try_from(random.below(round.shape.capacity as usize)).unwrap();
            let tokens = [0, 1].map(|_| random.below(round.slot as usize + 1));
            round.tokens = if step == 0 { [0, 1][rank.number()] } else { tokens[rank.number()] };
            round.algorithm = BOTH[random.below(2)];
            assert!(round.step(step), "step {step}, {} of {} tokens", round.tokens, round.slot);
        }
        round.close();
    }
}

fn launch(graph: &mut Graph, stream: &Stream) {
    // SAFETY: all that the graphs of these tests use lives.
    unsafe { graph.launch(stream.as_ref()) }.unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn both_in_one_graph_whose_replays_see_new_ids() {
    everywhere("prefetch::both_in_one_graph_whose_replays_see_new_ids", |rank| {
        one_graph::<Lines>(rank, Output::Packed);
        one_graph::<Flags>(rank, Output::Mx);
        one_graph::<PinnedFlags>(rank, Output::Bf16);
    });
}

fn one_graph<W: Way>(rank: &Rank, output: Output) {
    for algorithm in BOTH {
        let mut round = Round::new::<W>(rank, shape(output));
        round.algorithm = algorithm;
        let stream = Stream::new(device()).unwrap();
        // The first start ever is a captured one, of a rank without tokens in the end.
        let mut graph = stream
            .capture(|stream| {
                round.enqueue(stream);
                round.enqueue(stream);
                let all = std::mem::replace(&mut round.tokens, 0);
                round.start(stream).unwrap();
                (0..round.shape.layers).for_each(|layer| round.finish(layer, stream).unwrap());
                round.tokens = all;
                Ok(())
            })
            .unwrap();
        for step in 0..5 {
            let ids = round.draw(step);
            launch(&mut graph, &stream);
            stream.synchronize().unwrap();
            assert!(round.is_right(&ids), "replay {step}");
        }
        assert!(round.step(9), "an eager round after captured ones");
        drop(graph);
        round.close();
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn eager_calls_between_graph_segments() {
    everywhere("prefetch::eager_calls_between_graph_segments", |rank| {
        segments::<Lines>(rank);
        segments::<PinnedFlags>(rank);
    });
}

fn segments<W: Way>(rank: &Rank) {
    let mut round = Round::new::<W>(rank, shape(Output::Bf16));
    let stream = Stream::new(device()).unwrap();
    let capture = |work: &dyn Fn(StreamRef<'_>)| {
        let capture = stream.capture(|stream| {
            work(stream);
            Ok(())
        });
        capture.unwrap()
    };
    let mut before = capture(&|stream| round.produce(stream));
    let mut between = capture(&|stream| round.delay(stream));
    for step in 0..5 {
        round.algorithm = BOTH[usize::from(step % 2 == 0)];
        let ids = round.draw(step);
        launch(&mut before, &stream);
        round.start(stream.as_ref()).unwrap();
        for layer in 0..round.shape.layers {
            launch(&mut between, &stream);
            round.finish(layer, stream.as_ref()).unwrap();
        }
        stream.synchronize().unwrap();
        assert!(round.is_right(&ids), "step {step}");
    }
    round.close();
}

/// Each of them, left out, spoils rows; so no other order hides it.
#[cfg(feature = "fault-injection")]
#[test]
#[ignore = "needs a CUDA device"]
fn each_dependency_is_needed() {
    use engram_cuda::Dependency::{Consumer, IdLifetime, Producer};

    everywhere("prefetch::each_dependency_is_needed", |rank| {
        // Ids that change under way then give other rows, and no rank waits for rows that nobody sends.
        let mut round = Round::new::<Flags>(rank, shape(Output::Bf16));
        round.algorithm = Algorithm::Barrier;
        let other = Stream::new(device()).unwrap();
        let mut step = 0;
        for omitted in [None, Some(Producer), Some(IdLifetime), Some(Consumer), None] {
            round.prefetcher.omit(omitted);
            let rights = [(); 4].map(|()| {
                step += 1;
                let ids = round.draw(step);
                let stream = Stream::new(device()).unwrap();
                if omitted == Some(Producer) {
                    round.enqueue(stream.as_ref());
                } else {
                    round.hold_up(other.as_ref());
                    // The ids are there at once.
                    round.ids.write(0, &ids).unwrap();
                    round.start(stream.as_ref()).unwrap();
                    round.ids.fill(0xff, stream.as_ref()).unwrap();
                    for layer in 0..round.shape.layers {
                        round.finish(layer, stream.as_ref()).unwrap();
                    }
                }
                other.synchronize().unwrap();
                round.is_right(&ids)
            });
            match omitted {
                None => assert_eq!(rights, [true; 4]),
                Some(_) => assert!(rights.contains(&false), "without {omitted:?} nothing went wrong"),
            }
        }
        round.close();
    });
}

/// A step on another stream overwrites neither the ids nor the rows of the last one before they are read.
#[test]
#[ignore = "needs a CUDA device"]
fn steps_on_two_streams_do_not_spoil_each_other() {
    everywhere("prefetch::steps_on_two_streams_do_not_spoil_each_other", |rank| {
        let mut round = Round::new::<Flags>(rank, shape(Output::Bf16));
        let [first, second, other] = [(); 3].map(|()| Stream::new(device()).unwrap());
        let mut spare = (DeviceBuffer::new(device(), round.ids.bytes()).unwrap(), outs(&round.shape));
        let mut turn = |round: &mut Round| {
            std::mem::swap(&mut round.ids, &mut spare.0);
            std::mem::swap(&mut round.outs, &mut spare.1);
        };
        for step in 0..4 {
            round.algorithm = BOTH[usize::from(step % 2 == 0)];
            let ids = [2 * step, 2 * step + 1].map(|step| {
                let ids = round.draw(step);
                round.ids.write(0, &ids).unwrap();
                turn(&mut round);
                ids
            });
            round.hold_up(other.as_ref());
            for stream in [&first, &second] {
                round.start(stream.as_ref()).unwrap();
                for layer in 0..round.shape.layers {
                    round.finish(layer, stream.as_ref()).unwrap();
                    round.delay(stream.as_ref());
                }
                turn(&mut round);
            }
            for stream in [&first, &second, &other] {
                stream.synchronize().unwrap();
            }
            for ids in ids {
                assert!(round.is_right(&ids), "step {step}");
                turn(&mut round);
            }
        }
        round.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_are_lent_abandoned_and_run_between_steps() {
    everywhere("prefetch::rows_are_lent_abandoned_and_run_between_steps", |rank| {
        for output in [Output::Packed, Output::Mx] {
            between_steps(rank, output);
        }
    });
}

fn between_steps(rank: &Rank, output: Output) {
    let mut round = Round::new::<Lines>(rank, shape(output));
    let stream = Stream::new(device()).unwrap();
    for step in 0..6 {
        round.algorithm = BOTH[usize::from(step % 2 == 0)];
        // A start that is given up has taken part: here on one rank only.
        let ids = round.draw(step);
        round.produce(stream.as_ref());
        round.start(stream.as_ref()).unwrap();
        if round.rank() == 0 {
            round.finish(1, stream.as_ref()).unwrap();
            round.prefetcher.abandon(stream.as_ref()).unwrap();
            round.prefetcher.abandon(stream.as_ref()).unwrap();
        } else {
            let error = round.prefetcher.exchange_mut(stream.as_ref()).unwrap_err();
            assert!(matches!(error, Error::Prefetch(PrefetchError::Started { unfinished: 3, layers: 3 })), "{error}");
            for layer in 0..3 {
                round.finish(layer, stream.as_ref()).unwrap();
            }
            stream.synchronize().unwrap();
            assert!(round.is_right(&ids), "step {step}");
        }

        // A run of its own, on another stream.
        let other = Stream::new(device()).unwrap();
        let ids = round.shape.ids(round.rank(), 100 + step, round.tokens);
        let memory = DeviceBuffer::from_slice(device(), &ids).unwrap();
        let view = IdShape::dense(IdType::I32, round.tokens, round.shape.layers, round.shape.columns);
        let (slot, algorithm) = (round.slot, round.algorithm);
        let exchange = round.prefetcher.exchange_mut(other.as_ref()).unwrap();
        exchange.run(&Ids::new(&memory, view).unwrap(), slot, algorithm, other.as_ref()).unwrap();
        other.synchronize().unwrap();
        exchange.check().unwrap();
        assert!(bytes(exchange.config(), &exchange.rows()) == round.shape.expected(&ids, slot), "step {step}");

        // Rows where they are.
        let ids = round.draw(step + 50);
        round.produce(stream.as_ref());
        round.start(stream.as_ref()).unwrap();
        for layer in 0..3 {
            let lent = round.prefetcher.finish_in_place(layer, stream.as_ref()).unwrap();
            stream.synchronize().unwrap();
            let read = |view: DeviceView<'_>| {
                let bytes = usize::try_from(view.bytes()).unwrap();
                // SAFETY: rows of the exchange, which nobody writes before the next start.
                unsafe { raw::read::<u8>(device(), view.address(), bytes) }.unwrap()
            };
            let (rows, scales) = (read(lent.rows), lent.scales.map(read));
            assert_eq!(lent.slot, slot);
            let [expected, expected_scales] = round.expected(&ids, layer);
            let width = expected.len() / round.tokens;
            let pitch = if output == Output::Packed { 3 * width } else { width };
            for (token, expected) in expected.chunks(width).enumerate() {
                assert!(rows[token * pitch..][..width] == *expected, "token {token} of layer {layer}");
            }
            assert!(scales.is_none_or(|scales| scales == expected_scales));
        }
    }
    round.close();
}

#[test]
#[ignore = "needs a CUDA device"]
fn wrong_orders_and_shapes_are_refused_and_leave_the_group_as_it_was() {
    everywhere("prefetch::wrong_orders_and_shapes_are_refused_and_leave_the_group_as_it_was", |rank| {
        let mut round = Round::new::<Lines>(rank, shape(Output::Bf16));
        // The other rank does not even notice.
        if round.rank() == 0 {
            refusals(&mut round);
        }
        for step in 0..2 {
            assert!(round.step(step));
        }
        round.close();
    });
}

fn refusals(round: &mut Round) {
    let stream = Stream::new(device()).unwrap();
    let s = stream.as_ref();
    assert_eq!(round.finish(1, s), Err(PrefetchError::NotStarted { layer: 1 }.into()));
    let (layers, columns) = (round.shape.layers, round.shape.columns);
    let view = |tokens, layers, id_type| IdShape::dense(id_type, tokens, layers, columns);
    let memory = DeviceBuffer::from_slice(device(), &vec![0; 9 * 2 * layers * columns]).unwrap();
    let mut refused = |shape, slot| {
        let ids = Ids::new(&memory, shape).unwrap();
        let error = round.prefetcher.start(&ids, slot, Algorithm::Push, s).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(view(9, layers, IdType::I32), 9).contains("slot is 9"));
    assert!(refused(view(8, layers, IdType::I32), 7).contains("8 tokens"));
    assert!(refused(view(8, layers - 1, IdType::I32), 8).contains("layers"));
    assert!(refused(view(8, layers, IdType::I64), 8).contains("I64"));
    assert!(refused(view(0, layers, IdType::I32), 0).contains("slot is 0"));

    let host = vec![0_i32; 8 * layers * columns];
    // SAFETY: the call under test refuses the address before anything reads it.
    let foreign = unsafe { DeviceView::from_raw(host.as_ptr().expose_provenance() as u64, 1 << 20) };
    let foreign = Ids::new(foreign, view(8, layers, IdType::I32)).unwrap();
    let error = round.prefetcher.start(&foreign, 8, Algorithm::Push, s).unwrap_err();
    assert!(matches!(&error, Error::Cuda { reason, .. } if reason.contains("the ids")), "{error}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn calls_in_a_wrong_order_are_refused_with_the_remedy() {
    start("prefetch::calls_in_a_wrong_order_are_refused_with_the_remedy", 1, Spread::One, "alone", |rank| {
        let shape = Shape { layers: 3, output: Output::Mx, ..Shape::new(1, 5) };
        let mut round = Round::new::<Flags>(&rank, shape);
        orders(&mut round);
        captures(&mut round, &rank);
        assert!(round.step(9));
        round.close();
    });
}

fn orders(round: &mut Round) {
    let stream = Stream::new(device()).unwrap();
    let s = stream.as_ref();
    round.start(s).unwrap();
    round.finish(1, s).unwrap();
    assert_eq!(round.start(s), Err(PrefetchError::Started { unfinished: 2, layers: 3 }.into()));
    assert_eq!(round.finish(1, s), Err(PrefetchError::Finished { layer: 1 }.into()));
    let [rows, scales] = &round.outs[0];
    let (rows, scales): (DeviceView<'_>, DeviceView<'_>) = (rows.into(), scales.into());
    assert_eq!(
        round.prefetcher.finish(3, rows, Some(scales), s),
        Err(PrefetchError::Layer { layer: 3, layers: 3 }.into())
    );
    let none = round.prefetcher.finish(0, rows, None, s).unwrap_err();
    assert!(none.to_string().contains("scales"), "{none}");
    // SAFETY: a part of the memory.
    let short = unsafe { DeviceView::from_raw(rows.address(), 100) };
    let error = round.prefetcher.finish(0, short, Some(scales), s).unwrap_err();
    assert!(error.to_string().contains("100 bytes"), "{error}");
    round.prefetcher.abandon(s).unwrap();
    assert_eq!(round.finish(2, s), Err(PrefetchError::NotStarted { layer: 2 }.into()));
    stream.synchronize().unwrap();
}

fn captures(round: &mut Round, rank: &Rank) {
    let stream = Stream::new(device()).unwrap();
    let eager = Stream::new(device()).unwrap();

    // Creation inside a capture.
    let mut group = rank.group("captured");
    let (exchange, _tables) = create::<Lines>(&mut group, &round.shape, 0, Pace::Steady).unwrap().into_parts();
    let mut exchange = Some(exchange);
    let captured = stream.capture(|stream| {
        let error = Prefetcher::create(&mut group, exchange.take().unwrap(), stream).unwrap_err();
        assert!(matches!(error, Error::Capturing { rank: 0, .. }) && error.to_string().contains("before the capture"));
        Ok(())
    });
    // What was dropped there has waited for the device, which the capture does not survive.
    drop(captured);

    // A finish outside the capture of its start; then the capture fails as unjoined, and the next start says why.
    let error = stream
        .capture(|stream| {
            round.start(stream).unwrap();
            let error = round.finish(0, eager.as_ref()).unwrap_err();
            assert!(error.to_string().contains("same capture"), "{error}");
            Ok(())
        })
        .unwrap_err();
    assert!(error.to_string().contains("UNJOINED"), "{error}");
    let error = round.start(eager.as_ref()).unwrap_err();
    assert!(matches!(error, Error::Prefetch(PrefetchError::CaptureEnded { unfinished: 3, .. })), "{error}");
    assert!(round.step(1));

    // A finish inside a capture of a start outside it.
    round.start(eager.as_ref()).unwrap();
    let captured = stream.capture(|stream| {
        let error = round.finish(0, stream).unwrap_err();
        assert!(matches!(error, Error::Prefetch(PrefetchError::OtherScope { .. })), "{error}");
        Ok(())
    });
    captured.unwrap();
    round.prefetcher.abandon(eager.as_ref()).unwrap();
    // It takes part all the same, and graphs must not overlap with it.
    eager.synchronize().unwrap();

    // An abandoned start joins its side stream.
    let captured = stream.capture(|stream| {
        round.start(stream).unwrap();
        round.prefetcher.abandon(stream).unwrap();
        Ok(())
    });
    let mut graph = captured.unwrap();
    launch(&mut graph, &stream);
    stream.synchronize().unwrap();
    assert!(round.step(2));
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_replayed_asleep_touches_nothing_and_is_right_afterwards() {
    everywhere("prefetch::a_graph_replayed_asleep_touches_nothing_and_is_right_afterwards", |rank| {
        asleep::<Lines>(rank);
        asleep::<ThroughHost>(rank);
    });
}

fn asleep<W: Way>(rank: &Rank) {
    let mut round = Round::new::<W>(rank, shape(Output::Mx));
    let stream = Stream::new(device()).unwrap();
    let captured = stream.capture(|stream| {
        round.enqueue(stream);
        Ok(())
    });
    let mut graph = captured.unwrap();
    for step in 0..3 {
        let ids = round.draw(step);
        launch(&mut graph, &stream);
        stream.synchronize().unwrap();
        assert!(round.is_right(&ids));
        round.prefetcher.exchange_mut(stream.as_ref()).unwrap().sleep().unwrap();
        round.draw(step + 10);
        assert_eq!(round.start(stream.as_ref()), Err(Error::Asleep));
        launch(&mut graph, &stream);
        stream.synchronize().unwrap();
        device().synchronize().unwrap();
        assert_eq!(round.prefetcher.exchange().check(), Err(Error::Asleep));
        for out in round.outs.iter().flatten() {
            assert!(out.read::<u8>(0, out.bytes()).unwrap().iter().all(|&byte| byte == POISON));
        }
        round.prefetcher.exchange_mut(stream.as_ref()).unwrap().wake(&mut round.group).unwrap();
    }
    let ids = round.draw(20);
    launch(&mut graph, &stream);
    stream.synchronize().unwrap();
    assert!(round.is_right(&ids));
    drop(graph);
    round.close();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_thousand_rounds_with_random_delays() {
    let spread = Spread::all(2).pop().unwrap();
    start("prefetch::a_thousand_rounds_with_random_delays", 2, spread, "delays", |rank| {
        let mut round = Round::new::<Lines>(&rank, shape(Output::Packed));
        // Alike on all ranks, and another one for what each does by itself.
        let (mut random, mut own) = (Random(3), Random(rank.number() as u64 + 4));
        let sets: Vec<Vec<i32>> = (0..16).map(|set| round.draw(set)).collect();
        let fresh: Vec<_> = sets.iter().map(|ids| DeviceBuffer::from_slice(device(), ids).unwrap()).collect();
        let streams = [(); 2].map(|()| Stream::new(device()).unwrap());
        let mut done = Mark::new(device()).unwrap();
        for step in 0..1000 {
            let set = own.below(16);
            round.algorithm = BOTH[random.below(2)];
            let stream = streams[own.below(2)].as_ref();
            // The caller keeps the order of its own work, of which the layers' memory is.
            let scope = stream.scope(device()).unwrap();
            done.before(stream, scope).unwrap();
            for _ in 0..own.below(3) {
                round.scratch.fill(1, stream).unwrap();
            }
            if own.below(8) == 0 {
                std::thread::sleep(std::time::Duration::from_micros(own.below(400) as u64));
            }
            round.ids.copy_from(&fresh[set], stream).unwrap();
            round.start(stream).unwrap();
            round.ids.fill(0xff, stream).unwrap();
            for layer in 0..3 {
                round.finish(layer, stream).unwrap();
            }
            done.record(stream, scope).unwrap();
            if own.below(40) == 0 || step == 999 {
                streams.iter().for_each(|stream| stream.synchronize().unwrap());
                assert!(round.is_right(&sets[set]), "step {step}");
            }
        }
        round.close();
    });
}
