//! Token ids to row ids.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ops::Range;

use crate::config::Family;
use crate::layout::Layout;
use crate::reciprocal::Reciprocal;

/// Requests of any lengths, laid end to end.
///
/// GPU kernels read the same three arrays.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// `[tokens]`. Engram: compressed ids, -1 for a dead token. PLE: raw ids, 0 to 2^31 - 1.
    ///
    /// Tokens from the last boundary on belong to no request: their row ids are -1, and their values are not looked at.
    pub tokens: &'a [i32],
    /// `[requests + 1]`: request `r` has the tokens `starts[r]..starts[r + 1]`, maybe none. Starts at 0, never falls,
    /// ends at or before `tokens.len()`.
    pub starts: &'a [i32],
    /// `[requests][ngram_size - 1]`: the tokens before each request's first one.
    ///
    /// Engram: newest first; -1 is a dead token or the start of the sequence and blocks everything older, -2 is unknown
    /// and counts as the pad id without blocking. PLE: oldest first, the end-of-sequence id where there is none.
    pub history: &'a [i32],
}

/// Why a batch was refused. The output then holds nothing of use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// `starts` is empty or does not start at 0.
    #[error("request boundaries start at {found:?}, expected 0")]
    FirstStart {
        /// The first boundary, if there is one.
        found: Option<i32>,
    },
    /// A boundary lies before the one in front of it, or past the tokens.
    #[error("request boundary {place} is {found}, expected {low} to {high}")]
    Start {
        /// Place in `starts`.
        place: usize,
        /// The boundary.
        found: i32,
        /// The boundary before it.
        low: i32,
        /// Number of tokens.
        high: usize,
    },
    /// An array has another length than the batch calls for.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// `tokens`, `history`, `ids` or `mixes`.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// A token or an entry of the history is no id of this vocabulary.
    #[error("{what} {place} is {found}, expected {low} to {high}")]
    Token {
        /// `token`, `history entry` or `fill`.
        what: &'static str,
        /// Its place in the array.
        place: usize,
        /// Its value.
        found: i32,
        /// The least that is accepted.
        low: i32,
        /// The most that is accepted.
        high: i32,
    },
    /// This CPU lacks what a path needs.
    #[error("this CPU cannot run the {0:?} path")]
    Path(Path),
}

/// How remainders are taken. Every path gives the same ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// Plain Rust, on every CPU.
    Portable,
    /// AVX-512 F and DQ, sixteen columns at once. Layouts with tables of fewer than 2^14 rows take the portable
    /// arithmetic here, too.
    Avx512,
}

impl Path {
    /// The fastest path of this CPU.
    pub fn best() -> Self {
        if Self::Avx512.is_available() { Self::Avx512 } else { Self::Portable }
    }

    /// Whether this CPU can run the path.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512 => false,
        }
    }
}

/// Computes row ids for one layout.
#[derive(Debug, Clone)]
pub struct Hasher {
    family: Family,
    ngram_size: usize,
    heads: usize,
    layers: usize,
    /// Largest token.
    last_token: i32,
    fill: i32,
    /// A token that blocks everything older for the tokens after it: PLE's end of sequence.
    cut: i32,
    /// `[layer][distance]`
    multipliers: Vec<i64>,
    /// `[layer][column]`
    columns: Vec<Column>,
    path: Path,
    #[cfg(target_arch = "x86_64")]
    steps: Option<avx512::Steps>,
}

#[derive(Debug, Clone, Copy)]
struct Column {
    reciprocal: Reciprocal,
    offset: u32,
}

/// Mixes kept between the two halves of the work; at least one token of the largest layout.
const BLOCK: usize = 2048;
/// Ids written between them, unless one token has more: the first-level cache keeps them until their lines are full.
const BLOCK_IDS: usize = 4096;
/// Room behind the mixes that a vector may read.
#[cfg(target_arch = "x86_64")]
const BLOCK_PADDING: usize = avx512::PADDING;
#[cfg(not(target_arch = "x86_64"))]
const BLOCK_PADDING: usize = 0;

