//! Steps between kernels of others that start early as well: whoever writes the ids, and whoever reads the rows. On a GPU each the steps do, too;
//! where ranks share one, they do not.

use engram_cuda::kernels::Ptx;
use engram_cuda::raw::Module;
use engram_cuda::{DeviceBuffer, DeviceView, IdShape, IdType, Ids, Stream, StreamRef};
use engram_symm::Algorithm;
use engram_symm::cuda::{Exchange, Rows};

use crate::backend::{Flags, Lines, LinesApart, Way};
use crate::backend::{bytes, create, device};
use crate::ranks::{Rank, Spread, start};
use crate::starting_early::starting_early;
use crate::suite::Pace;
use crate::suite::model::Shape;

/// Moves words some microseconds after it has let the next kernel start: whoever does not wait for it sees what was there before.
const MOVE: Ptx = starting_early!(
    "move_words",
    ".param .align 8 .b8 move[24]",
    "
    .reg .pred %done;
    .reg .b32 %at, %step, %words, %word;
    .reg .b64 %from, %to, %offset;
    ",
    "
        nanosleep.u32 5000;
        ld.param.u64 %from, [move];
        ld.param.u64 %to, [move + 8];
        ld.param.u32 %words, [move + 16];
        mov.u32 %at, %tid.x;
        mov.u32 %step, %ntid.x;
    next:
        setp.ge.u32 %done, %at, %words;
        @%done bra end;
        mul.wide.u32 %offset, %at, 4;
        add.u64 %offset, %offset, %from;
        ld.global.u32 %word, [%offset];
        mul.wide.u32 %offset, %at, 4;
        add.u64 %offset, %offset, %to;
        st.global.u32 [%offset], %word;
        add.u32 %at, %at, %step;
        bra next;
    end:
        ret;
    "
);

#[repr(C)]
struct Move {
    from: u64,
    to: u64,
    words: u32,
    padding: u32,
}

const STEPS: usize = 20;
const TOKENS: usize = 8;
const SLOT: u32 = 8;

struct Stage {
    exchange: Exchange,
    module: Module,
    /// Ids of each step, and where the exchange finds them.
    fresh: Vec<DeviceBuffer>,
    ids: DeviceBuffer,
    /// Rows of each step.
    kept: Vec<DeviceBuffer>,
    shape: Shape,
}

impl Stage {
    fn new(exchange: Exchange, shape: Shape) -> Self {
        let buffer = |bytes| DeviceBuffer::new(device(), bytes).unwrap();
        let id_bytes = TOKENS * shape.layers * shape.columns * 4;
        let row_bytes = usize::try_from(exchange.rows().rows.bytes()).unwrap();
        assert!(exchange.rows().scales.is_none());
        Self {
            module: Module::load(device(), &MOVE).unwrap(),
            fresh: (0..STEPS).map(|_| buffer(id_bytes)).collect(),
            ids: buffer(id_bytes),
            kept: (0..STEPS).map(|_| buffer(row_bytes)).collect(),
            exchange,
            shape,
        }
    }

    fn enqueue(&mut self, algorithm: Algorithm, stream: StreamRef<'_>) {
        let Self { exchange, module, fresh, ids, kept, shape } = self;
        let move_words = |from: u64, to: &DeviceBuffer| {
            let param = Move { from, to: to.address(), words: u32::try_from(to.bytes() / 4).unwrap(), padding: 0 };
            // SAFETY: both are memory of that size, which outlives the stream's work and the graph.
            unsafe { module.launch("move_words", [1; 3], [256, 1, 1], stream, &param) }.unwrap();
        };
        for (fresh, kept) in fresh.iter().zip(kept) {
            move_words(fresh.address(), ids);
            let view = Ids::new(&*ids, IdShape::dense(IdType::I32, TOKENS, shape.layers, shape.columns)).unwrap();
            let rows = exchange.run(&view, SLOT, algorithm, stream).unwrap();
            move_words(rows.rows.address(), kept);
        }
    }

    /// Has other ids in each step of each round.
    #[track_caller]
    fn round(&mut self, rank: usize, round: u64, stream: &Stream, run: impl FnOnce(&mut Self)) {
        let step = |step: usize| round * STEPS as u64 + step as u64;
        let sets: Vec<_> = (0..STEPS).map(|k| self.shape.ids(rank, step(k), TOKENS)).collect();
        self.fresh.iter().zip(&sets).for_each(|(fresh, ids)| fresh.write(0, ids).unwrap());
        run(self);
        stream.synchronize().unwrap();
        self.exchange.check().unwrap();
        for (step, (kept, ids)) in self.kept.iter().zip(&sets).enumerate() {
            let rows = Rows { rows: DeviceView::from(kept), scales: None, slot: SLOT };
            let found = bytes(self.exchange.config(), &rows);
            assert!(found == self.shape.expected(ids, SLOT), "rank {rank}, round {round}, step {step}");
        }
    }
}

fn steps<W: Way>(rank: &Rank, algorithm: Algorithm) {
    let mut group = rank.group("early");
    let shape = Shape::new(rank.world(), 5);
    let (exchange, _tables) = create::<W>(&mut group, &shape, 0, Pace::Steady).unwrap().into_parts();
    let mut stage = Stage::new(exchange, shape);
    let stream = Stream::new(device()).unwrap();
    for round in 0..3 {
        stage.round(rank.number(), round, &stream, |stage| stage.enqueue(algorithm, stream.as_ref()));
    }
    let graph = stream.capture(|stream| {
        stage.enqueue(algorithm, stream);
        Ok(())
    });
    let mut graph = graph.unwrap();
    for round in 3..8 {
        // SAFETY: all that the graph uses lives.
        stage.round(rank.number(), round, &stream, |_| unsafe { graph.launch(stream.as_ref()) }.unwrap());
    }
    drop(graph);
    stage.exchange.close().unwrap();
    group.barrier().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn steps_wait_for_who_writes_their_ids_and_readers_wait_for_steps() {
    let name = "early::steps_wait_for_who_writes_their_ids_and_readers_wait_for_steps";
    for spread in Spread::all(2) {
        start(name, 2, spread, "early", |rank| {
            steps::<Lines>(&rank, Algorithm::Push);
            steps::<LinesApart>(&rank, Algorithm::Push);
            steps::<Flags>(&rank, Algorithm::Push);
            steps::<Flags>(&rank, Algorithm::Barrier);
        });
    }
}
