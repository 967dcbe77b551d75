//! The tokens before a request's next one, while it is served.

use crate::config::Family;
use crate::hash::{BatchError, DEAD, Hasher, UNKNOWN};

/// What one request must remember between batches: its last `ngram_size - 1` tokens, and drafts that may be taken back.
///
/// Tokens are in the hasher's space: compressed ids with -1 for dead tokens (Engram), or raw ids (PLE).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    family: Family,
    depth: usize,
    last_token: i32,
    /// The last `depth` committed tokens, oldest first, then the drafts.
    tokens: Vec<i32>,
}

/// More drafts were to be committed or rolled back than there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{asked} drafts asked for, {there} are there")]
pub struct DraftsError {
    /// Drafts asked for.
    pub asked: usize,
    /// Drafts that are there.
    pub there: usize,
}

impl History {
    /// The history at the start of a sequence.
    pub fn new(hasher: &Hasher) -> Self {
        let start = match hasher.family() {
            Family::Engram => DEAD,
            Family::Ple => hasher.fill(),
        };
        let depth = hasher.ngram_size() - 1;
        Self { family: hasher.family(), depth, last_token: hasher.last_token(), tokens: vec![start; depth] }
    }

    /// The history of a sequence of which only the last tokens are known, oldest first.
    ///
    /// The last `ngram_size - 1` of them count. If there are fewer, the sequence starts with them. Engram takes -2 for
    /// tokens that are not known.
    ///
    /// # Errors
    /// If a token is not of the hasher's vocabulary.
    pub fn resume(hasher: &Hasher, last: &[i32]) -> Result<Self, BatchError> {
        let mut history = Self::new(hasher);
        let low = match history.family {
            Family::Engram => UNKNOWN,
            Family::Ple => 0,
        };
        history.append(last, low)?;
        let drafts = history.drafts();
        history.tokens.drain(..drafts);
        Ok(history)
    }

    /// Appends tokens as drafts.
    ///
    /// # Errors
    /// If a token is not of the hasher's vocabulary; nothing is appended then.
    pub fn push(&mut self, tokens: &[i32]) -> Result<(), BatchError> {
        let low = match self.family {
            Family::Engram => DEAD,
            Family::Ple => 0,
        };
        self.append(tokens, low)
    }

    fn append(&mut self, tokens: &[i32], low: i32) -> Result<(), BatchError> {
        let high = self.last_token;
        if let Some(place) = tokens.iter().position(|token| !(low..=high).contains(token)) {
            return Err(BatchError::Token { what: "token", place, found: tokens[place], low, high });
        }
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Drafts that are neither committed nor rolled back.
    pub const fn drafts(&self) -> usize {
        self.tokens.len() - self.depth
    }

    /// Keeps the oldest `count` drafts for good.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn commit(&mut self, count: usize) -> Result<(), DraftsError> {
        self.checked(count)?;
        self.tokens.drain(..count);
        Ok(())
    }

    /// Takes back the newest `count` drafts.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn roll_back(&mut self, count: usize) -> Result<(), DraftsError> {
        self.checked(count)?;
        self.tokens.truncate(self.tokens.len() - count);
        Ok(())
    }

    const fn checked(&self, asked: usize) -> Result<(), DraftsError> {
        let there = self.drafts();
        if asked <= there { Ok(()) } else { Err(DraftsError { asked, there }) }
    }

    /// Writes the row of [`crate::Batch::history`] for the token that comes next, drafts included.
    ///
    /// # Panics
    /// If `row` has not `ngram_size - 1` entries.
    pub fn write_row(&self, row: &mut [i32]) {
        row.copy_from_slice(&self.tokens[self.tokens.len() - self.depth..]);
        if self.family == Family::Engram {
            row.reverse();
        }
    }
}
