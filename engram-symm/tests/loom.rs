//! The protocol under a model checker: every interleaving of two exchanges up to a number of preemptions, and every
//! value that weakly ordered loads may return. Run by `cargo xtask loom`.
#![cfg(loom)]
#![expect(
    clippy::arc_with_non_send_sync,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "the model's threads are its own, its numbers are small, and a test says how large it was or panics"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64 as Plain, AtomicUsize, Ordering};
use std::time::Instant;

use engram_symm::protocol::{
    Call, Control, Failure, Fault, Mutant, Operation, Payload, Phase, Protocol, Signals, Wait, Word,
};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;

const WORDS: usize = 5;

/// A word that two ranks share.
struct Signal {
    word: AtomicU64,
    /// What was stored last.
    latest: Plain,
    /// Whether the last load returned an older value than that, as loads may where nothing orders the store before them.
    missed: AtomicBool,
}

impl Signal {
    fn new(value: u64) -> Self {
        Self { word: AtomicU64::new(value), latest: Plain::new(value), missed: AtomicBool::new(false) }
    }

    fn load(&self, order: Ordering) -> u64 {
        let value = self.word.load(order);
        self.missed.store(value != self.latest.load(Ordering::Relaxed), Ordering::Relaxed);
        value
    }

    fn store(&self, value: u64, order: Ordering) {
        self.word.store(value, order);
        self.latest.store(value, Ordering::Relaxed);
    }
}

/// The memory of a group of `world` ranks: modelled atomics for the words that two ranks share, and cells that detect
/// conflicting accesses for ids and rows.
struct Memory {
    world: usize,
    /// Whether a rank may give up. Where none does, the words for that are left out of the model.
    faults: bool,
    /// How many more vain waits are explored, see [`Bounds`].
    vain_waits: AtomicUsize,
    /// `[owner][from][word]`
    signals: Vec<Signal>,
    /// `[rank][word]`, each rank's own line and control line.
    own: Vec<Plain>,
    /// `[rank]`, published for all owners to read.
    ids: Vec<UnsafeCell<u32>>,
    /// `[owner][requester]`, for the requester to read.
    rows: Vec<UnsafeCell<u32>>,
    /// `[owner][requester]`, written by the requester.
    pushed_ids: Vec<UnsafeCell<u32>>,
    /// `[requester][owner]`, written by the owner.
    pushed_rows: Vec<UnsafeCell<u32>>,
}

impl Memory {
    fn new(world: usize, faults: bool) -> Self {
        let cells = |count| (0..count).map(|_| UnsafeCell::new(0)).collect();
        let call = Call { epoch: LAST, operation: Operation::Unknown(0), slot: 0 }.to_word();
        let words = if faults { WORDS } else { Word::Done as usize + 1 };
        let word = |index| if index % words <= Word::Done as usize { call } else { 0 };
        Self {
            world,
            faults,
            vain_waits: usize::MAX.into(),
            signals: (0..world * world * words).map(|index| Signal::new(word(index))).collect(),
            own: (0..world * 2 * WORDS).map(|_| Plain::new(0)).collect(),
            ids: cells(world),
            rows: cells(world * world),
            pushed_ids: cells(world * world),
            pushed_rows: cells(world * world),
        }
    }

    /// The words in the memory of `owner`: `[from][word]`.
    fn signals(&self, owner: usize) -> &[Signal] {
        let line = self.signals.len() / self.world;
        &self.signals[owner * line..][..line]
    }

    fn signal(&self, owner: usize, from: usize, word: Word) -> &Signal {
        assert!(matches!(word, Word::Call | Word::Done) || self.faults, "a rank gives up");
        let signals = self.signals(owner);
        &signals[from * (signals.len() / self.world) + word as usize]
    }
}

#[derive(Clone)]
struct View {
    memory: Arc<Memory>,
    rank: usize,
}

impl View {
    fn own(&self, index: usize) -> &Plain {
        &self.memory.own[self.rank * 2 * WORDS + index]
    }

