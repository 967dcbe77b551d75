//! Whether the tokenizer gives the compressed vocabulary that Engram's constants were made for.

use std::io;
use std::path::Path;

use engram_core::{ModelConfig, TableConfig, TokenMap};

use crate::checkpoint::{Unreadable, open_text};
use crate::error::Error;
use crate::options::{Options, Tokenizer};
use crate::prove::report::{Fault, FaultCode};

/// Builds the compressed vocabulary, if there is a tokenizer, and compares its size with the config's.
///
/// # Errors
/// The tokenizer cannot be read as a file. One that can be read, but not as a tokenizer, is a fault.
pub(crate) fn check(
    folder: &Path,
    config: &ModelConfig,
    options: &Options<'_>,
    faults: &mut Vec<Fault>,
    not_checked: &mut Vec<String>,
) -> Result<Option<TokenMap>, Error> {
    // PLE hashes raw token ids.
    let TableConfig::Engram(config) = &config.table else { return Ok(None) };
    let mut skip = |why: &str| {
        not_checked.push(format!("compressed vocabulary: {why}"));
        Ok(None)
    };
    let (path, asked) = match &options.tokenizer {
        Tokenizer::InFolder => (folder.join("tokenizer.json"), false),
        Tokenizer::File(path) => (path.clone(), true),
        Tokenizer::Unchecked => return skip("the tokenizer was not to be read"),
    };
    if !cfg!(feature = "tokenizers") {
        return skip("this build cannot read tokenizers");
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fault = |message: String| Fault::new(FaultCode::VocabMismatch, message).file(&name);
    let io = |source| Error::Io { path: path.clone(), source };
    let text = match open_text(&path, options.header_cap).map_err(io)? {
        Ok(file) => file.read_all().map_err(io)?,
        Err(Unreadable::Absent) if asked => return Err(io(io::ErrorKind::NotFound.into())),
        Err(Unreadable::Absent) => return skip("there is no tokenizer.json"),
        Err(found) => {
            faults.push(fault(format!("expected a tokenizer, found {found}")));
            return Ok(None);
        }
    };
    match build(&text) {
        Ok(map) if map.compressed_len() == config.compressed_vocab_size => Ok(Some(map)),
        Ok(map) => {
            let (expected, found) = (config.compressed_vocab_size, map.compressed_len());
            let message = format!("expected a compressed vocabulary of {expected} by the config, found {found}");
            faults.push(fault(message));
            Ok(options.allow.contains(&FaultCode::VocabMismatch).then_some(map))
        }
        Err(reason) => {
            faults.push(fault(format!("expected a tokenizer, found a file that is none: {reason}")));
            Ok(None)
        }
    }
}

#[cfg(feature = "tokenizers")]
fn build(text: &[u8]) -> Result<TokenMap, String> {
    TokenMap::from_tokenizer_json(text).map_err(|error| error.to_string())
}

#[cfg(not(feature = "tokenizers"))]
fn build(_text: &[u8]) -> Result<TokenMap, String> {
    Err("this build cannot read tokenizers".to_owned())
}
