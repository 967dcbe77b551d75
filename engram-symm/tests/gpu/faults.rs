//! Ranks that die, are late, do something else, or get no memory.

use std::ops::Range;
use std::time::{Duration, Instant};

use engram_cuda::{DeviceBuffer, Graph, IdShape, IdType, Ids, Placement, Stream, Table};
use engram_ple::{SourceError, TableFormat, TableSource};
use engram_symm::access::{PeerAccess, Reason};
use engram_symm::cuda::{Exchange, Options, Push, peer_access};
use engram_symm::protocol::{Fault, Phase};
use engram_symm::{Algorithm, Error, Group, Output, Result};

use crate::backend::{Chosen, FlaggedIds, Flags, Lines, LinesApart, LinesOfOneBlock, MarkedLines, ThroughHost, Way};
use crate::backend::{bytes, create, create_as, device};
use crate::ranks::{Rank, Spread, die, start, start_with_victim};
use crate::segments::{fail_next, failed, steps};
use crate::suite::Pace;
use crate::suite::model::{Random, Shape};

/// One of the ways to exchange, with ids that stay.
struct Subject {
    /// Replayed in place of calls. Before what it was captured with.
    graph: Option<Graph>,
    exchange: Exchange,
    algorithm: Algorithm,
    shape: Shape,
    ids: DeviceBuffer,
    values: Vec<i32>,
    stream: Stream,
    _tables: Vec<DeviceBuffer>,
}

const TOKENS: usize = 8;

impl Subject {
    fn new<W: Way>(group: &mut Group, deadline: Duration, algorithm: Algorithm) -> Self {
        Self::of::<W>(group, Shape { deadline, ..Shape::new(group.world(), 5) }, algorithm)
    }

    fn of<W: Way>(group: &mut Group, shape: Shape, algorithm: Algorithm) -> Self {
        let (exchange, tables) = create::<W>(group, &shape, 0, Pace::Steady).unwrap().into_parts();
        let values = shape.ids(group.rank(), 1, TOKENS);
        let ids = DeviceBuffer::from_slice(device(), &values).unwrap();
        let stream = Stream::new(device()).unwrap();
        Self { graph: None, exchange, algorithm, shape, ids, values, stream, _tables: tables }
    }

    /// All ways; their exchanges run at the same time.
    fn all(group: &mut Group, deadline: Duration, replay: bool) -> Vec<Self> {
        let mut all = vec![
            Self::new::<Lines>(group, deadline, Algorithm::Push),
            Self::new::<LinesApart>(group, deadline, Algorithm::Push),
            Self::new::<MarkedLines>(group, deadline, Algorithm::Push),
            Self::new::<Flags>(group, deadline, Algorithm::Push),
            Self::new::<Flags>(group, deadline, Algorithm::Barrier),
            Self::new::<ThroughHost>(group, deadline, Algorithm::Push),
            Self::decoding_by_lines(group, deadline),
            Self::new::<FlaggedIds>(group, deadline, Algorithm::Push),
        ];
        if replay {
            all.iter_mut().for_each(Self::capture);
        }
        all
    }

    /// Each warp serves and decodes, and only some of its lanes wait for ids.
    fn decoding_by_lines(group: &mut Group, deadline: Duration) -> Self {
        let shape = Shape { deadline, output: Output::Bf16, ..Shape::new(group.world(), 5) };
        Self::of::<LinesOfOneBlock>(group, shape, Algorithm::Push)
    }

    fn capture(&mut self) {
        let Self { exchange, ids, shape, stream, algorithm, .. } = self;
        let view = Ids::new(&*ids, IdShape::dense(IdType::I32, TOKENS, shape.layers, shape.columns)).unwrap();
        let captured = stream.capture(|stream| {
            exchange.run(&view, shape.capacity, *algorithm, stream).unwrap();
            Ok(())
        });
        self.graph = Some(captured.unwrap());
    }

    fn call(&mut self) -> Result<()> {
        let shape = IdShape::dense(IdType::I32, TOKENS, self.shape.layers, self.shape.columns);
        let ids = Ids::new(&self.ids, shape).unwrap();
        self.exchange.run(&ids, self.shape.capacity, self.algorithm, self.stream.as_ref()).map(drop)
    }

    /// A failed exchange refuses calls, but nobody asks it before a graph is launched.
    fn enqueue(&mut self) {
        match &mut self.graph {
            // SAFETY: all that it uses lives.
            Some(graph) => unsafe { graph.launch(self.stream.as_ref()) }.unwrap(),
            None => drop(self.call()),
        }
    }

