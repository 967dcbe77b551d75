//! Exchanges in graphs, and from several streams.

use std::time::Duration;

use engram_core::Ownership;
use engram_cuda::{DeviceBuffer, Graph, IdShape, IdType, Ids, Stream, StreamRef, raw};
use engram_symm::cuda::{Exchange, Rows};
use engram_symm::protocol::Fault;
use engram_symm::{Algorithm, Error, Group};

use crate::backend::{
    Chosen, FlaggedIds, Flags, Lines, LinesApart, MarkedLines, PinnedFlags, PinnedLines, ThroughHost, Way,
};
use crate::backend::{bytes, create, device};
use crate::ranks::{Rank, Spread, start};
use crate::suite::Pace;
use crate::suite::model::{Random, Shape};

/// An exchange, and its graphs.
struct Stage {
    // Before what they were captured with.
    graphs: Vec<Captured>,
    exchange: Exchange,
    _tables: Vec<DeviceBuffer>,
    group: Group,
    shape: Shape,
    stream: Stream,
}

/// A graph of one exchange, and where its ids lie.
struct Captured {
    graph: Graph,
    ids: DeviceBuffer,
    tokens: usize,
    slot: u32,
}

const BOTH: [Algorithm; 2] = [Algorithm::Barrier, Algorithm::Push];

impl Stage {
    fn new<W: Way>(rank: &Rank, shape: Shape, epoch: u32) -> Self {
        let mut group = rank.group("graphs");
        let (exchange, tables) = create::<W>(&mut group, &shape, epoch, Pace::Steady).unwrap().into_parts();
        Self { graphs: Vec::new(), exchange, _tables: tables, group, shape, stream: Stream::new(device()).unwrap() }
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn memory(&self, tokens: usize) -> DeviceBuffer {
        DeviceBuffer::from_slice(device(), &vec![-1; (tokens * self.shape.layers * self.shape.columns).max(1)]).unwrap()
    }

    fn view<'a>(&self, ids: &'a DeviceBuffer, tokens: usize) -> Ids<'a> {
        Ids::new(ids, IdShape::dense(IdType::I32, tokens, self.shape.layers, self.shape.columns)).unwrap()
    }

    fn capture(&mut self, tokens: usize, slot: u32, algorithm: Algorithm) {
        let ids = self.memory(tokens);
        let view = Ids::new(&ids, IdShape::dense(IdType::I32, tokens, self.shape.layers, self.shape.columns)).unwrap();
        let captured = self.stream.capture(|stream| {
            self.exchange.run(&view, slot, algorithm, stream).unwrap();
            Ok(())
        });
        self.graphs.push(Captured { graph: captured.unwrap(), ids, tokens, slot });
    }

    fn launch(&mut self, graph: usize) {
        let stream = self.stream.as_ref();
        launch(&mut self.graphs[graph].graph, stream);
    }

    /// Waits, and compares the rows.
    #[track_caller]
    fn expect(&self, ids: &[i32], slot: u32) {
        self.stream.synchronize().unwrap();
        self.exchange.check().unwrap();
        let rows = Rows { slot, ..self.exchange.rows() };
        assert!(bytes(self.exchange.config(), &rows) == self.shape.expected(ids, slot), "rank {}", self.rank());
    }

    /// Replays a graph with the ids of a step.
    #[track_caller]
    fn replay(&mut self, graph: usize, step: u64) {
        let Captured { tokens, slot, .. } = self.graphs[graph];
        let ids = self.shape.ids(self.rank(), step, tokens);
        self.graphs[graph].ids.write(0, &ids).unwrap();
        self.launch(graph);
        self.expect(&ids, slot);
    }

    /// An exchange without a graph.
    #[track_caller]
    fn eager(&mut self, step: u64, algorithm: Algorithm) {
        let (tokens, slot) = (self.shape.capacity as usize, self.shape.capacity);
        let ids = self.shape.ids(self.rank(), step, tokens);
        let memory = self.memory(tokens);
        memory.write(0, &ids).unwrap();
        let view = self.view(&memory, tokens);
        self.exchange.run(&view, slot, algorithm, self.stream.as_ref()).unwrap();
        self.expect(&ids, slot);
    }

    fn close(mut self) {
        self.graphs.clear();
        self.exchange.close().unwrap();
        self.group.barrier().unwrap();
    }
}

