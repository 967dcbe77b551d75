//! The ids of an exchange.

use super::config::invalid;
use crate::Result;

/// A view of ids `[tokens][layers][columns]`, -1 for none, in a larger array: tokens may lie further apart than their ids
/// are long, and the array may have layers that are not exchanged.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    ids: &'a [i32],
    /// Index of the first token's first id.
    base: usize,
    /// Ids from one token to the next.
    token_stride: usize,
    tokens: usize,
    layers: usize,
    columns: usize,
}

impl<'a> Ids<'a> {
    /// All of `ids`, `[tokens][layers][columns]`.
    ///
    /// # Errors
    /// When the ids are not those of whole tokens.
    pub fn new(ids: &'a [i32], layers: usize, columns: usize) -> Result<Self> {
        let token = layers.saturating_mul(columns);
        if token == 0 || !ids.len().is_multiple_of(token) {
            return Err(invalid(
                "number of ids",
                &ids.len(),
                &format!("a multiple of {layers} layers x {columns} columns"),
            ));
        }
        Self::strided(ids, 0, token, ids.len() / token, layers, columns)
    }

    /// The ids of `tokens` tokens of which the first begins at index `base`, each `token_stride` ids after the one before.
    ///
    /// # Errors
    /// When the view reaches past `ids`.
    pub fn strided(
        ids: &'a [i32],
        base: usize,
        token_stride: usize,
        tokens: usize,
        layers: usize,
        columns: usize,
    ) -> Result<Self> {
        let end = || {
            let last = token_stride.checked_mul(tokens.checked_sub(1)?)?.checked_add(base)?;
            last.checked_add(layers.checked_mul(columns)?)
        };
        if tokens > 0 && end().is_none_or(|end| end > ids.len()) {
            let found = format!("{tokens} tokens of {layers} x {columns} from {base} on, {token_stride} apart");
            return Err(invalid("view of ids", &found, &format!("one inside {} ids", ids.len())));
        }
        Ok(Self { ids, base, token_stride, tokens, layers, columns })
    }

    /// The view of `count` of its layers, from `first` on.
    ///
    /// # Errors
    /// When there are fewer layers.
    pub fn layers(self, first: usize, count: usize) -> Result<Self> {
        if first.checked_add(count).is_none_or(|end| end > self.layers) {
            let found = format!("{count} from {first} on");
            return Err(invalid("layers of the view", &found, &format!("within {}", self.layers)));
        }
        // Not past the end: a view without tokens has no ids, wherever it begins.
        Ok(Self { base: self.base.saturating_add(first.saturating_mul(self.columns)), layers: count, ..self })
    }

    /// Tokens in the view.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Layers and columns of the view.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.layers, self.columns)
    }

    /// The ids of one token, `[layers][columns]`.
    ///
    /// # Panics
    /// When there are fewer tokens.
    pub fn token(&self, token: usize) -> &'a [i32] {
        assert!(token < self.tokens, "token {token} of {}", self.tokens);
        &self.ids[self.base + token * self.token_stride..][..self.layers * self.columns]
    }
}
