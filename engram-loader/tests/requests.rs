//! Requests against a model: what they become, and every way to be refused.
#![expect(clippy::unwrap_used, reason = "a failure to set a test up fails the test")]

use engram_core::{Layout, ModelConfig, Preset, TableConfig, TokenMap};
use engram_loader::{HashInput, Requests, RequestsError};

/// n-gram size 4, compressed size 500, pad token 2, image token 9.
fn engram() -> ModelConfig {
    let mut config = Preset::TinyEngram.config();
    if let TableConfig::Engram(engram) = &mut config.table {
        engram.image_token_id = Some(9);
    }
    config
}

/// n-gram size 3, end of sequence 11.
fn ple() -> ModelConfig {
    Preset::TinyPle.config()
}

/// 600 raw tokens; raw token t is compressed id (t + 100) % 500.
fn map() -> TokenMap {
    TokenMap::new(&(0..600).map(|raw| (raw + 100) % 500).collect::<Vec<_>>()).unwrap()
}

fn resolve(config: &ModelConfig, map: Option<&TokenMap>, json: &str) -> Result<HashInput, RequestsError> {
    Requests::from_json(json.as_bytes())?.resolve(config, &Layout::from_config(config).unwrap(), map)
}

#[track_caller]
fn accepted(config: &ModelConfig, map: Option<&TokenMap>, json: &str, expected: (&[i32], &[i32], &[i32], i32)) {
    let input = resolve(config, map, json).unwrap();
    let batch = input.batch();
    assert_eq!((batch.tokens, batch.starts, batch.history, input.fill()), expected, "{json}");
}

