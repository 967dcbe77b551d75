//! Whether the rows of a table are free of NaN, and whether somebody counts on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A promise of the table that gave it: as long as it is held, no row of the table has a NaN code or a NaN scale.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(unreachable_pub, reason = "public with the feature alone"))]
pub struct FreeOfNan(Arc<()>);

/// What loading has found out of NaN in a table's rows; at first, that nobody looked.
#[derive(Debug, Default)]
pub(crate) struct Proof(Mutex<Option<FreeOfNan>>);

impl Proof {
    /// Whether the last load found no NaN.
    pub(crate) fn holds(&self) -> bool {
        self.lock().is_some()
    }

    /// Promises that there is no NaN, if there is none.
    pub(crate) fn keep(&self) -> Option<FreeOfNan> {
        self.lock().clone()
    }

    /// Takes a load's result in: a row with NaN, if there is one. Gives that row back where it would break a promise; all stays as it was then.
    pub(crate) fn loaded(&self, nan: Option<u64>) -> Result<(), u64> {
        let mut free = self.lock();
        match (nan, &*free) {
            (None, None) => *free = Some(FreeOfNan(Arc::new(()))),
            (None, Some(_)) => {}
            // Whoever holds the promise shares it with this one.
            (Some(row), Some(FreeOfNan(promise))) if Arc::strong_count(promise) > 1 => return Err(row),
            (Some(_), _) => *free = None,
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Option<FreeOfNan>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_promised_of_rows_that_nobody_looked_at_or_that_have_nan() {
        let proof = Proof::default();
        assert!(!proof.holds() && proof.keep().is_none());
        proof.loaded(Some(7)).unwrap();
        assert!(!proof.holds() && proof.keep().is_none());
        proof.loaded(None).unwrap();
        assert!(proof.holds() && proof.keep().is_some());
    }

    #[test]
    fn a_promise_holds_until_the_last_one_that_has_it_drops_it() {
        let proof = Proof::default();
        proof.loaded(None).unwrap();
        let promise = proof.keep().unwrap();
        let other = proof.keep().unwrap();
        assert_eq!(proof.loaded(Some(7)), Err(7));
        drop(promise);
        assert_eq!(proof.loaded(Some(8)), Err(8));
        // Free of NaN again: the same promise goes on.
        proof.loaded(None).unwrap();
        assert_eq!(proof.loaded(Some(9)), Err(9));
        assert!(proof.holds());
        drop(other);
        proof.loaded(Some(9)).unwrap();
        assert!(!proof.holds() && proof.keep().is_none());
    }
}
