//! Symmetric memory as one rank sees it.

use std::ops::Range;
use std::ptr::NonNull;

use crate::Error;

/// One rank's view of the memory of a group: a segment a rank, all of one length, every one of them mapped here.
///
/// The segments are shared with other threads or processes that write to them at any time, so nothing ever makes a
/// `&` or `&mut` to their bytes: signals are atomics made from the raw pointer, rows are copied through it.
///
/// # Safety
///
/// For as long as the view lives, and for each `rank < world()`:
/// * `segment(rank)` points to `bytes()` bytes that are valid for reads and writes, and its address does not change;
/// * it is aligned to [`ALIGN`];
/// * segment `r` is the same memory in the views of all ranks of the group;
/// * all its bytes were zero before any rank of the group could have its view.
pub unsafe trait Memory: Send + Sync {
    /// This rank, `0..world()`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group, at least 1.
    fn world(&self) -> usize;

    /// Bytes of each segment.
    fn bytes(&self) -> usize;

    /// First byte of the segment of `rank`, where this rank has it mapped.
    ///
    /// # Panics
    /// When `rank >= world()`.
    fn segment(&self, rank: usize) -> NonNull<u8>;

    /// Gives the bytes of this rank's own segment in `range` back to the system. The addresses stay valid in all ranks
    /// and read as zeros until they are written again. The range is a whole number of [`ALIGN`] pieces.
    ///
    /// # Errors
    /// When the system refuses; the contents of the range are then unspecified.
    fn discard(&self, range: Range<usize>) -> Result<(), Error>;

    /// Takes the bytes of this rank's own segment in `range` from the system again, after they were discarded and before
    /// any rank writes to them. The range is a whole number of [`ALIGN`] pieces.
    ///
    /// # Errors
    /// When the system has no room.
    fn reserve(&self, range: Range<usize>) -> Result<(), Error>;
}

/// Alignment of segments and of the parts that can be discarded, in bytes: a page.
pub const ALIGN: usize = 4096;
