//! Every algorithm against the golden data and published constants.

#![expect(clippy::unwrap_used, clippy::unreadable_literal, reason = "a test; ids as they are published")]

use engram_core::{
    Batch, ConfigError, EngramConfig, Family, Hasher, LayerLayout, Layout, ModelConfig, Path, PleConfig, Preset,
    TableConfig,
};
use serde::Deserialize;
use serde_json::Value;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden/");

fn golden<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    let text = std::fs::read(format!("{GOLDEN}{name}")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn number(value: &Value, key: &str) -> u32 {
    u32::try_from(value[key].as_u64().unwrap()).unwrap()
}

fn numbers<T: for<'de> Deserialize<'de>>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).unwrap()
}

fn engram_config(edit: impl FnOnce(&mut EngramConfig)) -> EngramConfig {
    let TableConfig::Engram(mut config) = Preset::DeepseekV41Flash.config().table else { unreachable!() };
    edit(&mut config);
    config
}

fn ple_config(edit: impl FnOnce(&mut PleConfig)) -> PleConfig {
    let TableConfig::Ple(mut config) = Preset::Qwen38FlashNext.config().table else { unreachable!() };
    edit(&mut config);
    config
}

/// A golden Engram layout from its parameters alone.
fn engram_layout(case: &Value) -> Layout {
    let (params, layout) = (&case["params"], &case["layout"]);
    let config = engram_config(|config| {
        config.layer_ids = numbers(&params["layer_ids"]);
        config.num_embeddings = numbers(&layout["total_rows"]);
        config.max_ngram_size = number(params, "max_ngram");
        config.heads = number(params, "n_heads");
        config.vocab_size = number(params, "vocab_size");
        config.compressed_vocab_size = number(params, "compressed");
    });
    Layout::engram(&config).unwrap()
}

/// A golden PLE layout from its parameters alone: the layer at its dense place, behind as many others.
fn ple_layout(case: &Value) -> Layout {
    let params = &case["params"];
    let place = number(params, "dense_layer_id");
    let config = ple_config(|config| {
        config.layer_ids = (0..=place).collect();
        config.ngram_size = number(params, "ngram_size");
        config.heads_per_ngram = number(params, "heads_per_ngram");
        config.embed_dim = (config.ngram_size - 1) * config.heads_per_ngram * 8;
        config.vocab_base = number(params, "base");
        config.vocab_size = number(params, "unigram_vocab");
        config.seed = params["seed"].as_u64().unwrap_or(1234);
        config.divisor = params["divisor"].as_u64().map_or(128, |divisor| u32::try_from(divisor).unwrap());
    });
    let all = Layout::ple(&config).unwrap();
    let layer = all.layers().last().unwrap().clone();
    Layout::from_layers(Family::Ple, all.ngram_size(), all.heads(), all.vocab_size(), vec![layer]).unwrap()
}

#[test]
fn engram_layouts() {
    let all: Value = golden("layouts.json");
    for (name, case) in all["engram"].as_object().unwrap() {
        let layout = engram_layout(case);
        for (place, layer) in layout.layers().iter().enumerate() {
            assert_eq!(layer.sizes(), numbers::<u32>(&case["layout"]["primes"][place]), "{name}");
            assert_eq!(layer.offsets(), numbers::<u32>(&case["layout"]["offsets"][place]), "{name}");
            assert_eq!(layer.multipliers(), numbers::<i64>(&case["layout"]["multipliers"][place]), "{name}");
            assert_eq!(u64::from(layer.total_rows()), case["layout"]["total_rows"][place], "{name}");
            assert_eq!(layer.padded_rows(), layer.total_rows(), "{name}");
        }
    }
}

#[test]
fn ple_layouts() {
    let all: Value = golden("layouts.json");
    for (name, case) in all["ple"].as_object().unwrap() {
        let layout = ple_layout(case);
        let layer = &layout.layers()[0];
        assert_eq!(layer.sizes(), numbers::<u32>(&case["layout"]["sizes"]), "{name}");
        assert_eq!(layer.offsets(), numbers::<u32>(&case["layout"]["offsets"]), "{name}");
        assert_eq!(layer.multipliers(), numbers::<i64>(&case["layout"]["multipliers"]), "{name}");
        assert_eq!(u64::from(layer.total_rows()), case["layout"]["total_rows"], "{name}");
        assert_eq!(u64::from(layer.padded_rows()), case["layout"]["padded_rows"], "{name}");
    }
}

