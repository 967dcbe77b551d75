//! The protocol on a simulated machine: up to 16 ranks, scheduled at random, whose stores reach memory late and out of
//! order, except that a release keeps behind everything before it.
#![expect(clippy::cast_possible_truncation, reason = "its numbers are small")]

use std::cell::RefCell;
use std::convert::Infallible;
use std::sync::atomic::Ordering;

use engram_symm::protocol::{
    Call, Control, Failure, Fault, Operation, Payload, Phase, Progress, Protocol, Signals, Word,
};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// A place in the memory of the rank `owner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    owner: usize,
    part: Part,
    index: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    /// By writer.
    Signal(Word),
    /// By token.
    Ids,
    /// By requester and token of the slot.
    Rows,
    /// By requester and token.
    PushedIds,
    /// By token and owner of the row.
    PushedRows,
}

/// A store on its way to memory.
struct Store {
    place: Place,
    value: u64,
    release: bool,
}

impl Place {
    /// Words of a rank's memory.
    const WORDS: usize = (5 + 3 * CAPACITY) * MAX_WORLD + CAPACITY;

    fn word(self) -> usize {
        let at = match self.part {
            Part::Signal(word) => word as usize * MAX_WORLD,
            Part::Rows => 5 * MAX_WORLD,
            Part::PushedIds => (5 + CAPACITY) * MAX_WORLD,
            Part::PushedRows => (5 + 2 * CAPACITY) * MAX_WORLD,
            Part::Ids => (5 + 3 * CAPACITY) * MAX_WORLD,
        };
        self.owner * Self::WORDS + at + self.index
    }
}

struct Machine {
    world: usize,
    memory: Vec<u64>,
    /// By rank, oldest first.
    stores: Vec<Vec<Store>>,
    control: Vec<[u64; 3]>,
}

/// Tokens that areas have room for.
const CAPACITY: usize = 4;

const MAX_WORLD: usize = 16;

impl Machine {
    fn new(world: usize) -> RefCell<Self> {
        RefCell::new(Self {
            world,
            memory: vec![0; world * Place::WORDS],
            stores: (0..world).map(|_| Vec::new()).collect(),
            control: vec![[0; 3]; world],
        })
    }

    fn load(&self, rank: usize, place: Place) -> u64 {
        let own = self.stores[rank].iter().rev().find(|store| store.place == place).map(|store| store.value);
        own.unwrap_or(self.memory[place.word()])
    }

    /// Lets one store of `rank` reach memory: any that has no earlier one to the same place and, if it is a release,
    /// none before it at all.
    fn drain(&mut self, rank: usize, random: &mut Random) {
        let stores = &mut self.stores[rank];
        if stores.is_empty() {
            return;
        }
        let at = random.below(stores.len());
        let held = stores[..at].iter().any(|earlier| earlier.place == stores[at].place) || stores[at].release && at > 0;
        let Store { place, value, .. } = stores.remove(if held { 0 } else { at });
        self.memory[place.word()] = value;
    }
}

struct View<'a> {
    machine: &'a RefCell<Machine>,
    rank: usize,
}

impl View<'_> {
    fn get(&self, owner: usize, part: Part, index: usize) -> u64 {
        self.machine.borrow().load(self.rank, Place { owner, part, index })
    }

    fn set(&self, owner: usize, part: Part, index: usize, value: u64, release: bool) {
        let store = Store { place: Place { owner, part, index }, value, release };
        self.machine.borrow_mut().stores[self.rank].push(store);
    }
}

