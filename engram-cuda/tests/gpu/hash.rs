//! The hash kernels against the golden vectors and against the host.

use crate::common::*;
use engram_core::{Batch, Family, Hasher as HostHasher, LayerLayout, Layout, Preset};
use engram_cuda::{DeviceBatch, DeviceBuffer, Hasher, Stream};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect()
}

fn golden(name: &str) -> Value {
    serde_json::from_str(match name {
        "layouts" => include_str!("../../../tests/data/golden/layouts.json"),
        "engram" => include_str!("../../../tests/data/golden/engram_hash.json"),
        _ => include_str!("../../../tests/data/golden/ple_hash.json"),
    })
    .unwrap()
}

fn number(value: &Value) -> i32 {
    i32::try_from(value.as_i64().unwrap()).unwrap()
}

fn golden_layout(family: Family, name: &str) -> Layout {
    let all = golden("layouts");
    let entry = &all[family.name()][name];
    let (params, layout) = (&entry["params"], &entry["layout"]);
    let count = |name: &str| usize::try_from(params[name].as_u64().unwrap()).unwrap();
    let rows = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    let layer = |number, multipliers: &Value, sizes: &Value, offsets: &Value, rows| {
        LayerLayout::from_constants(number, &numbers(multipliers), &numbers(sizes), &numbers(offsets), rows).unwrap()
    };
    match family {
        Family::Engram => {
            let layer_ids = numbers(&params["layer_ids"]);
            let layers = layer_ids.iter().enumerate().map(|(k, &number)| {
                let at = |name: &str| &layout[name][k];
                let number = u32::try_from(number).unwrap();
                layer(number, at("multipliers"), at("primes"), at("offsets"), rows(at("total_rows")))
            });
            let vocab = u32::try_from(count("compressed")).unwrap();
            Layout::from_layers(family, count("max_ngram"), count("n_heads"), vocab, layers.collect()).unwrap()
        }
        Family::Ple => {
            let at = |name: &str| &layout[name];
            let layers = vec![layer(1, at("multipliers"), at("sizes"), at("offsets"), rows(at("padded_rows")))];
            Layout::from_layers(family, count("ngram_size"), count("heads_per_ngram"), 0, layers).unwrap()
        }
    }
}

