#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod config;
mod hash;
mod history;
mod layout;
mod preset;
mod primes;
mod random;
mod reciprocal;
mod shard;
mod token;
mod token_map;
#[cfg(feature = "tokenizers")]
mod tokenizer;

pub use config::{
    ConfigError, EngramConfig, Family, MAX_COLUMNS, MAX_LAYERS, MAX_NGRAM_SIZE, MAX_SHARDS, MAX_WIDTH, ModelConfig,
    PleConfig, TableConfig,
};
pub use hash::{Batch, BatchError, Hasher, Path};
pub use history::{DraftsError, History};
pub use layout::{ConstantsError, LayerLayout, Layout};
pub use preset::{Preset, UnknownPreset};
pub use random::NumpyRng;
pub use reciprocal::Reciprocal;
pub use shard::{HeadShards, Overlap, Ownership, RowShards, ShardError, Slot, TableGroups, overlap};
pub use token::{Token, TokenError, convert_tokens};
pub use token_map::{TokenMap, TokenMapError};
