//! Which format a quantization config gives to a table.

use crate::quant::names::{Module, is_pattern};
use crate::{Error, FormatKind, QuantConfig};
use std::fmt;

/// What a quantization config says about a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Selection {
    /// Not quantised: bf16, f16 or f32, whichever the checkpoint stores.
    Unquantized,
    /// E4M3 with one scale for the table.
    E4m3Global,
}

impl Selection {
    /// Whether a table stored in this format is what the config says.
    pub fn admits(self, kind: FormatKind) -> bool {
        match self {
            Self::Unquantized => kind.unquantized().is_some(),
            Self::E4m3Global => kind == FormatKind::E4m3Global,
        }
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Unquantized => "unquantized",
            Self::E4m3Global => FormatKind::E4m3Global.name(),
        })
    }
}

/// How the names that an FP8 config ignores are compared with a module's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Matching {
    /// The whole name.
    #[default]
    Exact,
    /// Anywhere in the name.
    Substring,
    /// The whole name or its end, after a dot.
    Suffix,
}

/// Chooses the format of the table `prefix` (its module name, such as `model.layers.1.ple.ple_embedding.ngram_embedding`) as inference
/// engines do, with exact matching and nothing fused; [`Selector`] has both as options.
///
/// The first that applies decides:
/// 1. `ple_embedding_dtype` `float8_e4m3fn`: E4M3 with a global scale.
/// 2. No config: unquantised.
/// 3. ModelOpt `MIXED_PRECISION`: E4M3 if the table's algorithm is exactly `FP8`, else unquantised.
/// 4. Any other ModelOpt config that excludes the table: unquantised.
/// 5. compressed-tensors that ignores the table, or no group of which targets it: unquantised.
/// 6. AutoRound where the table has 16 bits or more: unquantised.
/// 7. Quark: unquantised, since it quantises other layers only.
/// 8. Any other config but FP8 is refused.
/// 9. FP8: unquantised if the table or one of its shards is ignored, refused if it would be quantised while loading, else E4M3 with a
///    global scale.
///
/// ```
/// use engram_ple::{QuantConfig, Selection, select};
///
/// let table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
/// let config = QuantConfig::from_json(r#"{"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}"#)?;
/// assert_eq!(select(Some(&config), table, None)?, Selection::E4m3Global);
/// # Ok::<(), engram_ple::Error>(())
/// ```
///
/// # Errors
/// [`Error::EmbeddingDtype`] for a packed dtype that is not supported, [`Error::UnsupportedMethod`] and [`Error::NotSerialized`] as
/// above, [`Error::PartlyIgnored`], and [`Error::Pattern`] when the answer hangs on a pattern that cannot be used.
pub fn select(
    config: Option<&QuantConfig>,
    prefix: &str,
    ple_embedding_dtype: Option<&str>,
) -> Result<Selection, Error> {
    Selector::new().select(config, prefix, ple_embedding_dtype)
}

/// [`select`] with options.
#[derive(Debug, Clone, Copy, Default)]
pub struct Selector<'a> {
    matching: Matching,
    fused: &'a [(&'a str, &'a [&'a str])],
}

impl<'a> Selector<'a> {
    /// Exact matching, nothing fused.
    pub fn new() -> Self {
        Self::default()
    }

    /// How an FP8 config's ignored names are compared.
    #[must_use]
    pub fn matching(self, matching: Matching) -> Self {
        Self { matching, ..self }
    }

