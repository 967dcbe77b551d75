//! What a checkpoint's `config.json` says about its n-gram tables.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

/// Largest n-gram that a table may be addressed by.
pub const MAX_NGRAM_SIZE: u32 = 8;
/// Most hash columns, `(ngram_size - 1) * heads`, of one layer.
pub const MAX_COLUMNS: u32 = 1024;
/// Most layers that may hold a table.
pub const MAX_LAYERS: usize = 256;
/// Most elements in one row, or in all rows of a token for PLE.
pub const MAX_WIDTH: u32 = 65_536;
/// Most shards that one table may be stored in.
pub const MAX_SHARDS: u32 = 65_536;

const POSITIVE_I32: &str = "an integer from 1 to 2147483647";
const TOKEN_ID: &str = "a token id from 0 to 2147483647";

/// The two families of n-gram memories. They hash differently; nothing may guess between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// DeepSeek-V4.1 "Engram": a compressed vocabulary, dead tokens, no reset at the end of a document.
    Engram,
    /// Qwen4Exp / Qwen3.8-Flash-Next "PLE": raw token ids, a reset after each end-of-sequence token.
    Ple,
}

impl Family {
    /// `engram` or `ple`, as in every JSON that this workspace prints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Engram => "engram",
            Self::Ple => "ple",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a `config.json` was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON, or not a JSON object.
    #[error("config is not a JSON object: {reason}")]
    NotJson {
        /// What the parser met, with line and column where it knows them.
        reason: String,
    },
    /// One object names a key twice; readers disagree on which of the two counts.
    #[error("config names `{key}` twice")]
    DuplicateKey {
        /// Path of the key from the top of the file, joined by dots.
        key: String,
    },
    /// A field is missing, of another type, or out of its bounds.
    #[error("config field `{field}` is {value}, expected {expected}")]
    Field {
        /// Name of the field.
        field: String,
        /// Its value as JSON text, or `missing`.
        value: String,
        /// What would have been accepted.
        expected: String,
    },
    /// Neither `model_type` nor `architectures` names a family with an n-gram table that is known here.
    #[error("{found} names no known family (engram: deepseek_v41; ple: qwen4_exp, qwen4_exp_text)")]
    FamilyUnknown {
        /// The field that decided, with its value.
        found: String,
    },
}

impl ConfigError {
    pub(crate) fn field(field: &str, value: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Self::Field { field: field.to_owned(), value: value.to_string(), expected: expected.to_string() }
    }
}

/// A model's configuration, as far as its n-gram tables need it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The table's parameters.
    pub table: TableConfig,
    /// JSON text of `quantization_config` (the one in `text_config` before the one at the top), if there is one.
    pub quantization: Option<String>,
}

/// A family's table parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum TableConfig {
    /// DeepSeek-V4.1.
    Engram(EngramConfig),
    /// Qwen4Exp.
    Ple(PleConfig),
}

/// Table parameters of DeepSeek-V4.1 (`engram_*` fields).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngramConfig {
    /// `engram_layer_ids`: backbone layers with a table, counted from 0, in the config's order.
    pub layer_ids: Vec<u32>,
    /// `engram_num_embeddings`: rows of each layer's table; must be the sum of that layer's primes.
    pub num_embeddings: Vec<u32>,
    /// `engram_max_ngram_size`: longest n-gram; orders 2 to this one are looked up.
    pub max_ngram_size: u32,
    /// `engram_vocab_size`: the smallest number that may become a table size (a prime).
    pub vocab_size: u32,
    /// `engram_n_heads` (8 when absent): columns of one n-gram order.
    pub heads: u32,
    /// `engram_head_dim` (256 when absent): elements of one row.
    pub head_dim: u32,
    /// `engram_compressed_vocab_size`: distinct ids of the compressed vocabulary, which fix the multipliers.
    pub compressed_vocab_size: u32,
    /// `engram_pad_token_id` or `engram_pad_id` (2 when absent): a raw token id; hashing uses its compressed id.
    pub pad_token_id: u32,
    /// `image_token_id`: a raw token id that is dead by itself.
    pub image_token_id: Option<u32>,
    /// `vocab_size`: size of the raw vocabulary.
    pub raw_vocab_size: Option<u32>,
    /// `num_hidden_layers`.
    pub num_hidden_layers: Option<u32>,
    /// `quantization_config.engram_dtype`: only builds with other tables than FP8 set it.
    pub engram_dtype: Option<String>,
}

