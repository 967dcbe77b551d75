//! What `hash` and `lookup` share: a model, its requests, and the ids.

use crate::file::{check_not_of, metadata, read_regular, read_requests};
use crate::{Refused, say};
use anyhow::{Error, Result};
use engram_core::{Hasher, Layout, ModelConfig, TableConfig, TokenMap};
use engram_loader::{Checkpoint, DEFAULT_HEADER_CAP, FaultCode, HashInput, Options, Requests, Severity, Tokenizer};
use std::path::{Path, PathBuf};

/// The requests of a command line, and how to judge the model they are for.
#[derive(clap::Args)]
pub(crate) struct Query {
    /// Requests as JSON, a file or a pipe, `-` for stdin; their form is described below
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

/// What the help of `hash` and `lookup` says about requests.
pub(crate) const REQUESTS_HELP: &str = r#"Requests:
  {"token_space": "raw", "requests": [{"tokens": [1, 2, 3]}, {"tokens": [4]}]}

  token_space     raw (the default): ids of the tokenizer; compressed: ids of Engram's compressed vocabulary
  pad_id          compressed id of the pad token (Engram), by default from the tokenizer
  dead_token_ids  raw ids of tokens that are dead by themselves (Engram)
  requests        each with
    tokens        the ids
    dead          one bool a token (Engram)
    lookback      the tokens before the first, newest first, -1 dead, -2 unknown (Engram)
    context       the n-1 tokens before the first, oldest first, by default end of sequence (PLE)

Only `requests` and their `tokens` are required. Faults of the model and of requests go to stderr.

Exit codes: 0 done; 1 the model or the requests are at fault; 2 usage, or a path is not there or not readable"#;

/// How the report of a checkpoint names what a tokenizer is needed for.
const VOCABULARY: &str = "compressed vocabulary";

/// The longest config that is read, in bytes.
const CONFIG_CAP: u64 = 16 << 20;

/// A tokenizer that the command line names has to be there, even for a family that does without.
pub(crate) fn named_tokenizer(path: &Path) -> Result<Tokenizer> {
    metadata(path)?;
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
        Ok(Requests::from_json(&read_requests(&self.requests)?)?)
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
        for what in checkpoint.report().not_checked.iter().filter(|what| what.starts_with(VOCABULARY)) {
            say(format_args!("not checked: {what}"));
        }
        Ok(checkpoint)
    }

    /// Refuses results in place of the checkpoint that they are made from.
    pub(crate) fn check_not_of(&self, out: &Path, folder: &Path, checkpoint: &Checkpoint) -> Result<()> {
        let texts = ["config.json", "tokenizer.json", "model.safetensors.index.json"].map(|name| folder.join(name));
        let tables = checkpoint.files().iter().map(|file| file.path().to_owned());
        check_not_of(out, texts.into_iter().chain(tables).chain(self.tokenizer.clone()))
    }

    /// Refuses results in place of the config that they are made from, or of its tokenizer.
    pub(crate) fn check_not_of_config(&self, out: &Path, config: &Path) -> Result<()> {
        check_not_of(out, [config.to_owned(), self.tokenizer_of(config)])
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
            TableConfig::Engram(engram) => self.token_map(path, engram.compressed_vocab_size)?,
            _ => self.tokenizer.as_deref().map(named_tokenizer).transpose().map(|_| None)?,
        };
        ids(&layout, &requests.resolve(&config, &layout, map.as_ref())?)
    }

    fn tokenizer_of(&self, config: &Path) -> PathBuf {
        self.tokenizer.clone().unwrap_or_else(|| config.with_file_name("tokenizer.json"))
    }

    /// The vocabulary of the tokenizer that was named, or that lies beside the config; judged as that of a checkpoint is.
    fn token_map(&self, config: &Path, compressed_len: u32) -> Result<Option<TokenMap>> {
        let path = self.tokenizer_of(config);
        if self.tokenizer.is_none() && !path.exists() {
            say(format_args!("not checked: {VOCABULARY}: there is no tokenizer.json"));
            return Ok(None);
        }
        let map = match read_regular(&path, DEFAULT_HEADER_CAP).map_err(Error::downcast) {
            Ok(text) => {
                TokenMap::from_tokenizer_json(&text).map_err(|error| Refused(format!("{}: {error}", path.display())))
            }
            Err(Ok(refused)) => Err(refused),
            Err(Err(error)) => return Err(error),
        };
        let (map, message) = match map {
            Ok(map) if map.compressed_len() == compressed_len => return Ok(Some(map)),
            Ok(map) => {
                let (path, found) = (path.display(), map.compressed_len());
                let message = format!(
                    "{path}: expected a compressed vocabulary of {compressed_len} by the config, found {found}"
                );
                (Some(map), message)
            }
            Err(Refused(message)) => (None, message),
        };
        let code = FaultCode::VocabMismatch;
        if !self.allow.codes.contains(&code) {
            return Err(Refused(format!("error[{code}]: {message}")).into());
        }
        say(format_args!("warning[{code}]: {message}"));
        Ok(map)
    }
}

fn ids(layout: &Layout, input: &HashInput) -> Result<Ids> {
    let hasher = Hasher::new(layout, input.fill())?;
    let mut ids = vec![0; input.batch().tokens.len() * hasher.ids_per_token()];
    hasher.ids(&input.batch(), &mut ids)?;
    Ok(Ids { layout: layout.clone(), ids })
}
