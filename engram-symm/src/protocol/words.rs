//! The 64-bit words that ranks leave in each other's memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What all ranks of a group do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operation {
    /// An exchange with a barrier after the ids and one after the rows; rows are read from their owner's memory.
    Barrier,
    /// An exchange without a barrier; ids and rows are written into the memory of whoever needs them.
    Push,
    /// The group gives its row memory back until it wakes.
    Sleep,
    /// The group takes its row memory again.
    Wake,
    /// The group ends.
    Close,
    /// The ranks wait for each other, and do nothing else.
    Meet,
    /// A code that this version does not know.
    Unknown(u8),
}

impl Operation {
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Barrier => 1,
            Self::Push => 2,
            Self::Sleep => 3,
            Self::Wake => 4,
            Self::Close => 5,
            Self::Meet => 6,
            Self::Unknown(code) => code,
        }
    }

    const fn from_code(code: u8) -> Self {
        match code {
            1 => Self::Barrier,
            2 => Self::Push,
            3 => Self::Sleep,
            4 => Self::Wake,
            5 => Self::Close,
            6 => Self::Meet,
            _ => Self::Unknown(code),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Barrier => f.write_str("barrier"),
            Self::Push => f.write_str("push"),
            Self::Sleep => f.write_str("sleep"),
            Self::Wake => f.write_str("wake"),
            Self::Close => f.write_str("close"),
            Self::Meet => f.write_str("meeting"),
            Self::Unknown(code) => write!(f, "operation {code}"),
        }
    }
}

/// One rank's part in one collective step: what it does, how large, and for the how many-th time.
///
/// As a word: epoch in the upper 32 bits, the operation's code in the next 8, the slot in the lower 24.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Call {
    /// Number of the step, counted by each rank for itself. It wraps from `u32::MAX` to 0.
    pub epoch: u32,
    /// What the rank does in this step.
    pub operation: Operation,
    /// Tokens each rank has room for in this step, at most [`Call::MAX_SLOT`]; 0 where no rows move.
    pub slot: u32,
}

impl Call {
    /// Largest slot that a call can carry.
    pub const MAX_SLOT: u32 = (1 << 24) - 1;

    /// The call as one word.
    pub const fn to_word(self) -> u64 {
        debug_assert!(self.slot <= Self::MAX_SLOT);
        (self.epoch as u64) << 32 | (self.operation.code() as u64) << 24 | self.slot as u64
    }

    /// The call in `word`. Every word is some call.
    pub const fn from_word(word: u64) -> Self {
        let [slot0, slot1, slot2, code, epoch @ ..] = word.to_le_bytes();
        Self {
            epoch: u32::from_le_bytes(epoch),
            operation: Operation::from_code(code),
            slot: u32::from_le_bytes([slot0, slot1, slot2, 0]),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with slot {} at epoch {}", self.operation, self.slot, self.epoch)
    }
}

/// The half of a step that a rank owed when it was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Its call, and with it its ids.
    Ids,
    /// Its answer to another rank's call, and with it that rank's rows.
    Rows,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ids => "ids",
            Self::Rows => "rows",
        })
    }
}

/// Why a group can no longer be used. All ranks of the group learn the same cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A rank did not come within the deadline.
    #[error("rank {rank} did not send its {phase} of epoch {epoch} before the deadline")]
    Deadline {
        /// The rank that was waited for.
        rank: usize,
        /// What it owed.
        phase: Phase,
        /// The step it owed it for.
        epoch: u32,
    },
    /// Two ranks called different things.
    #[error("rank {rank} called {theirs}, this rank {ours}")]
    Mismatch {
        /// A rank that disagrees with this one.
        rank: usize,
        /// This rank's call.
        ours: Call,
        /// The other rank's call.
        theirs: Call,
    },
    /// A rank started a step while another one of the same group was still running on it.
    #[error("rank {rank} started epoch {epoch} before its previous one had ended")]
    Overlap {
        /// The rank on which both ran.
        rank: usize,
        /// The step that was still running.
        epoch: u32,
    },
    /// A rank could not do its part, such as read its table; there the error says why.
    #[error("rank {rank} could not do its part of epoch {epoch}")]
    Failed {
        /// The rank that failed.
        rank: usize,
        /// The step in which it failed.
        epoch: u32,
    },
    /// A fault of a kind that this version does not know.
    #[error("rank {rank} is the cause of fault {kind} at epoch {epoch}")]
    Unknown {
        /// The kind's code.
        kind: u8,
        /// The rank that caused it.
        rank: usize,
        /// The step in which it arose.
        epoch: u32,
    },
}

/// A fault as the three words that carry it. The calls count only where the kind is a mismatch.
///
/// The first word: epoch in the upper 32 bits, culprit in the next 16, phase in the next 8, kind in the lower 8. A kind is
/// never 0, so that a word of 0 means that nothing is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Poison {
    pub(crate) word: u64,
    pub(crate) ours: u64,
    pub(crate) theirs: u64,
}