/// Table parameters of Qwen4Exp (`ple_*` and n-gram fields).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PleConfig {
    /// `ple_layer_ids`, which count from 1, as backbone layers counted from 0, ascending.
    pub layer_ids: Vec<u32>,
    /// `ple_embed_dim` (`hidden_size`, else 2048, when absent): elements of all of a token's rows together.
    pub embed_dim: u32,
    /// `ngram_size` (3 when absent): longest n-gram; orders 2 to this one are looked up.
    pub ngram_size: u32,
    /// `heads_per_ngram` (8 when absent): columns of one n-gram order.
    pub heads_per_ngram: u32,
    /// `ngram_vocab_size_base` (20,000,000 when absent): the smallest number that may become a table size (a prime).
    pub vocab_base: u32,
    /// `make_ngram_vocab_size_divisible_by` (128 when absent): rows of a table are padded to a multiple of this.
    pub divisor: u32,
    /// `split_ngram_parts` (512 when absent): shards that a table is stored in.
    pub split_parts: u32,
    /// `seed` (1234 when absent) of the multipliers.
    pub seed: u64,
    /// `vocab_size` (248,320 when absent): size of the token vocabulary, which bounds the multipliers.
    pub vocab_size: u32,
    /// `eos_token_id`, an integer or a list of one.
    pub eos_token_id: u32,
    /// `ple_embedding_dtype`.
    pub embedding_dtype: Option<String>,
    /// `num_hidden_layers`.
    pub num_hidden_layers: Option<u32>,
}

impl ModelConfig {
    /// Reads a `config.json`.
    ///
    /// With a `text_config`, only that is read; `quantization_config`, `model_type` and `architectures` are taken from
    /// the top where `text_config` has none. `null` is the same as absent. Every number is bounded before it is used.
    ///
    /// # Errors
    /// See [`ConfigError`]; each names the field, its value and what was expected.
    pub fn from_json(text: &[u8]) -> Result<Self, ConfigError> {
        let top: Json = serde_json::from_slice(text).map_err(|e| ConfigError::NotJson { reason: e.to_string() })?;
        let Json::Object(entries) = &top else {
            return Err(ConfigError::NotJson { reason: format!("the top level is {top}") });
        };
        top.refuse_duplicates("")?;
        let top = Fields(entries);
        let fields = top.object("text_config")?.unwrap_or(top);
        let quantization = match fields.object("quantization_config")? {
            Some(found) => Some(found),
            None => top.object("quantization_config")?,
        };
        let table = match family(fields, top)? {
            Family::Engram => TableConfig::Engram(EngramConfig::read(fields, quantization)?),
            Family::Ple => TableConfig::Ple(PleConfig::read(fields)?),
        };
        Ok(Self { table, quantization: quantization_text(text) })
    }

    /// The family that a config names, also where another of its fields is at fault. `None` where it names none that is
    /// known, or is not JSON.
    pub fn family_of(text: &[u8]) -> Option<Family> {
        let Ok(Json::Object(entries)) = serde_json::from_slice(text) else { return None };
        let top = Fields(&entries);
        let fields = top.object("text_config").ok()?.unwrap_or(top);
        family(fields, top).ok()
    }

    /// The family.
    pub const fn family(&self) -> Family {
        match self.table {
            TableConfig::Engram(_) => Family::Engram,
            TableConfig::Ple(_) => Family::Ple,
        }
    }

    /// The 0-based backbone layers with a table, in the order of every output.
    pub fn layer_ids(&self) -> &[u32] {
        match &self.table {
            TableConfig::Engram(config) => &config.layer_ids,
            TableConfig::Ple(config) => &config.layer_ids,
        }
    }

    /// Elements of one row.
    pub const fn row_width(&self) -> u32 {
        match &self.table {
            TableConfig::Engram(config) => config.head_dim,
            TableConfig::Ple(config) => config.row_width(),
        }
    }

