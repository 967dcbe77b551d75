//! Configurations: what is read, what is refused, and how it is named.

#![expect(clippy::unwrap_used, reason = "a test")]

use engram_core::{
    ConfigError, ConstantsError, EngramConfig, Family, LayerLayout, Layout, ModelConfig, PleConfig, Preset, TableConfig,
};
use serde_json::{Value, json};

fn read(config: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(config.to_string().as_bytes())
}

fn engram() -> Value {
    json!({"model_type": "deepseek_v41", "engram_layer_ids": [1, 3], "engram_num_embeddings": [462, 630],
        "engram_max_ngram_size": 4, "engram_vocab_size": 64, "engram_n_heads": 2, "engram_head_dim": 64,
        "engram_compressed_vocab_size": 50, "engram_pad_token_id": 2, "vocab_size": 57, "num_hidden_layers": 4})
}

fn ple() -> Value {
    json!({"model_type": "qwen4_exp_text", "ple_layer_ids": [2, 5], "ple_embed_dim": 160, "ngram_size": 3,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 101, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4, "seed": 7, "vocab_size": 128, "eos_token_id": 11, "num_hidden_layers": 6})
}

fn with(mut config: Value, key: &str, value: Value) -> Value {
    config[key] = value;
    config
}

fn without(mut config: Value, key: &str) -> Value {
    config.as_object_mut().unwrap().remove(key);
    config
}

fn as_engram(config: &Value) -> EngramConfig {
    match read(config).unwrap().table {
        TableConfig::Engram(config) => config,
        TableConfig::Ple(_) => panic!("not engram"),
    }
}

fn as_ple(config: &Value) -> PleConfig {
    match read(config).unwrap().table {
        TableConfig::Ple(config) => config,
        TableConfig::Engram(_) => panic!("not ple"),
    }
}

/// The field that a refusal names.
fn refused(config: &Value) -> String {
    match read(config).and_then(|config| Layout::from_config(&config)) {
        Err(ConfigError::Field { field, value, expected }) => {
            assert!(!value.is_empty() && !expected.is_empty());
            field
        }
        other => panic!("{config} gave {other:?}"),
    }
}

#[test]
fn engram_defaults() {
    for absent in [None, Some(Value::Null)] {
        let set = |config, key| match &absent {
            None => without(config, key),
            Some(null) => with(config, key, null.clone()),
        };
        let mut config = engram();
        for key in ["engram_n_heads", "engram_head_dim", "engram_pad_token_id", "vocab_size", "num_hidden_layers"] {
            config = set(config, key);
        }
        let config = as_engram(&config);
        assert_eq!((config.heads, config.head_dim, config.pad_token_id), (8, 256, 2));
        assert_eq!((config.raw_vocab_size, config.num_hidden_layers, config.image_token_id), (None, None, None));
        for key in [
            "engram_layer_ids",
            "engram_num_embeddings",
            "engram_max_ngram_size",
            "engram_vocab_size",
            "engram_compressed_vocab_size",
        ] {
            assert_eq!(refused(&set(engram(), key)), key);
        }
    }
}

#[test]
fn the_reference_name_of_the_pad_id_is_read_where_the_other_is_absent() {
    let config = with(without(engram(), "engram_pad_token_id"), "engram_pad_id", json!(9));
    assert_eq!(as_engram(&config).pad_token_id, 9);
    assert_eq!(as_engram(&with(config, "engram_pad_token_id", json!(5))).pad_token_id, 5);
}

