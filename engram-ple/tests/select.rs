//! Which format follows from the quantization configs that checkpoints carry.

use engram_ple::{Error, FormatKind, Matching, QuantConfig, Selection, Selector, select};
use proptest::prelude::*;

const TABLE: &str = "model.layers.1.ple.ple_embedding.ngram_embedding";
const WRAPPED: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";

#[track_caller]
fn config(json: &str) -> QuantConfig {
    QuantConfig::from_json(json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

fn selected(json: &str, prefix: &str) -> Result<Selection, Error> {
    select(Some(&config(json)), prefix, None)
}

fn unsupported(method: &str) -> Result<Selection, Error> {
    Err(Error::UnsupportedMethod { method: method.to_owned(), prefix: TABLE.to_owned() })
}

const UNQUANTIZED: Result<Selection, Error> = Ok(Selection::Unquantized);
const E4M3: Result<Selection, Error> = Ok(Selection::E4m3Global);

#[test]
fn all_branches() {
    let cases = [
        // No method says anything else about the table.
        (
            r#"{"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}, "exclude": []}"#,
            UNQUANTIZED,
        ),
        (r#"{"quant_method": "awq", "bits": 4}"#, unsupported("awq")),
        (r#"{"quant_method": "gptq", "bits": 4}"#, unsupported("gptq")),
        (r#"{"quant_method": "mxfp4"}"#, unsupported("mxfp4")),
        // FP8.
        (r#"{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}"#, E4M3),
        (r#"{"quant_method": "FP8", "ignored_layers": null}"#, E4M3),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.1.ple.ple_embedding.ngram_embedding"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.1.ple.ple_embedding.ngram_embedding.shard_0"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["layers.1.ple.ple_embedding.ngram_embedding.shard_127"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.1.ple.ple_embedding.ngram_embedding.shards"]}"#,
            E4M3,
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.11.ple.ple_embedding.ngram_embedding.shard_0"]}"#,
            E4M3,
        ),
        (r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.1.ple", "ngram_embedding", "lm_head"]}"#, E4M3),
        (
            r#"{"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.ple.ple_embedding.ngram_embedding"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": [], "modules_to_not_convert": ["layers.1.ple.ple_embedding.ngram_embedding"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["lm_head"], "modules_to_not_convert": ["layers.1.ple.ple_embedding.ngram_embedding"]}"#,
            E4M3,
        ),
        (
            r#"{"quant_method": "fp8", "is_checkpoint_fp8_serialized": false}"#,
            Err(Error::NotSerialized { prefix: TABLE.to_owned() }),
        ),
        (
            r#"{"quant_method": "fp8", "is_checkpoint_fp8_serialized": false, "ignored_layers": ["model.layers.1.ple.ple_embedding.ngram_embedding.shard_3"]}"#,
            UNQUANTIZED,
        ),
        // ModelOpt with one algorithm.
        (r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}"#, unsupported("modelopt NVFP4")),
        (r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#, unsupported("modelopt FP8")),
        (
            r#"{"quant_method": "modelopt_fp4", "quant_algo": "nvfp4", "ignore": ["model.layers.1.ple.ple_embedding.ngram_embedding"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.1.ple*"]}"#,
            UNQUANTIZED,
        ),
        (r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*ngram_embedding"]}"#, UNQUANTIZED),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.ngram"]}"#,
            unsupported("modelopt NVFP4"),
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.1.ple.ple_embedding"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.?.ple.*"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.2.*", "mtp*"]}"#,
            unsupported("modelopt NVFP4"),
        ),
        (
            r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.1.*"]}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": null}}"#,
            unsupported("modelopt NVFP4"),
        ),
        // ModelOpt with an algorithm a layer.
        (
            r#"{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "FP8"}}}"#,
            E4M3,
        ),
        (
            r#"{"quant_method": "modelopt_mixed", "quant_algo": "mixed_precision", "quantized_layers": {"layers.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "fp8"}}}"#,
            E4M3,
        ),
        (
            r#"{"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "FP8", "group_size": 16}}}}"#,
            E4M3,
        ),
        (
            r#"{"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1.ple.ple_embedding.ngram_embedding.shard_0": {"quant_algo": "FP8"}}}"#,
            E4M3,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "NVFP4"}}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "FP8_PB_WO"}}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}}"#,
            UNQUANTIZED,
        ),
        // compressed-tensors.
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}, "ignore": ["lm_head"]}"#,
            UNQUANTIZED,
        ),
        (r#"{"quant_method": "compressed-tensors", "config_groups": {}, "ignore": null}"#, UNQUANTIZED),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*ngram_embedding"], "weights": {"num_bits": 8}}}}"#,
            unsupported("compressed-tensors"),
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*ngram_embedding"], "weights": null}}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*ngram"], "weights": {}}}, "ignore": ["re:.*\\.ple\\..*"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*ngram"], "weights": {}}}, "ignore": ["layers.1.ple.ple_embedding.ngram_embedding"]}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "compressed_tensors", "config_groups": {"a": {"targets": ["model.layers.1.ple.ple_embedding.ngram_embedding"], "weights": {}}}}"#,
            unsupported("compressed-tensors"),
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Embedding"], "weights": {}}}}"#,
            unsupported("compressed-tensors"),
        ),
        // A regular expression matches from the beginning of a name.
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:ple"], "weights": {}}}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:model.layers|lm_head"], "weights": {}}}}"#,
            unsupported("compressed-tensors"),
        ),
        // AutoRound.
        (
            r#"{"quant_method": "auto-round", "bits": 4, "group_size": 128, "block_name_to_quantize": "model.layers", "extra_config": {".*ple.*": {"bits": 16, "data_type": "float"}}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "group_size": 128, "block_name_to_quantize": "model.layers"}"#,
            unsupported("auto-round"),
        ),
        (
            r#"{"quant_method": "auto_round", "bits": 4, "extra_config": {"model.layers.1.ple.ple_embedding.ngram_embedding": {"bits": 16}}}"#,
            UNQUANTIZED,
        ),
        (r#"{"quant_method": "inc", "bits": 4}"#, unsupported("auto-round")),
        (r#"{"quant_method": "inc", "bits": 16}"#, UNQUANTIZED),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "block_name_to_quantize": "vision.blocks, thinker.layers"}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "to_quant_block_names": [["model.layers.0", "model.layers.1."]]}"#,
            unsupported("auto-round"),
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "extra_config": {"ngram_embedding": {"bits": 16}}}"#,
            unsupported("auto-round"),
        ),
        // The first pattern that matches decides, in the order of the text.
        (
            r#"{"quant_method": "auto-round", "bits": 4, "extra_config": {".*ngram.*": {"bits": 16}, ".*ple.*": {"bits": 8}}}"#,
            UNQUANTIZED,
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "extra_config": {".*ple.*": {"bits": 8}, ".*ngram.*": {"bits": 16}}}"#,
            unsupported("auto-round"),
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "extra_config": {".*ple.*": {"group_size": 32}}}"#,
            unsupported("auto-round"),
        ),
    ];
    for (json, expected) in cases {
        assert_eq!(selected(json, TABLE), expected, "{json}");
    }
    assert_eq!(select(None, TABLE, None), UNQUANTIZED);
}