    /// The same model with its tables' sizes multiplied by `factor`: `engram_vocab_size` or `ngram_vocab_size_base` is
    /// scaled and rounded, `engram_num_embeddings` follow, the rest stays.
    ///
    /// # Errors
    /// If `factor` is no positive number, or the scaled tables break a bound.
    pub fn scaled(mut self, factor: f64) -> Result<Self, ConfigError> {
        let scale = |field: &str, size: &mut u32| {
            let scaled = (f64::from(*size) * factor).round();
            if !(1.0..=f64::from(i32::MAX)).contains(&scaled) {
                return Err(ConfigError::field(field, scaled, POSITIVE_I32));
            }
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "checked to lie in 1..=i32::MAX"
            )]
            let scaled = scaled as u32;
            *size = scaled;
            Ok(())
        };
        match &mut self.table {
            TableConfig::Engram(config) => {
                scale("engram_vocab_size", &mut config.vocab_size)?;
                config.num_embeddings = crate::layout::engram_row_counts(config)?;
            }
            TableConfig::Ple(config) => {
                scale("ngram_vocab_size_base", &mut config.vocab_base)?;
                config.check()?;
            }
        }
        Ok(self)
    }

    /// A `config.json` that [`ModelConfig::from_json`] reads back to an equal value, in the shape of the official
    /// checkpoints: the fields lie in `text_config`, the quantization config at the top, unless it is no JSON.
    pub fn to_json(&self) -> String {
        let (model_type, text_type, architecture) = match self.family() {
            Family::Engram => ("deepseek_v41", "deepseek_v41", "DeepseekV41ForCausalLM"),
            Family::Ple => ("qwen4_exp", "qwen4_exp_text", "Qwen4ExpForConditionalGeneration"),
        };
        let mut text_config = match &self.table {
            TableConfig::Engram(config) => config.to_json(),
            TableConfig::Ple(config) => config.to_json(),
        };
        text_config.insert("model_type".to_owned(), text_type.into());
        text_config.retain(|_, value| !value.is_null());
        let quantization_config = self.quantization.clone().and_then(|text| RawValue::from_string(text).ok());
        let top = Top { architectures: [architecture], model_type, quantization_config, text_config };
        let mut text = serde_json::to_string_pretty(&top).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// The outer level of a `config.json`.
#[derive(serde::Serialize)]
struct Top {
    architectures: [&'static str; 1],
    model_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization_config: Option<Box<RawValue>>,
    text_config: serde_json::Map<String, serde_json::Value>,
}

impl EngramConfig {
    fn read(fields: Fields<'_>, quantization: Option<Fields<'_>>) -> Result<Self, ConfigError> {
        let pad_key = if fields.get("engram_pad_token_id").is_some() { "engram_pad_token_id" } else { "engram_pad_id" };
        let engram_dtype = quantization.map(|quantization| quantization.string("engram_dtype")).transpose()?.flatten();
        let config = Self {
            layer_ids: fields.list("engram_layer_ids")?,
            num_embeddings: fields.list("engram_num_embeddings")?,
            max_ngram_size: fields.required("engram_max_ngram_size", "an integer from 2 to 8")?,
            vocab_size: fields.required("engram_vocab_size", POSITIVE_I32)?,
            heads: fields.or("engram_n_heads", 8, POSITIVE_I32)?,
            head_dim: fields.or("engram_head_dim", 256, POSITIVE_I32)?,
            compressed_vocab_size: fields.required("engram_compressed_vocab_size", POSITIVE_I32)?,
            pad_token_id: fields.or(pad_key, 2, TOKEN_ID)?,
            image_token_id: fields.optional("image_token_id", TOKEN_ID)?,
            raw_vocab_size: fields.optional("vocab_size", POSITIVE_I32)?,
            num_hidden_layers: fields.optional("num_hidden_layers", POSITIVE_I32)?,
            engram_dtype: engram_dtype.map(str::to_owned),
        };
        config.check()?;
        Ok(config)
    }

    /// Bounds of everything that is cheap to bound; the prime sums are checked by [`crate::Layout`].
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_layers("engram_layer_ids", &self.layer_ids, 0, self.num_hidden_layers)?;
        if self.num_embeddings.len() != self.layer_ids.len() {
            return Err(ConfigError::field(
                "engram_num_embeddings",
                format_args!("a list of {}", self.num_embeddings.len()),
                format_args!("one number for each of the {} layers of engram_layer_ids", self.layer_ids.len()),
            ));
        }
        let names = Names { ngram: "engram_max_ngram_size", heads: "engram_n_heads", vocab: "engram_vocab_size" };
        check_columns(&names, self.max_ngram_size, self.heads, self.vocab_size)?;
        within("engram_head_dim", self.head_dim, 1, MAX_WIDTH)?;
        within("engram_compressed_vocab_size", self.compressed_vocab_size, 1, TOKEN_MAX)?;
        within("engram_pad_token_id", self.pad_token_id, 0, TOKEN_MAX)?;
        within("image_token_id", self.image_token_id.unwrap_or(0), 0, TOKEN_MAX)?;
        within("vocab_size", self.raw_vocab_size.unwrap_or(1), 1, TOKEN_MAX)
    }

    fn to_json(&self) -> serde_json::Map<String, serde_json::Value> {
        object(serde_json::json!({
            "vocab_size": self.raw_vocab_size,
            "num_hidden_layers": self.num_hidden_layers,
            "image_token_id": self.image_token_id,
            "engram_layer_ids": self.layer_ids,
            "engram_num_embeddings": self.num_embeddings,
            "engram_max_ngram_size": self.max_ngram_size,
            "engram_vocab_size": self.vocab_size,
            "engram_n_heads": self.heads,
            "engram_head_dim": self.head_dim,
            "engram_compressed_vocab_size": self.compressed_vocab_size,
            "engram_pad_token_id": self.pad_token_id,
        }))
    }
}

impl PleConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let num_hidden_layers = fields.optional("num_hidden_layers", POSITIVE_I32)?;
        let mut layer_ids: Vec<u32> = fields.list("ple_layer_ids")?;
        check_layers("ple_layer_ids", &layer_ids, 1, num_hidden_layers)?;
        layer_ids.iter_mut().for_each(|layer| *layer -= 1);
        layer_ids.sort_unstable();
        let embed_dim = match fields.optional("ple_embed_dim", POSITIVE_I32)? {
            Some(embed_dim) => embed_dim,
            None => fields.or("hidden_size", 2048, POSITIVE_I32)?,
        };
        let config = Self {
            layer_ids,
            embed_dim,
            ngram_size: fields.or("ngram_size", 3, "an integer from 2 to 8")?,
            heads_per_ngram: fields.or("heads_per_ngram", 8, POSITIVE_I32)?,
            vocab_base: fields.or("ngram_vocab_size_base", 20_000_000, POSITIVE_I32)?,
            divisor: fields.or("make_ngram_vocab_size_divisible_by", 128, POSITIVE_I32)?,
            split_parts: fields.or("split_ngram_parts", 512, POSITIVE_I32)?,
            seed: fields.or("seed", 1234, "an integer from 0 to 2^64 - 1")?,
            vocab_size: fields.or("vocab_size", 248_320, POSITIVE_I32)?,
            eos_token_id: fields.eos()?,
            embedding_dtype: fields.string("ple_embedding_dtype")?.map(str::to_owned),
            num_hidden_layers,
        };
        config.check()?;
        Ok(config)
    }

    /// Bounds of everything that is cheap to bound; the prime sums are checked by [`crate::Layout`].
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_layers("ple_layer_ids", &self.layer_ids, 0, self.num_hidden_layers)?;
        let names = Names { ngram: "ngram_size", heads: "heads_per_ngram", vocab: "ngram_vocab_size_base" };
        check_columns(&names, self.ngram_size, self.heads_per_ngram, self.vocab_base)?;
        within("ple_embed_dim", self.embed_dim, 1, MAX_WIDTH)?;
        if !self.embed_dim.is_multiple_of(self.columns()) {
            let expected = format_args!("a multiple of the {} columns", self.columns());
            return Err(ConfigError::field("ple_embed_dim", self.embed_dim, expected));
        }
        within("make_ngram_vocab_size_divisible_by", self.divisor, 1, TOKEN_MAX)?;
        within("split_ngram_parts", self.split_parts, 1, MAX_SHARDS)?;
        within("vocab_size", self.vocab_size, 1, TOKEN_MAX)?;
        within("eos_token_id", self.eos_token_id, 0, TOKEN_MAX)
    }

    const fn columns(&self) -> u32 {
        (self.ngram_size - 1) * self.heads_per_ngram
    }

    /// Elements of one row.
    pub const fn row_width(&self) -> u32 {
        self.embed_dim / self.columns()
    }

    fn to_json(&self) -> serde_json::Map<String, serde_json::Value> {
        object(serde_json::json!({
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_hidden_layers,
            "ple_layer_ids": self.layer_ids.iter().map(|layer| layer + 1).collect::<Vec<_>>(),
            "ple_embed_dim": self.embed_dim,
            "ngram_size": self.ngram_size,
            "heads_per_ngram": self.heads_per_ngram,
            "ngram_vocab_size_base": self.vocab_base,
            "make_ngram_vocab_size_divisible_by": self.divisor,
            "split_ngram_parts": self.split_parts,
            "seed": self.seed,
            "eos_token_id": self.eos_token_id,
            "ple_embedding_dtype": self.embedding_dtype,
        }))
    }
}

