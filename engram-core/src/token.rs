//! Tokens as they come from outside.

use std::fmt;

/// A number that is no token of the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("token {place} is {value}, expected 0 to {last}")]
pub struct TokenError {
    /// Its place among the tokens.
    pub place: usize,
    /// Its value.
    pub value: i128,
    /// The largest token.
    pub last: i32,
}

/// Integers that engines keep tokens in.
pub trait Token: Copy + fmt::Debug + TryInto<i32> + Into<i128> {}

impl Token for i32 {}
impl Token for i64 {}
impl Token for u32 {}
impl Token for u64 {}

/// Converts raw token ids, as PLE hashes them: 0 to 2^31 - 1.
///
/// # Errors
/// If a token is negative or too large. `out` then holds nothing of use.
///
/// # Panics
/// If `out` has another length than `tokens`.
pub fn convert_tokens<T: Token>(tokens: &[T], out: &mut [i32]) -> Result<(), TokenError> {
    assert_eq!(tokens.len(), out.len(), "one output for each token");
    for (place, (&token, out)) in tokens.iter().zip(out).enumerate() {
        *out = checked(token, place, i32::MAX)?;
    }
    Ok(())
}

pub(crate) fn checked<T: Token>(token: T, place: usize, last: i32) -> Result<i32, TokenError> {
    let narrow = token.try_into().ok().filter(|token| (0..=last).contains(token));
    narrow.ok_or(TokenError { place, value: token.into(), last })
}
