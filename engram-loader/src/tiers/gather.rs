//! Rows copied from memory: the loop that both memory tiers spend their time in.

use crate::Pool;
use engram_ple::SourceError;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// How many rows ahead of the copy the memory system is asked for: enough to keep every line-fill buffer of a core busy with rows of a
/// few lines.
const AHEAD: usize = 16;

/// Rows that one thread copies before it takes more.
const PART_ROWS: usize = 4096;

/// Gathers of fewer rows run on the calling thread: waking another one takes longer than they do.
const INLINE_ROWS: usize = 4096;

/// Runs `copy` on all ids and their rows in `out`, in parts on the pool where there are many.
pub(crate) fn on_pool(
    pool: &Pool,
    row_bytes: usize,
    ids: &[i32],
    out: &mut [u8],
    copy: impl Fn(&[i32], &mut [u8]) -> Result<(), SourceError> + Sync,
) -> Result<(), SourceError> {
    if ids.len() < INLINE_ROWS || pool.threads() == 1 {
        return copy(ids, out);
    }
    let failure = FirstError::default();
    pool.run_on_chunks(out, PART_ROWS * row_bytes, &|part, out| {
        let ids = &ids[part * PART_ROWS..];
        failure.keep(copy(&ids[..ids.len().min(PART_ROWS)], out));
    });
    failure.into_result()
}

/// Copies one part of each id's row, `part` of its packed bytes; the part of id -1 is zeros.
///
/// # Safety
/// Every pointer that `address` gives is valid for reads of `part.len()` bytes until this returns, and none of them points into `out`.
pub(crate) unsafe fn copy_rows(
    ids: &[i32],
    out: &mut [u8],
    row_bytes: usize,
    part: Range<usize>,
    address: impl Fn(u64) -> Result<*const u8, SourceError>,
) -> Result<(), SourceError> {
    let bytes = part.len();
    // Rows whose lines are on their way; the slot of row `i` is `i % AHEAD`. Null stands for a zero row.
    let mut flight = [std::ptr::null::<u8>(); AHEAD];
    let mut ahead = ids.iter();
    let mut start = |slot: &mut *const u8| -> Result<(), SourceError> {
        if let Some(&id) = ahead.next() {
            *slot = match u64::try_from(id) {
                Ok(row) => address(row)?,
                Err(_) => std::ptr::null(),
            };
            prefetch(*slot, bytes);
        }
        Ok(())
    };
    flight.iter_mut().try_for_each(&mut start)?;
    for (i, packed) in out.chunks_exact_mut(row_bytes).enumerate() {
        let slot = &mut flight[i % AHEAD];
        let part = &mut packed[part.clone()];
        if slot.is_null() {
            part.fill(0);
        } else {
            // SAFETY: the caller promises that an address is valid for `bytes` bytes and outside `out`; `part` is `bytes` long.
            unsafe { std::ptr::copy_nonoverlapping(*slot, part.as_mut_ptr(), bytes) };
        }
        start(slot)?;
    }
    Ok(())
}

/// Asks for all cache lines of a row, without waiting. A null pointer asks for nothing.
#[inline]
fn prefetch(row: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if !row.is_null() {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE: usize = 64;
        let first = row.map_addr(|address| address & !(LINE - 1));
        for line in (0..row.addr() - first.addr() + bytes).step_by(LINE) {
            // SAFETY: a prefetch is a hint that never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, bytes);
}

/// The first error of a job that several threads share.
pub(crate) struct FirstError<E>(Mutex<Option<E>>);

impl<E> Default for FirstError<E> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<E> FirstError<E> {
    pub(crate) fn keep(&self, result: Result<(), E>) {
        if let Err(error) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// Whether there is one, so that what is left need not be done.
    pub(crate) fn is_set(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(crate) fn into_result(self) -> Result<(), E> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}
