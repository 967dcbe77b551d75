//! JSON whose objects have no key twice: a plain map keeps one of them unseen, and two readers may then see two configs.

use crate::Error;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

/// Parses a text.
pub(super) fn parse(text: &str) -> Result<Json, Error> {
    let duplicate = Cell::new(None);
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Unique(&duplicate).deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
    match duplicate.take() {
        Some(key) => Err(Error::DuplicateKey { key }),
        None => value.map_err(|error| Error::NotJson { message: error.to_string() }),
    }
}

/// A value. Objects keep the order of the text.
#[derive(Debug)]
pub(super) enum Json {
    Null,
    Boolean(bool),
    Integer(i64),
    Number(f64),
    Text(String),
    List(Vec<Self>),
    Object(Vec<(String, Self)>),
}

impl Json {
    pub(super) fn as_object(&self) -> Result<Object<'_>, Error> {
        match self {
            Self::Object(fields) => Ok(Object { path: String::new(), fields }),
            value => Err(mistyped("quantization_config", "an object", value)),
        }
    }
}

/// An object and where it stands in the config.
#[derive(Debug)]
pub(super) struct Object<'a> {
    path: String,
    fields: &'a [(String, Json)],
}

/// Fields by name. Null is as good as absent; another type is an error.
impl<'a> Object<'a> {
    pub(super) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, Error> {
        self.get(name, "a string", |value| match value {
            Json::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>, Error> {
        self.get(name, "an integer", |value| match value {
            Json::Integer(integer) => Some(*integer),
            _ => None,
        })
    }

    pub(super) fn boolean(&self, name: &str) -> Result<Option<bool>, Error> {
        self.get(name, "a boolean", |value| match value {
            Json::Boolean(boolean) => Some(*boolean),
            _ => None,
        })
    }

    pub(super) fn strings(&self, name: &str) -> Result<Option<Vec<String>>, Error> {
        self.get(name, "a list of strings", |value| match value {
            Json::List(items) => flatten(items, false),
            _ => None,
        })
    }

    /// Names as a list, as a list of lists, or between the commas of a string.
    pub(super) fn names(&self, name: &str) -> Result<Option<Vec<String>>, Error> {
        self.get(name, "a string or a list of strings", |value| match value {
            Json::Text(text) => Some(text.split(',').map(|name| name.trim().to_owned()).collect()),
            Json::List(items) => flatten(items, true),
            _ => None,
        })
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Self>, Error> {
        let path = self.path_of(name);
        self.get(name, "an object", |value| match value {
            Json::Object(fields) => Some(Self { path: path.clone(), fields }),
            _ => None,
        })
    }

    /// The members of an object of objects; none if it is absent.
    pub(super) fn objects(&self, name: &str) -> Result<Vec<(String, Self)>, Error> {
        let Some(members) = self.object(name)? else { return Ok(Vec::new()) };
        let member = |(name, value): &'a (String, Json)| {
            let path = members.path_of(name);
            match value {
                Json::Object(fields) => Ok((name.clone(), Self { path, fields })),
                value => Err(mistyped(&path, "an object", value)),
            }
        };
        members.fields.iter().map(member).collect()
    }

    pub(super) fn missing(&self, name: &str, expected: &'static str) -> Error {
        Error::Field { field: self.path_of(name), expected, found: "missing".to_owned() }
    }

    fn find(&self, name: &str) -> Option<&'a Json> {
        let (_, value) = self.fields.iter().find(|(field, _)| field == name)?;
        (!matches!(value, Json::Null)).then_some(value)
    }

    fn get<T>(
        &self,
        name: &str,
        expected: &'static str,
        read: impl Fn(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.find(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| mistyped(&self.path_of(name), expected, value))
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

/// The strings of a list, and of the lists in it where `nested`; none if there is anything else.
fn flatten(items: &[Json], nested: bool) -> Option<Vec<String>> {
    let mut texts = Vec::with_capacity(items.len());
    for item in items {
        match item {
            Json::Text(text) => texts.push(text.clone()),
            Json::List(items) if nested => texts.extend(flatten(items, false)?),
            _ => return None,
        }
    }
    Some(texts)
}

fn mistyped(path: &str, expected: &'static str, value: &Json) -> Error {
    let found = match value {
        Json::Null => "null".to_owned(),
        Json::Boolean(value) => value.to_string(),
        Json::Integer(value) => value.to_string(),
        Json::Number(value) => value.to_string(),
        Json::Text(value) if value.len() <= 64 => format!("the string `{value}`"),
        Json::Text(value) => format!("a string of {} bytes", value.len()),
        Json::List(_) => "another list".to_owned(),
        Json::Object(_) => "an object".to_owned(),
    };
    Error::Field { field: path.to_owned(), expected, found }
}

/// Builds a value, and leaves the first repeated key in the cell.
#[derive(Clone, Copy)]
struct Unique<'a>(&'a Cell<Option<String>>);

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Json, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Boolean(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Integer(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        #[expect(clippy::cast_precision_loss, reason = "past every integer that a config can mean")]
        Ok(i64::try_from(value).map_or(Json::Number(value as f64), Json::Integer))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut seen = HashSet::new();
        let mut fields = Vec::new();
        while let Some(key) = entries.next_key::<String>()? {
            if !seen.insert(key.clone()) {
                self.0.set(Some(key));
                return Err(A::Error::custom("a key twice"));
            }
            fields.push((key, entries.next_value_seed(self)?));
        }
        Ok(Json::Object(fields))
    }
}
