//! The quantization configs that checkpoints carry, as far as they bear on an embedding table.

mod json;
pub(crate) mod names;

use crate::Error;
use json::Object;

/// A checkpoint's quantization config: `quantization_config` of its config.json, or the whole of a hf_quant_config.json.
///
/// Only what decides about a table is kept. Names and patterns are as written; [`Selector`](crate::Selector) compares them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantConfig {
    /// `fp8`.
    Fp8 {
        /// Whether the weights are stored in FP8, as every checkpoint of this method has them. An engine that quantises while loading
        /// has the same config with `false`.
        serialized: bool,
        /// `ignored_layers`, else `modules_to_not_convert`.
        ignored: Vec<String>,
    },
    /// `modelopt` and its kin, with another `quant_algo` than `MIXED_PRECISION`.
    ModelOpt {
        /// `quant_algo`, in capitals.
        algorithm: String,
        /// `exclude_modules` and `ignore`: names, parts of names, or patterns with `*` and `?`.
        excluded: Vec<String>,
    },
    /// `modelopt` with `quant_algo` `MIXED_PRECISION`.
    ModelOptMixed {
        /// `quantized_layers`: module names, each with its `quant_algo` in capitals.
        layers: Vec<(String, String)>,
    },
    /// `compressed-tensors`.
    CompressedTensors {
        /// The targets of all groups that quantise weights: names, module classes, or `re:` and a regular expression.
        targets: Vec<String>,
        /// `ignore`: names, or `re:` and a regular expression.
        ignored: Vec<String>,
    },
    /// `auto-round` and `inc`.
    AutoRound {
        /// `bits` of what has none of its own; 16 and more is unquantised.
        bits: i64,
        /// `block_name_to_quantize` or `to_quant_block_names`: names under which everything is quantised. Empty: everywhere.
        blocks: Vec<String>,
        /// `extra_config`: names or regular expressions, each with its `bits` if it has them.
        layers: Vec<(String, Option<i64>)>,
    },
    /// `quark`.
    Quark,
    /// Any other method, by its name.
    Other(String),
}

impl QuantConfig {
    /// Reads a config from its JSON text. Keys that have no bearing on tables are passed over.
    ///
    /// # Errors
    /// [`Error::NotJson`], [`Error::DuplicateKey`], [`Error::Field`] for a field that is missing or of the wrong type, and
    /// [`Error::Pattern`] for a config with more than 1,024 patterns.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let text = json::parse(text)?;
        let config = text.as_object()?;
        let Some(method) = config.text("quant_method")? else {
            // A hf_quant_config.json names no method, and is ModelOpt's.
            let named = config.has("quant_algo") || config.has("quantization");
            return if named { modelopt(&config) } else { Err(config.missing("quant_method", "a string")) };
        };
        match method.to_ascii_lowercase().replace('_', "-").as_str() {
            "fp8" => fp8(&config),
            "compressed-tensors" => compressed_tensors(&config),
            "auto-round" | "auto-round:fp8" | "intel/auto-round" | "inc" => auto_round(&config),
            "quark" => Ok(Self::Quark),
            name if name.starts_with("modelopt") => modelopt(&config),
            _ => Ok(Self::Other(method.to_owned())),
        }
    }

    /// The method's name, for messages.
    pub fn method(&self) -> String {
        match self {
            Self::Fp8 { .. } => "fp8".to_owned(),
            Self::ModelOpt { algorithm, .. } => format!("modelopt {algorithm}"),
            Self::ModelOptMixed { .. } => "modelopt MIXED_PRECISION".to_owned(),
            Self::CompressedTensors { .. } => "compressed-tensors".to_owned(),
            Self::AutoRound { .. } => "auto-round".to_owned(),
            Self::Quark => "quark".to_owned(),
            Self::Other(name) => name.clone(),
        }
    }
}

fn fp8(config: &Object<'_>) -> Result<QuantConfig, Error> {
    let serialized = config.boolean("is_checkpoint_fp8_serialized")?.unwrap_or(true);
    let mut ignored = config.strings("ignored_layers")?.unwrap_or_default();
    if ignored.is_empty() {
        ignored = config.strings("modules_to_not_convert")?.unwrap_or_default();
    }
    Ok(QuantConfig::Fp8 { serialized, ignored })
}

fn modelopt(config: &Object<'_>) -> Result<QuantConfig, Error> {
    let nested = config.object("quantization")?;
    let config = nested.as_ref().unwrap_or(config);
    let algorithm = capitals(config, "quant_algo")?;
    if algorithm != "MIXED_PRECISION" {
        let mut excluded = config.strings("exclude_modules")?.unwrap_or_default();
        excluded.extend(config.strings("ignore")?.unwrap_or_default());
        return Ok(QuantConfig::ModelOpt { algorithm, excluded });
    }
    let layers = config.objects("quantized_layers")?;
    let layers: Vec<_> = layers
        .into_iter()
        .map(|(name, layer)| Ok((name, capitals(&layer, "quant_algo")?)))
        .collect::<Result<_, _>>()?;
    if layers.is_empty() {
        return Err(config.missing("quantized_layers", "an object that names the quantised layers"));
    }
    Ok(QuantConfig::ModelOptMixed { layers })
}

fn capitals(config: &Object<'_>, name: &str) -> Result<String, Error> {
    let text = config.text(name)?.ok_or_else(|| config.missing(name, "a string"))?;
    Ok(text.to_ascii_uppercase())
}

fn compressed_tensors(config: &Object<'_>) -> Result<QuantConfig, Error> {
    let ignored = config.strings("ignore")?.unwrap_or_default();
    let mut targets = Vec::new();
    for (_, group) in config.objects("config_groups")? {
        if group.has("weights") {
            targets.extend(group.strings("targets")?.ok_or_else(|| group.missing("targets", "a list of strings"))?);
        }
    }
    names::bound(targets.iter().chain(&ignored).filter(|name| name.starts_with("re:")))?;
    Ok(QuantConfig::CompressedTensors { targets, ignored })
}

fn auto_round(config: &Object<'_>) -> Result<QuantConfig, Error> {
    let bits = config.integer("bits")?.ok_or_else(|| config.missing("bits", "an integer"))?;
    let blocks = match config.names("block_name_to_quantize")? {
        Some(blocks) => blocks,
        None => config.names("to_quant_block_names")?.unwrap_or_default(),
    };
    let layers = config.objects("extra_config")?;
    let layers: Vec<_> =
        layers.into_iter().map(|(name, layer)| Ok((name, layer.integer("bits")?))).collect::<Result<_, _>>()?;
    names::bound(layers.iter().map(|(name, _)| name).filter(|name| names::is_pattern(name)))?;
    Ok(QuantConfig::AutoRound { bits, blocks, layers })
}
