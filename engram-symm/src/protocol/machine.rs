//! The state machine of one rank in one step after another.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::mutant::Mutant;
use super::words::Poison;
use super::{Call, Control, Fault, Operation, Phase, Signals, Word};

/// What moves in a step: the ids and rows that the signals speak for.
///
/// The protocol orders these calls against those of the other ranks (see the [module](super)); where the bytes lie is
/// the payload's own affair.
pub trait Payload {
    /// Why rows could not be served.
    type Error;

    /// Makes this rank's ids ready for all owners.
    fn publish(&mut self, call: Call);

    /// Reads the ids of `requester` and makes ready for it the rows that this rank owns.
    ///
    /// # Errors
    /// When the table cannot be read. The group fails with [`Fault::Failed`].
    fn serve(&mut self, requester: usize) -> Result<(), Self::Error>;

    /// Takes the rows that `owner` made ready for this rank.
    fn collect(&mut self, owner: usize);
}

/// How a rank waits for others, and for how long.
pub trait Wait {
    /// Called after every round of polls that found nothing new, while others owe this rank what `phase` says. `false`
    /// says that the deadline is past.
    fn pause(&mut self, phase: Phase) -> bool;
}

/// What a round of polls found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The step is complete.
    Complete,
    /// Something arrived.
    Moved,
    /// Nothing arrived: others owe this rank what the phase says.
    Waiting(Phase),
}

/// Why a step failed on this rank.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure<E> {
    /// The group has failed.
    Fault(Fault),
    /// This rank could not serve its rows; the group has failed with [`Fault::Failed`] for the others.
    Payload(E),
}

impl<E> From<Fault> for Failure<E> {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// One rank's protocol state between and during steps.
///
/// What outlives a step is in the group's memory alone; this holds who is still waited for, and reuses its lists so that
/// a step allocates nothing.
#[derive(Debug)]
pub struct Protocol {
    call: Call,
    /// Ranks that have not called yet, or have but are not served.
    unserved: Vec<usize>,
    /// Ranks whose rows have not been collected.
    uncollected: Vec<usize>,
    /// Whether this rank has served itself.
    own_served: bool,
    #[cfg(loom)]
    mutant: Option<Mutant>,
}

impl Protocol {
    /// The protocol for one of `world` ranks.
    pub fn new(world: usize) -> Self {
        Self {
            call: Call::from_word(0),
            unserved: Vec::with_capacity(world),
            uncollected: Vec::with_capacity(world),
            own_served: false,
            #[cfg(loom)]
            mutant: None,
        }
    }

    /// A protocol with a deliberate fault.
    #[cfg(loom)]
    pub fn with_mutant(world: usize, mutant: Mutant) -> Self {
        Self { mutant: Some(mutant), ..Self::new(world) }
    }

    #[cfg(loom)]
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    #[cfg(not(loom))]
    #[expect(clippy::unused_self, reason = "the same calls under the model checker, where there are mutants")]
    const fn is(&self, _: Mutant) -> bool {
        false
    }

    /// Prepares the signals for a first step at the epoch after `last`, in memory that no step has used yet; zeroed memory
    /// is prepared for `last` = 0. All ranks do this alike, and then meet by other means before any of them begins.
    pub fn start_after<S: Signals + ?Sized>(signals: &S, last: u32) {
        let call = Call { epoch: last, operation: Operation::Unknown(0), slot: 0 }.to_word();
        signals.set_control(Control::Epoch, last.into());
        for peer in peers(signals) {
            signals.store(peer, Word::Call, call, Release);
            signals.store(peer, Word::Done, call, Release);
        }
    }

    /// Whether this rank has put the group's row memory to sleep.
    pub fn is_asleep<S: Signals + ?Sized>(signals: &S) -> bool {
        signals.control(Control::Asleep) != 0
    }

    /// Records that the row memory sleeps, or no longer does.
    pub fn set_asleep<S: Signals + ?Sized>(signals: &S, asleep: bool) {
        signals.set_control(Control::Asleep, asleep.into());
    }