    fn outcome(&self) -> Result<()> {
        self.stream.synchronize().unwrap();
        self.exchange.check()
    }

    #[track_caller]
    fn is_right(&self) {
        self.outcome().unwrap();
        let rows = bytes(self.exchange.config(), &self.exchange.rows());
        assert!(rows == self.shape.expected(&self.values, self.shape.capacity), "rank {}", self.exchange.rank());
    }

    #[track_caller]
    fn has_failed(&mut self, fault: Fault) {
        assert_eq!(self.outcome(), Err(fault.into()));
        assert_eq!(self.call(), Err(fault.into()));
        let rows = bytes(self.exchange.config(), &self.exchange.rows());
        assert!(rows.iter().flatten().all(|&byte| byte == 0), "rows of a failed exchange");
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What this crate has mapped of memory shared by processes.
fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:engram").count()
}

/// Files that something of this name has left.
fn files() -> Vec<String> {
    let names = |folder: &str| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let names = names("/dev/shm").chain(names("/tmp")).map(|name| name.to_string_lossy().into_owned());
    names.filter(|name| name.contains("engram")).collect()
}

/// The device has as much memory as before, once other ranks on it have given back theirs.
fn nothing_is_lost(before: u64) {
    let lost = || before.saturating_sub(device().memory().unwrap().0);
    let start = Instant::now();
    while lost() >= 32 << 20 {
        assert!(start.elapsed() < Duration::from_secs(10), "{} bytes of device memory are lost", lost());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The device does all that it did before: copies, and kernels.
fn device_works() {
    let mut group = Group::alone();
    for algorithm in [Algorithm::Push, Algorithm::Barrier] {
        let mut alone = Subject::new::<Flags>(&mut group, Duration::from_secs(10), algorithm);
        alone.call().unwrap();
        alone.is_right();
        alone.exchange.close().unwrap();
    }
}

#[derive(Clone, Copy, Debug)]
enum Death {
    /// After so many rounds.
    Between(u32),
    /// So many microseconds after the first round has begun.
    At(u64),
}

/// Runs `case` as every rank of two, and of four and eight where each has a device: of many that take turns, each exchange would take long.
fn everywhere(name: &str, case: fn(&Rank)) {
    for world in [2, 4, 8] {
        for spread in Spread::all(world).into_iter().filter(|&spread| world == 2 || spread == Spread::Each) {
            start(name, world, spread, "fault", |rank| case(&rank));
        }
    }
}

/// Devices of its own for each rank, so that short deadlines are enough; else a deadline that outlasts taking turns.
fn apart(world: usize) -> (Spread, Duration) {
    match Spread::widest(world) {
        Spread::Each => (Spread::Each, Duration::from_secs(1)),
        shared => (shared, Duration::from_secs(60)),
    }
}

const VICTIM: usize = 1;

fn killed(name: &str, world: usize, deaths: &[(Death, bool)]) {
    let (spread, deadline) = apart(world);
    // Each costs a deadline.
    let deaths = if spread == Spread::Each { deaths } else { &deaths[..1] };
    let before = files();
    for &(death, replay) in deaths {
        let run = format!("{death:?}-{replay}");
        start_with_victim(name, world, spread, &run, Some(VICTIM), |rank| survive(&rank, deadline, death, replay));
    }
    assert_eq!(files(), before);
}

#[expect(clippy::print_stdout, reason = "which cases have run")]
fn survive(rank: &Rank, deadline: Duration, death: Death, replay: bool) {
    let mut group = rank.group("survive");
    // The driver takes descriptors and memory of its own the first time.
    drop(Subject::all(&mut group, deadline, replay));
    device_works();
    group.barrier().unwrap();
    let (open, free) = (descriptors(), device().memory().unwrap().0);
    group.barrier().unwrap();
    let mut subjects = Subject::all(&mut group, deadline, replay);
    group.barrier().unwrap();
    if let (VICTIM, Death::At(micros)) = (rank.number(), death) {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(micros));
            die();
        });
    }

