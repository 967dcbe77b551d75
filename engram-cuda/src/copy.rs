//! Scattered rows to consecutive places: fetched ahead, and moved a cache line at a time.
//!
//! Stores go through the caches. The device takes a chunk soon after it was written, so it finds it there, and memory need not move the rows
//! twice; stores past the caches also take the place of loads among the lines that a core may have under way.

/// Rows fetched ahead of the one that is copied.
const AHEAD: usize = 8;

/// Copies rows of `len` bytes to consecutive places; a null source is a zero row.
///
/// # Safety
/// Each source that is not null has `len` bytes, and `to` has room for all rows.
pub(crate) unsafe fn rows(sources: &[*const u8], len: usize, to: *mut u8) {
    let lines = lines::are_here();
    for &source in sources.iter().take(AHEAD) {
        prefetch(source, len);
    }
    for (place, &source) in sources.iter().enumerate() {
        if let Some(&later) = sources.get(place + AHEAD) {
            prefetch(later, len);
        }
        let to = to.wrapping_add(place * len);
        if source.is_null() {
            // SAFETY: by the caller's promise.
            unsafe { to.write_bytes(0, len) };
        } else if lines {
            // SAFETY: by the caller's promise, and the instructions are here.
            unsafe { lines::row(source, len, to) };
        } else {
            // SAFETY: by the caller's promise; a table and a chunk never overlap.
            unsafe { std::ptr::copy_nonoverlapping(source, to, len) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn prefetch(source: *const u8, len: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    if !source.is_null() {
        for offset in (0..len + source.addr() % 64).step_by(64) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(offset).cast()) };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch(_: *const u8, _: usize) {}

/// Rows in pieces of a cache line, where the processor has registers of that size.
#[cfg(target_arch = "x86_64")]
mod lines {
    use std::arch::x86_64::{
        _mm512_loadu_si512, _mm512_mask_storeu_epi8, _mm512_maskz_loadu_epi8, _mm512_storeu_si512,
    };

    pub(super) fn are_here() -> bool {
        std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512bw")
    }

    /// # Safety
    /// [`are_here`]; `from` and `to` have `len` bytes.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn row(from: *const u8, len: usize, to: *mut u8) {
        let whole = len - len % 64;
        for offset in (0..whole).step_by(64) {
            // SAFETY: inside the row, at any alignment.
            let line = unsafe { _mm512_loadu_si512(from.wrapping_add(offset).cast()) };
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(to.wrapping_add(offset).cast(), line) };
        }
        if whole < len {
            let rest = (1 << (len - whole)) - 1;
            // SAFETY: the mask selects the row's own bytes, and no others are touched.
            let line = unsafe { _mm512_maskz_loadu_epi8(rest, from.wrapping_add(whole).cast()) };
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_epi8(to.wrapping_add(whole).cast(), rest, line) };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod lines {
    pub(super) fn are_here() -> bool {
        false
    }

    /// # Safety
    /// Never called.
    pub(super) unsafe fn row(_: *const u8, _: usize, _: *mut u8) {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_arrive_whole(
            len in 1usize..300, offset in 0usize..20, picks in prop::collection::vec(prop::option::of(0usize..40), 0..60),
        ) {
            let table: Vec<u8> = (0..40 * len).map(|at| u8::try_from(at % 251).unwrap()).collect();
            let sources: Vec<_> =
                picks.iter().map(|pick| pick.map_or(std::ptr::null(), |row| table[row * len..].as_ptr())).collect();
            let mut out = vec![0xeeu8; offset + picks.len() * len + 70];
            // SAFETY: the sources are rows of the table, and the output has room for all of them.
            unsafe { super::rows(&sources, len, out.as_mut_ptr().wrapping_add(offset)) };
            let expected: Vec<u8> = picks
                .iter()
                .flat_map(|pick| pick.map_or(vec![0; len], |row| table[row * len..(row + 1) * len].to_vec()))
                .collect();
            let (before, rest) = out.split_at(offset);
            let (found, after) = rest.split_at(expected.len());
            prop_assert_eq!(found, &expected[..]);
            prop_assert!(before.iter().chain(after).all(|&byte| byte == 0xee));
        }
    }
}