    /// Whether what follows a wait of this rank is to be explored: not if the wait is vain, once there were enough of those.
    fn may_wait(&self) -> bool {
        let vain = self.memory.signals(self.rank).iter().any(|signal| signal.missed.load(Ordering::Relaxed));
        let spend = |left: usize| left.checked_sub(1);
        !vain || self.memory.vain_waits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok()
    }
}

impl Signals for View {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.memory.world
    }

    fn load(&self, owner: usize, from: usize, word: Word, order: Ordering) -> u64 {
        if owner == from {
            assert_eq!(owner, self.rank);
            return self.own(word as usize).load(Ordering::Relaxed);
        }
        if word == Word::Poison && !self.memory.faults {
            return 0;
        }
        self.memory.signal(owner, from, word).load(order)
    }

    fn store(&self, owner: usize, word: Word, value: u64, order: Ordering) {
        if owner == self.rank {
            return self.own(word as usize).store(value, Ordering::Relaxed);
        }
        self.memory.signal(owner, self.rank, word).store(value, order);
    }

    fn control(&self, word: Control) -> u64 {
        self.own(WORDS + word as usize).load(Ordering::Relaxed)
    }

    fn set_control(&self, word: Control, value: u64) {
        self.own(WORDS + word as usize).store(value, Ordering::Relaxed);
    }

    fn claim(&self) -> bool {
        self.own(WORDS + Control::Busy as usize).swap(1, Ordering::Relaxed) == 0
    }
}

/// One id a rank and one row for it from each owner.
struct Rows {
    view: View,
    call: Call,
    /// A deliberate fault: rows are read only after the next ids have been published.
    reads_late: bool,
    unread: Vec<(usize, Call)>,
    collected: usize,
}

impl Rows {
    fn new(view: &View) -> Self {
        let call = Call { epoch: 0, operation: Operation::Unknown(0), slot: 0 };
        Self { view: view.clone(), call, reads_late: false, unread: Vec::new(), collected: 0 }
    }

    /// Different in every step and rank.
    fn id(call: Call, rank: usize) -> u32 {
        call.epoch.wrapping_mul(16).wrapping_add(rank as u32 + 1)
    }

    fn row(id: u32, owner: usize) -> u32 {
        id.wrapping_mul(1000).wrapping_add(owner as u32)
    }

    fn read(&mut self, owner: usize, call: Call) {
        let View { memory, rank } = &self.view;
        let (near, far) = (*rank * memory.world + owner, owner * memory.world + rank);
        let cell = if call.operation == Operation::Push { &memory.pushed_rows[near] } else { &memory.rows[far] };
        // SAFETY: Only this rank reads the cell, and the model reports a conflicting write.
        let row = cell.with(|row| unsafe { *row });
        assert_eq!(row, Self::row(Self::id(call, *rank), owner), "row of another step");
        self.collected += 1;
    }
}

impl Payload for Rows {
    type Error = std::convert::Infallible;

    fn publish(&mut self, call: Call) {
        self.call = call;
        let View { memory, rank } = &self.view;
        let id = Self::id(call, *rank);
        // SAFETY: The model reports an access that conflicts with the write.
        let write = |cell: &UnsafeCell<u32>| cell.with_mut(|cell| unsafe { *cell = id });
        if call.operation == Operation::Push {
            (0..memory.world).for_each(|owner| write(&memory.pushed_ids[owner * memory.world + rank]));
        } else {
            write(&memory.ids[*rank]);
        }
    }

    fn serve(&mut self, requester: usize) -> Result<(), Self::Error> {
        for (owner, call) in std::mem::take(&mut self.unread) {
            self.read(owner, call);
        }
        let View { memory, rank } = &self.view;
        let (near, far) = (rank * memory.world + requester, requester * memory.world + rank);
        let (ids, rows) = if self.call.operation == Operation::Push {
            (&memory.pushed_ids[near], &memory.pushed_rows[far])
        } else {
            (&memory.ids[requester], &memory.rows[near])
        };
        // SAFETY: The model reports a write that conflicts with the read.
        let id = ids.with(|id| unsafe { *id });
        assert_eq!(id, Self::id(self.call, requester), "id of another step");
        // SAFETY: The model reports an access that conflicts with the write.
        rows.with_mut(|row| unsafe { *row = Self::row(id, *rank) });
        Ok(())
    }

