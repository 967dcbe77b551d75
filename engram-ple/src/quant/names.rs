//! Module names and the patterns that configs match them with.

use crate::Error;
use regex_lite::{Regex, RegexBuilder};

/// Bytes that a compiled pattern may take. Matching is linear in the name, times at most this.
const PATTERN_BYTES: usize = 64 * 1024;

/// Patterns that a config may have.
const PATTERNS: usize = 1024;

/// Whether an AutoRound name is a regular expression.
pub(crate) fn is_pattern(name: &str) -> bool {
    name.contains(['*', '+', '?', '^', '$', '(', ')', '[', ']', '{', '}', '|', '\\'])
}

/// Refuses a config with too many patterns.
pub(super) fn bound<'a>(mut patterns: impl Iterator<Item = &'a String>) -> Result<(), Error> {
    match patterns.nth(PATTERNS) {
        None => Ok(()),
        Some(pattern) => {
            let message = format!("there are more than {PATTERNS} patterns");
            Err(Error::Pattern { pattern: pattern.clone(), message })
        }
    }
}

/// One module under all the names that it goes by.
///
/// Checkpoints, and the engines that wrap a text model into a multimodal one, differ in where they put `model.`: it may be left out, and
/// `model.language_model.` is `language_model.model.`.
#[derive(Debug)]
pub(crate) struct Module {
    /// The first is the key: equal for two spellings of one name.
    spellings: Vec<String>,
}

impl Module {
    pub(crate) fn new(name: &str) -> Self {
        let key = key(name);
        let mut spellings = vec![key.clone(), format!("model.{key}")];
        if let Some(rest) = key.strip_prefix("language_model.") {
            spellings.push(format!("language_model.model.{rest}"));
        }
        Self { spellings }
    }

    /// Whether `name` names this module.
    pub(crate) fn is(&self, name: &str) -> bool {
        key(name) == self.spellings[0]
    }

    /// Whether `name` is this module's with something after it.
    pub(crate) fn starts(&self, name: &str, something: &str) -> bool {
        key(name).strip_prefix(&self.spellings[0]).is_some_and(|rest| rest.starts_with(something))
    }

    /// Whether a spelling is `name`, or ends with it after a dot.
    pub(crate) fn ends_with(&self, name: &str) -> bool {
        self.any(|spelling| spelling.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
    }

    /// Whether a spelling starts with `start`.
    pub(crate) fn starts_with(&self, start: &str) -> bool {
        self.any(|spelling| spelling.starts_with(start))
    }

    /// Whether `part` stands anywhere in a spelling; the empty name is no part.
    pub(crate) fn contains(&self, part: &str) -> bool {
        !part.is_empty() && self.any(|spelling| spelling.contains(part))
    }

    /// Whether a whole spelling is of the form of `glob`, in which `*` stands for anything and `?` for one character.
    pub(crate) fn fits(&self, glob: &str) -> bool {
        self.any(|spelling| fits(spelling.as_bytes(), glob.as_bytes()))
    }

    /// Whether the regular expression matches from the beginning of a spelling (`anchored`), or anywhere in it.
    pub(crate) fn matches(&self, pattern: &str, anchored: bool) -> Result<bool, Error> {
        let regex = compile(pattern, anchored)?;
        Ok(self.any(|spelling| regex.is_match(spelling)))
    }

    fn any(&self, test: impl Fn(&str) -> bool) -> bool {
        self.spellings.iter().any(|spelling| test(spelling))
    }
}

/// What all spellings of a name have in common.
fn key(name: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    match name.strip_prefix("language_model.") {
        Some(rest) => format!("language_model.{}", rest.strip_prefix("model.").unwrap_or(rest)),
        None => name.to_owned(),
    }
}

/// Configs are not trusted: the engine is linear in the text, and what a pattern may grow to is bounded.
fn compile(pattern: &str, anchored: bool) -> Result<Regex, Error> {
    let whole = if anchored { format!("^(?:{pattern})") } else { pattern.to_owned() };
    RegexBuilder::new(&whole)
        .size_limit(PATTERN_BYTES)
        .build()
        .map_err(|error| Error::Pattern { pattern: pattern.to_owned(), message: error.to_string() })
}

/// Glob matching that goes back to the last `*` only, so that it takes at most the product of both lengths.
fn fits(name: &[u8], glob: &[u8]) -> bool {
    let (mut n, mut g) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match glob.get(g) {
            Some(b'*') => {
                star = Some((g, n));
                g += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => {
                (n, g) = (n + 1, g + 1);
            }
            _ => {
                let Some((at, from)) = star else { return false };
                star = Some((at, from + 1));
                (n, g) = (from + 1, at + 1);
            }
        }
    }
    glob[g..].iter().all(|&c| c == b'*')
}
