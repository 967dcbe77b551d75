//! Small checkpoints to be broken on purpose.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use engram_core::{Layout, ModelConfig};
use engram_loader::{FaultCode, Options, Report, Severity, validate};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const ENGRAM: &str = "layers.1.engram.embed.";
pub(crate) const PLE: &str = "model.language_model.layers.1.ple.ple_embedding.";
pub(crate) const CONSTANTS: [&str; 3] = ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"];

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

/// A checkpoint that has not been written yet.
#[derive(Debug, Clone)]
pub(crate) struct Sketch {
    pub(crate) config: Value,
    pub(crate) files: BTreeMap<String, Vec<Tensor>>,
    /// Whether to write an index of what `files` holds.
    pub(crate) indexed: bool,
}

pub(crate) fn tensor(name: impl Into<String>, dtype: &str, shape: &[u64], data: Vec<u8>) -> Tensor {
    Tensor { name: name.into(), dtype: dtype.to_owned(), shape: shape.to_vec(), data }
}

/// Numbers that are no NaN in any format.
pub(crate) fn bytes(len: u64) -> Vec<u8> {
    (0..len).map(|place| (place * 7 % 61) as u8).collect()
}

pub(crate) fn file(number: u32) -> String {
    format!("model-0000{number}-of-00002.safetensors")
}

pub(crate) fn longs(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Sketch {
    /// Two layers of different size, E4M3 with E8M0 scales, a file each.
    pub(crate) fn engram() -> Self {
        let mut config = json!({
            "model_type": "deepseek_v41", "engram_layer_ids": [1, 3], "engram_num_embeddings": [0, 0],
            "engram_max_ngram_size": 3, "engram_vocab_size": 20, "engram_n_heads": 2, "engram_head_dim": 64,
            "engram_compressed_vocab_size": 50, "engram_pad_token_id": 2, "num_hidden_layers": 8,
        });
        // Primes from 20 on: 23 29 31 37 and 41 43 47 53.
        let rows = [120, 184];
        config["engram_num_embeddings"] = json!(rows);
        let mut sketch = Self { config, files: BTreeMap::new(), indexed: true };
        for (number, (layer, rows)) in (1..).zip([(1, rows[0]), (3, rows[1])]) {
            let table = format!("layers.{layer}.engram.embed.");
            sketch.add(number, tensor(format!("layers.{layer}.engram.q_weight"), "BF16", &[4, 8], bytes(64)));
            sketch.add(number, tensor(format!("{table}weight"), "F8_E4M3", &[rows, 64], bytes(rows * 64)));
            sketch.add(number, tensor(format!("{table}scale"), "F8_E8M0", &[rows, 2], bytes(rows * 2)));
        }
        sketch
    }

    /// One layer in shards that alternate between two files, with its constants; `dtype` is that of the values.
    pub(crate) fn ple(dtype: &str, parts: u64) -> Self {
        let config = json!({
            "model_type": "qwen4_exp", "text_config": {
                "model_type": "qwen4_exp_text", "vocab_size": 128, "ple_layer_ids": [2], "ple_embed_dim": 160, "ngram_size": 3,
                "heads_per_ngram": 2, "ngram_vocab_size_base": 101, "make_ngram_vocab_size_divisible_by": 8,
                "split_ngram_parts": parts, "eos_token_id": 11, "num_hidden_layers": 6,
            },
        });
        let mut sketch = Self { config, files: BTreeMap::new(), indexed: true };
        let layout = sketch.layout();
        let layer = &layout.layers()[0];
        let wide = |list: &[u32]| list.iter().map(|&value| i64::from(value)).collect::<Vec<_>>();
        let constants = [layer.multipliers().to_vec(), wide(layer.sizes()), wide(layer.offsets())];
        for (number, (name, values)) in [1, 2, 1].into_iter().zip(CONSTANTS.iter().zip(constants)) {
            sketch.add(number, tensor(format!("{PLE}{name}"), "I64", &[values.len() as u64], longs(&values)));
        }
        let rows = u64::from(layer.padded_rows());
        let (each, element) = (
            rows.div_ceil(parts),
            if dtype == "F8_E4M3" {
                1
            } else if dtype == "F32" {
                4
            } else {
                2
            },
        );
        for shard in 0..parts {
            let rows = ((shard + 1) * each).min(rows) - (shard * each).min(rows);
            let name = format!("{PLE}ngram_embedding.shard_{shard}.weight");
            // Bytes that make no NaN whatever the element is.
            sketch.add(1 + (shard % 2) as u32, tensor(name, dtype, &[rows, 40], bytes(rows * 40 * element)));
        }
        if dtype == "F8_E4M3" {
            sketch.config["quantization_config"] = json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
            sketch.add(
                2,
                tensor(format!("{PLE}ngram_embedding.weight_scale"), "F32", &[], 0.5_f32.to_le_bytes().to_vec()),
            );
        }
        sketch
    }

    pub(crate) fn layout(&self) -> Layout {
        let text = serde_json::to_vec(&self.config).expect("a value is JSON");
        Layout::from_config(&ModelConfig::from_json(&text).expect("a sound config")).expect("a sound layout")
    }

    pub(crate) fn add(&mut self, number: u32, tensor: Tensor) {
        self.files.entry(file(number)).or_default().push(tensor);
    }

    pub(crate) fn find(&mut self, name: &str) -> &mut Tensor {
        self.files.values_mut().flatten().find(|tensor| tensor.name == name).expect("a tensor of the sketch")
    }

    pub(crate) fn remove(&mut self, name: &str) -> Tensor {
        for tensors in self.files.values_mut() {
            if let Some(place) = tensors.iter().position(|tensor| tensor.name == name) {
                return tensors.remove(place);
            }
        }
        panic!("{name} is not in the sketch")
    }

    /// Changes a tensor's shape and gives it as many bytes as its dtype then needs.
    pub(crate) fn reshape(&mut self, name: &str, dtype: &str, shape: &[u64], bits: u64) {
        let data = bytes(shape.iter().product::<u64>() * bits / 8);
        *self.find(name) = tensor(name, dtype, shape, data);
    }

    pub(crate) fn index(&self) -> Value {
        let placed =
            self.files.iter().flat_map(|(file, tensors)| tensors.iter().map(move |t| (t.name.clone(), json!(file))));
        json!({"metadata": {"total_size": 1}, "weight_map": serde_json::Map::from_iter(placed)})
    }

    pub(crate) fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().expect("a folder for the test");
        fs::write(folder.path().join("config.json"), self.config.to_string()).expect("written");
        for (name, tensors) in &self.files {
            fs::write(folder.path().join(name), encode(tensors)).expect("written");
        }
        if self.indexed {
            fs::write(folder.path().join("model.safetensors.index.json"), self.index().to_string()).expect("written");
        }
        folder
    }

    /// The faults of the checkpoint as it stands.
    pub(crate) fn faults(&self) -> Vec<String> {
        codes(&judge(self.write().path()))
    }
}