#[test]
fn presets_have_the_published_row_counts() {
    let rows = |preset: Preset| {
        let layout = Layout::from_config(&preset.config()).unwrap();
        layout.layers().iter().map(|layer| (layer.total_rows(), layer.padded_rows())).collect::<Vec<_>>()
    };
    assert_eq!(rows(Preset::DeepseekV41Flash), [(384_006_168, 384_006_168), (384_016_682, 384_016_682)]);
    assert_eq!(rows(Preset::Qwen38FlashNext), [(320_001_446, 320_001_536)]);
    assert_eq!(rows(Preset::TinyEngram), [(6_126, 6_126), (6_332, 6_332)]);
    assert_eq!(rows(Preset::TinyPle), [(4_062, 4_096)]);
}

#[derive(Deserialize)]
struct HashCase {
    layout: String,
    #[serde(alias = "eos")]
    pad_id: i32,
    requests: Vec<Request>,
    ids: Value,
}

#[derive(Deserialize)]
struct Request {
    tokens: Vec<i32>,
    #[serde(default)]
    dead: Vec<bool>,
    #[serde(default)]
    lookback: Vec<i32>,
    #[serde(default)]
    context: Vec<i32>,
}

/// Requests as the arrays of a batch.
struct Arrays {
    tokens: Vec<i32>,
    starts: Vec<i32>,
    history: Vec<i32>,
}

impl Arrays {
    fn new(requests: &[Request], family: Family, depth: usize, fill: i32) -> Self {
        let mut arrays = Self { tokens: vec![], starts: vec![0], history: vec![] };
        for request in requests {
            let dead = |place: usize| request.dead.get(place).copied().unwrap_or(false);
            let tokens = request.tokens.iter().enumerate();
            arrays.tokens.extend(tokens.map(|(place, &token)| if dead(place) { -1 } else { token }));
            arrays.starts.push(i32::try_from(arrays.tokens.len()).unwrap());
            let (mut row, missing) = match family {
                Family::Engram => (request.lookback.clone(), -1),
                Family::Ple => (request.context.clone(), fill),
            };
            row.resize(depth, missing);
            arrays.history.extend(row);
        }
        arrays
    }

    fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, starts: &self.starts, history: &self.history }
    }
}

/// Ids on every path that this CPU has, all equal.
fn ids(hasher: &Hasher, batch: &Batch<'_>) -> Vec<i32> {
    let mut ids = vec![i32::MIN; batch.tokens.len() * hasher.ids_per_token()];
    hasher.clone().with_path(Path::Portable).unwrap().ids(batch, &mut ids).unwrap();
    if Path::Avx512.is_available() {
        let mut again = vec![i32::MIN; ids.len()];
        hasher.clone().with_path(Path::Avx512).unwrap().ids(batch, &mut again).unwrap();
        assert_eq!(ids, again);
    }
    ids
}

#[test]
fn engram_hashes() {
    let all: Value = golden("layouts.json");
    for case in golden::<Vec<HashCase>>("engram_hash.json") {
        let layout = engram_layout(&all["engram"][&case.layout]);
        let hasher = Hasher::new(&layout, case.pad_id).unwrap();
        let arrays = Arrays::new(&case.requests, Family::Engram, layout.ngram_size() - 1, case.pad_id);
        let expected: Vec<Vec<Vec<i32>>> = numbers(&case.ids);
        assert_eq!(ids(&hasher, &arrays.batch()), expected.concat().concat(), "{}", case.layout);
    }
}

#[test]
fn ple_hashes() {
    let all: Value = golden("layouts.json");
    for case in golden::<Vec<HashCase>>("ple_hash.json") {
        let layout = ple_layout(&all["ple"][&case.layout]);
        let hasher = Hasher::new(&layout, case.pad_id).unwrap();
        let arrays = Arrays::new(&case.requests, Family::Ple, layout.ngram_size() - 1, case.pad_id);
        let expected: Vec<Vec<i32>> = numbers(&case.ids);
        assert_eq!(ids(&hasher, &arrays.batch()), expected.concat(), "{}", case.layout);
    }
}

#[derive(Deserialize)]
struct Expected {
    token_space: String,
    #[serde(alias = "eos")]
    pad_id: i32,
    requests: Vec<Request>,
    layers: Vec<ExpectedLayer>,
}

