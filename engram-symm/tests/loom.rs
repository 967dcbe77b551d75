//! The protocol under a model checker: every interleaving of two exchanges up to a number of preemptions, and every
//! value that weakly ordered loads may return. Run by `cargo xtask loom`.
#![cfg(loom)]
#![expect(
    clippy::arc_with_non_send_sync,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "the model's threads are its own, its numbers are small, and a test fails by panicking"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Plain, Ordering};

use engram_symm::protocol::{
    Call, Control, Failure, Fault, Mutant, Operation, Payload, Phase, Protocol, Signals, Wait, Word,
};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;

const WORDS: usize = 5;

/// The memory of a group of `world` ranks: modelled atomics for the words that two ranks share, and cells that detect
/// conflicting accesses for ids and rows.
struct Memory {
    world: usize,
    /// Whether a rank may give up. Where none does, the words for that are left out of the model.
    faults: bool,
    /// `[owner][from][word]`
    words: Vec<AtomicU64>,
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
    fn new(world: usize, last: u32, faults: bool) -> Self {
        let cells = |count| (0..count).map(|_| UnsafeCell::new(0)).collect();
        let call = Call { epoch: last, operation: Operation::Unknown(0), slot: 0 }.to_word();
        let word = |index| if index % WORDS <= Word::Done as usize { call } else { 0 };
        Self {
            world,
            faults,
            words: (0..world * world * WORDS).map(|index| AtomicU64::new(word(index))).collect(),
            own: (0..world * 2 * WORDS).map(|_| Plain::new(0)).collect(),
            ids: cells(world),
            rows: cells(world * world),
            pushed_ids: cells(world * world),
            pushed_rows: cells(world * world),
        }
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
        self.memory.words[(owner * self.memory.world + from) * WORDS + word as usize].load(order)
    }

    fn store(&self, owner: usize, word: Word, value: u64, order: Ordering) {
        if owner == self.rank {
            return self.own(word as usize).store(value, Ordering::Relaxed);
        }
        assert!(word != Word::Poison || self.memory.faults, "a rank gives up");
        self.memory.words[(owner * self.memory.world + self.rank) * WORDS + word as usize].store(value, order);
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

/// One failed round of polls is explored a barrier (a step, where there is no barrier). With the next one the deadline
/// passes if it may; otherwise the rest of the execution is followed but not branched.
#[derive(Default)]
struct Poll {
    phase: Option<Phase>,
    failed: bool,
    barriers: bool,
    expires: bool,
}

impl Wait for Poll {
    fn pause(&mut self, phase: Phase) -> bool {
        if self.barriers && self.phase != Some(phase) {
            self.failed = false;
        }
        self.phase = Some(phase);
        if std::mem::replace(&mut self.failed, true) {
            if self.expires {
                return false;
            }
            loom::skip_branch();
        }
        loom::thread::yield_now();
        true
    }
}

fn poll(operation: Operation, expires: bool) -> Poll {
    Poll { barriers: operation == Operation::Barrier, expires, ..Poll::default() }
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
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
        let wait = &mut poll(operation, self.expires);
        self.protocol.run(&self.view, operation, slot, &mut self.rows, wait).map_err(|failure| match failure {
            Failure::Fault(fault) => fault,
            Failure::Payload(never) => match never {},
        })
    }
}

/// Runs one closure a rank, rank 0 on the model's own thread, and returns what they return.
fn ranks<T: 'static>(world: usize, faults: bool, rank: impl Fn(&Arc<Memory>, usize) -> T + Clone + 'static) -> Vec<T> {
    let memory = Arc::new(Memory::new(world, LAST, faults));
    let others: Vec<_> = (1..world)
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

/// Two exchanges of all ranks.
fn exchanges(world: usize, preemptions: usize, steps: [Operation; 2], wrong: Wrong) {
    check(preemptions, move || {
        ranks(world, false, move |memory, rank| {
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
            assert_eq!(rank.rows.collected + rank.rows.unread.len(), 2 * world);
        });
    });
}

#[test]
fn two_ranks() {
    PAIRS.into_iter().for_each(|steps| exchanges(2, 3, steps, Wrong::Nothing));
}

#[test]
fn three_ranks() {
    PAIRS.into_iter().for_each(|steps| exchanges(3, 1, steps, Wrong::Nothing));
}

/// Three ranks at two preemptions, a test for each pair of steps, so that they run side by side.
macro_rules! three_ranks_deep {
    ($($name:ident = $pair:literal),*) => {$(
        #[test]
        #[ignore = "takes long: cargo xtask loom --deep"]
        fn $name() {
            exchanges(3, 2, PAIRS[$pair], Wrong::Nothing);
        }
    )*};
}
three_ranks_deep! { deep_barriers = 0, deep_pushes = 1, deep_push_after_barrier = 2, deep_barrier_after_push = 3 }

/// A rank that gives up at any time is reported to the other, which fails at the same step or at its next.
#[test]
fn a_deadline_may_pass_at_any_time() {
    for steps in PAIRS {
        check(3, move || {
            let memory = Arc::new(Memory::new(2, LAST, true));
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
        let failed = ranks(3, true, move |memory, rank| {
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
                let failed =
                    ranks(3, true, move |memory, rank| Rank::new(memory, rank, None).run(operation, slot(rank)));
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
        assert!(fails(move || exchanges(2, 3, steps, wrong)), "2 ranks do not see {wrong:?} in {steps:?}");
        assert!(fails(move || exchanges(3, 1, steps, wrong)), "3 ranks do not see {wrong:?} in {steps:?}");
    }
    for operation in [Operation::Barrier, Operation::Push] {
        let model = move || dead_rank(operation, false, Some(Mutant::PoisonNotRead));
        assert!(fails(model), "the model does not see that poison is not read in {operation}");
    }
}
