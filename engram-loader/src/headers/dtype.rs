use std::fmt;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Deserializer};

/// The element type of a tensor, as its header names it.
///
/// Names that the safetensors format does not define are kept, so that a file can be judged without knowing every dtype in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dtype(Kind);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Defined(safetensors::Dtype),
    Undefined(Box<str>),
}

impl Dtype {
    pub(crate) fn parse(name: &str) -> Self {
        let named: Result<_, serde::de::value::Error> = safetensors::Dtype::deserialize(name.into_deserializer());
        Self(named.map_or_else(|_| Kind::Undefined(name.into()), Kind::Defined))
    }

    /// Bits an element; `None` for a dtype that the safetensors format does not define.
    #[must_use]
    pub fn bits(&self) -> Option<u64> {
        match &self.0 {
            Kind::Defined(dtype) => Some(dtype.bitsize() as u64),
            Kind::Undefined(_) => None,
        }
    }

    /// The dtype, where the safetensors format defines it.
    pub(crate) fn defined(&self) -> Option<safetensors::Dtype> {
        match self.0 {
            Kind::Defined(dtype) => Some(dtype),
            Kind::Undefined(_) => None,
        }
    }
}

/// The name that headers use, such as `F8_E4M3`.
impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Defined(dtype) => dtype.fmt(f),
            Kind::Undefined(name) => name.fmt(f),
        }
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl serde::de::Visitor<'_> for Name {
            type Value = Dtype;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a dtype name")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Dtype, E> {
                Ok(Dtype::parse(name))
            }
        }

        deserializer.deserialize_str(Name)
    }
}