impl Hasher {
    /// A hasher on the fastest path of this CPU.
    ///
    /// `fill` stands for every token that is not there. Engram: the compressed id of the pad token; PLE: the
    /// end-of-sequence id.
    ///
    /// # Errors
    /// If `fill` is no token of the layout's vocabulary.
    pub fn new(layout: &Layout, fill: i32) -> Result<Self, BatchError> {
        let last_token = i32::try_from(layout.vocab_size() - 1).unwrap_or(i32::MAX);
        if !(0..=last_token).contains(&fill) {
            return Err(BatchError::Token { what: "fill", place: 0, found: fill, low: 0, high: last_token });
        }
        let columns = layout.layers().iter().flat_map(|layer| layer.sizes().iter().zip(layer.offsets()));
        let column = |(&size, &offset): (&u32, &u32)| Some(Column { reciprocal: Reciprocal::new(size)?, offset });
        // A layout's sizes lie in 1..2^31, so each has its reciprocal.
        let columns: Vec<Column> = columns.filter_map(column).collect();
        Ok(Self {
            family: layout.family(),
            ngram_size: layout.ngram_size(),
            heads: layout.heads(),
            layers: layout.layers().len(),
            last_token,
            fill,
            cut: match layout.family() {
                Family::Engram => DEAD,
                Family::Ple => fill,
            },
            multipliers: layout.layers().iter().flat_map(|layer| layer.multipliers()).copied().collect(),
            #[cfg(target_arch = "x86_64")]
            steps: avx512::Steps::new(&columns, layout.heads()),
            columns,
            path: Path::best(),
        })
    }

    /// The same hasher on a path of choice.
    ///
    /// # Errors
    /// If this CPU cannot run it.
    pub fn with_path(mut self, path: Path) -> Result<Self, BatchError> {
        if !path.is_available() {
            return Err(BatchError::Path(path));
        }
        self.path = path;
        Ok(self)
    }

    /// Largest token of the vocabulary.
    pub(crate) const fn last_token(&self) -> i32 {
        self.last_token
    }

    /// The path in use.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// The family.
    pub const fn family(&self) -> Family {
        self.family
    }

    /// The id that stands for tokens that are not there.
    pub const fn fill(&self) -> i32 {
        self.fill
    }

    /// Longest n-gram; a history row has one entry less.
    pub const fn ngram_size(&self) -> usize {
        self.ngram_size
    }

    /// Row ids a token: `layers * columns`.
    pub const fn ids_per_token(&self) -> usize {
        self.layers * (self.ngram_size - 1) * self.heads
    }

    /// Mixes a token: `layers * (ngram_size - 1)`.
    pub const fn mixes_per_token(&self) -> usize {
        self.layers * (self.ngram_size - 1)
    }

    /// Writes the row ids, `[tokens][layers][columns]`, on this thread and without allocating.
    ///
    /// # Errors
    /// If the batch is not as [`Batch`] asks, or `ids` has another length.
    pub fn ids(&self, batch: &Batch<'_>, ids: &mut [i32]) -> Result<(), BatchError> {
        check_length("ids", ids.len(), batch.tokens.len() * self.ids_per_token())?;
        self.ids_from(batch, 0, ids)
    }

    /// As [`Hasher::ids`], for some of the tokens: those from `first` on, as many as `ids` holds whole tokens of.
    ///
    /// This is how a batch is spread over threads: each hashes a part of the tokens, cut anywhere, into a part of the
    /// output. Only the tokens of the part, and the few before it, are looked at.
    ///
    /// # Errors
    /// As [`Hasher::ids`], and if there are not that many tokens.
    pub fn ids_from(&self, batch: &Batch<'_>, first: usize, ids: &mut [i32]) -> Result<(), BatchError> {
        self.check(batch, first, ids)?;
        self.run(batch, first, ids, None)
    }

    /// As [`Hasher::ids`], and the 64-bit mixes, `[tokens][layers][ngram_size - 1]`, from which the ids follow.
    ///
    /// Equal mixes of a layer and order mean equal ids in all heads of that order, so distinct n-grams are found by
    /// comparing one number. Tokens that belong to no request have mixes of -1, which an n-gram may have, too.
    ///
    /// # Errors
    /// As [`Hasher::ids`].
    pub fn ids_and_mixes(&self, batch: &Batch<'_>, ids: &mut [i32], mixes: &mut [i64]) -> Result<(), BatchError> {
        check_length("ids", ids.len(), batch.tokens.len() * self.ids_per_token())?;
        self.ids_and_mixes_from(batch, 0, ids, mixes)
    }

    /// As [`Hasher::ids_and_mixes`], for the tokens from `first` on that `ids` and `mixes` have room for; see
    /// [`Hasher::ids_from`].
    ///
    /// # Errors
    /// As [`Hasher::ids_from`].
    pub fn ids_and_mixes_from(
        &self,
        batch: &Batch<'_>,
        first: usize,
        ids: &mut [i32],
        mixes: &mut [i64],
    ) -> Result<(), BatchError> {
        self.check(batch, first, ids)?;
        check_length("mixes", mixes.len(), ids.len() / self.ids_per_token() * self.mixes_per_token())?;
        self.run(batch, first, ids, Some(mixes))
    }