impl Poison {
    const DEADLINE: u8 = 1;
    const MISMATCH: u8 = 2;
    const OVERLAP: u8 = 3;
    const FAILED: u8 = 4;

    pub(super) fn new(fault: Fault) -> Self {
        let word = |kind: u8, phase: u8, rank: usize, epoch: u32| {
            let [rank0, rank1, ..] = rank.to_le_bytes();
            let [epoch0, epoch1, epoch2, epoch3] = epoch.to_le_bytes();
            u64::from_le_bytes([kind, phase, rank0, rank1, epoch0, epoch1, epoch2, epoch3])
        };
        let (mut ours, mut theirs) = (0, 0);
        let word = match fault {
            Fault::Deadline { rank, phase, epoch } => word(Self::DEADLINE, (phase == Phase::Rows).into(), rank, epoch),
            Fault::Mismatch { rank, ours: our_call, theirs: their_call } => {
                (ours, theirs) = (our_call.to_word(), their_call.to_word());
                word(Self::MISMATCH, 0, rank, our_call.epoch)
            }
            Fault::Overlap { rank, epoch } => word(Self::OVERLAP, 0, rank, epoch),
            Fault::Failed { rank, epoch } => word(Self::FAILED, 0, rank, epoch),
            Fault::Unknown { kind, rank, epoch } => word(kind, 0, rank, epoch),
        };
        Self { word, ours, theirs }
    }

    /// The fault that `sender` reported, as the rank sees it that calls `call`.
    pub(crate) fn fault(self, sender: usize, call: Call) -> Fault {
        let [kind, phase, rank0, rank1, epoch @ ..] = self.word.to_le_bytes();
        let (rank, epoch) = (u16::from_le_bytes([rank0, rank1]).into(), u32::from_le_bytes(epoch));
        match kind {
            Self::DEADLINE => Fault::Deadline { rank, phase: if phase == 0 { Phase::Ids } else { Phase::Rows }, epoch },
            // The two calls differ, so that at least one of them is not ours: that rank is who disagrees with us.
            Self::MISMATCH if self.theirs == call.to_word() => {
                Fault::Mismatch { rank: sender, ours: call, theirs: Call::from_word(self.ours) }
            }
            Self::MISMATCH => Fault::Mismatch { rank, ours: call, theirs: Call::from_word(self.theirs) },
            Self::OVERLAP => Fault::Overlap { rank, epoch },
            Self::FAILED => Fault::Failed { rank, epoch },
            kind => Fault::Unknown { kind, rank, epoch },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_survive_their_word() {
        for epoch in [0, 1, 0x8000_0000, u32::MAX] {
            for code in 0..=u8::MAX {
                for slot in [0, 1, 0x1_0000, Call::MAX_SLOT] {
                    let call = Call { epoch, operation: Operation::from_code(code), slot };
                    assert_eq!(Call::from_word(call.to_word()), call);
                    assert_eq!(call.to_word() >> 32, u64::from(epoch));
                }
            }
        }
    }

    #[test]
    fn faults_survive_their_words() {
        let call = |slot| Call { epoch: 9, operation: Operation::Push, slot };
        let faults = [
            Fault::Deadline { rank: 0, phase: Phase::Ids, epoch: 0 },
            Fault::Deadline { rank: 65_535, phase: Phase::Rows, epoch: u32::MAX },
            Fault::Overlap { rank: 3, epoch: 7 },
            Fault::Failed { rank: 4, epoch: 8 },
            Fault::Unknown { kind: 200, rank: 5, epoch: 9 },
            Fault::Mismatch { rank: 2, ours: call(4), theirs: call(8) },
        ];
        for fault in faults {
            let poison = Poison::new(fault);
            assert_ne!(poison.word, 0);
            assert_eq!(poison.fault(1, call(4)), fault);
        }
    }

    #[test]
    fn each_rank_learns_a_rank_that_disagrees_with_it() {
        let call = |slot| Call { epoch: 9, operation: Operation::Push, slot };
        // Rank 1 called 4 and met rank 2, which called 8.
        let poison = Poison::new(Fault::Mismatch { rank: 2, ours: call(4), theirs: call(8) });
        // A rank that called as rank 1 did, rank 2 itself, and a rank that differs from both.
        assert_eq!(poison.fault(1, call(4)), Fault::Mismatch { rank: 2, ours: call(4), theirs: call(8) });
        assert_eq!(poison.fault(1, call(8)), Fault::Mismatch { rank: 1, ours: call(8), theirs: call(4) });
        assert_eq!(poison.fault(1, call(5)), Fault::Mismatch { rank: 2, ours: call(5), theirs: call(8) });
    }
}
