//! Requests as JSON: the tokens to hash, and what comes before them.

use engram_core::{Batch, EngramConfig, Layout, ModelConfig, PleConfig, TableConfig, TokenMap};
use serde::de::{Deserialize, Deserializer, IntoDeserializer, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// What an id stands for in a look-back that is dead, in every token space.
const DEAD: i64 = -1;
/// What an id stands for in a look-back that nobody knows.
const UNKNOWN: i64 = -2;

/// Requests as they were written, not yet held against a model.
///
/// ```json
/// {"token_space": "raw" | "compressed", "pad_id": N, "dead_token_ids": [N, ..],
///  "requests": [{"tokens": [N, ..], "dead": [B, ..], "lookback": [N, ..], "context": [N, ..]}, ..]}
/// ```
///
/// Only `requests` and the `tokens` in each are required; an unknown or repeated key is refused by name.
///
/// * `token_space`: `raw` (the default) are ids of the tokenizer, `compressed` ids of Engram's compressed vocabulary.
/// * `pad_id`: a compressed id, by default that of the config's pad token.
/// * `dead_token_ids`: raw Engram tokens that are dead by themselves, as the config's `image_token_id` is. An id that the tokenizer does
///   not know may be listed, but no token may have it.
/// * `dead`: one bool a token (Engram; for PLE all false).
/// * `lookback`: the tokens before the first one, newest first (Engram). -1 is dead and blocks all that is older, -2 is unknown. Entries
///   beyond the n-gram's reach are ignored; a list that ends early is the start of the sequence.
/// * `context`: the n-1 tokens before the first one, oldest first (PLE), by default the end-of-sequence token.
///
/// A key that has no meaning in the model's family may only hold what would change nothing.
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, remote = "Self")]
pub struct Requests {
    #[serde(default)]
    token_space: TokenSpace,
    #[serde(default)]
    pad_id: Option<Number>,
    #[serde(default)]
    dead_token_ids: Option<Vec<Number>>,
    requests: Vec<Request>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase", remote = "Self")]
enum TokenSpace {
    #[default]
    Raw,
    Compressed,
}

#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, remote = "Self")]
struct Request {
    tokens: Vec<Number>,
    #[serde(default)]
    dead: Option<Vec<bool>>,
    #[serde(default)]
    lookback: Option<Vec<Number>>,
    #[serde(default)]
    context: Option<Vec<Number>>,
}

impl<'de> Deserialize<'de> for Requests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The derived function, which `remote` makes an inherent one.
        Self::deserialize(Object(deserializer))
    }
}

impl<'de> Deserialize<'de> for Request {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(Object(deserializer))
    }
}

impl<'de> Deserialize<'de> for TokenSpace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // By way of a string, since what serde derives would take `{"raw": null}` too.
        Self::deserialize(String::deserialize(deserializer)?.into_deserializer())
    }
}

/// A deserializer that makes a struct of an object alone: what serde derives would take an array of the fields for one too.
struct Object<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Object<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// What stands where an id should, kept until it is known which bounds it has to keep.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Number {
    Whole(i64),
    /// Anything else, as written: a fraction, an exponent, more than 64 bits, or no number at all.
    Other(Box<str>),
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        Ok(text.parse().map_or_else(|_| Self::Other(text.into()), Self::Whole))
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 40;
        match self {
            Self::Whole(value) => value.fmt(f),
            Self::Other(text) if text.len() <= LONGEST => f.write_str(text),
            Self::Other(text) => write!(f, "{}..", text.chars().take(LONGEST).collect::<String>()),
        }
    }
}

/// Why requests were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestsError {
    /// The text is not JSON, lacks a key, or has an unknown or repeated one.
    #[error("requests: {reason}")]
    Json {
        /// What the parser met, with line and column.
        reason: String,
    },
    /// A number is no id that may stand where it does.
    #[error("{place}{field}[{position}] is {found}, expected {expected}")]
    Id {
        /// Which request.
        place: Place,
        /// The list that it is in.
        field: &'static str,
        /// Its place in the list, from 0.
        position: usize,
        /// The number as written.
        found: String,
        /// What may stand there.
        expected: String,
    },
    /// A field does not fit the model or the rest of its request.
    #[error("{place}{field}: {message}")]
    Field {
        /// Which request.
        place: Place,
        /// The key.
        field: &'static str,
        /// What is wrong.
        message: String,
    },
}

/// Where in the requests something is: in one of them, or around them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At the top.
    Top,
    /// In a request, counted from 0.
    Request(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => f.write_str("requests: "),
            Self::Request(request) => write!(f, "request {request}: "),
        }
    }
}

/// Requests in the form that a [`Hasher`](engram_core::Hasher) takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashInput {
    tokens: Vec<i32>,
    starts: Vec<i32>,
    history: Vec<i32>,
    fill: i32,
}

impl HashInput {
    /// The batch: all requests, end to end.
    #[must_use]
    pub fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, starts: &self.starts, history: &self.history }
    }

    /// What the hasher fills in for tokens that are not there.
    #[must_use]
    pub fn fill(&self) -> i32 {
        self.fill
    }
}

