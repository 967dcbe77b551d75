//! The compressed vocabulary of a `tokenizer.json`.
//!
//! Each token is decoded on its own and normalised; tokens with the same result share one compressed id, given at first
//! appearance. The normalised text of every token is thereby part of the checkpoint format.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use tokenizers::{Decoder, DecoderWrapper, Tokenizer};
use unicode_normalization_alignments::UnicodeNormalization;
use unicode_normalization_alignments::char::is_combining_mark;

use crate::token_map::{TokenMap, TokenMapError};

impl TokenMap {
    /// Builds the map of a `tokenizer.json`.
    ///
    /// # Errors
    /// If the text is no tokenizer, or has no token.
    pub fn from_tokenizer_json(text: &[u8]) -> Result<Self, TokenMapError> {
        let vocabulary = Vocabulary::read(text)?;
        let mut seen: HashMap<Box<str>, u32> = HashMap::with_capacity(vocabulary.names.len());
        let mut normalised = String::new();
        let mut ids = Vec::with_capacity(vocabulary.names.len());
        for name in &vocabulary.names {
            let text = vocabulary.decode(name)?;
            let key = if text.contains(char::REPLACEMENT_CHARACTER) {
                name.as_deref().unwrap_or_default()
            } else {
                normalise(&text, &mut normalised);
                if normalised.is_empty() { &*text } else { &*normalised }
            };
            let next = u32::try_from(seen.len()).unwrap_or(u32::MAX);
            ids.push(match seen.get(key) {
                Some(&id) => id,
                None => *seen.entry(key.into()).or_insert(next),
            });
        }
        Self::new(&ids)
    }
}

/// A tokenizer's tokens by id, and what turns them into text.
struct Vocabulary {
    names: Vec<Option<String>>,
    decoder: Option<DecoderWrapper>,
}

impl Vocabulary {
    fn read(text: &[u8]) -> Result<Self, TokenMapError> {
        // Building the whole tokenizer costs several times what the map does. Most of it, the merges, says nothing about
        // single tokens, so it is left out where the rest is plain.
        match serde_json::from_slice::<File>(text) {
            Ok(file) if file.is_plain() => Ok(file.vocabulary()),
            _ => Self::from_tokenizer(text),
        }
    }

    fn from_tokenizer(text: &[u8]) -> Result<Self, TokenMapError> {
        let tokenizer = Tokenizer::from_bytes(text).map_err(unreadable)?;
        let len = u32::try_from(tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX);
        let names = (0..len).map(|id| tokenizer.id_to_token(id)).collect();
        Ok(Self { names, decoder: tokenizer.get_decoder().cloned() })
    }

    /// The text of one token, special ones as they are.
    fn decode<'a>(&self, name: &'a Option<String>) -> Result<Cow<'a, str>, TokenMapError> {
        match &self.decoder {
            None => Ok(name.as_deref().unwrap_or_default().into()),
            // Byte-level names write printable ASCII as itself.
            Some(DecoderWrapper::ByteLevel(_)) if name.as_ref().is_some_and(|name| is_graphic(name)) => {
                Ok(name.as_deref().unwrap_or_default().into())
            }
            Some(decoder) => Ok(decoder.decode(name.iter().cloned().collect()).map_err(unreadable)?.into()),
        }
    }
}

fn is_graphic(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_graphic())
}

fn unreadable(error: impl fmt::Display) -> TokenMapError {
    TokenMapError::Tokenizer { reason: error.to_string() }
}

/// The parts of a `tokenizer.json` that tell what each token means.
#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Option<Normalizer>,
    #[serde(default)]
    decoder: Option<DecoderWrapper>,
}

#[derive(Deserialize)]
struct Model {
    vocab: Entries,
}

#[derive(Deserialize)]
struct AddedToken {
    id: usize,
    content: String,
}

#[derive(Deserialize)]
struct Normalizer {
    #[serde(default)]
    normalizers: Option<Vec<IgnoredAny>>,
}

impl File {
    /// Whether nothing but `vocab` and `added_tokens` decides what a token is called: a normaliser may rewrite added
    /// tokens.
    fn is_plain(&self) -> bool {
        self.normalizer.as_ref().is_none_or(|normalizer| normalizer.normalizers.as_ref().is_some_and(Vec::is_empty))
    }

    fn vocabulary(self) -> Vocabulary {
        let entries = self.model.vocab.0;
        let mut len = entries.len();
        let mut names = vec![None; len + self.added_tokens.len()];
        for (name, id) in entries {
            if let Some(place) = names.get_mut(id) {
                *place = Some(name);
            }
        }
        for AddedToken { id, content } in self.added_tokens {
            if let Some(place) = names.get_mut(id).filter(|place| place.as_ref() != Some(&content)) {
                len += usize::from(place.is_none());
                *place = Some(content);
            }
        }
        names.truncate(len);
        Vocabulary { names, decoder: self.decoder }
    }
}