    let mut failed = vec![None; subjects.len()];
    for round in 0.. {
        if let (VICTIM, Death::Between(rounds)) = (rank.number(), death)
            && round == rounds
        {
            die();
        }
        let start = Instant::now();
        subjects.iter_mut().for_each(Subject::enqueue);
        for (subject, failed) in subjects.iter().zip(&mut failed) {
            match (subject.outcome(), &failed) {
                (Ok(()), None) => {}
                (Err(Error::Fault(fault)), None) => {
                    assert!(matches!(fault, Fault::Deadline { rank: VICTIM, .. }), "{fault}");
                    *failed = Some(fault);
                }
                (Err(Error::Fault(fault)), Some(first)) => assert_eq!(fault, *first),
                (outcome, failed) => panic!("{outcome:?} after {failed:?}"),
            }
        }
        let took = start.elapsed();
        assert!(took < 2 * deadline + Duration::from_secs(2), "{took:?} for one round");
        if failed.iter().all(Option::is_some) {
            println!("  rank {}, {death:?}, replayed {replay}: {} rounds, the last {took:?}", rank.number(), round + 1);
            break;
        }
    }
    for (subject, failed) in subjects.iter_mut().zip(failed) {
        subject.has_failed(failed.unwrap());
    }
    device_works();

    for subject in subjects {
        drop(subject.graph);
        subject.exchange.close().unwrap();
    }
    assert_eq!((descriptors(), mappings()), (open, 0));
    nothing_is_lost(free);
    device_works();
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, Error::Lost { rank: VICTIM, .. }), "{error}");
}

const BETWEEN: [(Death, bool); 4] =
    [(Death::Between(2), false), (Death::Between(2), true), (Death::Between(0), false), (Death::Between(0), true)];

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_dies_between_exchanges_is_named() {
    killed("faults::a_rank_that_dies_between_exchanges_is_named", 2, &BETWEEN);
}

