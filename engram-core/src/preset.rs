//! Models by name.

use std::fmt;
use std::str::FromStr;

use crate::config::{EngramConfig, ModelConfig, PleConfig, TableConfig};

/// Known models, and small ones of the same shapes for tests and trials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preset {
    /// DeepSeek-V4.1-Flash: two tables of 384 million rows.
    DeepseekV41Flash,
    /// Qwen3.8-Flash-Next: one table of 320 million rows.
    Qwen38FlashNext,
    /// An Engram model of two tables with some thousand rows.
    TinyEngram,
    /// A PLE model of one table with some thousand rows.
    TinyPle,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 4] = [Self::DeepseekV41Flash, Self::Qwen38FlashNext, Self::TinyEngram, Self::TinyPle];

    /// The name, as `FromStr` reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DeepseekV41Flash => "deepseek-v4.1-flash",
            Self::Qwen38FlashNext => "qwen3.8-flash-next",
            Self::TinyEngram => "tiny-engram",
            Self::TinyPle => "tiny-ple",
        }
    }

    /// The model's configuration, without a quantization config.
    pub fn config(self) -> ModelConfig {
        let table = match self {
            Self::DeepseekV41Flash => TableConfig::Engram(EngramConfig {
                layer_ids: vec![1, 14],
                num_embeddings: vec![384_006_168, 384_016_682],
                max_ngram_size: 4,
                vocab_size: 16_000_000,
                heads: 8,
                head_dim: 256,
                compressed_vocab_size: 99_092,
                pad_token_id: 2,
                image_token_id: Some(129_264),
                raw_vocab_size: Some(129_280),
                num_hidden_layers: Some(40),
                engram_dtype: None,
            }),
            Self::TinyEngram => TableConfig::Engram(EngramConfig {
                layer_ids: vec![1, 3],
                num_embeddings: vec![6_126, 6_332],
                max_ngram_size: 4,
                vocab_size: 1_000,
                heads: 2,
                head_dim: 64,
                compressed_vocab_size: 500,
                pad_token_id: 2,
                image_token_id: None,
                raw_vocab_size: Some(600),
                num_hidden_layers: Some(6),
                engram_dtype: None,
            }),
            Self::Qwen38FlashNext => TableConfig::Ple(PleConfig {
                layer_ids: vec![1],
                embed_dim: 2_560,
                ngram_size: 3,
                heads_per_ngram: 8,
                vocab_base: 20_000_000,
                divisor: 128,
                split_parts: 128,
                seed: 1_234,
                vocab_size: 248_320,
                eos_token_id: 248_044,
                embedding_dtype: None,
                num_hidden_layers: Some(48),
            }),
            Self::TinyPle => TableConfig::Ple(PleConfig {
                layer_ids: vec![1],
                embed_dim: 256,
                ngram_size: 3,
                heads_per_ngram: 2,
                vocab_base: 1_000,
                divisor: 128,
                split_parts: 4,
                seed: 1_234,
                vocab_size: 1_024,
                eos_token_id: 11,
                embedding_dtype: None,
                num_hidden_layers: Some(6),
            }),
        };
        ModelConfig { table, quantization: None }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No preset has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no preset {0:?}, expected deepseek-v4.1-flash, qwen3.8-flash-next, tiny-engram or tiny-ple")]
pub struct UnknownPreset(pub String);

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(name: &str) -> Result<Self, UnknownPreset> {
        Self::ALL.into_iter().find(|preset| preset.name() == name).ok_or_else(|| UnknownPreset(name.to_owned()))
    }
}