#[test]
fn engram_requests() {
    let (config, map) = (engram(), map());
    let case = |json, expected| accepted(&config, Some(&map), json, expected);
    // Raw by default; the pad token is 2 of the config, compressed 102; a missing look-back is the start of the sequence.
    case(r#"{"requests": [{"tokens": [0, 450]}]}"#, (&[100, 50], &[0, 2], &[-1, -1, -1], 102));
    // The image token, listed tokens and marked ones are dead; what is listed need not be known to the tokenizer.
    case(
        r#"{"token_space": "raw", "dead_token_ids": [5, 7000], "requests": [{"tokens": [9, 5, 1, 2], "dead": [false, false, true, false]}]}"#,
        (&[-1, -1, -1, 102], &[0, 4], &[-1, -1, -1], 102),
    );
    // In look-backs too, where -1 and -2 stand for themselves; short ones are filled, long ones cut without a look at the rest.
    case(r#"{"requests": [{"tokens": [1], "lookback": [9, -2]}]}"#, (&[101], &[0, 1], &[-1, -2, -1], 102));
    case(
        r#"{"requests": [{"tokens": [], "lookback": [3, -1, 4, -77]}, {"tokens": [7], "lookback": []}]}"#,
        (&[107], &[0, 0, 1], &[103, -1, 104, -1, -1, -1], 102),
    );
    // Compressed ids, with the pad id given or from the tokenizer.
    let json = r#"{"token_space": "compressed", "pad_id": 4, "requests": [{"tokens": [499, 0], "lookback": [1]}]}"#;
    accepted(&config, None, json, (&[499, 0], &[0, 2], &[1, -1, -1], 4));
    case(r#"{"token_space": "compressed", "requests": [{"tokens": [9]}]}"#, (&[9], &[0, 1], &[-1, -1, -1], 102));
    case(r#"{"pad_id": 0, "requests": []}"#, (&[], &[0], &[], 0));
    // What would change nothing is no fault; null is the same as absent.
    case(
        r#"{"pad_id": null, "requests": [{"tokens": [1], "context": [], "dead": null}]}"#,
        (&[101], &[0, 1], &[-1, -1, -1], 102),
    );
}

#[test]
fn ple_requests() {
    let config = ple();
    let case = |json, expected| accepted(&config, None, json, expected);
    case(r#"{"requests": [{"tokens": [0, 2147483647]}]}"#, (&[0, i32::MAX], &[0, 2], &[11, 11], 11));
    case(
        r#"{"token_space": "raw", "dead_token_ids": [], "requests": [{"tokens": [1], "context": [7, 8]}, {"tokens": [2], "lookback": [], "dead": [false]}]}"#,
        (&[1, 2], &[0, 1, 2], &[7, 8, 11, 11], 11),
    );
}

/// Requests, and what the message must contain.
type Refusals = &'static [(&'static str, &'static [&'static str])];

#[track_caller]
fn refused(config: &ModelConfig, map: Option<&TokenMap>, cases: Refusals) {
    for (json, words) in cases {
        let message = resolve(config, map, json).expect_err(json).to_string();
        for word in *words {
            assert!(message.contains(word), "{json}: {message:?} lacks {word:?}");
        }
    }
}

#[test]
fn engram_requests_that_are_refused() {
    let map = map();
    refused(
        &engram(),
        Some(&map),
        &[
            // Numbers that are no raw id, with request and position.
            (r#"{"requests": [{"tokens": []}, {"tokens": [1, 600]}]}"#, &["request 1", "tokens[1]", "600", "0 to 599"]),
            (r#"{"requests": [{"tokens": [-1]}]}"#, &["request 0", "tokens[0]", "-1"]),
            (r#"{"requests": [{"tokens": [-2]}]}"#, &["request 0", "tokens[0]", "-2"]),
            (r#"{"requests": [{"tokens": [4294967295]}]}"#, &["request 0", "tokens[0]", "4294967295"]),
            (r#"{"requests": [{"tokens": [4294967296]}]}"#, &["tokens[0]", "4294967296"]),
            (r#"{"requests": [{"tokens": [-9223372036854775808]}]}"#, &["tokens[0]", "-9223372036854775808"]),
            (r#"{"requests": [{"tokens": [9223372036854775808]}]}"#, &["tokens[0]", "9223372036854775808"]),
            (r#"{"requests": [{"tokens": [18446744073709551616]}]}"#, &["tokens[0]", "18446744073709551616"]),
            (r#"{"requests": [{"tokens": [1e999]}]}"#, &["request 0", "tokens[0]", "1e999"]),
            (r#"{"requests": [{"tokens": [0, 1.5]}]}"#, &["request 0", "tokens[1]", "1.5"]),
            (r#"{"requests": [{"tokens": [1.0]}]}"#, &["tokens[0]", "1.0"]),
            (r#"{"requests": [{"tokens": [1e2]}]}"#, &["tokens[0]", "1e2"]),
            (r#"{"requests": [{"tokens": ["7"]}]}"#, &["request 0", "tokens[0]", "\"7\""]),
            (r#"{"requests": [{"tokens": [null]}]}"#, &["request 0", "tokens[0]", "null"]),
            (r#"{"requests": [{"tokens": [[1]]}]}"#, &["request 0", "tokens[0]", "[1]"]),
            (r#"{"requests": [{"tokens": [600], "dead": [true]}]}"#, &["request 0", "tokens[0]", "600"]),
            (r#"{"requests": [{"tokens": [1], "lookback": [0, 600]}]}"#, &["request 0", "lookback[1]", "600"]),
            (r#"{"requests": [{"tokens": [1], "lookback": [-3]}]}"#, &["request 0", "lookback[0]", "-3"]),
            (r#"{"dead_token_ids": [7000], "requests": [{"tokens": [7000]}]}"#, &["tokens[0]", "7000", "0 to 599"]),
            (
                r#"{"dead_token_ids": [7000], "requests": [{"tokens": [1], "lookback": [7000]}]}"#,
                &["lookback[0]", "7000", "0 to 599"],
            ),
            (r#"{"dead_token_ids": [4, -1], "requests": []}"#, &["dead_token_ids[1]", "-1"]),
            (r#"{"dead_token_ids": [2147483648], "requests": []}"#, &["dead_token_ids[0]", "2147483648"]),
            (r#"{"pad_id": 500, "requests": []}"#, &["pad_id", "500", "0 to 499"]),
            (r#"{"pad_id": -1, "requests": []}"#, &["pad_id", "-1"]),
            (r#"{"pad_id": 2.5, "requests": []}"#, &["pad_id", "2.5"]),
            // Compressed ids.
            (
                r#"{"token_space": "compressed", "requests": [{"tokens": [500]}]}"#,
                &["request 0", "tokens[0]", "500", "0 to 499"],
            ),
            (r#"{"token_space": "compressed", "requests": [{"tokens": [-1]}]}"#, &["tokens[0]", "-1"]),
            (
                r#"{"token_space": "compressed", "requests": [{"tokens": [1], "lookback": [500]}]}"#,
                &["lookback[0]", "500"],
            ),
            (
                r#"{"token_space": "compressed", "dead_token_ids": [1], "requests": []}"#,
                &["dead_token_ids", "compressed"],
            ),
            // Fields that do not fit.
            (r#"{"requests": [{"tokens": [1, 2], "dead": [true]}]}"#, &["request 0", "dead", "1 entries", "2 tokens"]),
            (r#"{"requests": [{"tokens": [1], "dead": [true, false]}]}"#, &["request 0", "dead"]),
            (r#"{"requests": [{"tokens": [1], "context": [1, 2, 3]}]}"#, &["request 0", "context", "lookback"]),
            // Text that is not of this form.
            ("", &["requests", "EOF"]),
            ("[]", &["requests"]),
            // The fields in their order, but without their names.
            (r#"["raw", null, null, [{"tokens": [1]}]]"#, &["invalid type: sequence", "line 1 column"]),
            (r#"{"requests": [[[1, 2], null, null, null]]}"#, &["invalid type: sequence", "line 1 column"]),
            ("{}", &["missing field `requests`"]),
            (r#"{"requests": [{}]}"#, &["missing field `tokens`"]),
            (r#"{"requests": [], "request": []}"#, &["unknown field `request`"]),
            (r#"{"requests": [{"tokens": [], "look_back": []}]}"#, &["unknown field `look_back`"]),
            (r#"{"requests": [], "requests": []}"#, &["duplicate field `requests`"]),
            (r#"{"requests": [{"tokens": [], "tokens": [1]}]}"#, &["duplicate field `tokens`"]),
            (r#"{"pad_id": 1, "pad_id": 1, "requests": []}"#, &["duplicate field `pad_id`"]),
            (r#"{"token_space": {"raw": null}, "requests": []}"#, &["invalid type: map", "line 1 column"]),
            (r#"{"token_space": "Raw", "requests": []}"#, &["unknown variant `Raw`"]),
            (r#"{"requests": [{"tokens": 1}]}"#, &["line 1 column"]),
            (r#"{"requests": [{"tokens": [1], "dead": [1]}]}"#, &["line 1 column"]),
            (r#"{"requests": []} {}"#, &["trailing characters"]),
            (r#"{"requests": [{"tokens": [01]}]}"#, &["line 1 column"]),
            (r#"{"requests": [{"tokens": [NaN]}]}"#, &["line 1 column"]),
        ],
    );
}

#[test]
fn without_a_tokenizer() {
    refused(
        &engram(),
        None,
        &[
            (r#"{"requests": [{"tokens": [1]}]}"#, &["token_space", "tokenizer"]),
            (r#"{"pad_id": 1, "requests": [{"tokens": [1]}]}"#, &["token_space", "tokenizer"]),
            (r#"{"token_space": "compressed", "requests": [{"tokens": [1]}]}"#, &["pad_id", "tokenizer"]),
        ],
    );
}

#[test]
fn ple_requests_that_are_refused() {
    refused(
        &ple(),
        None,
        &[
            (r#"{"token_space": "compressed", "requests": []}"#, &["token_space", "PLE"]),
            (r#"{"pad_id": 1, "requests": []}"#, &["pad_id", "PLE"]),
            (r#"{"dead_token_ids": [1], "requests": []}"#, &["dead_token_ids", "PLE"]),
            (r#"{"requests": [{"tokens": [1], "lookback": [1, 2]}]}"#, &["request 0", "lookback", "context"]),
            (r#"{"requests": [{"tokens": [1, 2], "dead": [false, true]}]}"#, &["request 0", "dead", "token 1"]),
            (r#"{"requests": [{"tokens": [1, 2], "dead": [false]}]}"#, &["request 0", "dead", "1 entries", "2 tokens"]),
            (r#"{"requests": [{"tokens": [1], "dead": []}]}"#, &["request 0", "dead", "0 entries", "1 tokens"]),
            (
                r#"{"requests": [{"tokens": [2147483648]}]}"#,
                &["request 0", "tokens[0]", "2147483648", "0 to 2147483647"],
            ),
            (r#"{"requests": [{"tokens": [-1]}]}"#, &["request 0", "tokens[0]", "-1"]),
            (r#"{"requests": [{"tokens": [1], "context": [1]}]}"#, &["request 0", "context", "1 ids, expected 2"]),
            (r#"{"requests": [{"tokens": [1], "context": []}]}"#, &["request 0", "context", "0 ids, expected 2"]),
            (
                r#"{"requests": [{"tokens": [1], "context": [1, 2, 3]}]}"#,
                &["request 0", "context", "3 ids, expected 2"],
            ),
            (r#"{"requests": [{"tokens": [1], "context": [1, -1]}]}"#, &["request 0", "context[1]", "-1"]),
        ],
    );
}

#[test]
fn a_tokenizer_of_another_size() {
    // Allowed to differ from the config: tokens past the config's vocabulary are still no ids of it.
    let wide = TokenMap::new(&(0..600).collect::<Vec<_>>()).unwrap();
    accepted(&engram(), Some(&wide), r#"{"requests": [{"tokens": [499]}]}"#, (&[499], &[0, 1], &[-1, -1, -1], 2));
    refused(
        &engram(),
        Some(&wide),
        &[(r#"{"requests": [{"tokens": [1, 500]}]}"#, &["request 0", "tokens[1]", "500", "0 to 499"])],
    );
}

#[test]
fn deep_nesting_is_no_stack_overflow() {
    let json = format!(r#"{{"requests": [{{"tokens": [{}"#, "[".repeat(1 << 20));
    assert!(Requests::from_json(json.as_bytes()).is_err());
}