    /// Does a whole step, waiting as `wait` says.
    ///
    /// # Errors
    /// As [`Protocol::begin`] and [`Protocol::poll`]; an expired wait fails as [`Protocol::expire`] says.
    pub fn run<S: Signals + ?Sized, P: Payload>(
        &mut self,
        signals: &S,
        operation: Operation,
        slot: u32,
        payload: &mut P,
        wait: &mut impl Wait,
    ) -> Result<(), Failure<P::Error>> {
        self.begin(signals, operation, slot, payload)?;
        loop {
            match self.poll(signals, payload)? {
                Progress::Complete => return Ok(()),
                Progress::Moved => {}
                Progress::Waiting(phase) => {
                    if !wait.pause(phase) {
                        return Err(self.expire(signals).into());
                    }
                }
            }
        }
    }

    /// Starts the next step: publishes the ids, then the call to all ranks.
    ///
    /// # Errors
    /// [`Fault::Overlap`] when a step is still running on this rank, and any fault by which the group has failed before;
    /// then nothing is published.
    pub fn begin<S: Signals + ?Sized>(
        &mut self,
        signals: &S,
        operation: Operation,
        slot: u32,
        payload: &mut impl Payload,
    ) -> Result<(), Fault> {
        let last = u32::from_le_bytes(low_half(signals.control(Control::Epoch)));
        self.call = Call { epoch: last.wrapping_add(1), operation, slot };
        if let Some(fault) = self.learn(signals) {
            return Err(fault);
        }
        if !signals.claim() {
            let fault = Fault::Overlap { rank: signals.rank(), epoch: last };
            self.give_up(signals, fault);
            return Err(fault);
        }
        signals.set_control(Control::Epoch, self.call.epoch.into());

        payload.publish(self.call);
        self.unserved.clear();
        self.uncollected.clear();
        self.own_served = false;
        for peer in peers(signals) {
            // Release: whoever acquires the call sees the ids, and its owner's rows come after this rank's last reads.
            let order = if self.is(Mutant::RelaxedCall) { Relaxed } else { Release };
            signals.store(peer, Word::Call, self.call.to_word(), order);
            self.unserved.push(peer);
            self.uncollected.push(peer);
        }
        Ok(())
    }

    /// One round of polls: serves and collects what has arrived since the last one.
    ///
    /// # Errors
    /// [`Fault::Mismatch`] when a rank called another thing, the payload's error when it cannot serve, and the fault
    /// that another rank reported when nothing arrived. The group has then failed, and all ranks know.
    pub fn poll<S: Signals + ?Sized, P: Payload>(
        &mut self,
        signals: &S,
        payload: &mut P,
    ) -> Result<Progress, Failure<P::Error>> {
        let owed = self.unserved.len() + self.uncollected.len();
        if self.call.operation == Operation::Push {
            self.serve_as_called(signals, payload)?;
            self.collect(signals, payload)?;
        } else if !self.own_served {
            if self.all_called(signals)? {
                self.serve_all(signals, payload)?;
            }
        } else {
            self.collect(signals, payload)?;
        }

        if self.own_served && self.uncollected.is_empty() && self.unserved.is_empty() {
            signals.set_control(Control::Busy, 0);
            return Ok(Progress::Complete);
        }
        if self.unserved.len() + self.uncollected.len() < owed {
            return Ok(Progress::Moved);
        }
        if let Some(fault) = self.learn(signals) {
            return Err(fault.into());
        }
        Ok(Progress::Waiting(self.phase()))
    }

    /// Gives the group up since the deadline is past, unless another rank already did, and returns the cause.
    pub fn expire<S: Signals + ?Sized>(&mut self, signals: &S) -> Fault {
        if let Some(fault) = self.learn(signals) {
            return fault;
        }
        let late = if let Some(&late) = self.unserved.first() { late } else { self.uncollected[0] };
        let fault = self.blame(signals, late);
        self.give_up(signals, fault);
        fault
    }

    /// The fault by which the group has failed, if it has. Reads this rank's memory only and waits for nothing.
    pub fn fault<S: Signals + ?Sized>(&self, signals: &S) -> Option<Fault> {
        self.report(signals, |_| true).map(|(_, fault)| fault)
    }