#[derive(Deserialize)]
struct ExpectedLayer {
    layer: u32,
    ids: Vec<Vec<i32>>,
}

/// Config to ids, for every golden checkpoint.
#[test]
fn checkpoints() {
    let mut seen = 0;
    for entry in std::fs::read_dir(format!("{GOLDEN}ckpt")).unwrap() {
        let folder = entry.unwrap().file_name().into_string().unwrap();
        let config = std::fs::read(format!("{GOLDEN}ckpt/{folder}/config.json")).unwrap();
        let config = ModelConfig::from_json(&config).unwrap();
        let expected: Expected = golden(&format!("ckpt/{folder}/expected.json"));
        let space = if config.family() == Family::Engram { "compressed" } else { "raw" };
        assert_eq!(expected.token_space, space, "{folder}");
        let layout = Layout::from_config(&config).unwrap();
        let hasher = Hasher::new(&layout, expected.pad_id).unwrap();
        let arrays = Arrays::new(&expected.requests, config.family(), layout.ngram_size() - 1, expected.pad_id);
        let ids = ids(&hasher, &arrays.batch());
        assert_eq!(config.layer_ids(), expected.layers.iter().map(|layer| layer.layer).collect::<Vec<_>>());
        for (place, layer) in expected.layers.iter().enumerate() {
            let tokens = ids.chunks(hasher.ids_per_token());
            let found = tokens.map(|token| &token[place * layout.columns()..][..layout.columns()]);
            assert!(found.eq(&layer.ids), "{folder}, layer {}", layer.layer);
        }
        seen += 1;
    }
    assert_eq!(seen, 8);
}

#[test]
fn a_missing_field_is_named() {
    let text = std::fs::read(format!("{GOLDEN}broken/config-field-gone/config.json")).unwrap();
    let error = ModelConfig::from_json(&text).unwrap_err();
    assert!(matches!(&error, ConfigError::Field { field, .. } if field == "engram_compressed_vocab_size"), "{error}");
}

/// The first tokens of a sequence with real constants.
#[test]
fn published_engram_ids() {
    let layout = Layout::from_config(&Preset::DeepseekV41Flash.config()).unwrap();
    let hasher = Hasher::new(&layout, 2).unwrap();
    let hash = |tokens: &[i32]| ids(&hasher, &Batch { tokens, starts: &[0, 5], history: &[-1; 3] });
    let check = |ids: &[i32], layer: usize, token: usize, columns: &[usize], literal: &[i32], sum: i64| {
        let row = &ids[(token * 2 + layer) * 24..][..24];
        assert_eq!(
            columns.iter().map(|&column| row[column]).collect::<Vec<_>>(),
            literal,
            "layer {layer}, token {token}"
        );
        assert_eq!(row.iter().map(|&id| i64::from(id)).sum::<i64>(), sum, "layer {layer}, token {token}");
    };
    let plain = hash(&[10, 20, 30, 40, 50]);
    let literals: [(usize, usize, [i32; 8], i64); 6] = [
        (0, 0, [9400104, 24924096, 42335591, 128026094, 156221192, 261350200, 277988921, 382122658], 4626224965),
        (0, 1, [11440887, 30331972, 33504180, 133705728, 147178272, 269468428, 274561985, 369904708], 4597553149),
        (0, 3, [1326936, 22120929, 40011923, 142088989, 151706440, 270969918, 287524568, 378628807], 4617492917),
        (0, 4, [5457301, 26470289, 42926785, 130605657, 156377119, 261515048, 274655344, 377395685], 4595585815),
        (1, 0, [11315085, 19412660, 45130897, 135395884, 144699923, 269973942, 285486044, 379075217], 4570734955),
        (1, 4, [12112771, 17594806, 40177035, 142726201, 145257379, 259419700, 284922264, 380580960], 4617809656),
    ];
    for (layer, token, literal, sum) in literals {
        check(&plain, layer, token, &[0, 1, 2, 8, 9, 16, 17, 23], &literal, sum);
    }
    let dead = hash(&[10, -1, 30, 40, 50]);
    check(&dead, 0, 2, &[], &[], 4665994333);
    check(&dead, 0, 3, &[0, 8], &[1326936, 139450378], 4648441512);
    check(&dead, 0, 4, &[0, 8, 16], &[5457301, 130605657, 261669035], 4620536985);
}

