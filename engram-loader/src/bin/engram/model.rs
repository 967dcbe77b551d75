//! What `hash` and `lookup` share: a model, its requests, and the ids.

use crate::{Refused, say, text};
use anyhow::{Context, Result};
use engram_core::{Hasher, Layout, ModelConfig, TableConfig, TokenMap};
use engram_loader::{Checkpoint, DEFAULT_HEADER_CAP, FaultCode, HashInput, Options, Requests, Severity, Tokenizer};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The requests of a command line, and how to judge the model they are for.
#[derive(clap::Args)]
pub(crate) struct Query {
    /// Requests as JSON, `-` for stdin
    #[arg(long, value_name = "FILE")]
    requests: PathBuf,
    /// The model's tokenizer.json, by default the one in the checkpoint's folder
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    allow: Allow,
}

#[derive(clap::Args)]
pub(crate) struct Allow {
    /// Take this error for a warning: constants-mismatch, vocab-mismatch, scale-value, row-nan or unread-tensor
    #[arg(long = "allow", value_name = "CODE", value_parser = allowed)]
    pub(crate) codes: Vec<FaultCode>,
}

fn allowed(name: &str) -> Result<FaultCode, String> {
    let code: FaultCode = name.parse().map_err(|_| "no fault has this code".to_owned())?;
    if code.can_be_allowed() { Ok(code) } else { Err("this error cannot be allowed".to_owned()) }
}

/// The longest requests that are read, in bytes: enough for a hundred million tokens, and an end to what has none.
const REQUESTS_CAP: u64 = 1 << 30;

/// The longest config that is read, in bytes.
const CONFIG_CAP: u64 = 16 << 20;

/// All bytes of `from`, of which there may be `cap`.
fn read(from: impl Read, cap: u64, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(cap + 1).read_to_end(&mut bytes).with_context(|| name.to_owned())?;
    if bytes.len() as u64 > cap {
        return Err(Refused(format!("{name}: more than {} are not read", text::bytes(cap))).into());
    }
    Ok(bytes)
}

/// All bytes of a regular file; what else it may be is not even opened, since that could wait for ever.
fn read_regular(path: &Path, cap: u64) -> Result<Vec<u8>> {
    let name = path.display().to_string();
    if !std::fs::metadata(path).with_context(|| name.clone())?.is_file() {
        return Err(engram_loader::Error::NotAFile { path: path.to_owned() }.into());
    }
    read(File::open(path).with_context(|| name.clone())?, cap, &name)
}

/// A tokenizer that the command line names has to be there, even for a family that does without.
pub(crate) fn named_tokenizer(path: &Path) -> Result<Tokenizer> {
    std::fs::metadata(path).with_context(|| path.display().to_string())?;
    Ok(Tokenizer::File(path.to_owned()))
}

/// Row ids of all tokens, `[tokens][layers][columns]`.
pub(crate) struct Ids {
    pub(crate) layout: Layout,
    pub(crate) ids: Vec<i32>,
}

impl Query {
    /// Reads the requests.
    pub(crate) fn requests(&self) -> Result<Requests> {
        let text = if self.requests.as_os_str() == "-" {
            read(std::io::stdin().lock(), REQUESTS_CAP, "stdin")?
        } else {
            let name = self.requests.display().to_string();
            read(File::open(&self.requests).with_context(|| name.clone())?, REQUESTS_CAP, &name)?
        };
        Ok(Requests::from_json(&text)?)
    }

    /// Opens a checkpoint, and refuses it where its tables are at fault.
    pub(crate) fn checkpoint(&self, folder: &Path) -> Result<Checkpoint> {
        let mut options = Options::default();
        options.allow.clone_from(&self.allow.codes);
        if let Some(tokenizer) = &self.tokenizer {
            options.tokenizer = named_tokenizer(tokenizer)?;
        }
        let checkpoint = Checkpoint::open(folder, &options)?;
        for warning in checkpoint.report().faults.iter().filter(|fault| fault.severity == Severity::Warning) {
            say(format_args!("{warning}"));
        }
        let refusals: Vec<String> = checkpoint.refusals().map(ToString::to_string).collect();
        if !refusals.is_empty() {
            return Err(Refused(format!("{} is refused\n{}", folder.display(), refusals.join("\n"))).into());
        }
        Ok(checkpoint)
    }

    /// Hashes requests for an open checkpoint.
    pub(crate) fn hash(&self, requests: &Requests, checkpoint: &Checkpoint) -> Result<Ids> {
        let (Some(config), Some(layout)) = (checkpoint.config(), checkpoint.layout()) else {
            return Err(Refused("the checkpoint has no usable config".to_owned()).into());
        };
        ids(layout, &requests.resolve(config, layout, checkpoint.token_map())?)
    }

    /// Hashes requests for a model of which there is only a config.
    pub(crate) fn hash_by_config(&self, requests: &Requests, path: &Path) -> Result<Ids> {
        let refused = |error: engram_core::ConfigError| Refused(format!("{}: {error}", path.display()));
        let config = ModelConfig::from_json(&read_regular(path, CONFIG_CAP)?).map_err(refused)?;
        let layout = Layout::from_config(&config).map_err(refused)?;
        let map = match &config.table {
            TableConfig::Engram(engram) if requests.need_tokenizer(&config) || self.tokenizer.is_some() => {
                self.token_map(path, engram.compressed_vocab_size)?
            }
            _ => self.tokenizer.as_deref().map(named_tokenizer).transpose().map(|_| None)?,
        };
        ids(&layout, &requests.resolve(&config, &layout, map.as_ref())?)
    }

    /// The vocabulary of the tokenizer that was named, or that lies beside the config.
    fn token_map(&self, config: &Path, compressed_len: u32) -> Result<Option<TokenMap>> {
        let path = match &self.tokenizer {
            Some(path) => path.clone(),
            None => config.with_file_name("tokenizer.json"),
        };
        if self.tokenizer.is_none() && !path.exists() {
            return Ok(None);
        }
        let text = read_regular(&path, DEFAULT_HEADER_CAP)?;
        let map = TokenMap::from_tokenizer_json(&text)
            .map_err(|error| Refused(format!("error[vocab-mismatch]: {}: {error}", path.display())))?;
        if map.compressed_len() != compressed_len {
            let message = format!(
                "[vocab-mismatch]: {}: expected a compressed vocabulary of {compressed_len} by the config, found {}",
                path.display(),
                map.compressed_len()
            );
            if !self.allow.codes.contains(&FaultCode::VocabMismatch) {
                return Err(Refused(format!("error{message}")).into());
            }
            say(format_args!("warning{message}"));
        }
        Ok(Some(map))
    }
}

fn ids(layout: &Layout, input: &HashInput) -> Result<Ids> {
    let hasher = Hasher::new(layout, input.fill())?;
    let mut ids = vec![0; input.batch().tokens.len() * hasher.ids_per_token()];
    hasher.ids(&input.batch(), &mut ids)?;
    Ok(Ids { layout: layout.clone(), ids })
}