fn launch(graph: &mut Graph, stream: StreamRef<'_>) {
    // SAFETY: all that the graphs of these tests use lives.
    unsafe { graph.launch(stream) }.unwrap();
}

fn everywhere(name: &str, world: usize, case: fn(&Rank)) {
    for spread in Spread::all(world) {
        start(name, world, spread, "graphs", |rank| case(&rank));
    }
}

fn each_way(rank: &Rank, case: impl Fn(&Rank, Stage)) {
    let shape = || Shape::new(rank.world(), 5);
    // Across the wrap of the epoch.
    let epoch = u32::MAX - 10;
    case(rank, Stage::new::<Lines>(rank, shape(), epoch));
    case(rank, Stage::new::<MarkedLines>(rank, shape(), epoch));
    case(rank, Stage::new::<Flags>(rank, shape(), epoch));
    case(rank, Stage::new::<FlaggedIds>(rank, shape(), epoch));
    case(rank, Stage::new::<LinesApart>(rank, shape(), epoch));
    case(rank, Stage::new::<PinnedLines>(rank, Shape { heads: false, ..shape() }, epoch));
    case(rank, Stage::new::<PinnedFlags>(rank, Shape { heads: false, ..shape() }, epoch));
    case(rank, Stage::new::<ThroughHost>(rank, shape(), epoch));
}

#[test]
#[ignore = "needs a CUDA device"]
fn replays_see_new_ids_and_slots_alternate() {
    everywhere("graphs::replays_see_new_ids_and_slots_alternate", 2, |rank| each_way(rank, replays));
}

#[test]
#[ignore = "needs a CUDA device"]
fn three_ranks_replay_with_new_ids() {
    everywhere("graphs::three_ranks_replay_with_new_ids", 3, |rank| {
        replays(rank, Stage::new::<Lines>(rank, Shape::new(3, 5), 0));
        replays(rank, Stage::new::<Flags>(rank, Shape::new(3, 5), 0));
    });
}

fn replays(rank: &Rank, mut stage: Stage) {
    for algorithm in BOTH {
        stage.capture(8, 8, algorithm);
        // Others have no tokens, or fewer.
        stage.capture(3 - rank.number().min(3), 3, algorithm);
    }
    let mut random = Random(6);
    for step in 0..12 {
        stage.replay(random.below(4), step);
        if step % 4 == 3 {
            stage.eager(step, BOTH[random.below(2)]);
        }
    }
    // Back to back: the ids change on the stream.
    let sets: Vec<Vec<i32>> = (0..4).map(|set| stage.shape.ids(rank.number(), 50 + set, 8)).collect();
    let fresh: Vec<_> = sets.iter().map(|ids| DeviceBuffer::from_slice(device(), ids).unwrap()).collect();
    for round in 0..20 {
        let graph = [0, 2][random.below(2)];
        stage.graphs[graph].ids.copy_from(&fresh[round % 4], stage.stream.as_ref()).unwrap();
        stage.launch(graph);
        if round % 5 == 4 {
            stage.expect(&sets[round % 4], 8);
        }
    }
    stage.close();
}

/// Calls are ordered by the exchange, whichever stream they come on.
#[test]
#[ignore = "needs a CUDA device"]
fn a_thousand_rounds_from_two_streams_with_skew() {
    let spread = Spread::all(2).pop().unwrap();
    start("graphs::a_thousand_rounds_from_two_streams_with_skew", 2, spread, "skew", |rank| {
        two_streams::<Lines>(&rank, 300);
        two_streams::<Flags>(&rank, 300);
        two_streams::<Chosen>(&rank, 400);
    });
}

