//! The format that the config announces for a table, compared with the one its tensors have.

use std::path::Path;

use engram_core::{ModelConfig, TableConfig};
use engram_ple::{FormatKind, QuantConfig, select};

use crate::checkpoint::{CONFIG_CAP, open_text};
use crate::error::Error;

/// What a checkpoint says about its quantisation.
#[derive(Debug)]
pub(crate) struct Announced(Result<Option<QuantConfig>, engram_ple::Error>);

impl Announced {
    /// Takes `quantization_config` from the config, or else ModelOpt's file of its own.
    ///
    /// # Errors
    /// That file cannot be read.
    pub(crate) fn read(folder: &Path, config: &ModelConfig) -> Result<Self, Error> {
        if let Some(text) = &config.quantization {
            return Ok(Self(QuantConfig::from_json(text).map(Some)));
        }
        let path = folder.join("hf_quant_config.json");
        let io = |source| Error::Io { path: path.clone(), source };
        let Ok(file) = open_text(&path, CONFIG_CAP).map_err(io)? else { return Ok(Self(Ok(None))) };
        let text = file.read_all().map_err(io)?;
        Ok(Self(QuantConfig::from_json(&String::from_utf8_lossy(&text)).map(Some)))
    }

    /// What is expected in place of `kind`, if it is another format; `module` is the table's name without the tensors' leaves.
    pub(crate) fn other_than(&self, kind: FormatKind, config: &ModelConfig, module: &str) -> Option<String> {
        match &config.table {
            TableConfig::Engram(config) => {
                let usual = FormatKind::E4m3E8m0x32;
                (kind != usual && config.engram_dtype.is_none())
                    .then(|| format!("{usual}, since engram_dtype is absent"))
            }
            // No engine's config selects block scales for this family, so `ple_embedding_dtype` may name the format itself.
            TableConfig::Ple(config) if config.embedding_dtype.as_deref() == Some(kind.name()) => None,
            TableConfig::Ple(config) => {
                let quant = match &self.0 {
                    Ok(quant) => quant.as_ref(),
                    Err(error) => return Some(format!("a quantization config that selects a format ({error})")),
                };
                match select(quant, module, config.embedding_dtype.as_deref()) {
                    Ok(selection) if selection.admits(kind) => None,
                    Ok(selection) => Some(format!("{selection} by the quantization config")),
                    Err(error) => Some(format!("a quantization config that selects a format ({error})")),
                }
            }
        }
    }
}
