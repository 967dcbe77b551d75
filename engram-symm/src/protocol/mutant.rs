//! Deliberate faults in the protocol, one at a time, to prove that the model checker would find them.

/// What to do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "public for the model only"))]
pub enum Mutant {
    /// Calls are stored without ordering the ids, and the last reads, before them.
    RelaxedCall,
    /// Answers are stored without ordering the rows before them.
    RelaxedDone,
    /// Polls order nothing after them.
    RelaxedPoll,
    /// Rows are looked up before anybody has called.
    NoFirstBarrier,
    /// Rows are read before anybody has answered.
    NoSecondBarrier,
    /// The next rank is not waited for.
    PeerNotAwaited,
    /// The reports of other ranks are not read.
    PoisonNotRead,
}