fn two_streams<W: Way>(rank: &Rank, rounds: u64) {
    let mut stage = Stage::new::<W>(rank, Shape::new(2, 23), 0);
    // Alike on all ranks, and another one for what each does by itself.
    let (mut random, mut own) = (Random(8), Random(rank.number() as u64 + 9));
    let sets: Vec<Vec<i32>> = (0..16).map(|set| stage.shape.ids(rank.number(), set, 8)).collect();
    let memory: Vec<_> = sets.iter().map(|ids| DeviceBuffer::from_slice(device(), ids).unwrap()).collect();
    let streams = [(); 2].map(|()| Stream::new(device()).unwrap());
    let mut used = [0; 2];
    for round in 0..rounds {
        let (set, which) = (own.below(16), own.below(2));
        used[which] += 1;
        match own.below(8) {
            0 => std::thread::sleep(Duration::from_micros(own.below(800) as u64)),
            1 => streams[which].synchronize().unwrap(),
            _ => {}
        }
        let ids = Ids::new(&memory[set], IdShape::dense(IdType::I32, 8, 2, 23)).unwrap();
        stage.exchange.run(&ids, 8, BOTH[random.below(2)], streams[which].as_ref()).unwrap();
        if own.below(30) == 0 || round + 1 == rounds {
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            stage.expect(&sets[set], 8);
        }
    }
    assert!(used.iter().all(|&used| used > rounds / 4));
    stage.close();
}

/// Two graphs at once are two steps at once, which is found out; unless processes take turns on a device, which happens to run one after the other.
#[test]
#[ignore = "needs a CUDA device"]
fn graphs_that_overlap_are_reported_to_all() {
    everywhere("graphs::graphs_that_overlap_are_reported_to_all", 2, |rank| {
        overlap::<Lines>(rank, Algorithm::Push);
        overlap::<Flags>(rank, Algorithm::Push);
        overlap::<Flags>(rank, Algorithm::Barrier);
    });
}