/// A safetensors file, its tensors in the order given.
pub(crate) fn encode(tensors: &[Tensor]) -> Vec<u8> {
    let mut offset = 0;
    let entries = tensors.iter().map(|tensor| {
        let start = offset;
        offset += tensor.data.len();
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, offset]});
        format!("{}:{entry}", json!(tensor.name))
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let data: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.data.iter().copied()).collect();
    raw(&header, &data)
}

/// A file of any header and any data.
pub(crate) fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

pub(crate) fn judge(folder: &Path) -> Report {
    judge_with(folder, |_| ())
}

pub(crate) fn judge_with(folder: &Path, change: impl FnOnce(&mut Options<'_>)) -> Report {
    let mut options = Options::default();
    change(&mut options);
    validate(folder, &options).expect("every file can be read")
}

/// The codes of a report, warnings in brackets, and a check of what holds for all of them.
pub(crate) fn codes(report: &Report) -> Vec<String> {
    assert_eq!(report.ok, report.faults.iter().all(|fault| fault.severity == Severity::Warning));
    for fault in &report.faults {
        // These are worded by the crates that found them.
        let codes =
            [FaultCode::FamilyUnknown, FaultCode::ConstantsInvalid, FaultCode::ConfigMissing, FaultCode::ConfigField];
        let terse = codes.contains(&fault.code);
        assert!(fault.message.contains("expected") || terse, "{fault}");
    }
    let code = |fault: &engram_loader::Fault| match fault.severity {
        Severity::Warning => format!("({})", fault.code),
        _ => fault.code.to_string(),
    };
    report.faults.iter().map(code).collect()
}