    fn collect(&mut self, owner: usize) {
        if self.reads_late && owner != self.view.rank {
            self.unread.push((owner, self.call));
        } else {
            self.read(owner, self.call);
        }
    }
}

/// One failed round of polls is explored a barrier (a step, where there is no barrier), within [`Bounds`]. With the next
/// one the deadline passes if it may; otherwise the rest of the execution is followed but not branched.
struct Poll {
    view: View,
    barriers: bool,
    expires: bool,
    phase: Option<Phase>,
    failed: bool,
}

impl Poll {
    fn new(view: &View, operation: Operation, expires: bool) -> Self {
        let barriers = operation == Operation::Barrier;
        Self { view: view.clone(), barriers, expires, phase: None, failed: false }
    }
}

impl Wait for Poll {
    fn pause(&mut self, phase: Phase) -> bool {
        if self.barriers && self.phase != Some(phase) {
            self.failed = false;
        }
        self.phase = Some(phase);
        let again = std::mem::replace(&mut self.failed, true);
        if again && self.expires {
            return false;
        }
        if again || !self.view.may_wait() {
            loom::skip_branch();
        }
        loom::thread::yield_now();
        true
    }
}

/// Explores all executions with that many preemptions at most, and returns how many there were.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) -> usize {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    let executions = Arc::new(AtomicUsize::new(0));
    let count = executions.clone();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    executions.load(Ordering::Relaxed)
}

/// Steps begin just before the epoch wraps.
const LAST: u32 = u32::MAX - 1;

/// One rank in the model.
struct Rank {
    view: View,
    protocol: Protocol,
    rows: Rows,
    expires: bool,
}

impl Rank {
    fn new(memory: &Arc<Memory>, rank: usize, mutant: Option<Mutant>) -> Self {
        let view = View { memory: memory.clone(), rank };
        view.set_control(Control::Epoch, LAST.into());
        let protocol = mutant.map_or_else(
            || Protocol::new(memory.world), //
            |mutant| Protocol::with_mutant(memory.world, mutant),
        );
        Self { rows: Rows::new(&view), view, protocol, expires: false }
    }

    fn run(&mut self, operation: Operation, slot: u32) -> Result<(), Fault> {
        let wait = &mut Poll::new(&self.view, operation, self.expires);
        self.protocol.run(&self.view, operation, slot, &mut self.rows, wait).map_err(|failure| match failure {
            Failure::Fault(fault) => fault,
            Failure::Payload(never) => match never {},
        })
    }
}

/// Runs one closure a rank, rank 0 on the model's own thread, and returns what they return.
fn ranks<T: 'static>(memory: Memory, rank: impl Fn(&Arc<Memory>, usize) -> T + Clone + 'static) -> Vec<T> {
    let memory = Arc::new(memory);
    let others: Vec<_> = (1..memory.world)
        .map(|other| {
            let (memory, rank) = (memory.clone(), rank.clone());
            loom::thread::spawn(move || rank(&memory, other))
        })
        .collect();
    let first = rank(&memory, 0);
    std::iter::once(first).chain(others.into_iter().map(|other| other.join().unwrap())).collect()
}

const PAIRS: [[Operation; 2]; 4] = [
    [Operation::Barrier, Operation::Barrier],
    [Operation::Push, Operation::Push],
    [Operation::Barrier, Operation::Push],
    [Operation::Push, Operation::Barrier],
];

/// What the model does wrong on purpose, if anything.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    Protocol(Mutant),
    /// The rows of a step are read after the next ids were published.
    ReadsLate,
}

/// How much of what may happen in two exchanges is explored.
///
/// A rank that could go on is held up when it is preempted, but also when it waits in vain: when its polls miss a signal
/// that is there, as loads may, and it yields. Both are the same to all ranks. Polls that find nothing read words that
/// their rank has seen in the step before, so they order nothing, and no rank can tell that they were made: it might as
/// well have been preempted before them. But the checker does not count vain waits among the preemptions, and they are
/// most of what there is to explore. Where that is too much they have a bound of their own: after one too many the rest of
/// the execution is followed but not branched.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    ranks: usize,
    preemptions: usize,
    vain_waits: usize,
}