/// Largest token id, vocabulary size and row count: all of them travel as `i32`.
const TOKEN_MAX: u32 = i32::MAX.unsigned_abs();

fn object(value: serde_json::Value) -> serde_json::Map<String, serde_json::Value> {
    match value {
        serde_json::Value::Object(map) => map,
        _ => serde_json::Map::new(),
    }
}

fn within(field: &str, value: u32, low: u32, high: u32) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ConfigError::field(field, value, format_args!("an integer from {low} to {high}")))
}

struct Names {
    ngram: &'static str,
    heads: &'static str,
    vocab: &'static str,
}

/// Bounds n-gram size, columns and rows; a table has at least `vocab` rows a column.
fn check_columns(names: &Names, ngram_size: u32, heads: u32, vocab: u32) -> Result<(), ConfigError> {
    within(names.ngram, ngram_size, 2, MAX_NGRAM_SIZE)?;
    let orders = ngram_size - 1;
    within(names.heads, heads, 1, MAX_COLUMNS / orders)?;
    within(names.vocab, vocab, 1, TOKEN_MAX / (orders * heads))
}

/// `ids` as written, counted from `first`: not empty, not too many, none twice, all inside the model.
fn check_layers(field: &str, ids: &[u32], first: u32, layers: Option<u32>) -> Result<(), ConfigError> {
    within("num_hidden_layers", layers.unwrap_or(1), 1, TOKEN_MAX)?;
    if ids.is_empty() || ids.len() > MAX_LAYERS {
        let expected = format_args!("a list of 1 to {MAX_LAYERS} layers");
        return Err(ConfigError::field(field, format_args!("a list of {}", ids.len()), expected));
    }
    let last = layers.map_or(TOKEN_MAX, |layers| layers - 1 + first);
    for (place, &id) in ids.iter().enumerate() {
        if !(first..=last).contains(&id) {
            return Err(ConfigError::field(field, id, format_args!("layers from {first} to {last}")));
        }
        if ids[..place].contains(&id) {
            return Err(ConfigError::field(field, format_args!("{id} twice"), "each layer once"));
        }
    }
    Ok(())
}