/// Cutting a sequence without carrying its last three tokens changes all 4-grams of three tokens, and so on.
#[test]
fn a_lost_history_changes_48_ids_a_layer() {
    let layout = Layout::from_config(&Preset::DeepseekV41Flash.config()).unwrap();
    let hasher = Hasher::new(&layout, 2).unwrap();
    let tokens: Vec<i32> = (100..130).collect();
    let whole = ids(&hasher, &Batch { tokens: &tokens, starts: &[0, 30], history: &[-1; 3] });
    let cut = ids(&hasher, &Batch { tokens: &tokens, starts: &[0, 17, 30], history: &[-1; 6] });
    assert_eq!(whole.iter().zip(&cut).filter(|(a, b)| a != b).count(), 2 * 48);
}

#[test]
fn published_ple_ids() {
    let layout = Layout::from_config(&Preset::Qwen38FlashNext.config()).unwrap();
    let eos = 248_044;
    let hasher = Hasher::new(&layout, eos).unwrap();
    let tokens = [100, 200, 300, eos, 400, 500];
    let all = ids(&hasher, &Batch { tokens: &tokens, starts: &[0, 6], history: &[eos; 2] });
    let literals: [([i32; 8], i64); 6] = [
        ([5727835, 21884476, 43702108, 157314943, 162363667, 189466439, 200618315, 305180972], 2521676758),
        ([6669481, 25231135, 54517055, 143415227, 164675732, 199178354, 201246635, 318456244], 2563850351),
        ([6129193, 20484628, 57667260, 149309416, 172664702, 184433127, 201501905, 311036336], 2534663010),
        ([3325485, 35913088, 46614178, 148604753, 167208810, 185568855, 202335181, 318016177], 2541144391),
        ([5871033, 30917552, 57175113, 146283787, 164342091, 188641148, 219861821, 316254055], 2542061349),
        ([10748886, 21034810, 46189315, 156960499, 171569641, 199252284, 210022337, 304039692], 2558856914),
    ];
    for (row, (literal, sum)) in all.chunks(16).zip(literals) {
        assert_eq!([0, 1, 2, 7, 8, 9, 10, 15].map(|column| row[column]), literal);
        assert_eq!(row.iter().map(|&id| i64::from(id)).sum::<i64>(), sum);
    }
    let rest = ids(&hasher, &Batch { tokens: &tokens[3..], starts: &[0, 3], history: &[200, 300] });
    assert_eq!(rest, all[3 * 16..]);
}

/// Products that wrap to negative numbers keep a non-negative remainder.
#[test]
fn published_wrapping_ple_mix() {
    let layout = Layout::from_config(&Preset::Qwen38FlashNext.config()).unwrap();
    let hasher = Hasher::new(&layout, 248_044).unwrap();
    let batch = Batch { tokens: &[1_000_000_002], starts: &[0, 1], history: &[1_000_000_000, 1_000_000_001] };
    let (mut found, mut mixes) = ([0; 16], [0; 2]);
    hasher.ids_and_mixes(&batch, &mut found, &mut mixes).unwrap();
    assert_eq!(mixes[0], -1_991_198_521_110_620_121);
    assert_eq!([0, 1, 8, 9].map(|column| found[column]), [9_113_245, 25_045_808, 168_491_919, 195_647_725]);
    assert_eq!(ids(&hasher, &batch), found);
}

/// The multiplier of distance 0 belongs to the current token, and what is missing before the first one is EOS.
#[test]
fn multipliers_pair_with_look_back_distances() {
    let layer = LayerLayout::from_constants(0, &[9, 11, 13], &[31, 37], &[0, 31], 68).unwrap();
    let layout = Layout::from_layers(Family::Ple, 3, 1, 1, vec![layer]).unwrap();
    let hasher = Hasher::new(&layout, 2).unwrap();
    let hash = |tokens: &[i32], history: &[i32]| {
        ids(&hasher, &Batch { tokens, starts: &[0, i32::try_from(tokens.len()).unwrap()], history })
    };
    assert_eq!(hash(&[4, 8, 15], &[2, 2]), [19, 34, 7, 46, 6, 44]);
    assert_eq!(hash(&[8, 15], &[2, 4]), [7, 46, 6, 44]);
    assert_eq!(hash(&[15], &[4, 8]), [6, 44]);
    assert_eq!(hash(&[5, 2, 4, 8, 15], &[7, 7])[4..], [19, 34, 7, 46, 6, 44]);
}