const TWO: Bounds = Bounds { ranks: 2, preemptions: 3, vain_waits: usize::MAX };
const THREE: Bounds = Bounds { ranks: 3, preemptions: 1, vain_waits: usize::MAX };
/// `THREE` has any number of vain waits with a preemption at most, so that both together hold ranks up twice in every way.
const DEEP: Bounds = Bounds { ranks: 3, preemptions: 2, vain_waits: 1 };

/// Two exchanges of all ranks.
fn exchanges(bounds: Bounds, steps: [Operation; 2], wrong: Wrong) {
    let start = Instant::now();
    let executions = check(bounds.preemptions, move || {
        let memory = Memory { vain_waits: bounds.vain_waits.into(), ..Memory::new(bounds.ranks, false) };
        ranks(memory, move |memory, rank| {
            let mutant = match wrong {
                // Here one rank at fault must be enough.
                Wrong::Protocol(Mutant::PeerNotAwaited) if rank > 0 => None,
                Wrong::Protocol(mutant) => Some(mutant),
                _ => None,
            };
            let mut rank = Rank::new(memory, rank, mutant);
            rank.rows.reads_late = wrong == Wrong::ReadsLate;
            for operation in steps {
                assert_eq!(rank.run(operation, 1), Ok(()));
            }
            assert_eq!(rank.rows.collected + rank.rows.unread.len(), 2 * bounds.ranks);
        });
    });
    let Bounds { ranks, preemptions, .. } = bounds;
    let time = start.elapsed();
    println!("{steps:?} of {ranks} ranks at {preemptions} preemptions: {executions} executions in {time:.1?}");
}

#[test]
fn two_ranks() {
    PAIRS.into_iter().for_each(|steps| exchanges(TWO, steps, Wrong::Nothing));
}

#[test]
fn three_ranks() {
    PAIRS.into_iter().for_each(|steps| exchanges(THREE, steps, Wrong::Nothing));
}

/// A test for each pair of steps, so that they run side by side.
macro_rules! three_ranks_deep {
    ($($name:ident = $pair:literal),*) => {$(
        #[test]
        #[ignore = "takes long: cargo xtask loom --deep"]
        fn $name() {
            exchanges(DEEP, PAIRS[$pair], Wrong::Nothing);
        }
    )*};
}
three_ranks_deep! { deep_barriers = 0, deep_pushes = 1, deep_push_after_barrier = 2, deep_barrier_after_push = 3 }

/// A rank that gives up at any time is reported to the other, which fails at the same step or at its next.
#[test]
fn a_deadline_may_pass_at_any_time() {
    for steps in PAIRS {
        check(3, move || {
            let memory = Arc::new(Memory::new(2, true));
            let run = move |memory: &Arc<Memory>, rank, expires| {
                let mut rank = Rank { expires, ..Rank::new(memory, rank, None) };
                let failed = (0..).zip(steps).find_map(|(at, operation)| Some((at, rank.run(operation, 1).err()?)));
                (rank, failed)
            };
            let patient = {
                let memory = memory.clone();
                loom::thread::spawn(move || run(&memory, 1, false))
            };
            let (_, gave_up) = run(&memory, 0, true);
            let (mut patient, failed) = patient.join().unwrap();
            match (gave_up, failed) {
                (None, None) => assert_eq!(patient.rows.collected, 4),
                (Some((at, fault)), Some((later, same))) => {
                    assert_eq!(fault, same);
                    assert!(matches!(fault, Fault::Deadline { rank: 1, .. }) && later <= at + 1);
                }
                (Some((_, fault)), None) => assert_eq!(patient.run(Operation::Push, 1), Err(fault)),
                (None, Some(_)) => panic!("only one rank has a deadline"),
            }
        });
    }
}