#[expect(clippy::print_stdout, reason = "whether it has happened")]
fn overlap<W: Way>(rank: &Rank, algorithm: Algorithm) {
    let mut stage = Stage::new::<W>(rank, Shape::new(2, 5), 0);
    stage.capture(8, 8, algorithm);
    stage.capture(8, 8, algorithm);
    stage.replay(0, 1);
    stage.replay(1, 2);
    stage.group.barrier().unwrap();
    let other = Stream::new(device()).unwrap();
    if stage.rank() == 0 {
        // Rank 1 is late, so that the first one waits while the second one begins.
        stage.launch(0);
        launch(&mut stage.graphs[1].graph, other.as_ref());
    } else {
        std::thread::sleep(Duration::from_millis(100));
        stage.launch(0);
    }
    stage.stream.synchronize().unwrap();
    // Where processes take turns on a device, a kernel of rank 1 that waited here could keep rank 0's second graph from its turn.
    stage.group.barrier().unwrap();
    if stage.rank() == 1 {
        stage.launch(1);
        stage.stream.synchronize().unwrap();
    }
    other.synchronize().unwrap();
    let outcome = stage.exchange.check();
    println!("  rank {}, {algorithm:?}: {outcome:?}", stage.rank());
    let outcomes = stage.group.all_gather(format!("{outcome:?}").as_bytes()).unwrap();
    match outcome {
        Ok(()) if rank.takes_turns() => {}
        Err(Error::Fault(Fault::Overlap { rank: 0, epoch: 3 })) => {
            assert!(bytes(stage.exchange.config(), &stage.exchange.rows()).iter().flatten().all(|&byte| byte == 0));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(outcomes[0], outcomes[1]);
    stage.graphs.clear();
    // Nobody leaves before all have seen it.
    stage.group.barrier().unwrap();
    stage.exchange.close().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_graph_replayed_asleep_says_so_and_is_right_once_awake() {
    everywhere("graphs::a_graph_replayed_asleep_says_so_and_is_right_once_awake", 2, |rank| each_way(rank, asleep));
}

fn asleep(_: &Rank, mut stage: Stage) {
    for algorithm in BOTH {
        stage.capture(8, 8, algorithm);
    }
    for round in 0..2 {
        (0..2).for_each(|graph| stage.replay(graph, round));
        // Going to sleep waits for what was launched.
        if stage.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
        }
        stage.launch(1);
        stage.exchange.sleep().unwrap();
        // As often as each rank likes.
        for graph in [0, 1, 0].into_iter().take(1 + stage.rank()) {
            stage.launch(graph);
            stage.stream.synchronize().unwrap();
            assert_eq!(stage.exchange.check(), Err(Error::Asleep));
        }
        device().synchronize().unwrap();
        stage.exchange.wake(&mut stage.group).unwrap();
        stage.exchange.check().unwrap();
        assert!(bytes(stage.exchange.config(), &stage.exchange.rows()).iter().flatten().all(|&byte| byte == 0));
    }
    (0..2).for_each(|graph| stage.replay(graph, 7));
    stage.eager(8, Algorithm::Push);
    // One that sleeps can be closed, whatever was replayed meanwhile.
    stage.exchange.sleep().unwrap();
    if stage.rank() == 1 {
        stage.launch(0);
        stage.stream.synchronize().unwrap();
    }
    stage.close();
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_are_shared_where_their_owners_leave_them() {
    everywhere("graphs::rows_are_shared_where_their_owners_leave_them", 2, |rank| {
        for heads in [true, false] {
            shared(rank, Stage::new::<Lines>(rank, Shape { heads, ..Shape::new(2, 5) }, 0));
            shared(rank, Stage::new::<ThroughHost>(rank, Shape { heads, ..Shape::new(2, 5) }, 0));
        }
    });
}

fn shared(rank: &Rank, mut stage: Stage) {
    let (layers, columns) = (stage.shape.layers, stage.shape.columns);
    let row = stage.shape.format(0).row_bytes();
    for (step, tokens) in [(0, 8), (1, 5 - rank.number()), (2, 0)] {
        let ids = stage.shape.ids(rank.number(), step, tokens);
        let memory = DeviceBuffer::from_slice(device(), &ids).unwrap();
        let view = stage.view(&memory, tokens);
        let stream = Stream::new(device()).unwrap();
        let bases = stage.exchange.run_shared(&view, 8, stream.as_ref()).unwrap();
        stream.synchronize().unwrap();
        stage.exchange.check().unwrap();
        let expected = &stage.shape.expected(&ids, 8)[0];
        let config = stage.exchange.config();
        assert_eq!(bases.len(), 2);
        for (owner, base) in bases.into_iter().enumerate() {
            let own = config.layers[0].ownership.columns_of(columns, owner);
            let count = 8 * layers * own.len();
            // SAFETY: an owner's rows for this rank, which stay until its next call.
            let rows: Vec<u8> = unsafe { raw::read(device(), base, count * row) }.unwrap();
            for (index, row) in rows.chunks(row).enumerate() {
                let (place, column) = (index / own.len(), own.start + index % own.len());
                let at = place * columns + column;
                let owns = match config.layers[place % layers].ownership {
                    Ownership::Heads(_) => true,
                    Ownership::Rows(shards) => ids.get(at).is_some_and(|&id| shards.owner_of(id.into()) == Some(owner)),
                };
                assert!(!owns || *row == expected[at * row.len()..][..row.len()], "row {at} of rank {owner}");
            }
        }
        // The next run is of another kind.
        stage.eager(step, BOTH[usize::from(step == 1)]);
    }
    stage.close();
}