/// The seed's default is part of the format; 0 is a seed, null is none.
#[test]
fn ple_defaults() {
    let bare = json!({"model_type": "qwen4_exp", "ple_layer_ids": [2], "eos_token_id": 248_044});
    let config = as_ple(&bare);
    assert_eq!((config.ngram_size, config.heads_per_ngram, config.vocab_base), (3, 8, 20_000_000));
    assert_eq!((config.divisor, config.split_parts, config.seed, config.vocab_size), (128, 512, 1234, 248_320));
    assert_eq!((config.embed_dim, config.embedding_dtype, config.num_hidden_layers), (2048, None, None));
    assert_eq!(config.layer_ids, [1], "counted from 1 in the file, from 0 here");
    assert_eq!(as_ple(&with(bare.clone(), "hidden_size", json!(2560))).embed_dim, 2560);
    assert_eq!(as_ple(&with(bare.clone(), "seed", Value::Null)).seed, 1234);
    assert_eq!(as_ple(&with(bare.clone(), "seed", json!(0))).seed, 0);
    for key in ["ple_layer_ids", "eos_token_id"] {
        assert_eq!(refused(&without(bare.clone(), key)), key);
        assert_eq!(refused(&with(bare.clone(), key, Value::Null)), key);
    }
}

/// A default seed gives the shipped multipliers, another one others.
#[test]
fn the_default_seed_gives_the_stored_multipliers() {
    let multipliers = |seed: Value| {
        let bare = json!({"model_type": "qwen4_exp", "ple_layer_ids": [2], "eos_token_id": 0, "seed": seed});
        Layout::from_config(&read(&bare).unwrap()).unwrap().layers()[0].multipliers().to_vec()
    };
    let stored = [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071];
    assert_eq!(multipliers(Value::Null), stored);
    assert_eq!(multipliers(json!(1234)), stored);
    assert_ne!(multipliers(json!(0)), stored);
}

#[test]
fn only_text_config_is_read_where_it_is_there() {
    let mut nested = with(engram(), "text_config", engram());
    nested["engram_vocab_size"] = json!("nonsense");
    nested["text_config"]["engram_head_dim"] = json!(32);
    assert_eq!(as_engram(&nested).head_dim, 32);
    assert_eq!(
        refused(&with(engram(), "text_config", json!({}))),
        "engram_layer_ids",
        "nothing else comes from the top"
    );
    assert_eq!(as_engram(&with(engram(), "text_config", Value::Null)).head_dim, 64);
    assert_eq!(refused(&with(engram(), "text_config", json!([]))), "text_config");
}