    /// Modules that an engine fuses from parts, by the last components of their names: `[("kv_proj", &["key_proj", "value_proj"])]`. A
    /// fused module is ignored when all of its parts are; when some are, it is refused.
    #[must_use]
    pub fn fused(self, fused: &'a [(&'a str, &'a [&'a str])]) -> Self {
        Self { fused, ..self }
    }

    /// Chooses the format of a table; see [`select`].
    ///
    /// # Errors
    /// As [`select`].
    pub fn select(
        &self,
        config: Option<&QuantConfig>,
        prefix: &str,
        ple_embedding_dtype: Option<&str>,
    ) -> Result<Selection, Error> {
        match ple_embedding_dtype {
            Some("float8_e4m3fn") => return Ok(Selection::E4m3Global),
            Some(dtype @ ("nf4" | "nvfp4")) => return Err(Error::EmbeddingDtype { dtype: dtype.to_owned() }),
            _ => {}
        }
        let Some(config) = config else { return Ok(Selection::Unquantized) };
        let unquantized = match config {
            QuantConfig::ModelOptMixed { layers } => {
                let unquantized = self.decide(prefix, |_| true, |module| Ok(mixed_precision(module, layers)))?;
                return Ok(if unquantized { Selection::Unquantized } else { Selection::E4m3Global });
            }
            QuantConfig::ModelOpt { excluded, .. } => self
                .listed(prefix, |module| Ok(excluded.iter().any(|name| module.contains(name) || module.fits(name))))?,
            QuantConfig::CompressedTensors { targets, ignored } => {
                self.listed(prefix, |module| any(ignored, |name| is_named(module, name)))?
                    || self.decide(
                        prefix,
                        |_| true,
                        |module| Ok(any(targets, |name| is_target(module, name))?.then_some(false)),
                    )?
            }
            QuantConfig::AutoRound { bits, blocks, layers } => {
                let default = |module: &Module| {
                    *bits >= FULL_BITS || !blocks.is_empty() && !blocks.iter().any(|block| module.starts_with(block))
                };
                self.decide(prefix, default, |module| auto_round(module, layers, || default(module)))?
            }
            QuantConfig::Quark => true,
            QuantConfig::Other(_) => false,
            QuantConfig::Fp8 { serialized, ignored } => return self.fp8(*serialized, ignored, prefix),
        };
        if unquantized {
            Ok(Selection::Unquantized)
        } else {
            Err(Error::UnsupportedMethod { method: config.method(), prefix: prefix.to_owned() })
        }
    }

    fn fp8(&self, serialized: bool, ignored: &[String], prefix: &str) -> Result<Selection, Error> {
        let is_ignored = |module: &Module, name: &str| match self.matching {
            Matching::Exact => module.is(name),
            Matching::Substring => module.is(name) || module.contains(name),
            Matching::Suffix => module.is(name) || module.ends_with(name),
        };
        let module = Module::new(prefix);
        // The shards of a table are one parameter: one of them ignored is all of them.
        if self.listed(prefix, |module| Ok(ignored.iter().any(|name| is_ignored(module, name))))?
            || ignored.iter().any(|name| module.starts(name, ".shard_"))
        {
            Ok(Selection::Unquantized)
        } else if serialized {
            Ok(Selection::E4m3Global)
        } else {
            Err(Error::NotSerialized { prefix: prefix.to_owned() })
        }
    }

    /// Whether a list holds the module, itself or all of its parts.
    fn listed(&self, prefix: &str, holds: impl Fn(&Module) -> Result<bool, Error>) -> Result<bool, Error> {
        self.decide(prefix, |_| false, |module| Ok(holds(module)?.then_some(true)))
    }

    /// Whether a module is unquantised: what is said about itself, else about its parts if it is fused, else the default.
    fn decide(
        &self,
        prefix: &str,
        default: impl Fn(&Module) -> bool,
        said: impl Fn(&Module) -> Result<Option<bool>, Error>,
    ) -> Result<bool, Error> {
        let module = Module::new(prefix);
        if let Some(unquantized) = said(&module)? {
            return Ok(unquantized);
        }
        let (mut ignored, mut quantized) = (None, None);
        for part in self.parts(prefix) {
            let module = Module::new(&part);
            let unquantized = said(&module)?.unwrap_or_else(|| default(&module));
            *(if unquantized { &mut ignored } else { &mut quantized }) = Some(part);
        }
        match (ignored, quantized) {
            (Some(ignored), Some(quantized)) => {
                Err(Error::PartlyIgnored { prefix: prefix.to_owned(), ignored, quantized })
            }
            (None, None) => Ok(default(&module)),
            (ignored, _) => Ok(ignored.is_some()),
        }
    }

    /// The names of the parts that a module is fused from; none when it is not fused.
    fn parts(&self, prefix: &str) -> Vec<String> {
        let parent = prefix.rfind('.').map_or(0, |dot| dot + 1);
        let (parent, last) = prefix.split_at(parent);
        let parts = self.fused.iter().find(|(name, _)| *name == last).map_or(&[][..], |(_, parts)| parts);
        parts.iter().map(|part| format!("{parent}{part}")).collect()
    }
}

/// Bits from which a number counts as not quantised.
const FULL_BITS: i64 = 16;

/// The class that tables have among modules; a compressed-tensors group may target classes.
const CLASS: &str = "Embedding";

/// Whether any of the names passes. A pattern that cannot be used matters only when no other name decides.
fn any(names: &[String], test: impl Fn(&str) -> Result<bool, Error>) -> Result<bool, Error> {
    let mut undecided = None;
    for name in names {
        match test(name) {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(error) => undecided = undecided.or(Some(error)),
        }
    }
    undecided.map_or(Ok(false), Err)
}

/// compressed-tensors: the name, or a regular expression that matches from its beginning.
fn is_named(module: &Module, name: &str) -> Result<bool, Error> {
    match name.strip_prefix("re:") {
        Some(pattern) => module.matches(pattern, true),
        None => Ok(module.is(name)),
    }
}

fn is_target(module: &Module, target: &str) -> Result<bool, Error> {
    Ok(target == CLASS || is_named(module, target)?)
}

/// ModelOpt: whether the table's algorithm, or that of modules beneath it, is another than per-tensor FP8.
fn mixed_precision(module: &Module, layers: &[(String, String)]) -> Option<bool> {
    let own = layers.iter().find(|(name, _)| module.is(name));
    let (_, algorithm) = own.or_else(|| layers.iter().find(|(name, _)| module.starts(name, ".")))?;
    Some(algorithm != "FP8")
}

/// AutoRound: a layer's own entry, else the first regular expression that matches anywhere in its name.
fn auto_round(
    module: &Module,
    layers: &[(String, Option<i64>)],
    default: impl Fn() -> bool,
) -> Result<Option<bool>, Error> {
    let unquantized = |bits: Option<i64>| Some(bits.map_or_else(&default, |bits| bits >= FULL_BITS));
    if let Some((_, bits)) = layers.iter().find(|(name, _)| module.is(name)) {
        return Ok(unquantized(*bits));
    }
    let mut undecided = None;
    for (pattern, bits) in layers.iter().filter(|(name, _)| is_pattern(name)) {
        match module.matches(pattern, false) {
            Ok(true) => return Ok(unquantized(*bits)),
            Ok(false) => {}
            Err(error) => undecided = undecided.or(Some(error)),
        }
    }
    undecided.map_or(Ok(None), Err)
}