fn family(text: Fields<'_>, top: Fields<'_>) -> Result<Family, ConfigError> {
    for fields in [text, top] {
        if let Some(model_type) = fields.string("model_type")? {
            return match model_type {
                "deepseek_v41" => Ok(Family::Engram),
                "qwen4_exp" | "qwen4_exp_text" => Ok(Family::Ple),
                _ => Err(ConfigError::FamilyUnknown { found: format!("model_type {model_type:?}") }),
            };
        }
    }
    for fields in [text, top] {
        let Some(architectures) = fields.get("architectures") else { continue };
        let Json::Array(names) = architectures else {
            return Err(ConfigError::field("architectures", architectures, "a list of names"));
        };
        let known = names.iter().find_map(|name| match name {
            Json::String(name) if name.starts_with("DeepseekV41For") => Some(Family::Engram),
            Json::String(name) if name.starts_with("Qwen4ExpFor") => Some(Family::Ple),
            _ => None,
        });
        return known.ok_or_else(|| ConfigError::FamilyUnknown { found: format!("architectures {architectures}") });
    }
    Err(ConfigError::FamilyUnknown { found: "a config without model_type and architectures".to_owned() })
}

/// The exact text of the quantization config. The whole text was parsed before, so this cannot fail anew.
fn quantization_text(text: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Level<'a> {
        #[serde(borrow)]
        quantization_config: Option<&'a RawValue>,
        #[serde(borrow)]
        text_config: Option<&'a RawValue>,
    }
    let top: Level<'_> = serde_json::from_slice(text).ok()?;
    let inner = top.text_config.and_then(|text| serde_json::from_str::<Level<'_>>(text.get()).ok());
    let found = inner.and_then(|inner| inner.quantization_config).or(top.quantization_config)?;
    Some(found.get().to_owned())
}

