//! The index: which file holds which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::{Component, Path};

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};

use crate::headers::json::{Duplicate, StringMap, Unread};
use crate::prove::report::{Fault, FaultCode};

/// The name that Hugging Face libraries look for.
pub(crate) const USUAL_NAME: &str = "model.safetensors.index.json";
/// How every index is named; some tools put another word than `model` first.
pub(crate) const SUFFIX: &str = ".safetensors.index.json";

/// Where the index places every tensor.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    /// Paths relative to the checkpoint's folder.
    pub(crate) files: Vec<String>,
    /// Positions in `files`, by tensor name.
    pub(crate) tensors: BTreeMap<Box<str>, usize>,
}

/// What a folder's index turned out to be.
#[derive(Debug)]
pub(crate) enum Indexed {
    /// There is none, so that the folder's files are all of it.
    Absent,
    Read(Index),
    /// There is one that cannot be relied on, so that nobody knows which files belong together.
    Faulty,
}

impl Index {
    /// Reads an index. After a fault nothing that it says may be relied on.
    ///
    /// # Errors
    /// The text cannot be read; a fault of what it says is the inner error.
    pub(crate) fn parse(text: impl Read) -> io::Result<Result<Self, Fault>> {
        let duplicate = Duplicate::default();
        let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(64 << 10, text));
        let placed = WeightMap { duplicate: &duplicate }.deserialize(&mut json);
        match placed.and_then(|placed| json.end().map(|()| placed)) {
            Ok(placed) => Ok(Self::place(placed)),
            Err(error) if error.is_io() => Err(error.into()),
            Err(error) => Ok(Err(duplicate.fault_or(FaultCode::IndexJson, "a JSON object with a weight_map", &error))),
        }
    }

    /// The files in which the index places none of the tensors that `is_wanted` picks.
    pub(crate) fn files_without(&self, is_wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let mut files: BTreeSet<String> = self.files.iter().cloned().collect();
        for (_, &file) in self.tensors.iter().filter(|(tensor, _)| is_wanted(tensor)) {
            files.remove(&self.files[file]);
        }
        files
    }

    fn place(placed: Vec<(Box<str>, Box<str>)>) -> Result<Self, Fault> {
        let mut index = Self::default();
        let mut positions: BTreeMap<String, usize> = BTreeMap::new();
        for (tensor, file) in placed {
            let Some(inside) = inside_folder(&file) else {
                let message = format!("expected a file inside the checkpoint's folder, found {file:?}");
                return Err(Fault::new(FaultCode::IndexJson, message).tensor(&tensor));
            };
            let next = positions.len();
            index.tensors.insert(tensor, *positions.entry(inside).or_insert(next));
        }
        index.files = vec![String::new(); positions.len()];
        for (file, position) in positions {
            index.files[position] = file;
        }
        Ok(index)
    }
}

/// The path in plain form, if it leads to something below the folder it is relative to.
fn inside_folder(path: &str) -> Option<String> {
    let mut plain = Vec::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(name) => plain.push(name.to_str()?),
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::ParentDir => return None,
        }
    }
    // No file name holds NUL, so the system cannot even be asked for one.
    (!plain.is_empty() && !path.contains('\0')).then(|| plain.join("/"))
}

/// The object of an index: tensor names and file names, as they stand there.
struct WeightMap<'a> {
    duplicate: &'a Duplicate,
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = Vec<(Box<str>, Box<str>)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = Vec<(Box<str>, Box<str>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map of tensor names to files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut placed = None;
        let mut others: BTreeSet<Box<str>> = BTreeSet::new();
        while let Some(key) = map.next_key::<Box<str>>()? {
            if *key == *"weight_map" {
                self.duplicate.refuse_second(placed.as_ref(), &key)?;
                placed = Some(map.next_value_seed(StringMap { duplicate: self.duplicate })?);
            } else {
                self.duplicate.refuse_second(others.get(&key), &key)?;
                map.next_value::<Unread>()?;
                others.insert(key);
            }
        }
        placed.ok_or_else(|| A::Error::missing_field("weight_map"))
    }
}