impl Requests {
    /// Reads requests.
    ///
    /// # Errors
    /// [`RequestsError::Json`] for text that is not JSON of this form.
    pub fn from_json(text: &[u8]) -> Result<Self, RequestsError> {
        serde_json::from_slice(text).map_err(|error| RequestsError::Json { reason: error.to_string() })
    }

    /// Holds the requests against a model. `map` is the vocabulary of its tokenizer, where there is one.
    ///
    /// # Errors
    /// The first thing that does not fit, with its request and its place in there.
    pub fn resolve(
        &self,
        config: &ModelConfig,
        layout: &Layout,
        map: Option<&TokenMap>,
    ) -> Result<HashInput, RequestsError> {
        let depth = layout.ngram_size() - 1;
        match &config.table {
            TableConfig::Engram(engram) => self.resolve_engram(&Vocabulary::new(self, engram, layout, map)?, depth),
            TableConfig::Ple(ple) => self.resolve_ple(ple, depth),
        }
    }

    fn resolve_engram(&self, vocabulary: &Vocabulary<'_>, depth: usize) -> Result<HashInput, RequestsError> {
        let mut input = HashInput::new(self, depth, vocabulary.pad)?;
        for (request, place) in self.requests.iter().zip((0..).map(Place::Request)) {
            refuse(
                place,
                "context",
                request.context.as_deref(),
                "Engram has none; tokens before the first go into lookback",
            )?;
            let first = input.tokens.len();
            for (position, token) in request.tokens.iter().enumerate() {
                input.tokens.push(vocabulary.id(token, 0).map_err(|e| e.at(place, "tokens", position))?);
            }
            let dead = request.dead_tokens(place)?;
            for (token, _) in input.tokens[first..].iter_mut().zip(dead).filter(|(_, dead)| **dead) {
                *token = -1;
            }
            let lookback = request.lookback.as_deref().unwrap_or_default();
            for (position, token) in lookback.iter().take(depth).enumerate() {
                input.history.push(vocabulary.id(token, UNKNOWN).map_err(|e| e.at(place, "lookback", position))?);
            }
            // The start of the sequence blocks like a dead token.
            input.end_request(depth, -1);
        }
        Ok(input)
    }

    fn resolve_ple(&self, config: &PleConfig, depth: usize) -> Result<HashInput, RequestsError> {
        let unfit =
            |field, message: &str| RequestsError::Field { place: Place::Top, field, message: message.to_owned() };
        if self.token_space == TokenSpace::Compressed {
            return Err(unfit("token_space", "PLE hashes raw tokens; there is no compressed vocabulary"));
        }
        if self.pad_id.is_some() {
            return Err(unfit("pad_id", "PLE has no pad token"));
        }
        refuse(Place::Top, "dead_token_ids", self.dead_token_ids.as_deref(), "PLE has no dead tokens")?;
        // Checked to be a token when the config was read.
        let eos = i32::try_from(config.eos_token_id).unwrap_or(i32::MAX);
        let id = |number: &Number| number.within(0, i32::MAX);
        let mut input = HashInput::new(self, depth, eos)?;
        for (request, place) in self.requests.iter().zip((0..).map(Place::Request)) {
            refuse(
                place,
                "lookback",
                request.lookback.as_deref(),
                "PLE has none; tokens before the first go into context",
            )?;
            if let Some(position) = request.dead_tokens(place)?.iter().position(|dead| *dead) {
                let message = format!("token {position} is dead; PLE has no dead tokens");
                return Err(RequestsError::Field { place, field: "dead", message });
            }
            for (position, token) in request.tokens.iter().enumerate() {
                input.tokens.push(id(token).map_err(|e| e.at(place, "tokens", position))?);
            }
            if let Some(context) = &request.context {
                if context.len() != depth {
                    let message = format!(
                        "{} ids, expected {depth}, oldest first, eos ({eos}) where there are none",
                        context.len()
                    );
                    return Err(RequestsError::Field { place, field: "context", message });
                }
                for (position, token) in context.iter().enumerate() {
                    input.history.push(id(token).map_err(|e| e.at(place, "context", position))?);
                }
            }
            input.end_request(depth, eos);
        }
        Ok(input)
    }
}

impl Request {
    /// Which tokens are marked as dead: one bool each, or none at all.
    fn dead_tokens(&self, place: Place) -> Result<&[bool], RequestsError> {
        let Some(dead) = &self.dead else { return Ok(&[]) };
        let (found, tokens) = (dead.len(), self.tokens.len());
        if found != tokens {
            let message = format!("{found} entries, expected one for each of {tokens} tokens");
            return Err(RequestsError::Field { place, field: "dead", message });
        }
        Ok(dead)
    }
}

/// A key without a meaning in the family may only be there empty.
fn refuse(place: Place, field: &'static str, found: Option<&[Number]>, message: &str) -> Result<(), RequestsError> {
    match found {
        None | Some([]) => Ok(()),
        Some(_) => Err(RequestsError::Field { place, field, message: message.to_owned() }),
    }
}

