//! The cases.

use std::time::Duration;

use engram_ple::FormatKind;
use engram_symm::protocol::{Call, Fault, Operation, Phase};
use engram_symm::{Algorithm, Error, Group, Ids, Output};

use super::model::{Random, Shape, Tables};
use super::{Backend, Exchanger, Pace, fault};

const BOTH: [Algorithm; 2] = [Algorithm::Barrier, Algorithm::Push];

fn operation(algorithm: Algorithm) -> Operation {
    match algorithm {
        Algorithm::Barrier => Operation::Barrier,
        Algorithm::Push => Operation::Push,
    }
}

fn steady<B: Backend>(group: &mut Group, shape: &Shape) -> B::Exchange {
    B::exchange(group, shape, Tables::Sound, 0, Pace::Steady).unwrap()
}

/// Exchanges the ids of `step` and compares the rows.
#[track_caller]
fn exchange(
    exchange: &mut impl Exchanger,
    (shape, rank): (&Shape, usize),
    step: u64,
    tokens: usize,
    slot: u32,
    algorithm: Algorithm,
) {
    let ids = shape.ids(rank, step, tokens);
    let rows = exchange.run(shape.view(&ids), slot, algorithm).unwrap();
    assert!(rows == shape.expected(&ids, slot), "rank {rank}, step {step}, {tokens} of {slot} tokens by {algorithm:?}");
}

/// A few exchanges of full slots by both algorithms, then the end.
fn run_all<B: Backend>(group: &mut Group, shape: &Shape) {
    let mut rows = steady::<B>(group, shape);
    for step in 0..4 {
        for algorithm in BOTH {
            exchange(&mut rows, (shape, group.rank()), step, shape.capacity as usize, shape.capacity, algorithm);
        }
    }
    rows.close().unwrap();
}

pub fn world_of_one<B: Backend>(mut group: Group) {
    for columns in [1, 5, 24] {
        run_all::<B>(&mut group, &Shape::new(1, columns));
    }
}

/// A short last shard, and ranks without heads.
pub fn uneven_heads<B: Backend>(mut group: Group) {
    for columns in [24, 23, 5] {
        let shape = Shape::new(group.world(), columns);
        run_all::<B>(&mut group, &shape);
    }
}

/// Every id has one owner, whatever its column; with many ranks some own no row.
pub fn rows_are_owned<B: Backend>(mut group: Group) {
    for (columns, layers) in [(16, 1), (1, 2)] {
        let shape = Shape { heads: false, layers, ..Shape::new(group.world(), columns) };
        run_all::<B>(&mut group, &shape);
    }
}

pub fn every_output<B: Backend>(mut group: Group) {
    let world = group.world();
    let kinds = [
        (FormatKind::E4m3E8m0x32, 64),
        (FormatKind::E4m3Global, 20),
        (FormatKind::Bf16, 6),
        (FormatKind::F16, 5),
        (FormatKind::F32, 3),
    ];
    for (kind, width) in kinds {
        for output in [Output::Packed, Output::Bf16, Output::F16, Output::F32, Output::Mx] {
            for heads in [true, false] {
                // Two tiles of MX scales, the second one not full, and groups that do not fill a tile.
                let shape = Shape { kind, width, output, heads, capacity: 130, layers: 2, ..Shape::new(world, 5) };
                if output.takes(kind) {
                    run_all::<B>(&mut group, &shape);
                } else {
                    let refused = B::exchange(&mut group, &shape, Tables::Sound, 0, Pace::Steady);
                    assert!(matches!(refused, Err(Error::Invalid { .. })), "{kind} as {output:?}");
                }
            }
        }
    }
}