/// A map of names to ids, with repeated names as they come.
struct Entries(Vec<(String, usize)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;

        impl<'de> Visitor<'de> for Pairs {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tokens to ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Pairs)
    }
}

/// Stands for a text that is one space while the ends are stripped.
const LONE_SPACE: char = '\u{e000}';

/// NFKC, NFD, accents dropped, lower case, runs of blanks to one space, ends stripped; a lone space survives. Tokens that
/// hold U+E000 themselves turn it into a space, as the reference does.
fn normalise(text: &str, out: &mut String) {
    out.clear();
    if text.is_ascii() {
        text.chars().for_each(|c| push_collapsed(out, c.to_ascii_lowercase()));
    } else {
        let composed = text.nfkc().map(|(c, _)| c);
        let decomposed = composed.nfd().map(|(c, _)| c);
        decomposed.filter(|&c| !is_combining_mark(c)).flat_map(char::to_lowercase).for_each(|c| push_collapsed(out, c));
    }
    if out == " " {
        return;
    }
    let end = out.trim_end().len();
    out.truncate(end);
    let start = out.len() - out.trim_start().len();
    out.drain(..start);
    if out.contains(LONE_SPACE) {
        *out = out.replace(LONE_SPACE, " ");
    }
}

fn push_collapsed(out: &mut String, c: char) {
    match c {
        ' ' | '\t' | '\r' | '\n' if out.ends_with(' ') => {}
        '\t' | '\r' | '\n' => out.push(' '),
        c => out.push(c),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::normalizers::{Lowercase, NFD, NFKC, Replace, Sequence, Strip, StripAccents};
    use tokenizers::{NormalizedString, Normalizer as _, NormalizerWrapper};

    use super::*;

    /// The chain as the reference builds it, of the crate's own normalisers.
    struct Chain(Sequence);

    impl Chain {
        fn new() -> Self {
            let regex = |pattern: &str, content: &str| {
                let pattern = tokenizers::normalizers::replace::ReplacePattern::Regex(pattern.to_owned());
                NormalizerWrapper::Replace(Replace::new(pattern, content).unwrap())
            };
            Self(Sequence::new(vec![
                NFKC.into(),
                NFD.into(),
                StripAccents.into(),
                Lowercase.into(),
                regex(r"[ \t\r\n]+", " "),
                regex(r"\A \z", "\u{e000}"),
                Strip::new(true, true).into(),
                regex("\u{e000}", " "),
            ]))
        }

        fn check(&self, text: &str) {
            let mut expected = NormalizedString::from(text);
            self.0.normalize(&mut expected).unwrap();
            let mut found = String::from("left over");
            normalise(text, &mut found);
            assert_eq!(found, expected.get(), "{text:?}");
        }
    }

    #[test]
    fn every_character_is_normalised_as_by_the_reference_chain() {
        let chain = Chain::new();
        for c in (0..=u32::from(char::MAX)).filter_map(char::from_u32) {
            chain.check(c.encode_utf8(&mut [0; 4]));
        }
    }

    #[test]
    fn every_short_ascii_text_is_normalised_as_by_the_reference_chain() {
        let chain = Chain::new();
        let bytes: Vec<u8> = (0..128).collect();
        for &first in &bytes {
            for &second in &bytes {
                chain.check(std::str::from_utf8(&[first, second]).unwrap());
            }
        }
    }

    proptest! {
        #[test]
        fn texts_are_normalised_as_by_the_reference_chain(
            text in "[ \t\r\na-zA-Zéèß\u{e000}\u{300}\u{301}\u{323}\u{1fbd}\u{3000}\u{2028}ＡＢﬁ①İΣς가각\u{1100}\u{1161}]{0,8}",
            any in "\\PC{0,6}",
        ) {
            let chain = Chain::new();
            chain.check(&text);
            chain.check(&any);
        }
    }

    /// Golden and odd tokenizers give the same vocabulary on the short way and through the whole tokenizer.
    #[test]
    fn the_short_way_equals_the_whole_tokenizer() {
        let golden = include_bytes!("../../tests/data/golden/tokens/tokenizer.json");
        let short = Vocabulary::read(golden).unwrap();
        let whole = Vocabulary::from_tokenizer(golden).unwrap();
        assert_eq!(short.names, whole.names);
        for name in &whole.names {
            let decoded = whole.decoder.as_ref().unwrap().decode(vec![name.clone().unwrap()]).unwrap();
            assert_eq!(short.decode(name).unwrap(), decoded);
        }
    }
}