    /// The same as far as it concerns this step, recorded: later steps of this rank fail by this cause, whatever else is
    /// reported meanwhile.
    fn learn<S: Signals + ?Sized>(&self, signals: &S) -> Option<Fault> {
        // Who calls the next step has answered all calls of this one, so that this one can end before the mismatch in the
        // next is its own: only then does this rank know how its call differs.
        let next = self.call.epoch.wrapping_add(1);
        let concerns = |fault: &Fault| !matches!(fault, Fault::Mismatch { theirs, .. } if theirs.epoch == next);
        let (from, fault) = self.report(signals, concerns)?;
        if from != signals.rank() {
            leave(signals, signals.rank(), fault);
        }
        Some(fault)
    }

    /// A fault that `concerns` this rank, and the rank that reported it: this one first.
    fn report<S: Signals + ?Sized>(&self, signals: &S, concerns: impl Fn(&Fault) -> bool) -> Option<(usize, Fault)> {
        if self.is(Mutant::PoisonNotRead) {
            return None;
        }
        let own = signals.rank();
        std::iter::once(own).chain(peers(signals)).find_map(|from| {
            // Acquire: pairs with the release in `leave`, which the two calls precede.
            let word = signals.load(own, from, Word::Poison, Acquire);
            if word == 0 {
                return None;
            }
            let ours = signals.load(own, from, Word::Ours, Relaxed);
            let theirs = signals.load(own, from, Word::Theirs, Relaxed);
            // What this rank recorded was by its own call then.
            let call = if from == own { Call::from_word(ours) } else { self.call };
            let fault = Poison { word, ours, theirs }.fault(from, call);
            concerns(&fault).then_some((from, fault))
        })
    }

    fn phase(&self) -> Phase {
        if self.unserved.is_empty() { Phase::Rows } else { Phase::Ids }
    }

    /// `Push`: each rank is served as soon as it has called, this one after the first round of others.
    fn serve_as_called<S: Signals + ?Sized, P: Payload>(
        &mut self,
        signals: &S,
        payload: &mut P,
    ) -> Result<(), Failure<P::Error>> {
        let mut at = 0;
        while let Some(&peer) = self.unserved.get(at) {
            if self.arrived(signals, peer, Word::Call)? {
                self.serve(signals, payload, peer)?;
                self.unserved.swap_remove(at);
            } else {
                at += 1;
            }
        }
        if !self.own_served {
            self.serve(signals, payload, signals.rank())?;
        }
        Ok(())
    }

    /// `Barrier`, first half: whether all ranks have called. Then nobody reads rows of the step before any more.
    fn all_called<S: Signals + ?Sized>(&mut self, signals: &S) -> Result<bool, Fault> {
        let mut at = 0;
        while let Some(&peer) = self.unserved.get(at) {
            if self.arrived(signals, peer, Word::Call)? {
                self.unserved.swap_remove(at);
            } else {
                at += 1;
            }
        }
        Ok(self.unserved.is_empty())
    }

    fn serve_all<S: Signals + ?Sized, P: Payload>(
        &mut self,
        signals: &S,
        payload: &mut P,
    ) -> Result<(), Failure<P::Error>> {
        for peer in peers(signals) {
            self.serve(signals, payload, peer)?;
        }
        self.serve(signals, payload, signals.rank())
    }

    fn serve<S: Signals + ?Sized, P: Payload>(
        &mut self,
        signals: &S,
        payload: &mut P,
        requester: usize,
    ) -> Result<(), Failure<P::Error>> {
        payload.serve(requester).map_err(|error| {
            self.give_up(signals, Fault::Failed { rank: signals.rank(), epoch: self.call.epoch });
            Failure::Payload(error)
        })?;
        if requester == signals.rank() {
            payload.collect(requester);
            self.own_served = true;
        } else {
            // Release: whoever acquires the answer sees the rows, and may overwrite the ids that were read for them.
            let order = if self.is(Mutant::RelaxedDone) { Relaxed } else { Release };
            signals.store(requester, Word::Done, self.call.to_word(), order);
        }
        Ok(())
    }

