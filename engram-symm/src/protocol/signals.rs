//! The words of a group's signal area, whatever they are kept in.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::thread::futex;

use crate::Memory;

/// Bytes of a signal line. Two cache lines, since processors fetch them in pairs.
pub const LINE: usize = 128;

/// Most ranks of a group: a reported fault has 16 bits for the rank that caused it.
pub const MAX_WORLD: usize = 1 << 16;

/// A word of the line that one rank writes in another's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// The writer's call: its ids are ready, and it has read all rows of its earlier calls.
    Call = 0,
    /// The writer's answer to the reader's call, by the same word: the reader's rows are ready, its ids are read.
    Done = 1,
    /// Not 0 once the writer knows that the group has failed.
    Poison = 2,
    /// The writer's call, where the fault is a mismatch.
    Ours = 3,
    /// The call of the rank that the writer names as culprit, where the fault is a mismatch.
    Theirs = 4,
}

/// A word of the line in which a rank keeps its own state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// Epoch of the rank's last call, 32 bits.
    Epoch = 0,
    /// 1 while a step is running.
    Busy = 1,
    /// 1 while the row memory is given back.
    Asleep = 2,
}

/// Access to the signals in a group's memory, for one rank of it.
///
/// In the memory of each rank there is a line a rank, of which only that rank writes the words: no word has two writers,
/// so nobody ever needs a read-modify-write of remote memory. The rank's own line and the control line are written by
/// itself.
pub trait Signals {
    /// This rank, `0..world()`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group, `1..=MAX_WORLD`.
    fn world(&self) -> usize;

    /// Reads `word` of the line that rank `from` writes in the memory of rank `owner`.
    fn load(&self, owner: usize, from: usize, word: Word, order: Ordering) -> u64;

    /// Writes `word` of this rank's line in the memory of rank `owner`.
    fn store(&self, owner: usize, word: Word, value: u64, order: Ordering);

    /// Reads a word of this rank's own state.
    fn control(&self, word: Control) -> u64;

    /// Writes a word of this rank's own state.
    fn set_control(&self, word: Control, value: u64);

    /// Sets [`Control::Busy`] of this rank to 1 and tells whether it was 0. Local memory only, so a swap is cheap.
    fn claim(&self) -> bool;
}

/// Bytes at the start of each segment that the signals of `world` ranks take: the control line, then a line a rank.
pub const fn signal_bytes(world: usize) -> usize {
    LINE * (1 + world)
}

/// Offset in bytes of the line of `from`; the control line is at 0.
const fn line(from: usize) -> usize {
    LINE * (1 + from)
}

/// The address of the word at `offset` bytes in the segment of `owner`.
fn address<M: Memory + ?Sized>(memory: &M, owner: usize, offset: usize) -> *mut u64 {
    assert!(offset.is_multiple_of(8) && offset + 8 <= memory.bytes(), "signal word outside of the segment");
    // SAFETY: `Memory` promises `bytes()` bytes from the segment's start, and the word lies within them.
    let word = unsafe { memory.segment(owner).add(offset) };
    word.cast().as_ptr()
}

fn word<M: Memory + ?Sized>(memory: &M, owner: usize, offset: usize) -> &AtomicU64 {
    // SAFETY: The pointer is valid for reads and writes as long as `memory`, from which the reference borrows, and is
    // aligned to 8 since segments are aligned to a page and the offset to 8. All accesses to signal words, in every
    // process, are atomic ones of 64 bits.
    unsafe { AtomicU64::from_ptr(address(memory, owner, offset)) }
}

/// The bell of `owner`, which is 1 while that rank sleeps until a signal comes: the sixth word of its line in its own
/// memory, of which the lower half is used.
pub(super) fn bell<M: Memory + ?Sized>(memory: &M, owner: usize) -> &AtomicU32 {
    // SAFETY: As above, but that all accesses to bells are atomic ones of 32 bits, of the half at the lower address.
    unsafe { AtomicU32::from_ptr(address(memory, owner, line(owner) + 40).cast()) }
}

/// Wakes `owner` if it sleeps, after a signal was stored in its memory.
fn ring<M: Memory + ?Sized>(memory: &M, owner: usize) {
    // Pairs with the fence in `Patience::pause`.
    fence(Ordering::SeqCst);
    let bell = bell(memory, owner);
    if bell.load(Ordering::Relaxed) != 0 {
        bell.store(0, Ordering::Relaxed);
        // Nobody sleeping any more is no failure, and there is no other.
        let _ = futex::wake(bell, futex::Flags::empty(), 1);
    }
}

impl<M: Memory + ?Sized> Signals for M {
    fn rank(&self) -> usize {
        Memory::rank(self)
    }

    fn world(&self) -> usize {
        Memory::world(self)
    }

    fn load(&self, owner: usize, from: usize, at: Word, order: Ordering) -> u64 {
        word(self, owner, line(from) + 8 * at as usize).load(order)
    }

    fn store(&self, owner: usize, at: Word, value: u64, order: Ordering) {
        word(self, owner, line(Memory::rank(self)) + 8 * at as usize).store(value, order);
        if order == Ordering::Release {
            ring(self, owner);
        }
    }

    fn control(&self, at: Control) -> u64 {
        word(self, Memory::rank(self), 8 * at as usize).load(Ordering::Relaxed)
    }

    fn set_control(&self, at: Control, value: u64) {
        word(self, Memory::rank(self), 8 * at as usize).store(value, Ordering::Relaxed);
    }

    fn claim(&self) -> bool {
        word(self, Memory::rank(self), 8 * Control::Busy as usize).swap(1, Ordering::Relaxed) == 0
    }
}