impl Signals for View<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.machine.borrow().world
    }

    fn load(&self, owner: usize, from: usize, word: Word, _: Ordering) -> u64 {
        self.get(owner, Part::Signal(word), from)
    }

    fn store(&self, owner: usize, word: Word, value: u64, order: Ordering) {
        self.set(owner, Part::Signal(word), self.rank, value, order == Ordering::Release);
    }

    fn control(&self, word: Control) -> u64 {
        self.machine.borrow().control[self.rank][word as usize]
    }

    fn set_control(&self, word: Control, value: u64) {
        self.machine.borrow_mut().control[self.rank][word as usize] = value;
    }

    fn claim(&self) -> bool {
        std::mem::replace(&mut self.machine.borrow_mut().control[self.rank][Control::Busy as usize], 1) == 0
    }
}

/// One id a token, and one row for it from each owner.
struct Rows<'a> {
    view: View<'a>,
    call: Call,
    collected: usize,
}

impl Rows<'_> {
    fn push(&self) -> bool {
        self.call.operation == Operation::Push
    }

    fn slot(&self) -> usize {
        self.call.slot as usize
    }

    fn id(&self, rank: usize, token: usize) -> u64 {
        (u64::from(self.call.epoch) << 16) + (rank as u64) * 64 + token as u64
    }

    fn row(id: u64, owner: usize) -> u64 {
        id * 64 + owner as u64 + 1
    }
}

impl Payload for Rows<'_> {
    type Error = Infallible;

    fn publish(&mut self, call: Call) {
        self.call = call;
        let rank = self.view.rank;
        for token in 0..self.slot() {
            let id = self.id(rank, token);
            if self.push() {
                let world = self.view.world();
                (0..world).for_each(|owner| {
                    self.view.set(owner, Part::PushedIds, rank * CAPACITY + token, id, false);
                });
            } else {
                self.view.set(rank, Part::Ids, token, id, false);
            }
        }
    }

    fn serve(&mut self, requester: usize) -> Result<(), Infallible> {
        let rank = self.view.rank;
        for token in 0..self.slot() {
            let id = if self.push() {
                self.view.get(rank, Part::PushedIds, requester * CAPACITY + token)
            } else {
                self.view.get(requester, Part::Ids, token)
            };
            assert_eq!(id, self.id(requester, token), "id of another step");
            if self.push() {
                let world = self.view.world();
                self.view.set(requester, Part::PushedRows, token * world + rank, Self::row(id, rank), false);
            } else {
                self.view.set(rank, Part::Rows, requester * self.slot() + token, Self::row(id, rank), false);
            }
        }
        Ok(())
    }

    fn collect(&mut self, owner: usize) {
        let rank = self.view.rank;
        for token in 0..self.slot() {
            let row = if self.push() {
                self.view.get(rank, Part::PushedRows, token * self.view.world() + owner)
            } else {
                self.view.get(owner, Part::Rows, rank * self.slot() + token)
            };
            assert_eq!(row, Self::row(self.id(rank, token), owner), "row of another step");
        }
        self.collected += 1;
    }
}

/// One rank.
struct Rank<'a> {
    protocol: Protocol,
    rows: Rows<'a>,
    running: bool,
    /// Steps that are complete.
    done: usize,
    failed: Option<(usize, Fault)>,
    dead: bool,
    /// Polls in a row that found nothing.
    failed_polls: usize,
}

/// What goes wrong in a run.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Nothing,
    /// A rank dies after so many of its turns.
    Death {
        rank: usize,
        turn: usize,
    },
    /// A rank calls another slot in this step.
    Slot {
        rank: usize,
        step: usize,
    },
}

struct Run<'a> {
    machine: &'a RefCell<Machine>,
    ranks: Vec<Rank<'a>>,
    steps: Vec<(Operation, u32)>,
    wrong: Wrong,
    /// Polls in a row that a rank does before it gives up.
    patience: usize,
}