/// The entries of one JSON object without repeated keys.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a [(String, Json)]);

impl<'a> Fields<'a> {
    /// A field that is there and not null.
    fn get(self, key: &str) -> Option<&'a Json> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value).filter(|value| !matches!(value, Json::Null))
    }

    fn object(self, key: &str) -> Result<Option<Self>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Object(entries)) => Ok(Some(Self(entries))),
            Some(other) => Err(ConfigError::field(key, other, "an object")),
        }
    }

    fn string(self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(other) => Err(ConfigError::field(key, other, "a string")),
        }
    }

    fn optional<T: TryFrom<u64>>(self, key: &str, expected: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.integer().map(Some).ok_or_else(|| ConfigError::field(key, value, expected))
    }

    fn or<T: TryFrom<u64>>(self, key: &str, default: T, expected: &str) -> Result<T, ConfigError> {
        Ok(self.optional(key, expected)?.unwrap_or(default))
    }

    fn required<T: TryFrom<u64>>(self, key: &str, expected: &str) -> Result<T, ConfigError> {
        self.optional(key, expected)?.ok_or_else(|| ConfigError::field(key, "missing", expected))
    }

    fn list(self, key: &str) -> Result<Vec<u32>, ConfigError> {
        const EXPECTED: &str = "a list of integers from 0 to 2147483647, not empty";
        let value = self.get(key).ok_or_else(|| ConfigError::field(key, "missing", EXPECTED))?;
        let Json::Array(items) = value else { return Err(ConfigError::field(key, value, EXPECTED)) };
        let number = |item: &Json| item.integer().ok_or_else(|| ConfigError::field(key, item, EXPECTED));
        items.iter().map(number).collect()
    }

    fn eos(self) -> Result<u32, ConfigError> {
        const KEY: &str = "eos_token_id";
        const EXPECTED: &str = "one token id from 0 to 2147483647, as an integer or a list of one";
        let value = self.get(KEY).ok_or_else(|| ConfigError::field(KEY, "missing", EXPECTED))?;
        let id = match value {
            Json::Array(items) if items.len() == 1 => items[0].integer(),
            other => other.integer(),
        };
        id.ok_or_else(|| ConfigError::field(KEY, value, EXPECTED))
    }
}

/// A JSON value that keeps repeated keys, so that they can be refused by name.
enum Json {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    fn integer<T: TryFrom<u64>>(&self) -> Option<T> {
        let Self::Number(number) = self else { return None };
        T::try_from(number.as_u64()?).ok()
    }

    fn refuse_duplicates(&self, path: &str) -> Result<(), ConfigError> {
        match self {
            Self::Array(items) => items.iter().try_for_each(|item| item.refuse_duplicates(path)),
            Self::Object(entries) => {
                let mut seen = std::collections::HashSet::with_capacity(entries.len());
                for (key, value) in entries {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    if !seen.insert(key) {
                        return Err(ConfigError::DuplicateKey { key: path });
                    }
                    value.refuse_duplicates(&path)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// The value as short JSON text, for messages: containers by their size only.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => value.fmt(f),
            Self::Number(number) => number.fmt(f),
            Self::String(text) if text.chars().count() <= 64 => write!(f, "{text:?}"),
            Self::String(text) => write!(f, "a string of {} bytes", text.len()),
            Self::Array(items) if items.len() <= 8 && items.iter().all(Self::is_scalar) => {
                f.write_str("[")?;
                for (place, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if place == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Self::Array(items) => write!(f, "a list of {}", items.len()),
            Self::Object(entries) => write!(f, "an object of {} fields", entries.len()),
        }
    }
}

impl Json {
    const fn is_scalar(&self) -> bool {
        !matches!(self, Self::Array(_) | Self::Object(_))
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(Number::from_f64(value).map_or(Json::Null, Json::Number))
            }

            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element()? {
                    list.push(item);
                }
                Ok(Json::Array(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Json::Object(entries))
            }
        }

        deserializer.deserialize_any(Any)
    }
}