/// Rows past the tokens are zero rows, whatever was there before; ranks without tokens take part.
pub fn fewer_tokens_than_the_slot<B: Backend>(mut group: Group) {
    for output in [Output::Packed, Output::Bf16, Output::Mx] {
        for heads in [true, false] {
            let shape = Shape { output, heads, ..Shape::new(group.world(), 5) };
            let mut rows = steady::<B>(&mut group, &shape);
            for (step, tokens) in [[8, 8, 8], [0, 3, 7], [8, 0, 0], [0, 0, 0], [1, 8, 5]].into_iter().enumerate() {
                for algorithm in BOTH {
                    for slot in [8, tokens.into_iter().max().unwrap_or(0).max(1)] {
                        let (tokens, slot) = (tokens[group.rank() % tokens.len()], slot as u32);
                        exchange(&mut rows, (&shape, group.rank()), step as u64, tokens, slot, algorithm);
                    }
                }
            }
            rows.close().unwrap();
        }
    }
}

/// Slots that give every worker several turns, the last one not full.
pub fn many_tokens<B: Backend>(mut group: Group) {
    for output in [Output::Packed, Output::Mx] {
        let shape = Shape { capacity: 700, output, ..Shape::new(group.world(), 24) };
        let mut rows = steady::<B>(&mut group, &shape);
        for (step, slot) in [(0, 700), (1, 301), (2, 700)] {
            for algorithm in BOTH {
                exchange(&mut rows, (&shape, group.rank()), step, slot as usize - group.rank(), slot, algorithm);
            }
        }
        rows.close().unwrap();
    }
}

/// Ids in an array of more layers, with gaps between tokens.
pub fn views_of_ids<B: Backend>(mut group: Group) {
    let shape = Shape::new(group.world(), 3);
    let mut rows = steady::<B>(&mut group, &shape);
    let (tokens, before, all_layers, stride, base) = (4, 1, 5, 5 * 3 + 2, 7);
    for (step, algorithm) in (0..).zip(BOTH) {
        let ids = shape.ids(group.rank(), step, tokens);
        let mut array = vec![12345; base + tokens * stride];
        for (token, ids) in ids.chunks(shape.layers * shape.columns).enumerate() {
            array[base + token * stride + before * shape.columns..][..ids.len()].copy_from_slice(ids);
        }
        let view = Ids::strided(&array, base, stride, tokens, all_layers, shape.columns).unwrap();
        let view = view.layers(before, shape.layers).unwrap();
        assert_eq!(rows.run(view, 4, algorithm).unwrap(), shape.expected(&ids, 4));
    }
    rows.close().unwrap();
}

/// One rank only writes rows, slowly; the other needs them.
pub fn delayed_writer<B: Backend>(mut group: Group) {
    one_is_slow::<B>(&mut group, 0);
}

/// One rank only reads rows, slowly; the other would overwrite them.
pub fn delayed_reader<B: Backend>(mut group: Group) {
    one_is_slow::<B>(&mut group, 1);
}

fn one_is_slow<B: Backend>(group: &mut Group, slow: usize) {
    let shape = Shape::new(2, 1);
    let pace = if group.rank() == slow { Pace::Slow } else { Pace::Steady };
    let mut rows = B::exchange(group, &shape, Tables::Sound, 0, pace).unwrap();
    let tokens = if group.rank() == 0 { 0 } else { 8 };
    for step in 0..10 {
        for algorithm in BOTH {
            exchange(&mut rows, (&shape, group.rank()), step, tokens, 8, algorithm);
        }
    }
    rows.close().unwrap();
}

/// Late by less than the deadline is no error, for every rank in turn.
pub fn late_but_in_time<B: Backend>(mut group: Group) {
    let shape = Shape { deadline: Duration::from_secs(20), ..Shape::new(group.world(), 5) };
    let mut rows = steady::<B>(&mut group, &shape);
    for late in 0..group.world() {
        for algorithm in BOTH {
            if group.rank() == late {
                std::thread::sleep(Duration::from_millis(100));
            }
            exchange(&mut rows, (&shape, group.rank()), late as u64, 8, 8, algorithm);
        }
    }
    rows.close().unwrap();
}