impl<'a> Run<'a> {
    fn new(machine: &'a RefCell<Machine>, steps: Vec<(Operation, u32)>, wrong: Wrong, patience: usize) -> Self {
        let world = machine.borrow().world;
        let ranks = (0..world).map(|rank| {
            let view = View { machine, rank };
            // Just below the wrap.
            Protocol::start_after(&view, u32::MAX - 3);
            let call = Call::from_word(0);
            let rows = Rows { view, call, collected: 0 };
            let protocol = Protocol::new(world);
            Rank { protocol, rows, running: false, done: 0, failed: None, dead: false, failed_polls: 0 }
        });
        let ranks = ranks.collect();
        // The ranks meet after that.
        let mut machine_mut = machine.borrow_mut();
        for rank in 0..world {
            while !machine_mut.stores[rank].is_empty() {
                machine_mut.drain(rank, &mut Random(0));
            }
        }
        drop(machine_mut);
        Self { machine, ranks, steps, wrong, patience }
    }

    fn is_over(&self, rank: usize) -> bool {
        let Rank { done, failed, dead, .. } = &self.ranks[rank];
        *dead || failed.is_some() || *done == self.steps.len()
    }

    /// One turn of one rank.
    fn turn(&mut self, at: usize) {
        let rank = &mut self.ranks[at];
        if !rank.running {
            let (operation, mut slot) = self.steps[rank.done];
            if matches!(self.wrong, Wrong::Slot { rank, step } if rank == at && step == self.ranks[at].done) {
                slot = slot % CAPACITY as u32 + 1;
            }
            let rank = &mut self.ranks[at];
            let view = View { machine: self.machine, rank: at };
            match rank.protocol.begin(&view, operation, slot, &mut rank.rows) {
                Ok(()) => rank.running = true,
                Err(fault) => rank.failed = Some((rank.done, fault)),
            }
            return;
        }
        let view = View { machine: self.machine, rank: at };
        match rank.protocol.poll(&view, &mut rank.rows) {
            Ok(Progress::Complete) => {
                (rank.running, rank.failed_polls) = (false, 0);
                rank.done += 1;
            }
            Ok(Progress::Moved) => rank.failed_polls = 0,
            Ok(Progress::Waiting(_)) => {
                rank.failed_polls += 1;
                if rank.failed_polls > self.patience {
                    rank.failed = Some((rank.done, rank.protocol.expire(&view)));
                }
            }
            Err(Failure::Fault(fault)) => rank.failed = Some((rank.done, fault)),
            Err(Failure::Payload(never)) => match never {},
        }
    }

    /// Runs all ranks to their ends.
    fn finish(&mut self, random: &mut Random) {
        let world = self.ranks.len();
        // Some ranks, and the stores of some, are slower than others.
        let pace: Vec<_> = (0..world).map(|_| [1, 4, 4, 16][random.below(4)]).collect();
        let haste: Vec<_> = (0..world).map(|_| [1, 4, 16, 16][random.below(4)]).collect();
        let mut turns = vec![0; world];
        while !(0..world).all(|rank| self.is_over(rank)) {
            let rank = random.below(world);
            if random.below(16) < haste[rank] {
                self.machine.borrow_mut().drain(rank, random);
            }
            let rank = random.below(world);
            if self.is_over(rank) || random.below(16) >= pace[rank] {
                continue;
            }
            turns[rank] += 1;
            if matches!(self.wrong, Wrong::Death { rank: victim, turn } if victim == rank && turn == turns[rank]) {
                // Some of its stores still reach memory, the others never will.
                let mut machine = self.machine.borrow_mut();
                for _ in 0..random.below(machine.stores[rank].len() + 1) {
                    machine.drain(rank, random);
                }
                machine.stores[rank].clear();
                drop(machine);
                self.ranks[rank].dead = true;
                continue;
            }
            self.turn(rank);
        }
    }
}

fn random_steps(random: &mut Random) -> Vec<(Operation, u32)> {
    let step = |random: &mut Random| {
        let operation = [Operation::Barrier, Operation::Push][random.below(2)];
        (operation, 1 + random.below(CAPACITY) as u32)
    };
    (0..8).map(|_| step(random)).collect()
}

