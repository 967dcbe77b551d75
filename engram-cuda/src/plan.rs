//! How large ranges are cut: chunks of a load, of a registration, of a gather.

use std::ops::Range;

/// Cuts `0..total` into pieces of `size`, the last one shorter. Nothing for `total == 0`.
pub(crate) fn chunks(total: u64, size: u64) -> impl ExactSizeIterator<Item = Range<u64>> + Clone {
    let size = size.max(1);
    let count = usize::try_from(total.div_ceil(size)).unwrap_or(usize::MAX);
    (0..count).map(move |k| {
        let start = k as u64 * size;
        start..(start + size).min(total)
    })
}

/// Rows whose packed bytes fit into `budget`, at least one.
pub(crate) fn rows_within(budget: u64, row_bytes: usize) -> u64 {
    (budget / row_bytes.max(1) as u64).max(1)
}

/// Applies `step` to every part in order; when one fails, applies `undo` to those before it, newest first, and returns the failure.
pub(crate) fn all_or_nothing<T, E>(
    parts: impl Iterator<Item = T>,
    mut step: impl FnMut(&T) -> Result<(), E>,
    mut undo: impl FnMut(&T),
) -> Result<Vec<T>, E> {
    let mut done = Vec::new();
    for part in parts {
        if let Err(error) = step(&part) {
            done.iter().rev().for_each(&mut undo);
            return Err(error);
        }
        done.push(part);
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_the_whole_once_and_in_order(total in 0u64..10_000, size in 1u64..500) {
            let mut next = 0;
            for chunk in chunks(total, size) {
                prop_assert_eq!(chunk.start, next);
                prop_assert!(chunk.end > chunk.start && chunk.end - chunk.start <= size);
                next = chunk.end;
            }
            prop_assert_eq!(next, total);
        }
    }

    #[test]
    fn a_registration_of_half_a_tebibyte_is_cut_below_the_driver_limit() {
        let limit = 1u64 << 37;
        let parts: Vec<_> = chunks((1 << 39) + 4096, limit).collect();
        assert_eq!(parts.len(), 5);
        assert!(parts.iter().all(|part| part.end - part.start < 1 << 38));
        assert_eq!(parts.last().unwrap().end, (1 << 39) + 4096);
    }

    #[test]
    fn a_row_wider_than_the_budget_still_moves() {
        assert_eq!(rows_within(100, 264), 1);
        assert_eq!(rows_within(1 << 20, 264), 3971);
    }

    #[test]
    fn a_failed_part_undoes_the_ones_before_it_newest_first() {
        let mut undone = Vec::new();
        let result = all_or_nothing(0..5, |&k| if k == 3 { Err("no") } else { Ok(()) }, |&k| undone.push(k));
        assert_eq!(result, Err("no"));
        assert_eq!(undone, [2, 1, 0]);
        assert_eq!(all_or_nothing(0..3, |_| Ok::<_, ()>(()), |_| unreachable!()), Ok(vec![0, 1, 2]));
    }
}