pub fn back_to_back_across_the_wrap<B: Backend>(mut group: Group) {
    let shape = Shape::new(group.world(), 5);
    for algorithm in BOTH {
        let pace = Pace::Random(group.rank() as u64);
        let mut rows = B::exchange(&mut group, &shape, Tables::Sound, u32::MAX - 50, pace).unwrap();
        for step in 0..100 {
            exchange(&mut rows, (&shape, group.rank()), step, 3, 3, algorithm);
        }
        rows.close().unwrap();
    }
}

/// Each algorithm keeps to its own buffers, so that one may follow the other.
pub fn both_algorithms_in_turn<B: Backend>(mut group: Group) {
    let shape = Shape::new(group.world(), 23);
    let pace = Pace::Random(group.rank() as u64 + 100);
    let mut rows = B::exchange(&mut group, &shape, Tables::Sound, u32::MAX - 1, pace).unwrap();
    let mut random = Random(5);
    for step in 0..200 {
        let slot = 1 + random.below(8);
        exchange(&mut rows, (&shape, group.rank()), step, slot, slot as u32, BOTH[random.below(2)]);
    }
    rows.close().unwrap();
}

/// Two exchanges of the same ranks run at the same time and know nothing of each other.
pub fn two_groups_at_once<B: Backend>(group: Group)
where
    B::Exchange: Send,
{
    two_groups::<B>(group, 0);
}

/// The same, but the first steps come one after the other: on a device that processes share, the first kernel on a stream may wait for those that
/// run, which may be the other exchange's.
pub fn two_groups_once_begun<B: Backend>(group: Group)
where
    B::Exchange: Send,
{
    two_groups::<B>(group, 1);
}

fn two_groups<B: Backend>(mut group: Group, begun: u64)
where
    B::Exchange: Send,
{
    let shapes = [Shape::new(group.world(), 5), Shape { heads: false, ..Shape::new(group.world(), 16) }];
    let mut exchanges = shapes.map(|shape| (steady::<B>(&mut group, &shape), shape));
    let rank = group.rank();
    for (rows, shape) in &mut exchanges {
        (0..begun).for_each(|step| exchange(rows, (shape, rank), step, 4, 4, BOTH[step as usize % 2]));
    }
    std::thread::scope(|scope| {
        for (mut rows, shape) in exchanges {
            scope.spawn(move || {
                for step in begun..100 {
                    // They go at different speeds, and differently on each rank.
                    if step % 7 == (rank + shape.columns) as u64 % 7 {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    exchange(&mut rows, (&shape, rank), step, 4, 4, BOTH[step as usize % 2]);
                }
                rows.close().unwrap();
            });
        }
    });
}

/// Two exchanges that end at the same time, in another order on each rank. If one waited for the other, neither would end.
pub fn closing_two_at_once<B: Backend>(mut group: Group)
where
    B::Exchange: Send,
{
    let shape = Shape::new(group.world(), 5);
    let mut exchanges = [0, 1].map(|_| steady::<B>(&mut group, &shape));
    for rows in &mut exchanges {
        exchange(rows, (&shape, group.rank()), 0, 8, 8, Algorithm::Push);
    }
    let rank = group.rank();
    std::thread::scope(|scope| {
        for (number, rows) in exchanges.into_iter().enumerate() {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(if (rank + number).is_multiple_of(2) { 0 } else { 100 }));
                rows.close().unwrap();
            });
        }
    });
}

