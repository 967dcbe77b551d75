//! The ids of a run, as n-grams.

use super::Run;

/// The ids of neighbouring columns.
pub(super) struct IdsOf<'a> {
    pub(super) run: &'a Run,
    /// From token to token.
    pub(super) stride: usize,
    pub(super) first: usize,
    pub(super) columns: usize,
}

impl IdsOf<'_> {
    pub(super) fn get(&self, token: usize, column: usize) -> i64 {
        let at = token * self.stride + self.first + column;
        if self.run.wide {
            // SAFETY: ids are `[tokens][layers][columns]`.
            unsafe { self.run.ids.cast::<i64>().wrapping_add(at).read() }
        } else {
            // SAFETY: as above.
            i64::from(unsafe { self.run.ids.cast::<i32>().wrapping_add(at).read() })
        }
    }

    pub(super) fn all(&self, token: usize) -> impl Iterator<Item = i64> {
        (0..self.columns).map(move |column| self.get(token, column))
    }

    /// Whether all of a token's rows are zero rows, wherever the others are.
    pub(super) fn is_dead(&self, token: usize) -> bool {
        self.all(token).all(|id| id < 0)
    }

    /// The first ids tell n-grams apart well enough: each head has a modulus of its own.
    pub(super) fn hash(&self, token: usize) -> u64 {
        self.all(token).take(2).fold(0, |hash, id| hash.rotate_left(32) ^ id.cast_unsigned())
    }

    pub(super) fn equal(&self, a: usize, b: usize) -> bool {
        self.all(a).eq(self.all(b))
    }
}