fn simulate(seed: u64, world: usize, wrong: impl Fn(&mut Random) -> Wrong, check: impl Fn(&Run<'_>)) {
    let mut random = Random(seed);
    let machine = Machine::new(world);
    let (steps, wrong) = (random_steps(&mut random), wrong(&mut random));
    // Far longer than anything but a dead rank takes.
    let mut run = Run::new(&machine, steps, wrong, 20_000);
    run.finish(&mut random);
    check(&run);
}

#[test]
fn all_ranks_get_their_rows() {
    for world in 1..=16 {
        for seed in 0..20 {
            simulate(
                seed,
                world,
                |_| Wrong::Nothing,
                |run| {
                    for rank in &run.ranks {
                        assert_eq!((rank.failed, rank.done), (None, 8));
                        assert_eq!(rank.rows.collected, 8 * world);
                    }
                },
            );
        }
    }
}

#[test]
fn a_dead_rank_is_named_by_all() {
    for world in 2..=16 {
        for seed in 0..6 {
            let death = |random: &mut Random| Wrong::Death { rank: random.below(world), turn: 1 + random.below(40) };
            simulate(seed, world, death, |run| {
                let Wrong::Death { rank: victim, .. } = run.wrong else { unreachable!("a rank dies") };
                if run.ranks[victim].done == 8 {
                    return;
                }
                let alive = run.ranks.iter().filter(|rank| !rank.dead);
                // Who was through with the last step when the rank died learns nothing of it.
                let failed: Vec<_> = alive.clone().filter_map(|rank| rank.failed).collect();
                assert!(failed.len() == world - 1 || alive.clone().any(|rank| rank.done == 8));
                for &(step, fault) in &failed {
                    let Fault::Deadline { rank, .. } = fault else { panic!("seed {seed} of {world} ranks: {fault:?}") };
                    assert_eq!(rank, victim, "seed {seed} of {world} ranks");
                    assert!(failed.iter().all(|&(other, _)| other.abs_diff(step) <= 1));
                }
            });
        }
    }
}

#[test]
fn a_mismatch_is_seen_by_all() {
    for world in 2..=16 {
        for seed in 0..6 {
            let slot = |random: &mut Random| Wrong::Slot { rank: random.below(world), step: random.below(8) };
            simulate(seed, world, slot, |run| {
                let Wrong::Slot { rank: odd, step } = run.wrong else { unreachable!("a rank calls another slot") };
                for (rank, state) in run.ranks.iter().enumerate() {
                    let Some((failed_in, Fault::Mismatch { rank: other, ours, theirs })) = state.failed else {
                        panic!("seed {seed} of {world} ranks: {:?}", state.failed)
                    };
                    assert_eq!((failed_in, ours.epoch, theirs.epoch), (step, ours.epoch, ours.epoch));
                    assert!((rank == odd) != (other == odd) && ours.slot != theirs.slot);
                }
            });
        }
    }
}

/// Any rank may give up at any time. Then all fail by one of the causes that were given, none hangs, and no row is wrong.
#[test]
fn deadlines_may_pass_at_any_time() {
    for world in 2..=16 {
        for seed in 0..12 {
            let mut random = Random(seed);
            let machine = Machine::new(world);
            let steps = random_steps(&mut random);
            let patience = 1 << random.below(9);
            let mut run = Run::new(&machine, steps, Wrong::Nothing, patience);
            run.finish(&mut random);
            let failed: Vec<_> = run.ranks.iter().filter_map(|rank| rank.failed).collect();
            for &(step, fault) in &failed {
                assert!(matches!(fault, Fault::Deadline { phase: Phase::Ids | Phase::Rows, .. }));
                assert!(failed.iter().all(|&(other, _)| other.abs_diff(step) <= 1));
            }
            assert!(failed.is_empty() || run.ranks.iter().all(|rank| rank.failed.is_some() || rank.done == 8));
        }
    }
}