/// A rank calls once more than the others. They learn of it with their next call.
pub fn different_call_counts<B: Backend>(mut group: Group) {
    let shape = Shape { deadline: Duration::from_secs(1), ..Shape::new(group.world(), 5) };
    for algorithm in BOTH {
        let mut rows = steady::<B>(&mut group, &shape);
        exchange(&mut rows, (&shape, group.rank()), 0, 8, 8, algorithm);
        let ids = shape.ids(group.rank(), 1, 8);
        let mut failed = None;
        if group.rank() == 0 {
            failed = Some(fault(rows.run(shape.view(&ids), 8, algorithm)));
        }
        group.barrier().unwrap();
        let failed = failed.unwrap_or_else(|| {
            let reported = rows.check();
            let failed = fault(rows.run(shape.view(&ids), 8, algorithm));
            assert!(!B::SEES_REPORTS || reported == Err(failed));
            failed
        });
        assert_eq!(failed, Fault::Deadline { rank: 1, phase: Phase::Ids, epoch: 2 });
        // It stays failed, its outputs are zero, and closing it does not wait.
        assert_eq!(rows.check(), Err(failed));
        assert_eq!(fault(rows.run(shape.view(&ids), 8, algorithm)), failed);
        assert!(rows.rows().iter().flatten().all(|&byte| byte == 0));
        rows.close().unwrap();
    }
}

/// One rank creates its exchanges in another order: all ranks are told, none hangs.
pub fn another_buffer_order<B: Backend>(mut group: Group) {
    let mut shapes = [Shape::new(group.world(), 5), Shape::new(group.world(), 24)];
    if group.rank() == 1 {
        shapes.reverse();
    }
    let created = B::exchange(&mut group, &shapes[0], Tables::Sound, 0, Pace::Steady);
    assert!(matches!(created, Err(Error::Disagreement { rank: 0, other: 1, .. })));
}

/// Whoever it is that differs, every rank gets two calls that disagree, one of them its own.
fn disagree<B: Backend>(group: &mut Group, call: impl Fn(usize) -> (Algorithm, u32)) {
    let shape = Shape::new(group.world(), 5);
    let mut rows = steady::<B>(group, &shape);
    let ids = shape.ids(group.rank(), 0, 2);
    let (algorithm, slot) = call(group.rank());
    let failed = fault(rows.run(shape.view(&ids), slot, algorithm));
    let Fault::Mismatch { rank, ours, theirs } = failed else { panic!("{failed}") };
    let expected = |rank| {
        let (algorithm, slot) = call(rank);
        Call { epoch: 1, operation: operation(algorithm), slot }
    };
    assert_eq!((ours, theirs), (expected(group.rank()), expected(rank)));
    assert_ne!(ours, theirs);
    assert_eq!(rows.check(), Err(failed));
    // Nobody leaves before all have seen it.
    group.barrier().unwrap();
    rows.close().unwrap();
}

pub fn slots_that_disagree<B: Backend>(mut group: Group) {
    for odd in 0..group.world() {
        for algorithm in BOTH {
            disagree::<B>(&mut group, |rank| (algorithm, if rank == odd { 3 } else { 2 }));
        }
    }
}

pub fn algorithms_that_disagree<B: Backend>(mut group: Group) {
    for odd in 0..group.world() {
        disagree::<B>(&mut group, |rank| (BOTH[usize::from(rank == odd)], 2));
    }
}

pub fn closing_while_others_exchange<B: Backend>(mut group: Group) {
    let shape = Shape::new(group.world(), 5);
    for algorithm in BOTH {
        let mut rows = steady::<B>(&mut group, &shape);
        exchange(&mut rows, (&shape, group.rank()), 0, 2, 2, algorithm);
        let failed = if group.rank() == 1 {
            fault(rows.close())
        } else {
            let ids = shape.ids(group.rank(), 1, 2);
            fault(rows.run(shape.view(&ids), 2, algorithm))
        };
        let close = Call { epoch: 2, operation: Operation::Close, slot: 0 };
        let run = Call { epoch: 2, operation: operation(algorithm), slot: 2 };
        match failed {
            Fault::Mismatch { rank: 1, ours, theirs } => assert_eq!((ours, theirs), (run, close)),
            Fault::Mismatch { ours, theirs, .. } => assert_eq!((ours, theirs), (close, run)),
            _ => panic!("{failed}"),
        }
        group.barrier().unwrap();
    }
}