    /// The shape of a batch, its history, and of the output for tokens from `first` on; tokens are checked where they
    /// are read.
    fn check(&self, batch: &Batch<'_>, first: usize, ids: &[i32]) -> Result<(), BatchError> {
        let tokens = batch.tokens.len();
        match batch.starts.first() {
            Some(0) => {}
            other => return Err(BatchError::FirstStart { found: other.copied() }),
        }
        let mut low = 0;
        for (place, &start) in batch.starts.iter().enumerate() {
            if start < low || usize::try_from(start).is_ok_and(|start| start > tokens) {
                return Err(BatchError::Start { place, found: start, low, high: tokens });
            }
            low = start;
        }
        check_length("history", batch.history.len(), (batch.starts.len() - 1) * (self.ngram_size - 1))?;
        let after =
            tokens.checked_sub(first).ok_or(BatchError::Length { what: "tokens", found: tokens, expected: first })?;
        let part = (ids.len() / self.ids_per_token()).min(after);
        check_length("ids", ids.len(), part * self.ids_per_token())?;
        let low = match self.family {
            Family::Engram => UNKNOWN,
            Family::Ple => 0,
        };
        self.check_tokens("history entry", batch.history, 0, low)
    }

    fn check_tokens(&self, what: &'static str, tokens: &[i32], first: usize, low: i32) -> Result<(), BatchError> {
        let outside = |token: i32| token < low || token > self.last_token;
        // Without an early exit, so that it runs on vectors.
        if tokens.iter().fold(false, |any, &token| any | outside(token)) {
            let place = tokens.iter().position(|&token| outside(token)).unwrap_or(0);
            let (found, high) = (tokens[place], self.last_token);
            return Err(BatchError::Token { what, place: first + place, found, low, high });
        }
        Ok(())
    }

    /// Hashes as many tokens from `first` on as `ids` and `mixes` have room for.
    fn run(
        &self,
        batch: &Batch<'_>,
        first: usize,
        ids: &mut [i32],
        mixes: Option<&mut [i64]>,
    ) -> Result<(), BatchError> {
        match self.ngram_size {
            2 => self.run_order::<2>(batch, first, ids, mixes),
            3 => self.run_order::<3>(batch, first, ids, mixes),
            4 => self.run_order::<4>(batch, first, ids, mixes),
            5 => self.run_order::<5>(batch, first, ids, mixes),
            6 => self.run_order::<6>(batch, first, ids, mixes),
            7 => self.run_order::<7>(batch, first, ids, mixes),
            _ => self.run_order::<8>(batch, first, ids, mixes),
        }
    }

    fn run_order<const N: usize>(
        &self,
        batch: &Batch<'_>,
        first: usize,
        ids: &mut [i32],
        mut mixes: Option<&mut [i64]>,
    ) -> Result<(), BatchError> {
        let range = first..first + ids.len() / self.ids_per_token();
        let hashed = batch.starts.last().map_or(0, |&end| position(end)).clamp(range.start, range.end);
        let low = match self.family {
            Family::Engram => DEAD,
            Family::Ple => 0,
        };
        self.check_tokens("token", &batch.tokens[range.start..hashed], range.start, low)?;
        let (per_token, ids_per_token) = (self.mixes_per_token(), self.ids_per_token());
        let block_tokens = (BLOCK / per_token).min(BLOCK_IDS / ids_per_token).max(1);
        let mut walk = Walk::<N>::new(self, batch, range.start);
        let mut block = [0_i64; BLOCK + BLOCK_PADDING];
        let mut start = range.start;
        while start < hashed {
            let count = block_tokens.min(hashed - start);
            let done = start - range.start;
            walk.mix(start..start + count, &mut block[..count * per_token]);
            self.reduce(&block, &mut ids[done * ids_per_token..][..count * ids_per_token]);
            if let Some(mixes) = &mut mixes {
                mixes[done * per_token..][..count * per_token].copy_from_slice(&block[..count * per_token]);
            }
            start += count;
        }
        ids[(hashed - range.start) * ids_per_token..].fill(-1);
        if let Some(mixes) = mixes {
            mixes[(hashed - range.start) * per_token..].fill(-1);
        }
        Ok(())
    }