    fn collect<S: Signals + ?Sized>(&mut self, signals: &S, payload: &mut impl Payload) -> Result<(), Fault> {
        let mut at = 0;
        while let Some(&peer) = self.uncollected.get(at) {
            if self.arrived(signals, peer, Word::Done)? {
                payload.collect(peer);
                self.uncollected.swap_remove(at);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Whether `peer` has left `word` for this step.
    fn arrived<S: Signals + ?Sized>(&self, signals: &S, peer: usize, word: Word) -> Result<bool, Fault> {
        let mutant = match word {
            Word::Call => Mutant::NoFirstBarrier,
            _ => Mutant::NoSecondBarrier,
        };
        if self.is(mutant) || self.is(Mutant::PeerNotAwaited) && Some(peer) == peers(signals).next() {
            return Ok(true);
        }
        // Acquire: pairs with the release of the same word in `begin` or `serve` on the other rank.
        let order = if self.is(Mutant::RelaxedPoll) { Relaxed } else { Acquire };
        let theirs = Call::from_word(signals.load(signals.rank(), peer, word, order));
        if theirs == self.call {
            return Ok(true);
        }
        // A rank cannot be more than this one step behind: it could not have left the step before last without us.
        if theirs.epoch == self.call.epoch.wrapping_sub(1) {
            return Ok(false);
        }
        let fault = Fault::Mismatch { rank: peer, ours: self.call, theirs };
        self.give_up(signals, fault);
        Err(fault)
    }

    /// Reports the fault to all ranks, this one last.
    fn give_up<S: Signals + ?Sized>(&self, signals: &S, fault: Fault) {
        for peer in peers(signals) {
            leave(signals, peer, fault);
        }
        leave(signals, signals.rank(), fault);
    }

    /// Who keeps the group from going on: `late`, or whoever `late` itself is waiting for, and so forth.
    ///
    /// A rank's memory shows what has not reached it, and so what a living rank is held up by. Read on the way to a
    /// fault only.
    fn blame<S: Signals + ?Sized>(&self, signals: &S, late: usize) -> Fault {
        let call_of = |owner, from, word| Call::from_word(signals.load(owner, from, word, Acquire));
        let (mut waiting, mut rank, mut epoch) = (signals.rank(), late, self.call.epoch);
        let mut hops = 0;
        loop {
            // `rank` owes `waiting` something for the step `epoch`, which `waiting` has called.
            let before = epoch.wrapping_sub(1);
            let call = call_of(waiting, rank, Word::Call);
            let (phase, word, stuck_in) = if call.epoch == before {
                // Not even the call: it may lack an answer to the call before.
                (Phase::Ids, Word::Done, before)
            } else {
                // The answer: with barriers, it may lack another call.
                (Phase::Rows, Word::Call, epoch)
            };
            let next = (0..signals.world())
                .filter(|_| phase == Phase::Ids || call.operation != Operation::Push)
                .find(|&other| other != rank && call_of(rank, other, word).epoch == stuck_in.wrapping_sub(1))
                .filter(|&other| other != signals.rank() && hops < signals.world());
            let Some(next) = next else { return Fault::Deadline { rank, phase, epoch } };
            (waiting, rank, epoch) = (rank, next, stuck_in);
            hops += 1;
        }
    }
}

/// Writes `fault` into this rank's line in the memory of `owner`.
fn leave<S: Signals + ?Sized>(signals: &S, owner: usize, fault: Fault) {
    let Poison { word, ours, theirs } = Poison::new(fault);
    signals.store(owner, Word::Ours, ours, Relaxed);
    signals.store(owner, Word::Theirs, theirs, Relaxed);
    // Release: whoever acquires the word sees the two calls.
    signals.store(owner, Word::Poison, word, Release);
}

/// All ranks but this one, beginning with the next: so not all of them start with the same rank.
fn peers<S: Signals + ?Sized>(signals: &S) -> impl Iterator<Item = usize> {
    let (rank, world) = (signals.rank(), signals.world());
    (1..world).map(move |distance| (rank + distance) % world)
}

fn low_half(word: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = word.to_le_bytes();
    [a, b, c, d]
}