/// Ids and mixes of a batch from the GPU.
fn on_gpu(hasher: &Hasher, batch: &Batch<'_>) -> (Vec<i32>, Vec<i64>) {
    let stream = Stream::new(device()).unwrap();
    let (tokens, starts, history) = (upload(batch.tokens), upload(batch.starts), upload(batch.history));
    let len = batch.tokens.len();
    let ids = DeviceBuffer::new(device(), len * hasher.ids_per_token() * 4).unwrap();
    let mixes = DeviceBuffer::new(device(), len * hasher.mixes_per_token() * 8).unwrap();
    ids.fill(POISON, stream.as_ref()).unwrap();
    mixes.fill(POISON, stream.as_ref()).unwrap();
    let batch = DeviceBatch {
        tokens: (&tokens).into(),
        len,
        starts: (&starts).into(),
        requests: batch.starts.len() - 1,
        history: (&history).into(),
    };
    hasher.ids(&batch, (&ids).into(), Some((&mixes).into()), stream.as_ref()).unwrap();
    stream.synchronize().unwrap();
    (ids.read(0, len * hasher.ids_per_token()).unwrap(), mixes.read(0, len * hasher.mixes_per_token()).unwrap())
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_golden_hash_vector() {
    let mut checked = 0;
    for (family, file) in [(Family::Engram, "engram"), (Family::Ple, "ple")] {
        for case in golden(file).as_array().unwrap() {
            let layout = golden_layout(family, case["layout"].as_str().unwrap());
            let fill = number(case.get("pad_id").unwrap_or(&case["eos"]));
            let before = layout.ngram_size() - 1;
            let (mut tokens, mut starts, mut history) = (vec![], vec![0], vec![]);
            for request in case["requests"].as_array().unwrap() {
                let dead = request.get("dead").map(|dead| dead.as_array().unwrap().clone());
                for (place, token) in request["tokens"].as_array().unwrap().iter().enumerate() {
                    let dead = dead.as_ref().is_some_and(|dead| dead[place].as_bool().unwrap());
                    tokens.push(if dead { -1 } else { number(token) });
                }
                starts.push(i32::try_from(tokens.len()).unwrap());
                let given = request.get("lookback").unwrap_or(&request["context"]).as_array().unwrap();
                // A look-back that ends early is the start of the sequence.
                history.extend((0..before).map(|place| given.get(place).map_or(-1, number)));
            }
            let hasher = Hasher::new(device(), &layout, fill).unwrap();
            let (ids, _) = on_gpu(&hasher, &Batch { tokens: &tokens, starts: &starts, history: &history });
            let expected: Vec<i32> = flatten(&case["ids"]);
            assert_eq!(ids, expected, "{}", case["layout"]);
            checked += ids.len();
        }
    }
    assert!(checked > 4000, "{checked} golden ids");
}

fn flatten(value: &Value) -> Vec<i32> {
    match value {
        Value::Array(values) => values.iter().flat_map(flatten).collect(),
        number => vec![self::number(number)],
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn ids_and_mixes_equal_the_hosts_on_random_ragged_batches() {
    let mut random = Random(11);
    for preset in [Preset::DeepseekV41Flash, Preset::Qwen38FlashNext, Preset::TinyEngram, Preset::TinyPle] {
        let layout = Layout::from_config(&preset.config()).unwrap();
        let engram = layout.family() == Family::Engram;
        let last = if engram { u64::from(layout.vocab_size()) } else { 1 << 31 };
        let fill = i32::try_from(random.below(last.min(1 << 20))).unwrap();
        let host = HostHasher::new(&layout, fill).unwrap();
        let hasher = Hasher::new(device(), &layout, fill).unwrap();
        for round in 0..40 {
            let requests = random.below(if round % 4 == 0 { 300 } else { 6 });
            let (mut tokens, mut starts) = (vec![], vec![0]);
            let token = |random: &mut Random, history: bool| match random.below(8) {
                0 if engram => -1,
                1 if engram && history => -2,
                0 | 1 => fill,
                _ => i32::try_from(random.below(last)).unwrap(),
            };
            for _ in 0..requests {
                let longest = if random.below(4) == 0 { 70 } else { 4 };
                for _ in 0..random.below(longest) {
                    tokens.push(token(&mut random, false));
                }
                starts.push(i32::try_from(tokens.len()).unwrap());
            }
            for _ in 0..random.below(20) {
                tokens.push(token(&mut random, false));
            }
            let history: Vec<_> =
                (0..requests * (layout.ngram_size() as u64 - 1)).map(|_| token(&mut random, true)).collect();
            let batch = Batch { tokens: &tokens, starts: &starts, history: &history };
            let mut ids = vec![0; tokens.len() * host.ids_per_token()];
            let mut mixes = vec![0; tokens.len() * host.mixes_per_token()];
            host.ids_and_mixes(&batch, &mut ids, &mut mixes).unwrap();
            let (gpu_ids, gpu_mixes) = on_gpu(&hasher, &batch);
            assert_eq!(gpu_ids, ids, "{preset:?}, round {round}");
            let counted = usize::try_from(*starts.last().unwrap()).unwrap() * host.mixes_per_token();
            assert_eq!(gpu_mixes[..counted], mixes[..counted], "{preset:?}, round {round}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_hash_sees_new_tokens_at_every_replay() {
    let layout = Layout::from_config(&Preset::TinyEngram.config()).unwrap();
    let (host, hasher) = (HostHasher::new(&layout, 1).unwrap(), Hasher::new(device(), &layout, 1).unwrap());
    let len = 33;
    let (tokens, starts) = (upload(&vec![0; len]), upload(&[0, 20, 33]));
    let history = upload(&vec![-2; 2 * (layout.ngram_size() - 1)]);
    let ids = DeviceBuffer::new(device(), len * hasher.ids_per_token() * 4).unwrap();
    let batch = DeviceBatch {
        tokens: (&tokens).into(),
        len,
        starts: (&starts).into(),
        requests: 2,
        history: (&history).into(),
    };
    let stream = Stream::new(device()).unwrap();
    let mut graph = stream.capture(|stream| hasher.ids(&batch, (&ids).into(), None, stream)).unwrap();
    let mut random = Random(3);
    for _ in 0..5 {
        let new: Vec<i32> =
            (0..len).map(|_| i32::try_from(random.below(u64::from(layout.vocab_size()))).unwrap()).collect();
        tokens.write(0, &new).unwrap();
        // SAFETY: all buffers live.
        unsafe { graph.launch(stream.as_ref()) }.unwrap();
        stream.synchronize().unwrap();
        let mut expected = vec![0; len * host.ids_per_token()];
        let history = vec![-2; 2 * (layout.ngram_size() - 1)];
        host.ids(&Batch { tokens: &new, starts: &[0, 20, 33], history: &history }, &mut expected).unwrap();
        assert_eq!(ids.read::<i32>(0, expected.len()).unwrap(), expected);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn arrays_that_a_batch_does_not_fit_are_refused() {
    let layout = Layout::from_config(&Preset::TinyEngram.config()).unwrap();
    let hasher = Hasher::new(device(), &layout, 1).unwrap();
    let small = upload(&[0, 0]);
    let stream = Stream::new(device()).unwrap();
    let batch =
        DeviceBatch { tokens: (&small).into(), len: 2, starts: (&small).into(), requests: 1, history: (&small).into() };
    let error = hasher.ids(&batch, (&small).into(), None, stream.as_ref()).unwrap_err();
    assert!(matches!(error, engram_cuda::Error::TooSmall { .. }), "{error}");
    assert!(Hasher::new(device(), &layout, -1).is_err());
}