/// At random times of some rounds.
fn times() -> [(Death, bool); 6] {
    let mut random = Random(11);
    std::array::from_fn(|index| (Death::At(200 + random.below(30_000) as u64), index % 2 == 1))
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_dies_at_any_time_is_named() {
    killed("faults::a_rank_that_dies_at_any_time_is_named", 2, &times());
}

#[test]
#[ignore = "needs a CUDA device"]
fn of_three_ranks_one_that_dies_is_named() {
    killed("faults::of_three_ranks_one_that_dies_is_named", 3, &[&BETWEEN[..], &times()].concat());
}

/// Four of them, and eight where each has a device.
#[test]
#[ignore = "needs a CUDA device"]
fn of_many_ranks_one_that_dies_is_named() {
    let deaths = [&BETWEEN[..2], &times()[..4]].concat();
    for world in [4, 8] {
        if world == 4 || apart(world).0 == Spread::Each {
            killed("faults::of_many_ranks_one_that_dies_is_named", world, &deaths);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn late_by_seconds_is_no_error() {
    everywhere("faults::late_by_seconds_is_no_error", |rank| {
        let mut group = rank.group("late");
        for (late, replay) in [(0, false), (1, true)] {
            let mut subjects = Subject::all(&mut group, Duration::from_secs(20), replay);
            group.barrier().unwrap();
            if group.rank() == late {
                std::thread::sleep(Duration::from_secs(2));
            }
            for _ in 0..2 {
                subjects.iter_mut().for_each(Subject::enqueue);
                subjects.iter().for_each(Subject::is_right);
            }
            subjects.into_iter().for_each(|subject| subject.exchange.close().unwrap());
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_short_deadline_is_for_steps_and_not_for_measuring() {
    everywhere("faults::a_short_deadline_is_for_steps_and_not_for_measuring", |rank| {
        let mut group = rank.group("short");
        // Shorter than what any exchange between two ranks takes.
        let shape = Shape { deadline: Duration::from_nanos(1), ..Shape::new(group.world(), 5) };
        let mut subject = Subject::of::<Chosen>(&mut group, shape, Algorithm::Push);
        assert!(!subject.exchange.choice().measured.is_empty());
        if rank.number() == 0 {
            let start = Instant::now();
            subject.enqueue();
            let outcome = subject.outcome();
            assert!(matches!(outcome, Err(Error::Fault(Fault::Deadline { epoch: 1, .. }))), "{outcome:?}");
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        }
        // Nobody leaves before.
        group.barrier().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn different_replay_counts_are_found_by_all() {
    everywhere("faults::different_replay_counts_are_found_by_all", |rank| {
        let mut group = rank.group("counts");
        let mut subjects = Subject::all(&mut group, Duration::from_secs(2), true);
        for round in 0..4 {
            // Rank 0 once more than the others, which learn of it by their next replay.
            if round < 3 || group.rank() == 0 {
                subjects.iter_mut().for_each(Subject::enqueue);
                if round < 3 {
                    subjects.iter().for_each(Subject::is_right);
                } else {
                    subjects.iter().for_each(|subject| drop(subject.outcome()));
                }
            }
        }
        group.barrier().unwrap();
        if group.rank() != 0 {
            subjects.iter_mut().for_each(Subject::enqueue);
        }
        for subject in &mut subjects {
            subject.has_failed(Fault::Deadline { rank: 1, phase: Phase::Ids, epoch: 4 });
        }
        subjects.into_iter().for_each(|subject| subject.exchange.close().unwrap());
        device_works();
        group.barrier().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn another_order_of_names_is_told_to_all() {
    everywhere("faults::another_order_of_names_is_told_to_all", |rank| {
        let mut group = rank.group("names");
        let shape = Shape::new(group.world(), 5);
        let mut names = ["first", "second"];
        if group.rank() == 1 {
            names.reverse();
        }
        for name in names {
            let error = create_as::<Lines>(&mut group, name, &shape, 0, Pace::Steady).map(drop).unwrap_err();
            assert!(matches!(error, Error::Disagreement { rank: 0, other: 1, .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("first") && text.contains("second"), "{text}");
            let all = group.all_gather(text.as_bytes()).unwrap();
            assert_eq!(all[0], all[1]);
        }
        // So is what only one of them shares through the host, or pushes by flags only.
        differ::<ThroughHost>(&mut group, &shape);
        differ::<FlaggedIds>(&mut group, &shape);
        let mut subject = Subject::new::<Lines>(&mut group, Duration::from_secs(20), Algorithm::Push);
        subject.enqueue();
        subject.is_right();
        subject.exchange.close().unwrap();
    });
}

fn differ<W: Way>(group: &mut Group, shape: &Shape) {
    let created = match group.rank() {
        0 => create::<Flags>(group, shape, 0, Pace::Steady).map(drop),
        _ => create::<W>(group, shape, 0, Pace::Steady).map(drop),
    };
    let error = created.unwrap_err();
    assert!(matches!(error, Error::Disagreement { rank: 0, other: 1, .. }), "{error}");
}

fn tables(shape: &Shape, rank: usize) -> Vec<Table> {
    let load = |layer| {
        let (source, rows) = (shape.table(layer), shape.owned(layer, rank));
        Table::load(device(), &source, rows, Placement::Device).unwrap()
    };
    (0..shape.layers).map(load).collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn lines_are_refused_where_they_may_be_split() {
    everywhere("faults::lines_are_refused_where_they_may_be_split", |rank| {
        let mut group = rank.group("lines");
        let shape = Shape::new(group.world(), 8);
        let tables = tables(&shape, rank.number());
        let mut create = |push, through_host, only_flags| {
            let mut options = Options::default();
            (options.push, options.through_host, options.only_flags) = (push, through_host, only_flags);
            Exchange::create(&mut group, device(), "lines", shape.config(), &tables, &options)
        };
        for (through_host, only_flags, why) in
            [(true, false, "host memory"), (false, true, "options"), (true, true, "host memory")]
        {
            let error = create(Some(Push::Lines), through_host, only_flags).map(drop).unwrap_err();
            assert!(matches!(&error, Error::Invalid { what, .. } if what == "way to push"), "{error}");
            assert!(error.to_string().contains(why), "{error}");
            // Where nobody asks for lines, none are tried.
            let exchange = create(None, through_host, only_flags).unwrap();
            assert!(exchange.choice().ways.iter().all(|way| way.push == Push::Flags));
            exchange.close().unwrap();
        }
        group.close().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_allocation_that_fails_fails_on_all_and_the_group_goes_on() {
    everywhere("faults::an_allocation_that_fails_fails_on_all_and_the_group_goes_on", |rank| {
        let mut group = rank.group("memory");
        let access = peer_access(&mut group, device()).unwrap();
        allocations::<Lines>(&mut group, access);
        allocations::<ThroughHost>(&mut group, PeerAccess::Host(Reason::HostBackend));
        group.close().unwrap();
    });
}

fn allocations<W: Way>(group: &mut Group, access: PeerAccess) {
    let deadline = Duration::from_secs(20);
    let shape = Shape { deadline, ..Shape::new(group.world(), 5) };
    drop(Subject::new::<W>(group, deadline, Algorithm::Push));
    group.barrier().unwrap();
    let (open, free) = (descriptors(), device().memory().unwrap().0);
    group.barrier().unwrap();
    let [allocating, _] = steps(access);
    for victim in [0, 1] {
        for &step in allocating {
            fail_next(group, victim, step);
            let outcome = create::<W>(group, &shape, 0, Pace::Steady).map(drop);
            failed(outcome, victim, step);
            let others = group.all_gather(format!("{victim} {step}").as_bytes()).unwrap();
            assert_eq!(others[0], others[1]);
        }
        let mut subject = Subject::new::<W>(group, deadline, Algorithm::Push);
        subject.enqueue();
        subject.is_right();
        subject.exchange.close().unwrap();
    }
    group.barrier().unwrap();
    assert_eq!((descriptors(), mappings()), (open, 0));
    nothing_is_lost(free);
    group.barrier().unwrap();
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_wake_that_fails_leaves_all_asleep() {
    everywhere("faults::a_wake_that_fails_leaves_all_asleep", |rank| {
        let mut group = rank.group("wake");
        let access = peer_access(&mut group, device()).unwrap();
        wakes::<Flags>(&mut group, access);
        wakes::<ThroughHost>(&mut group, PeerAccess::Host(Reason::HostBackend));
        group.close().unwrap();
    });
}

fn wakes<W: Way>(group: &mut Group, access: PeerAccess) {
    let mut subject = Subject::new::<W>(group, Duration::from_secs(20), Algorithm::Push);
    subject.capture();
    subject.enqueue();
    subject.is_right();
    let [_, reserving] = steps(access);
    for victim in [1, 0] {
        subject.exchange.sleep().unwrap();
        for &step in reserving {
            fail_next(group, victim, step);
            failed(subject.exchange.wake(group), victim, step);
            subject.enqueue();
            assert_eq!(subject.outcome(), Err(Error::Asleep));
        }
        subject.exchange.wake(group).unwrap();
        subject.enqueue();
        subject.is_right();
    }
    drop(subject.graph);
    subject.exchange.close().unwrap();
}

/// Rows of which every byte is a NaN or a scale that is one.
struct NanRows {
    format: TableFormat,
    rows: u64,
}

impl TableSource for NanRows {
    fn format(&self) -> &TableFormat {
        &self.format
    }

    fn rows(&self) -> u64 {
        self.rows
    }

    fn read_range(&self, _: Range<u64>, out: &mut [u8]) -> Result<(), SourceError> {
        out.fill(0xff);
        Ok(())
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn tables_wake_without_nan_as_long_as_they_go_by_unmarked_lines() {
    everywhere("faults::tables_wake_without_nan_as_long_as_they_go_by_unmarked_lines", |rank| {
        let mut group = rank.group("nan");
        wakes_without_nan(&mut group, Some(Push::Lines), true);
        wakes_without_nan(&mut group, None, true);
        wakes_without_nan(&mut group, Some(Push::Flags), false);
        group.close().unwrap();
    });
}

/// Whether an exchange that pushes like this holds its tables to what they were, and goes on when they wake.
fn wakes_without_nan(group: &mut Group, push: Option<Push>, held: bool) {
    // A column for each of eight ranks: all of them have rows then.
    let shape = Shape { deadline: Duration::from_secs(20), ..Shape::new(group.world(), 8) };
    let tables = tables(&shape, group.rank());
    let table = tables[1].clone();
    let mut options = Options::default();
    options.push = push;
    let exchange = Exchange::create(group, device(), "nan", shape.config(), &tables, &options).unwrap();
    let values = shape.ids(group.rank(), 1, TOKENS);
    let ids = DeviceBuffer::from_slice(device(), &values).unwrap();
    let stream = Stream::new(device()).unwrap();
    let mut subject =
        Subject { graph: None, exchange, algorithm: Algorithm::Push, shape, ids, values, stream, _tables: Vec::new() };
    subject.capture();
    subject.enqueue();
    subject.is_right();

    let unclean = NanRows { format: subject.shape.format(1), rows: subject.shape.rows(1) };
    let clean = subject.shape.table(1);
    table.sleep().unwrap();
    if held {
        let error = table.wake(&unclean).unwrap_err();
        assert!(matches!(error, engram_cuda::Error::Nan { .. }), "{error}");
        assert!(table.is_asleep());
        let refused = subject.call().unwrap_err();
        assert!(matches!(&refused, Error::Invalid { what, .. } if what == "table of layer 1"), "{refused}");
    } else {
        // By flags any rows arrive.
        table.wake(&unclean).unwrap();
        subject.enqueue();
        subject.outcome().unwrap();
        table.sleep().unwrap();
    }
    table.wake(&clean).unwrap();
    // No call comes between, which could look at the tables.
    subject.enqueue();
    subject.is_right();

    drop(subject.graph);
    subject.exchange.close().unwrap();
    table.sleep().unwrap();
    table.wake(&unclean).unwrap();
    assert!(!table.is_free_of_nan());
}
