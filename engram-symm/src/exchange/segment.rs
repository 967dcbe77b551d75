//! Where things lie in a rank's segment, and access to them.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use crate::memory::{ALIGN, Memory};
use crate::protocol::signal_bytes;

/// The parts of a segment, each from a page boundary on, in bytes. Alike in all ranks.
///
/// | part | shape | written by | for |
/// |---|---|---|---|
/// | signals | control line, then a line a rank | each its own | both |
/// | `ids` | i32 `[slot][layers][columns]` | this rank | `Barrier` |
/// | `rows` | `[requester][slot][layers][own columns][row_bytes]` | this rank | `Barrier` |
/// | `pushed_ids` | i32 `[requester][capacity][layers][own columns]` | each requester | `Push` |
/// | `pushed_rows` | `[slot][layers][columns][row_bytes]` | each owner | `Push` |
///
/// The own columns of a rank are those that it owns; where rows are owned, all columns. `slot` is that of the exchange.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) ids: Range<usize>,
    pub(super) rows: Range<usize>,
    pub(super) pushed_ids: Range<usize>,
    pub(super) pushed_rows: Range<usize>,
}

/// The sizes that a segment follows from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) world: usize,
    pub(super) capacity: usize,
    pub(super) layers: usize,
    pub(super) columns: usize,
    /// The most columns that a rank owns.
    pub(super) own_columns: usize,
    pub(super) row_bytes: usize,
}

impl Segment {
    /// The layout, unless it takes more bytes than can be addressed.
    pub(super) fn new(sizes: Sizes) -> Option<Self> {
        let product = |factors: &[usize]| factors.iter().try_fold(1_usize, |bytes, &factor| bytes.checked_mul(factor));
        let Sizes { world, capacity, layers, columns, own_columns, row_bytes } = sizes;
        let mut end = signal_bytes(world);
        let mut part = |bytes: Option<usize>| {
            let start = end.checked_next_multiple_of(ALIGN)?;
            end = start.checked_add(bytes?)?;
            Some(start..end)
        };
        let segment = Self {
            ids: part(product(&[capacity, layers, columns, 4]))?,
            rows: part(product(&[world, capacity, layers, own_columns, row_bytes]))?,
            pushed_ids: part(product(&[world, capacity, layers, own_columns, 4]))?,
            pushed_rows: part(product(&[capacity, layers, columns, row_bytes]))?,
        };
        segment.pushed_rows.end.checked_next_multiple_of(ALIGN).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        Some(segment)
    }

    /// Bytes of the segment.
    pub(super) fn bytes(&self) -> usize {
        self.pushed_rows.end.next_multiple_of(ALIGN)
    }

    /// All but the signals.
    pub(super) fn data(&self) -> Range<usize> {
        self.ids.start..self.bytes()
    }
}

/// A part of a rank's segment.
///
/// Copies go through raw pointers: the bytes belong to other threads and processes too. That nobody writes what is being
/// read is the protocol's doing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area<'a> {
    base: NonNull<u8>,
    bytes: usize,
    memory: PhantomData<&'a ()>,
}

/// What shared memory is made of: any bytes are a value.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i32 {}

impl<'a> Area<'a> {
    /// The bytes in `range` of the segment of `rank`.
    pub(super) fn new<M: Memory>(memory: &'a M, rank: usize, range: &Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= memory.bytes(), "area outside of the segment");
        // SAFETY: `Memory` promises `bytes()` bytes from the segment's start for as long as it lives.
        let base = unsafe { memory.segment(rank).add(range.start) };
        Self { base, bytes: range.len(), memory: PhantomData }
    }

    fn check<T>(&self, offset: usize, values: &[T]) -> usize {
        let bytes = size_of_val(values);
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "access outside of the area");
        bytes
    }

    /// Copies values out, from `offset` bytes on.
    pub(super) fn read<T: Plain>(&self, offset: usize, out: &mut [T]) {
        let bytes = self.check(offset, out);
        // SAFETY: The offset lies within the area, as was just checked.
        let from = unsafe { self.base.add(offset) };
        // SAFETY:
        // * `from` is valid for `bytes` bytes as checked, for as long as the memory lives that the area borrows from.
        // * `out` is a private buffer, so that the two do not overlap, and any bytes are a `Plain` value.
        // * By the protocol nobody writes these bytes now; whoever breaks it leaves bytes that are no less a value.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr().cast(), bytes) }
    }

    /// Copies values in, from `offset` bytes on.
    pub(super) fn write<T: Plain>(&self, offset: usize, values: &[T]) {
        let bytes = self.check(offset, values);
        // SAFETY: The offset lies within the area, as was just checked.
        let to = unsafe { self.base.add(offset) };
        // SAFETY: As in `read`: `to` is valid for `bytes` bytes, `values` is private, and by the protocol nobody else
        // accesses these bytes now.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), to.as_ptr(), bytes) }
    }
}