#[test]
fn a_declared_dtype_wins_over_everything() {
    let excluded = config(r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*"]}"#);
    let refused = config(r#"{"quant_method": "awq"}"#);
    for config in [None, Some(&excluded), Some(&refused)] {
        assert_eq!(select(config, TABLE, Some("float8_e4m3fn")), E4M3);
        for dtype in ["nf4", "nvfp4"] {
            assert_eq!(select(config, TABLE, Some(dtype)), Err(Error::EmbeddingDtype { dtype: dtype.to_owned() }));
        }
    }
    assert_eq!(select(Some(&excluded), TABLE, Some("bfloat16")), UNQUANTIZED);
}

#[test]
fn names_compare_across_the_places_of_model() {
    let wrapped = [
        WRAPPED,
        "language_model.model.layers.1.ple.ple_embedding.ngram_embedding",
        "language_model.layers.1.ple.ple_embedding.ngram_embedding",
    ];
    let bare = [TABLE, "layers.1.ple.ple_embedding.ngram_embedding"];
    let ignoring = |name: &str| format!(r#"{{"quant_method": "fp8", "ignored_layers": ["{name}"]}}"#);
    for (names, others) in [(&wrapped[..], &bare[..]), (&bare, &wrapped)] {
        for prefix in names {
            for name in names {
                assert_eq!(selected(&ignoring(name), prefix), UNQUANTIZED, "{name} {prefix}");
                assert_eq!(selected(&ignoring(&format!("{name}.shard_5")), prefix), UNQUANTIZED, "{name} {prefix}");
                let mixed = format!(
                    r#"{{"quant_algo": "MIXED_PRECISION", "quantized_layers": {{"{name}": {{"quant_algo": "FP8"}}}}}}"#
                );
                assert_eq!(selected(&mixed, prefix), E4M3, "{name} {prefix}");
                let modelopt = format!(r#"{{"quant_algo": "NVFP4", "ignore": ["{}*"]}}"#, &name[..name.len() - 9]);
                assert_eq!(selected(&modelopt, prefix), UNQUANTIZED, "{name} {prefix}");
                let regex = format!(
                    r#"{{"quant_method": "compressed-tensors", "ignore": ["re:^{name}$"], "config_groups": {{"a": {{"targets": ["re:.*"], "weights": {{}}}}}}}}"#
                );
                assert_eq!(selected(&regex, prefix), UNQUANTIZED, "{name} {prefix}");
            }
            for other in others {
                assert_eq!(selected(&ignoring(other), prefix), E4M3, "{other} {prefix}");
            }
        }
    }
}

#[test]
fn fp8_names_match_exactly_unless_told_otherwise() {
    let cases = [
        ("model.layers.1.ple.ple_embedding.ngram_embedding", [true, true, true]),
        ("ngram_embedding", [false, true, true]),
        ("ple_embedding.ngram_embedding", [false, true, true]),
        ("am_embedding", [false, true, false]),
        ("layers.1.ple", [false, true, false]),
        ("lm_head", [false, false, false]),
        ("", [false, false, false]),
    ];
    for (name, expected) in cases {
        let config = config(&format!(r#"{{"quant_method": "fp8", "ignored_layers": ["{name}"]}}"#));
        for (matching, expected) in [Matching::Exact, Matching::Substring, Matching::Suffix].into_iter().zip(expected) {
            let selection = Selector::new().matching(matching).select(Some(&config), TABLE, None);
            assert_eq!(selection, if expected { UNQUANTIZED } else { E4M3 }, "{name} {matching:?}");
        }
    }
}

#[test]
fn a_fused_module_is_ignored_with_all_of_its_parts() {
    let selector = Selector::new().fused(&[("kv_proj", &["key_proj", "value_proj"])]);
    let prefix = "model.layers.1.ple.kv_proj";
    let select = |json: String| selector.select(Some(&config(&json)), prefix, None);
    let partly = |ignored: &str, quantized: &str| {
        let name = |part| format!("model.layers.1.ple.{part}");
        Err(Error::PartlyIgnored { prefix: prefix.to_owned(), ignored: name(ignored), quantized: name(quantized) })
    };
    let list = |parts: &[&str]| {
        let names: Vec<String> = parts.iter().map(|part| format!(r#""model.layers.1.ple.{part}""#)).collect();
        names.join(",")
    };
    let cases = [
        (&["key_proj", "value_proj"][..], UNQUANTIZED),
        (&["kv_proj"], UNQUANTIZED),
        (&[], E4M3),
        (&["key_proj"], partly("key_proj", "value_proj")),
        (&["value_proj", "lm_head"], partly("value_proj", "key_proj")),
    ];
    for (parts, expected) in cases {
        let list = list(parts);
        assert_eq!(select(format!(r#"{{"quant_method": "fp8", "ignored_layers": [{list}]}}"#)), expected, "{list}");
        let refused = Error::UnsupportedMethod { method: "compressed-tensors".to_owned(), prefix: prefix.to_owned() };
        let expected = if expected == E4M3 { Err(refused) } else { expected };
        let groups = r#"{"a": {"targets": ["re:.*"], "weights": {}}}"#;
        let json =
            format!(r#"{{"quant_method": "compressed-tensors", "config_groups": {groups}, "ignore": [{list}]}}"#);
        assert_eq!(select(json), expected, "{list}");
    }

    // Targets, layers with an algorithm each and layers with bits each disagree the same way.
    let targets = |parts| {
        format!(
            r#"{{"quant_method": "compressed-tensors", "config_groups": {{"a": {{"targets": [{}], "weights": {{}}}}}}}}"#,
            list(parts)
        )
    };
    assert_eq!(select(targets(&["key_proj"])), partly("value_proj", "key_proj"));
    assert!(matches!(select(targets(&["key_proj", "value_proj"])), Err(Error::UnsupportedMethod { .. })));
    assert_eq!(select(targets(&[])), UNQUANTIZED);
    let mixed = |layers: &str| format!(r#"{{"quant_algo": "MIXED_PRECISION", "quantized_layers": {{{layers}}}}}"#);
    let layer = |part: &str, algorithm: &str| format!(r#""layers.1.ple.{part}": {{"quant_algo": "{algorithm}"}}"#);
    let both = |a, b| mixed(&[layer("key_proj", a), layer("value_proj", b)].join(","));
    assert_eq!(select(both("FP8", "FP8")), E4M3);
    assert_eq!(select(both("NVFP4", "MXFP8")), UNQUANTIZED);
    assert_eq!(select(both("NVFP4", "FP8")), partly("key_proj", "value_proj"));
    assert_eq!(select(mixed(&layer("key_proj", "FP8"))), partly("value_proj", "key_proj"));
    let bits = r#"{"quant_method": "inc", "bits": 4, "extra_config": {"model.layers.1.ple.key_proj": {"bits": 16}}}"#;
    assert_eq!(select(bits.to_owned()), partly("key_proj", "value_proj"));
}

#[test]
fn what_a_selection_admits() {
    let kinds = |selection: Selection| FormatKind::ALL.into_iter().filter(move |&kind| selection.admits(kind));
    assert!(kinds(Selection::Unquantized).eq([FormatKind::Bf16, FormatKind::F16, FormatKind::F32]));
    assert!(kinds(Selection::E4m3Global).eq([FormatKind::E4m3Global]));
    assert_eq!(Selection::Unquantized.to_string(), "unquantized");
    assert_eq!(Selection::E4m3Global.to_string(), "e4m3-global");
}

#[test]
fn configs_that_cannot_be_read() {
    let field = |field: &str, expected, found: &str| Error::Field {
        field: field.to_owned(),
        expected,
        found: found.to_owned(),
    };
    let cases = [
        (r"{}", field("quant_method", "a string", "missing")),
        (r"[1]", field("quantization_config", "an object", "another list")),
        (r"null", field("quantization_config", "an object", "null")),
        (r#"{"quant_method": 8}"#, field("quant_method", "a string", "8")),
        (
            r#"{"quant_method": "fp8", "ignored_layers": "lm_head"}"#,
            field("ignored_layers", "a list of strings", "the string `lm_head`"),
        ),
        (
            r#"{"quant_method": "fp8", "ignored_layers": ["a", 1]}"#,
            field("ignored_layers", "a list of strings", "another list"),
        ),
        (
            r#"{"quant_method": "fp8", "is_checkpoint_fp8_serialized": "yes"}"#,
            field("is_checkpoint_fp8_serialized", "a boolean", "the string `yes`"),
        ),
        (r#"{"quant_method": "modelopt"}"#, field("quant_algo", "a string", "missing")),
        (r#"{"quantization": [], "quant_algo": "FP8"}"#, field("quantization", "an object", "another list")),
        (r#"{"quantization": {"quant_algo": true}}"#, field("quantization.quant_algo", "a string", "true")),
        (
            r#"{"quant_algo": "MIXED_PRECISION"}"#,
            field("quantized_layers", "an object that names the quantised layers", "missing"),
        ),
        (
            r#"{"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}"#,
            field("quantized_layers", "an object that names the quantised layers", "missing"),
        ),
        (
            r#"{"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}}}"#,
            field("quantization.quantized_layers.a.b.quant_algo", "a string", "missing"),
        ),
        (
            r#"{"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}"#,
            field("quantized_layers.a", "an object", "the string `FP8`"),
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}}"#,
            field("config_groups.g.targets", "a list of strings", "missing"),
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": [], "ignore": []}"#,
            field("config_groups", "an object", "another list"),
        ),
        (r#"{"quant_method": "auto-round"}"#, field("bits", "an integer", "missing")),
        (r#"{"quant_method": "auto-round", "bits": 4.5}"#, field("bits", "an integer", "4.5")),
        (
            r#"{"quant_method": "auto-round", "bits": 18446744073709551615}"#,
            field("bits", "an integer", "18446744073709552000"),
        ),
        (
            r#"{"quant_method": "inc", "bits": 4, "extra_config": {"x": {"bits": "16"}}}"#,
            field("extra_config.x.bits", "an integer", "the string `16`"),
        ),
        (
            r#"{"quant_method": "inc", "bits": 4, "block_name_to_quantize": 3}"#,
            field("block_name_to_quantize", "a string or a list of strings", "3"),
        ),
    ];
    for (json, expected) in cases {
        assert_eq!(QuantConfig::from_json(json), Err(expected), "{json}");
    }
    for json in ["", "{", "{} x", "nul", "{\"a\": 1,}", "\u{feff}{}", "{'quant_method': 'fp8'}", &"[".repeat(100_000)] {
        assert!(matches!(QuantConfig::from_json(json), Err(Error::NotJson { .. })), "{json:.20}");
    }
}

#[test]
fn a_key_twice_is_refused_wherever_it_stands() {
    let cases = [
        (r#"{"quant_method": "fp8", "quant_method": "fp8"}"#, "quant_method"),
        (r#"{"quant_method": "fp8", "quant_method": "quark"}"#, "quant_method"),
        (r#"{"quant_method": "fp8", "unknown": [{"a": {"x": 1, "y": 2, "x": 1}}]}"#, "x"),
        (
            r#"{"quant_algo": "MIXED_PRECISION", "quantized_layers": {"t": {"quant_algo": "FP8"}, "t": {"quant_algo": "NVFP4"}}}"#,
            "t",
        ),
        (r#"{"quant_method": "fp8", "quant_\u006dethod": "quark"}"#, "quant_method"),
    ];
    for (json, key) in cases {
        assert_eq!(QuantConfig::from_json(json), Err(Error::DuplicateKey { key: key.to_owned() }), "{json}");
    }
}

#[test]
fn patterns_are_bounded() {
    let groups = r#"{"a": {"targets": ["re:.*"], "weights": {}}}"#;
    let ignoring = |names: &str| {
        format!(r#"{{"quant_method": "compressed-tensors", "config_groups": {groups}, "ignore": [{names}]}}"#)
    };
    let bad = |names: &str, pattern: &str| match selected(&ignoring(names), TABLE) {
        Err(Error::Pattern { pattern: found, .. }) => assert_eq!(found, pattern),
        other => panic!("{other:?}"),
    };
    // Not a regular expression, one with look-around, and ones that would grow.
    bad(r#""re:(""#, "(");
    bad(r#""re:^(?!.*ple).*""#, "^(?!.*ple).*");
    bad(r#""re:(((a{100}){100}){100}){100}""#, "(((a{100}){100}){100}){100}");
    bad(r#""re:[a-z]{65536}""#, "[a-z]{65536}");
    // They do not matter when a name decides.
    assert_eq!(selected(&ignoring(r#""re:(", "re:.*ple""#), TABLE), UNQUANTIZED);

    let many = vec![r#""re:a""#; 1025].join(",");
    assert!(matches!(QuantConfig::from_json(&ignoring(&many)), Err(Error::Pattern { .. })));
    let layers: Vec<String> = (0..1025).map(|n| format!(r#""a{n}+": {{}}"#)).collect();
    let json = format!(r#"{{"quant_method": "inc", "bits": 4, "extra_config": {{{}}}}}"#, layers.join(","));
    assert!(matches!(QuantConfig::from_json(&json), Err(Error::Pattern { .. })));
    // Plain names are not patterns, however many.
    let names = vec![r#""model.layers.7.mlp""#; 5000].join(",");
    assert!(QuantConfig::from_json(&ignoring(&names)).is_ok());
}

#[test]
fn hostile_patterns_take_linear_time() {
    // Each takes exponential time in a backtracking matcher.
    let prefix = "a".repeat(4096);
    for pattern in ["(a*)*b", "(a|a)*b", "(.*)(.*)(.*)(.*)(.*)b"] {
        let json = format!(r#"{{"quant_method": "inc", "bits": 4, "extra_config": {{"{pattern}": {{"bits": 16}}}}}}"#);
        assert!(matches!(selected(&json, &prefix), Err(Error::UnsupportedMethod { .. })), "{pattern}");
    }
    let stars = "*a".repeat(500);
    let json = format!(r#"{{"quant_algo": "NVFP4", "ignore": ["{stars}b"]}}"#);
    assert!(matches!(selected(&json, &prefix), Err(Error::UnsupportedMethod { .. })));
}

proptest! {
    #[test]
    fn globs_match_as_regular_expressions_do(name in "[ab.]{0,8}", glob in "[ab.*?]{0,8}") {
        // Substring matching is another rule of the same list, so only globs that are no plain names are compared.
        prop_assume!(glob.contains(['*', '?']));
        let pattern = glob.replace('.', r"\\.").replace('*', ".*").replace('?', ".");
        let modelopt = format!(r#"{{"quant_algo": "NVFP4", "ignore": ["{glob}"]}}"#);
        let regex = format!(r#"{{"quant_method": "inc", "bits": 4, "extra_config": {{"^{pattern}$": {{"bits": 16}}}}}}"#);
        prop_assert_eq!(selected(&modelopt, &name).is_ok(), selected(&regex, &name).is_ok());
    }

    #[test]
    fn no_text_makes_reading_panic(text in r#"[{}\[\]",:a-z0-9*.\\ ]{0,64}"#) {
        let _ = QuantConfig::from_json(&text);
    }
}
