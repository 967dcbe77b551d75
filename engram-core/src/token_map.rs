//! The compressed vocabulary: which raw tokens count as one when Engram hashes.

use crate::token::{Token, TokenError, checked};

/// Raw token ids to compressed ones, with the tokens that are dead by themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMap {
    ids: Vec<i32>,
    compressed_len: u32,
    dead: Vec<i32>,
}

/// Why a token map could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenMapError {
    /// There is no token, or there are 2^31 or more.
    #[error("a vocabulary of {found} tokens, expected 1 to 2147483647")]
    Length {
        /// Number of tokens.
        found: usize,
    },
    /// A compressed id does not fit.
    #[error("token {token} maps to {id}, expected 0 to 2147483646")]
    Id {
        /// The raw token.
        token: usize,
        /// Its compressed id.
        id: u32,
    },
    /// The text is no tokenizer.json that can be read.
    #[error("tokenizer cannot be read: {reason}")]
    Tokenizer {
        /// What is wrong with it.
        reason: String,
    },
}

impl TokenMap {
    /// A map that is known already: `ids[raw]` is the compressed id.
    ///
    /// # Errors
    /// If there is no token, or an id is 2^31 - 1 or more.
    pub fn new(ids: &[u32]) -> Result<Self, TokenMapError> {
        if ids.is_empty() || i32::try_from(ids.len()).is_err() {
            return Err(TokenMapError::Length { found: ids.len() });
        }
        let narrow = |(token, &id): (usize, &u32)| match i32::try_from(id) {
            Ok(id) if id < i32::MAX => Ok(id),
            _ => Err(TokenMapError::Id { token, id }),
        };
        let narrow = ids.iter().enumerate().map(narrow).collect::<Result<Vec<_>, _>>()?;
        let compressed_len = ids.iter().max().map_or(0, |&last| last + 1);
        Ok(Self { ids: narrow, compressed_len, dead: Vec::new() })
    }

    /// The same map with tokens that are dead by themselves, such as image placeholders. They need not be of the
    /// tokenizer's vocabulary.
    #[must_use]
    pub fn with_dead(mut self, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.dead.extend(tokens.into_iter().filter_map(|token| i32::try_from(token).ok()));
        self.dead.sort_unstable();
        self.dead.dedup();
        self
    }

    /// The compressed id of each raw token, dead tokens included.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// Size of the compressed vocabulary: its ids lie below this.
    pub const fn compressed_len(&self) -> u32 {
        self.compressed_len
    }

    /// The compressed id of one token, dead or not: for the pad token.
    ///
    /// # Errors
    /// If it is not of the vocabulary.
    pub fn id<T: Token>(&self, token: T) -> Result<i32, TokenError> {
        self.lookup(token, 0)
    }

    fn lookup<T: Token>(&self, token: T, place: usize) -> Result<i32, TokenError> {
        let last = i32::try_from(self.ids.len() - 1).unwrap_or(i32::MAX);
        let token = checked(token, place, last)?;
        Ok(usize::try_from(token).map_or(0, |token| self.ids[token]))
    }

    /// Writes what Engram hashes: compressed ids, -1 for dead tokens.
    ///
    /// # Errors
    /// If a token is negative, or neither of the vocabulary nor dead. `out` then holds nothing of use.
    ///
    /// # Panics
    /// If `out` has another length than `tokens`.
    pub fn map<T: Token>(&self, tokens: &[T], out: &mut [i32]) -> Result<(), TokenError> {
        assert_eq!(tokens.len(), out.len(), "one output for each token");
        for (place, (&token, out)) in tokens.iter().zip(out).enumerate() {
            let dead = !self.dead.is_empty() && token.try_into().is_ok_and(|token| self.dead.contains(&token));
            *out = if dead { crate::hash::DEAD } else { self.lookup(token, place)? };
        }
        Ok(())
    }
}