    /// Row ids of whole tokens from a block of their mixes.
    fn reduce(&self, mixes: &[i64; BLOCK + BLOCK_PADDING], ids: &mut [i32]) {
        #[cfg(target_arch = "x86_64")]
        if let (Path::Avx512, Some(steps)) = (self.path, &self.steps) {
            return steps.reduce(mixes, ids);
        }
        let tokens = mixes.chunks_exact(self.mixes_per_token()).zip(ids.chunks_exact_mut(self.ids_per_token()));
        for (mixes, ids) in tokens {
            let columns = self.columns.chunks_exact(self.heads);
            for ((&mix, ids), columns) in mixes.iter().zip(ids.chunks_exact_mut(self.heads)).zip(columns) {
                if mix >= 0 {
                    let mix = mix.cast_unsigned();
                    for (id, column) in ids.iter_mut().zip(columns) {
                        *id = (column.reciprocal.remainder_of_magnitude(mix) + column.offset).cast_signed();
                    }
                } else {
                    for (id, column) in ids.iter_mut().zip(columns) {
                        *id = (column.reciprocal.remainder(mix) + column.offset).cast_signed();
                    }
                }
            }
        }
    }
}

fn check_length(what: &'static str, found: usize, expected: usize) -> Result<(), BatchError> {
    if found == expected { Ok(()) } else { Err(BatchError::Length { what, found, expected }) }
}

/// A dead token, or the start of the sequence.
pub(crate) const DEAD: i32 = -1;
/// A look-back entry that is not known.
pub(crate) const UNKNOWN: i32 = -2;

/// Boundaries are checked to be positive.
fn position(start: i32) -> usize {
    usize::try_from(start).unwrap_or(0)
}

/// The current token and those before it as they count for hashing, newest first.
#[derive(Clone, Copy)]
struct Window<const N: usize> {
    tokens: [i64; N],
    fill: i64,
    cut: i32,
}

impl<const N: usize> Window<N> {
    const fn clear(&mut self) {
        self.tokens = [self.fill; N];
    }

    #[inline(always)]
    fn push(&mut self, token: i32) {
        for distance in (1..N).rev() {
            self.tokens[distance] = self.tokens[distance - 1];
        }
        self.tokens[0] = if token < 0 { self.fill } else { token.into() };
        if token == DEAD {
            self.clear();
        }
    }

    /// What a token does to those after it, once its own rows are settled.
    #[inline(always)]
    fn settle(&mut self, token: i32) {
        if token == self.cut {
            self.clear();
        }
    }
}

/// Walks over the tokens of all requests.
struct Walk<'a, const N: usize> {
    hasher: &'a Hasher,
    batch: &'a Batch<'a>,
    /// The request that the next token belongs to, or one before it.
    request: usize,
    window: Window<N>,
}

impl<'a, const N: usize> Walk<'a, N> {
    /// Ready to go on with the token at `start`, which may lie inside a request.
    fn new(hasher: &'a Hasher, batch: &'a Batch<'a>, start: usize) -> Self {
        let fill = hasher.fill.into();
        let window = Window { tokens: [fill; N], fill, cut: hasher.cut };
        let ends = &batch.starts[1..];
        let request = ends.partition_point(|&end| position(end) <= start);
        let mut walk = Self { hasher, batch, request, window };
        if request < ends.len() {
            walk.enter(request);
            // Only the last tokens are left in the window, whatever came before them.
            let first = position(batch.starts[request]).max(start.saturating_sub(N - 1));
            for &token in &batch.tokens[first..start] {
                walk.window.push(token);
                walk.window.settle(token);
            }
        }
        walk
    }

    /// Starts a request from its history.
    fn enter(&mut self, request: usize) {
        self.request = request;
        self.window.clear();
        let history = &self.batch.history[request * (N - 1)..][..N - 1];
        for place in 0..N - 1 {
            let token = match self.hasher.family {
                Family::Engram => history[N - 2 - place],
                Family::Ple => history[place],
            };
            self.window.push(token);
            self.window.settle(token);
        }
    }

    /// Mixes of the tokens of `range`, `[token][layer][order]`.
    fn mix(&mut self, range: Range<usize>, mixes: &mut [i64]) {
        let (multipliers, _) = self.hasher.multipliers.as_chunks::<N>();
        let mut mixes = mixes.chunks_exact_mut(self.hasher.mixes_per_token());
        let mut start = range.start;
        while start < range.end {
            while position(self.batch.starts[self.request + 1]) <= start {
                self.enter(self.request + 1);
            }
            let end = position(self.batch.starts[self.request + 1]).min(range.end);
            // A copy, which can live in registers.
            let mut window = self.window;
            for (&token, mixes) in self.batch.tokens[start..end].iter().zip(&mut mixes) {
                window.push(token);
                for (multipliers, mixes) in multipliers.iter().zip(mixes.chunks_exact_mut(N - 1)) {
                    let mut mix = window.tokens[0].wrapping_mul(multipliers[0]);
                    for distance in 1..N {
                        mix ^= window.tokens[distance].wrapping_mul(multipliers[distance]);
                        mixes[distance - 1] = mix;
                    }
                }
                window.settle(token);
            }
            self.window = window;
            start = end;
        }
    }
}