pub fn a_table_that_fails<B: Backend>(mut group: Group) {
    for heads in [true, false] {
        for algorithm in BOTH {
            let shape = Shape { heads, ..Shape::new(group.world(), 5) };
            let tables = if group.rank() == 1 { Tables::Broken } else { Tables::Sound };
            let mut rows = B::exchange(&mut group, &shape, tables, 0, Pace::Steady).unwrap();
            let ids = shape.ids(group.rank(), 0, 8);
            let failed = rows.run(shape.view(&ids), 8, algorithm);
            if group.rank() == 1 {
                assert!(matches!(failed, Err(Error::Table { layer: 0, .. })), "{failed:?}");
            } else {
                assert_eq!(fault(failed), Fault::Failed { rank: 1, epoch: 1 });
            }
            assert_eq!(rows.check(), Err(Fault::Failed { rank: 1, epoch: 1 }));
            assert!(rows.rows().iter().flatten().all(|&byte| byte == 0));
            group.barrier().unwrap();
            rows.close().unwrap();
        }
    }
}

pub fn sleeping_and_waking<B: Backend>(mut group: Group) {
    let shape = Shape::new(group.world(), 5);
    let mut rows = B::exchange(&mut group, &shape, Tables::Sound, u32::MAX - 5, Pace::Steady).unwrap();
    for round in 0..4 {
        for algorithm in BOTH {
            exchange(&mut rows, (&shape, group.rank()), round, 8, 8, algorithm);
        }
        assert_eq!(rows.wake(&mut group), Err(Error::Awake));
        rows.sleep().unwrap();
        let ids = shape.ids(group.rank(), 0, 8);
        assert_eq!(rows.run(shape.view(&ids), 8, Algorithm::Push), Err(Error::Asleep));
        assert_eq!(rows.sleep(), Err(Error::Asleep));
        rows.wake(&mut group).unwrap();
    }
    rows.sleep().unwrap();
    rows.close().unwrap();
}

/// What a rank refuses by itself leaves the group as it was.
pub fn refusals_are_local<B: Backend>(mut group: Group) {
    let shape = Shape::new(group.world(), 5);
    let mut rows = steady::<B>(&mut group, &shape);
    let ids = shape.ids(group.rank(), 0, 4);
    if group.rank() == 0 {
        let one_layer = shape.view(&ids).layers(1, 1).unwrap();
        for (ids, slot) in [(shape.view(&ids), 0), (shape.view(&ids), 3), (shape.view(&ids), 9), (one_layer, 4)] {
            let refused = rows.run(ids, slot, Algorithm::Push);
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        }
    }
    for algorithm in BOTH {
        exchange(&mut rows, (&shape, group.rank()), 0, 4, 4, algorithm);
    }
    rows.close().unwrap();
}

/// Shapes, sizes, ids, algorithms, ownership and delays drawn at random, across the wrap of the epoch.
pub fn random_exchanges<B: Backend, const COUNT: u64>(mut group: Group) {
    const EACH: u64 = 25;
    let (world, rank) = (group.world(), group.rank());
    let mut random = Random(world as u64);
    for _ in 0..COUNT / EACH {
        let shape = Shape::random(world, &mut random);
        let pace = Pace::Random(random.next().wrapping_add(rank as u64));
        let mut rows = B::exchange(&mut group, &shape, Tables::Sound, u32::MAX - EACH as u32 / 2, pace).unwrap();
        for step in 0..EACH {
            let slot = 1 + random.below(shape.capacity as usize);
            let tokens: Vec<_> = (0..world).map(|_| random.below(slot + 1)).collect();
            let algorithm = BOTH[random.below(2)];
            exchange(&mut rows, (&shape, rank), step, tokens[rank], slot as u32, algorithm);
        }
        rows.close().unwrap();
    }
}