impl HashInput {
    fn new(requests: &Requests, depth: usize, fill: i32) -> Result<Self, RequestsError> {
        let tokens = requests.requests.iter().map(|request| request.tokens.len()).sum();
        let fits = i32::try_from(tokens).is_ok() && i32::try_from(requests.requests.len()).is_ok();
        if !fits {
            let message = format!("{tokens} tokens in {} requests, expected fewer than 2^31", requests.requests.len());
            return Err(RequestsError::Field { place: Place::Top, field: "requests", message });
        }
        Ok(Self {
            tokens: Vec::with_capacity(tokens),
            starts: vec![0],
            history: Vec::with_capacity(requests.requests.len() * depth),
            fill,
        })
    }

    /// Fills up the history of the request whose tokens were pushed last.
    fn end_request(&mut self, depth: usize, missing: i32) {
        self.history.resize(self.starts.len() * depth, missing);
        #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "counted in `new`")]
        self.starts.push(self.tokens.len() as i32);
    }
}

/// How the tokens of Engram requests become compressed ids.
struct Vocabulary<'a> {
    /// For raw tokens.
    map: Option<&'a TokenMap>,
    /// The raw token that stands for images, dead by itself; the tokenizer need not know it.
    image: Option<i32>,
    /// Raw tokens that the requests take for dead, sorted.
    dead: Vec<i32>,
    /// The largest compressed id.
    last: i32,
    pad: i32,
}

/// A number that is no id, before it is known where it stands.
struct NoId {
    found: String,
    expected: String,
}

impl<'a> Vocabulary<'a> {
    fn new(
        requests: &Requests,
        config: &EngramConfig,
        layout: &Layout,
        map: Option<&'a TokenMap>,
    ) -> Result<Self, RequestsError> {
        let top = |field, message| RequestsError::Field { place: Place::Top, field, message };
        let last = i32::try_from(layout.vocab_size() - 1).unwrap_or(i32::MAX);
        let raw = requests.token_space == TokenSpace::Raw;
        if raw && map.is_none() {
            let message = "raw tokens take the model's tokenizer.json, and there is none".to_owned();
            return Err(top("token_space", message));
        }
        let pad = match (&requests.pad_id, map) {
            (Some(pad), _) => pad.within(0, last).map_err(|NoId { found, expected }| {
                top("pad_id", format!("{found} is no compressed id, expected {expected}"))
            })?,
            (None, Some(map)) => {
                let pad = map
                    .id(config.pad_token_id)
                    .map_err(|error| top("pad_id", format!("the config's pad token: {error}")))?;
                Number::Whole(pad.into()).within(0, last).map_err(|NoId { found, expected }| {
                    top("pad_id", format!("the config's pad token maps to {found}, expected {expected}"))
                })?
            }
            (None, None) => {
                let message =
                    "missing; without a tokenizer the compressed id of the pad token has to be given".to_owned();
                return Err(top("pad_id", message));
            }
        };
        let mut dead = Vec::new();
        if raw {
            for (position, number) in requests.dead_token_ids.iter().flatten().enumerate() {
                dead.push(number.within(0, i32::MAX).map_err(|e| e.at(Place::Top, "dead_token_ids", position))?);
            }
            dead.sort_unstable();
        } else {
            refuse(
                Place::Top,
                "dead_token_ids",
                requests.dead_token_ids.as_deref(),
                "these are raw ids, and the tokens are compressed",
            )?;
        }
        let image = config.image_token_id.and_then(|id| i32::try_from(id).ok());
        Ok(Self { map: map.filter(|_| raw), image, dead, last, pad })
    }

    /// The compressed id of a token; marks from `lowest` to -1 stand for themselves.
    fn id(&self, number: &Number, lowest: i64) -> Result<i32, NoId> {
        if let &Number::Whole(mark @ (DEAD | UNKNOWN)) = number
            && mark >= lowest
        {
            return Ok(if mark == DEAD { -1 } else { -2 });
        }
        let Some(map) = self.map else { return number.within(0, self.last) };
        if self.image.is_some_and(|image| *number == Number::Whole(image.into())) {
            return Ok(-1);
        }
        let last = i32::try_from(map.ids().len() - 1).unwrap_or(i32::MAX);
        let token = number.within(0, last)?;
        if self.dead.binary_search(&token).is_ok() {
            return Ok(-1);
        }
        let id = map.ids()[usize::try_from(token).unwrap_or(0)];
        if id > self.last {
            let expected = format!("a token whose compressed id is 0 to {}; its is {id}", self.last);
            return Err(NoId { found: number.to_string(), expected });
        }
        Ok(id)
    }
}

impl Number {
    fn within(&self, low: i32, high: i32) -> Result<i32, NoId> {
        match self {
            &Self::Whole(value) if (i64::from(low)..=i64::from(high)).contains(&value) =>
            {
                #[expect(clippy::cast_possible_truncation, reason = "between two i32")]
                Ok(value as i32)
            }
            _ => Err(NoId { found: self.to_string(), expected: format!("{low} to {high}") }),
        }
    }
}

impl NoId {
    fn at(self, place: Place, field: &'static str, position: usize) -> RequestsError {
        RequestsError::Id { place, field, position, found: self.found, expected: self.expected }
    }
}
