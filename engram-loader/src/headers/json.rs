//! Reading JSON that nobody vouches for: names that occur twice are seen, not overwritten.

use std::cell::RefCell;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::prove::report::{Fault, FaultCode};

/// Where a deserialiser leaves the name that it met twice, because its error type holds only text.
#[derive(Debug, Default)]
pub(crate) struct Duplicate(RefCell<Option<String>>);

impl Duplicate {
    /// Fails if there is an `earlier` value of `key`, and remembers the key.
    pub(crate) fn refuse_second<T, E: Error>(&self, earlier: Option<T>, key: &str) -> Result<(), E> {
        if earlier.is_none() {
            return Ok(());
        }
        self.0.replace(Some(key.to_owned()));
        Err(E::custom(format_args!("duplicate key {key:?}")))
    }

    /// The fault that ended the parse: a name met twice, or else `code`, where `expected` should have been.
    pub(crate) fn fault_or(&self, code: FaultCode, expected: &str, error: &serde_json::Error) -> Fault {
        match &*self.0.borrow() {
            Some(key) => {
                let place = format!("line {} column {}", error.line(), error.column());
                Fault::new(FaultCode::DuplicateKey, format!("expected each name once, found {key:?} again at {place}"))
            }
            None => Fault::new(code, format!("expected {expected}, but {error}")),
        }
    }
}

/// A map of strings to strings, as pairs in the order of the names.
pub(crate) struct StringMap<'a> {
    pub(crate) duplicate: &'a Duplicate,
}

impl<'de> DeserializeSeed<'de> for StringMap<'_> {
    type Value = Vec<(Box<str>, Box<str>)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StringMap<'_> {
    type Value = Vec<(Box<str>, Box<str>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings to strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs: Vec<(Box<str>, Box<str>)> = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        pairs.sort_unstable();
        let twice = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0);
        self.duplicate.refuse_second(twice, twice.map_or("", |pair| &pair[0].0))?;
        Ok(pairs)
    }
}

/// Any value at all, read over but for being JSON: its strings are checked to be text, and it may not nest without end.
pub(crate) struct Unread;

impl<'de> Deserialize<'de> for Unread {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Unread {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        while entries.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}
