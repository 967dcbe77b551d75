//! Bytes that several threads write at once, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// Bytes in slots of one size, for threads that each write slots of their own, or parts of slots.
pub(crate) struct Slots<'a> {
    start: *mut u8,
    bytes: usize,
    slot_bytes: usize,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Slots` stands for the `&mut [u8]` it was made from, which may be sent; a slot is only reached through `get`, whose caller
// promises that no two threads hold the same one.
unsafe impl Sync for Slots<'_> {}

impl<'a> Slots<'a> {
    pub(crate) fn new(bytes: &'a mut [u8], slot_bytes: usize) -> Self {
        assert!(slot_bytes > 0, "slots of no bytes");
        Self { start: bytes.as_mut_ptr(), bytes: bytes.len(), slot_bytes, borrow: PhantomData }
    }

    /// How many slots there are, a shorter last one included.
    pub(crate) fn len(&self) -> usize {
        self.bytes.div_ceil(self.slot_bytes)
    }

    /// The bytes of `part` of one slot; of a shorter last slot, as much of `part` as it has.
    ///
    /// # Safety
    /// No other slice of these bytes exists meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps parts of slots apart")]
    pub(crate) unsafe fn get(&self, slot: usize, part: Range<usize>) -> &mut [u8] {
        assert!(slot < self.len() && part.start <= part.end && part.end <= self.slot_bytes, "part of slot {slot}");
        let from = slot * self.slot_bytes;
        let part = from + part.start.min(self.bytes - from)..from + part.end.min(self.bytes - from);
        // SAFETY: `part` lies inside the slice that `start` was made from: `from` does by the assertion, and its ends are cut to `bytes`.
        let start = unsafe { self.start.add(part.start) };
        // SAFETY: as above for all of `part`; that slice stays mutably borrowed for 'a, and the caller promises that no other slice of
        // these bytes exists.
        unsafe { std::slice::from_raw_parts_mut(start, part.len()) }
    }
}
