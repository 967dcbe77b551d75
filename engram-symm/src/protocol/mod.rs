//! The protocol by which ranks exchange rows through memory that they share.
//!
//! It needs nothing of that memory but stores and loads: no read-modify-write of another rank's words, no messages, no
//! clock that is shared. (Ranks that sleep while they wait are woken by the system, on top of that.) The same state machine runs between threads, between processes, under a model checker, on a
//! simulated machine whose stores are late, and in kernels.
//!
//! # Signals
//!
//! In each rank's memory there is a control line, which is its own, and then a line for every rank of the group, by rank,
//! of which only that rank writes the words. Lines are [`LINE`] bytes, words 64 bits.
//!
//! | line | offset | word | content |
//! |---|---|---|---|
//! | control | 0 | [`Control::Epoch`] | epoch of this rank's last call |
//! | | 8 | [`Control::Busy`] | 1 while a step runs |
//! | | 16 | [`Control::Asleep`] | 1 while the row memory is given back |
//! | of rank `p`, at 128 (1 + `p`) | 0 | [`Word::Call`] | `p`'s call: epoch << 32, operation << 24, slot |
//! | | 8 | [`Word::Done`] | `p`'s answer, the same word as the call that it answers |
//! | | 16 | [`Word::Poison`] | 0, or the fault that `p` reports: epoch << 32, culprit << 16, phase << 8, kind |
//! | | 24 | [`Word::Ours`] | with a mismatch, `p`'s call |
//! | | 32 | [`Word::Theirs`] | with a mismatch, the culprit's call |
//! | | 40 | bell | in `p`'s own memory: 1 while `p` sleeps until a signal comes (processes and threads only) |
//! | | 48 | | not used; kernels that signal by block keep their words there |
//!
//! Operations: 1 `Barrier`, 2 `Push`, 3 `Sleep`, 4 `Wake`, 5 `Close`, 6 `Meet`. Kinds: 1 deadline, 2 mismatch, 3 overlap, 4 failed.
//! Phases: 0 ids, 1 rows. Zeroed memory is that of a group at epoch 0.
//!
//! # A step
//!
//! A rank *calls*: it makes its ids ready, then stores its call into every other rank's memory. It *serves* a rank: it
//! reads that rank's ids, makes the rows ready that it owns, then stores the answer into that rank's memory. It *collects*
//! from a rank once that rank's answer has come. The step is complete when it has served and collected from all.
//!
//! * `Barrier` serves nobody before all have called: that is the first barrier. All answers together are the second. Ids
//!   and rows stay in the memory of who writes them and are read from there. Steps in which no rows move are of this kind.
//! * `Push` serves each rank as it calls. Ids and rows are written into the memory of who reads them.
//!
//! A word is polled until it is the rank's own call. Anything else than that or the epoch before it is a disagreement. So
//! the epoch only ever needs to be told from its neighbours, and wraps from `u32::MAX` to 0 like any other.
//!
//! # Why each ordering is needed
//!
//! Calls and answers are stored with release and polled with acquire. Write `a -> b` for "a happens before b".
//!
//! 1. *The right ids.* Ids written -> call stored (release) -> call seen (acquire) -> ids read.
//! 2. *The right rows.* Rows written -> answer stored (release) -> answer seen (acquire) -> rows read.
//! 3. *Ids are rewritten only when read.* An owner's reads of ids -> its answer (release) -> seen by the requester
//!    (acquire), without which that one does not end the step -> its next ids. With both algorithms every rank answers
//!    every other one, those that own nothing too.
//! 4. *Rows are rewritten only when read.* A requester's reads of rows -> its next call (release): the next ids are the
//!    permission to overwrite the last rows. With `Push` the owner's next rows for this requester come after it has seen
//!    this call, with `Barrier` after it has seen the calls of all, since its rows for several ranks may share an area.
//! 5. *A rank is at most one step ahead.* It ends no step without everyone's answer to its call, so that while it polls a
//!    line, that line holds this step's word or the last one's; and a line's word is not overwritten by the next step's
//!    before it has been seen, since its writer would need this rank's answer first.
//!
//! 4 and 5 have a consequence for layouts: with `Push`, a requester that is one step ahead writes its ids while those of
//! another one for the last step are still being read. Where ids lie must therefore not depend on the slot, which may
//! differ between the two steps. The same holds between steps of both algorithms, so each has areas of its own.
//!
//! The model checker finds every one of these orderings missing when it is left out (`tests/loom.rs`).
//!
//! # Faults
//!
//! A rank that gives up stores the fault into its line in every rank's memory, the poison word last and with release. A
//! rank looks for poison when it calls and whenever a round of polls finds nothing; it takes the first that it sees,
//! records it in its own line, and fails by it from then on. Whoever has all its answers completes the step nevertheless
//! and fails in the next one. Poison is never taken back: the memory of a failed group is not used again.
//!
//! * *Deadline.* An expired wait names the rank that is late; or, if that one is itself waiting, whoever it waits for, and
//!   so forth: each rank's memory shows which calls and answers have not reached it.
//! * *Mismatch.* All ranks publish their call before they look at any other, so every rank sees the calls that disagree
//!   with its own, if not before another one's report of it: then it takes both calls from the report. At least one of
//!   the two differs from its own.
//! * *Overlap.* A rank's control line says that a step is running when the next one begins.
//! * *Failed.* A rank that cannot read its table says so instead of answering.
//!
//! How long a wait may take is for the caller to say ([`Wait`]): a clock, a number of polls, or the choice of a model.

mod machine;
mod mutant;
mod signals;
mod wait;
pub(crate) mod words;

pub use machine::{Failure, Payload, Progress, Protocol, Wait};
#[cfg(loom)]
pub use mutant::Mutant;
pub use signals::{Control, LINE, MAX_WORLD, Signals, Word, signal_bytes};
pub use wait::{Patience, Spins};
pub use words::{Call, Fault, Operation, Phase};