#[test]
fn quantization_config_comes_from_either_level_as_it_is_written() {
    let read = |text: &str| ModelConfig::from_json(text.as_bytes()).unwrap().quantization;
    let fields = engram().to_string();
    let fields = fields.trim_start_matches('{').trim_end_matches('}');
    let top = format!(r#"{{"quantization_config": {{ "quant_method" :"fp8"}}, "text_config": {{{fields}}}}}"#);
    assert_eq!(read(&top).unwrap(), r#"{ "quant_method" :"fp8"}"#);
    let both =
        format!(r#"{{"quantization_config":{{}},"text_config":{{"quantization_config":{{"a":1e5}},{fields}}}}}"#);
    assert_eq!(read(&both).unwrap(), r#"{"a":1e5}"#);
    let null = format!(r#"{{"quantization_config":{{"b":2}},"text_config":{{"quantization_config":null,{fields}}}}}"#);
    assert_eq!(read(&null).unwrap(), r#"{"b":2}"#);
    assert_eq!(read(&engram().to_string()), None);
    assert_eq!(refused(&with(engram(), "quantization_config", json!("fp8"))), "quantization_config");
    let dtype = json!({"engram_dtype": "fp4"});
    assert_eq!(as_engram(&with(engram(), "quantization_config", dtype)).engram_dtype.as_deref(), Some("fp4"));
    let dtype = json!({"engram_dtype": 4});
    assert_eq!(refused(&with(engram(), "quantization_config", dtype)), "engram_dtype");
}

#[test]
fn the_family_comes_from_model_type_then_architectures() {
    let family = |config: &Value| read(config).map(|config| config.family());
    assert_eq!(family(&engram()), Ok(Family::Engram));
    assert_eq!(family(&ple()), Ok(Family::Ple));
    let bare = without(engram(), "model_type");
    for name in ["DeepseekV41ForCausalLM", "DeepseekV41ForConditionalGeneration"] {
        assert_eq!(family(&with(bare.clone(), "architectures", json!([name]))), Ok(Family::Engram));
    }
    let bare = without(ple(), "model_type");
    for name in ["Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"] {
        assert_eq!(family(&with(bare.clone(), "architectures", json!(["Other", name]))), Ok(Family::Ple));
    }
    let mut nested = json!({"model_type": "qwen4_exp", "text_config": engram()});
    assert_eq!(family(&nested), Ok(Family::Engram), "text_config's first");
    nested["text_config"] = without(ple(), "model_type");
    assert_eq!(family(&nested), Ok(Family::Ple));

    let unknown = |config: &Value| match read(config) {
        Err(ConfigError::FamilyUnknown { found }) => found,
        other => panic!("{other:?}"),
    };
    assert_eq!(unknown(&without(engram(), "model_type")), "a config without model_type and architectures");
    assert_eq!(unknown(&json!({})), "a config without model_type and architectures");
    assert_eq!(unknown(&with(engram(), "model_type", json!("longcat"))), "model_type \"longcat\"");
    let llama = with(without(engram(), "model_type"), "architectures", json!(["LlamaForCausalLM"]));
    assert_eq!(unknown(&llama), "architectures [\"LlamaForCausalLM\"]");
    assert_eq!(refused(&with(engram(), "model_type", json!(41))), "model_type");
    assert_eq!(refused(&with(bare, "architectures", json!("Qwen4ExpForCausalLM"))), "architectures");
}

#[test]
fn what_is_no_json_object_is_told_from_a_bad_field() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for text in
        ["", " ", "{", "[]", "null", "7", "\"{}\"", "{} {}", "{'a':1}", "<!DOCTYPE html>", "version https", &deep]
    {
        let error = ModelConfig::from_json(text.as_bytes()).unwrap_err();
        assert!(matches!(error, ConfigError::NotJson { .. }), "{}: {error}", &text[..text.len().min(20)]);
    }
    assert!(matches!(ModelConfig::from_json(b"{\"a\":\"\xff\"}"), Err(ConfigError::NotJson { .. })));
}

#[test]
fn a_key_twice_is_refused_wherever_it_stands() {
    let key = |text: &str| match ModelConfig::from_json(text.as_bytes()) {
        Err(ConfigError::DuplicateKey { key }) => key,
        other => panic!("{other:?}"),
    };
    let fields = ple().to_string();
    let fields = fields.trim_start_matches('{').trim_end_matches('}');
    assert_eq!(key(&format!("{{{fields},\"seed\":7}}")), "seed");
    assert_eq!(key(&format!("{{{fields},\"\\u0073eed\":7}}")), "seed");
    assert_eq!(key(&format!("{{\"text_config\":{{{fields},\"seed\":8}}}}")), "text_config.seed");
    assert_eq!(key(&format!("{{{fields},\"unread\":1,\"unread\":1}}")), "unread");
    let quantization = r#""quantization_config":{"list":[{"a":1,"b":[],"a":2}]}"#;
    assert_eq!(key(&format!("{{{fields},{quantization}}}")), "quantization_config.list.a");
    assert_eq!(key(&format!("{{\"text_config\":{{}},\"text_config\":{{{fields}}}}}")), "text_config");
}

/// No number is taken for another type, and none is used before it is bounded.
#[test]
fn numbers_are_bounded_and_typed() {
    let odd = [json!(-1), json!(1.5), json!(1e30), json!("7"), json!(true), json!([]), json!({}), json!(u64::MAX)];
    for key in [
        "engram_max_ngram_size",
        "engram_vocab_size",
        "engram_n_heads",
        "engram_head_dim",
        "engram_compressed_vocab_size",
        "engram_pad_token_id",
        "image_token_id",
        "vocab_size",
        "num_hidden_layers",
    ] {
        for value in odd.iter().chain([&json!(1_u64 << 31), &json!(1_u64 << 32)]) {
            assert_eq!(refused(&with(engram(), key, value.clone())), key, "{value}");
        }
    }
    for key in [
        "ple_embed_dim",
        "ngram_size",
        "heads_per_ngram",
        "ngram_vocab_size_base",
        "make_ngram_vocab_size_divisible_by",
        "split_ngram_parts",
        "vocab_size",
        "eos_token_id",
        "num_hidden_layers",
    ] {
        for value in odd.iter().chain([&json!(1_u64 << 31), &json!(1_u64 << 32)]) {
            assert_eq!(refused(&with(ple(), key, value.clone())), key, "{value}");
        }
    }
    for value in &odd[..odd.len() - 1] {
        assert_eq!(refused(&with(ple(), "seed", value.clone())), "seed");
    }
    assert_eq!(as_ple(&with(ple(), "seed", json!(u64::MAX))).seed, u64::MAX);
    assert_eq!(refused(&with(ple(), "ple_embedding_dtype", json!(8))), "ple_embedding_dtype");
    for key in [
        "engram_max_ngram_size",
        "engram_vocab_size",
        "engram_n_heads",
        "engram_head_dim",
        "vocab_size",
        "num_hidden_layers",
    ] {
        assert_eq!(refused(&with(engram(), key, json!(0))), key);
    }
    for size in [1, 9] {
        assert_eq!(refused(&with(engram(), "engram_max_ngram_size", json!(size))), "engram_max_ngram_size");
        assert_eq!(refused(&with(ple(), "ngram_size", json!(size))), "ngram_size");
    }
    assert_eq!(refused(&with(ple(), "heads_per_ngram", json!(513))), "heads_per_ngram", "1,026 columns");
    assert_eq!(refused(&with(ple(), "ple_embed_dim", json!(162))), "ple_embed_dim", "no multiple of 4 columns");
    assert_eq!(refused(&with(ple(), "ngram_vocab_size_base", json!((1 << 29) - 1))), "ngram_vocab_size_base");
    let divisor = "make_ngram_vocab_size_divisible_by";
    let padded = with(with(ple(), divisor, json!((1 << 30) + 1)), "ngram_vocab_size_base", json!(500_000_000));
    assert_eq!(refused(&padded), "ngram_vocab_size_base", "padding reaches 2^31 rows");
}

#[test]
fn eos_is_one_token() {
    assert_eq!(as_ple(&with(ple(), "eos_token_id", json!([5]))).eos_token_id, 5);
    for value in [json!([]), json!([5, 6]), json!([[5]]), json!([null])] {
        assert_eq!(refused(&with(ple(), "eos_token_id", value)), "eos_token_id");
    }
}

#[test]
fn layers_are_few_distinct_and_inside_the_model() {
    for value in [json!([]), json!([1, 1]), json!([1, 4]), json!([1, "3"]), json!([1, null]), json!(1), json!([-1, 1])]
    {
        assert_eq!(refused(&with(engram(), "engram_layer_ids", value)), "engram_layer_ids");
    }
    for value in [json!([]), json!([2, 2]), json!([0, 2]), json!([7]), json!([2.0])] {
        assert_eq!(refused(&with(ple(), "ple_layer_ids", value)), "ple_layer_ids");
    }
    let many: Vec<u32> = (1..300).collect();
    assert_eq!(refused(&with(without(ple(), "num_hidden_layers"), "ple_layer_ids", json!(many))), "ple_layer_ids");
    assert_eq!(as_ple(&with(ple(), "ple_layer_ids", json!([6, 1, 4]))).layer_ids, [0, 3, 5], "ascending");
    let turned = with(with(engram(), "engram_layer_ids", json!([3, 1])), "engram_num_embeddings", json!([462, 630]));
    assert_eq!(as_engram(&turned).layer_ids, [3, 1], "in the config's order");
    for value in [json!([462]), json!([462, 630, 1]), json!([]), json!([462, -630]), json!("462")] {
        assert_eq!(refused(&with(engram(), "engram_num_embeddings", value)), "engram_num_embeddings");
    }
}

#[test]
fn row_counts_must_be_the_sums_of_the_primes() {
    assert_eq!(refused(&with(engram(), "engram_num_embeddings", json!([630, 462]))), "engram_num_embeddings[0]");
    let config = read(&with(engram(), "engram_num_embeddings", json!([462, 631]))).unwrap();
    let error = Layout::from_config(&config).unwrap_err();
    let message = "config field `engram_num_embeddings[1]` is 631, expected 630, the sum of the primes of layer 3";
    assert_eq!(error.to_string(), message);
}

/// The largest numbers that pass the bounds are still quick.
#[test]
fn the_largest_configs_are_quick() {
    let started = std::time::Instant::now();
    let layers: Vec<u32> = (1..=128).collect();
    let ple = json!({"model_type": "qwen4_exp", "ple_layer_ids": layers, "eos_token_id": 0, "ngram_size": 2,
        "heads_per_ngram": 1024, "ple_embed_dim": 1024, "ngram_vocab_size_base": 1});
    let layout = Layout::from_config(&read(&ple).unwrap()).unwrap();
    assert_eq!(layout.layers().len(), 128);
    let one = json!({"model_type": "qwen4_exp", "ple_layer_ids": [1], "eos_token_id": 0, "ngram_size": 2,
        "heads_per_ngram": 1, "ple_embed_dim": 1, "ngram_vocab_size_base": i32::MAX,
        "make_ngram_vocab_size_divisible_by": 1});
    let layout = Layout::from_config(&read(&one).unwrap()).unwrap();
    assert_eq!(layout.layers()[0].sizes(), [i32::MAX.unsigned_abs()]);
    assert_eq!(refused(&with(one, "ple_layer_ids", json!([1, 2]))), "ngram_vocab_size_base");
    assert!(started.elapsed().as_secs() < 5);
}

#[test]
fn presets_are_read_back_from_their_text() {
    for preset in Preset::ALL {
        assert_eq!(preset.name().parse(), Ok(preset));
        let config = preset.config();
        assert_eq!(ModelConfig::from_json(config.to_json().as_bytes()), Ok(config.clone()), "{preset}");
        let mut scaled = config.scaled(0.001).unwrap();
        Layout::from_config(&scaled).unwrap();
        scaled.quantization = Some(r#"{"quant_method":"fp8"}"#.to_owned());
        assert_eq!(ModelConfig::from_json(scaled.to_json().as_bytes()), Ok(scaled), "{preset}");
    }
    assert!("deepseek".parse::<Preset>().is_err());
}

#[test]
fn scales_that_leave_the_bounds_are_refused() {
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9, 1e3] {
        for preset in [Preset::DeepseekV41Flash, Preset::Qwen38FlashNext] {
            assert!(matches!(preset.config().scaled(factor), Err(ConfigError::Field { .. })), "{preset} x {factor}");
        }
    }
    let config = Preset::DeepseekV41Flash.config().scaled(1.0).unwrap();
    assert_eq!(config, Preset::DeepseekV41Flash.config());
}

#[test]
fn stored_constants_are_checked_before_they_win() {
    let make = |multipliers: &[i64], sizes: &[i64], offsets: &[i64], rows| {
        LayerLayout::from_constants(1, multipliers, sizes, offsets, rows)
    };
    let (multipliers, sizes, offsets) = ([9, -11, 13], [31, 37], [0, 31]);
    let layer = make(&multipliers, &sizes, &offsets, 70).unwrap();
    assert_eq!((layer.total_rows(), layer.padded_rows(), layer.layer()), (68, 70, 1));
    make(&multipliers, &sizes, &[37, 0], 68).unwrap();

    use ConstantsError as E;
    assert_eq!(make(&[9, 10, 13], &sizes, &offsets, 70), Err(E::EvenMultiplier { place: 1, value: 10 }));
    assert_eq!(make(&[9, 11, 0], &sizes, &offsets, 70), Err(E::EvenMultiplier { place: 2, value: 0 }));
    assert_eq!(make(&multipliers, &[31, 0], &offsets, 70), Err(E::Size { column: 1, value: 0 }));
    assert_eq!(make(&multipliers, &[-31, 37], &offsets, 70), Err(E::Size { column: 0, value: -31 }));
    assert_eq!(make(&multipliers, &[31, 1 << 31], &offsets, 70), Err(E::Size { column: 1, value: 1 << 31 }));
    let past = |column, offset, size| Err(E::PastTable { column, offset, size, rows: 67 });
    assert_eq!(make(&multipliers, &sizes, &offsets, 67), past(1, 31, 37));
    assert_eq!(make(&multipliers, &sizes, &[-1, 31], 67), past(0, -1, 31));
    assert_eq!(make(&multipliers, &sizes, &[0, i64::MAX], 67), past(1, i64::MAX, 37));
    assert_eq!(make(&multipliers, &sizes, &[0, (1 << 32) + 31], 67), past(1, (1 << 32) + 31, 37));
    assert_eq!(make(&multipliers, &sizes, &[0, 30], 70).unwrap().total_rows(), 67, "columns may share rows");
    let length = |what, found, expected| Err(E::Length { what, found, expected });
    assert_eq!(make(&multipliers, &sizes, &[0], 70), length("offsets", 1, 2));
    for bad in [&[1][..], &[1; 9]] {
        assert!(matches!(make(bad, &sizes, &offsets, 70), Err(E::Bound { what: "number of multipliers", .. })));
    }
    assert!(matches!(make(&multipliers, &[], &[], 70), Err(E::Bound { what: "number of sizes", .. })));
    assert!(matches!(make(&multipliers, &sizes, &offsets, 1 << 31), Err(E::Bound { what: "number of rows", .. })));

    let config = read(&without(with(ple(), "ple_layer_ids", json!([2])), "seed")).unwrap();
    let computed = Layout::from_config(&config).unwrap();
    let swapped = make(&[1, 3, 5], &[101, 103, 107, 109], &[0, 101, 204, 311], 424).unwrap();
    let stored = computed.clone().with_layer(0, swapped).unwrap();
    assert_eq!(stored.layers()[0].multipliers(), [1, 3, 5]);
    assert_eq!(stored.layers()[0].sizes(), computed.layers()[0].sizes());
    assert_eq!(
        computed.clone().with_layer(0, layer.clone()).unwrap_err(),
        E::Length { what: "sizes", found: 2, expected: 4 }
    );
    let short = make(&[1, 3], &[101, 103, 107, 109], &[0, 101, 204, 311], 424).unwrap();
    assert_eq!(
        computed.clone().with_layer(0, short).unwrap_err(),
        E::Length { what: "multipliers", found: 2, expected: 3 }
    );
    assert!(matches!(computed.with_layer(1, layer), Err(E::Bound { .. })));
}

#[test]
fn engram_multipliers_may_not_overflow() {
    let layer = |multiplier| LayerLayout::from_constants(0, &[multiplier, 1], &[7], &[0], 7).unwrap();
    let layout = |multiplier, vocab| Layout::from_layers(Family::Engram, 2, 1, vocab, vec![layer(multiplier)]);
    let largest = i64::MAX / 50 - 1;
    layout(largest, 50).unwrap();
    layout(i64::MAX, 1).unwrap();
    for multiplier in [-1, i64::MAX, largest + 2] {
        assert!(matches!(layout(multiplier, 50), Err(ConstantsError::MultiplierRange { place: 0, .. })));
    }
    for (ngram_size, heads, layers) in [(1, 1, 1), (9, 1, 1), (2, 0, 1), (2, 1025, 1), (2, 1, 0), (2, 1, 257)] {
        let layers = vec![layer(1); layers];
        let error = Layout::from_layers(Family::Ple, ngram_size, heads, 1, layers).unwrap_err();
        assert!(matches!(error, ConstantsError::Bound { .. }), "{error}");
    }
}