/// Rank 2 dies, before its first call or once only rank 0 has got it. Only rank 0 has a deadline; the third learns of it.
fn dead_rank(operation: Operation, calls: bool, mutant: Option<Mutant>) {
    check(2, move || {
        let failed = ranks(Memory::new(3, true), move |memory, rank| {
            let mut rank = Rank { expires: rank == 0, ..Rank::new(memory, rank, mutant) };
            if rank.view.rank < 2 {
                return rank.run(operation, 1).err();
            }
            if calls {
                let call = Call { epoch: LAST + 1, operation, slot: 1 };
                rank.rows.publish(call);
                rank.view.store(0, Word::Call, call.to_word(), Ordering::Release);
            }
            None
        });
        // Rank 1 may also have come too late itself.
        assert!(matches!(failed[0], Some(Fault::Deadline { rank: 1 | 2, epoch: u32::MAX, .. })));
        assert_eq!(failed[0], failed[1]);
    });
}

#[test]
fn a_dead_rank_is_named_by_all() {
    for operation in [Operation::Barrier, Operation::Push] {
        dead_rank(operation, false, None);
        dead_rank(operation, true, None);
    }
}

/// Whoever differs, all ranks see two calls that disagree and name a rank that made the other one. No deadline passes.
#[test]
fn a_mismatch_is_seen_by_all() {
    for operation in [Operation::Barrier, Operation::Push] {
        for odd in 0..3 {
            check(1, move || {
                let slot = move |rank| if rank == odd { 2 } else { 1 };
                let failed = ranks(Memory::new(3, true), move |memory, rank| {
                    Rank::new(memory, rank, None).run(operation, slot(rank))
                });
                for (rank, failed) in failed.into_iter().enumerate() {
                    let Err(Fault::Mismatch { rank: other, ours, theirs }) = failed else {
                        panic!("rank {rank}: {failed:?}")
                    };
                    let call = |rank| Call { epoch: LAST + 1, operation, slot: slot(rank) };
                    assert_eq!((ours, theirs), (call(rank), call(other)));
                    assert_ne!(ours, theirs);
                }
            });
        }
    }
}

/// Whether the model checker finds fault with the model, on a thread of its own.
fn fails(model: impl FnOnce() + Send + 'static) -> bool {
    std::thread::Builder::new().name("mutant".into()).spawn(model).unwrap().join().is_err()
}

/// The model would be worth nothing if it did not see these.
#[test]
fn every_mutant_fails() {
    // What mutants report is expected, and would only clutter the output.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() != Some("mutant") {
            report(info);
        }
    }));

    let [barrier, push, ..] = PAIRS;
    let wrong = [
        (barrier, Wrong::Protocol(Mutant::RelaxedCall)),
        (push, Wrong::Protocol(Mutant::RelaxedCall)),
        (barrier, Wrong::Protocol(Mutant::RelaxedDone)),
        (push, Wrong::Protocol(Mutant::RelaxedDone)),
        (barrier, Wrong::Protocol(Mutant::RelaxedPoll)),
        (push, Wrong::Protocol(Mutant::RelaxedPoll)),
        (barrier, Wrong::Protocol(Mutant::NoFirstBarrier)),
        (push, Wrong::Protocol(Mutant::NoFirstBarrier)),
        (barrier, Wrong::Protocol(Mutant::NoSecondBarrier)),
        (push, Wrong::Protocol(Mutant::NoSecondBarrier)),
        (barrier, Wrong::Protocol(Mutant::PeerNotAwaited)),
        (push, Wrong::Protocol(Mutant::PeerNotAwaited)),
        (barrier, Wrong::ReadsLate),
        (push, Wrong::ReadsLate),
    ];
    for (steps, wrong) in wrong {
        for bounds in [TWO, THREE, DEEP] {
            assert!(fails(move || exchanges(bounds, steps, wrong)), "{bounds:?} does not see {wrong:?} in {steps:?}");
        }
    }
    for operation in [Operation::Barrier, Operation::Push] {
        let model = move || dead_rank(operation, false, Some(Mutant::PoisonNotRead));
        assert!(fails(model), "the model does not see that poison is not read in {operation}");
    }
}
