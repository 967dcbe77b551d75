//! What reading untrusted bytes has to keep, whatever they are: no panic, no hang, and only sound results accepted.
//!
//! Each function takes one input and panics when something is wrong.
#![expect(clippy::missing_panics_doc, reason = "a panic is how these functions say what they found")]

use engram_core::{Hasher, Layout, ModelConfig, Preset, TableConfig, TokenMap};
use engram_loader::{Error, Header, Options, Requests, Severity, Tokenizer, validate};
use engram_ple::{Matching, QuantConfig, Selector};
use std::fs;
use std::path::Path;

/// A safetensors file: once `input` as it is, once with a right length prefix before it and as many zero bytes behind it as its first two
/// bytes say. `folder` is empty, or was used here before.
pub fn header(input: &[u8], folder: &Path) {
    header_of(input, folder);
    if let Some((tail, json)) = input.split_first_chunk::<2>() {
        let prefix = (json.len() as u64).to_le_bytes();
        header_of(&[&prefix[..], json, &vec![0; usize::from(u16::from_le_bytes(*tail))]].concat(), folder);
    }
}

fn header_of(file: &[u8], folder: &Path) {
    let path = folder.join("model.safetensors");
    fs::write(&path, file).expect("the folder can be written");
    let header = match Header::read(&path, 1 << 16) {
        Ok(header) => header,
        Err(Error::Refused(fault)) => {
            assert!(!fault.message.is_empty());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    // What was accepted tiles the file, with as many bytes as dtypes and shapes say and no name twice.
    let mut ranges = Vec::new();
    for tensor in header.tensors() {
        assert!(tensor.is_sound());
        assert_eq!(header.tensor(tensor.name()), Some(tensor), "a name twice");
        let range = tensor.byte_range();
        if let Some(bits) = tensor.dtype().bits() {
            let elements = tensor.shape().iter().product::<u64>();
            assert_eq!(u128::from(elements) * u128::from(bits), u128::from(range.end - range.start) * 8);
        }
        ranges.push((range.start, range.end));
    }
    ranges.sort_unstable();
    let end = ranges.iter().fold(header.data_start(), |end, &(start, next)| {
        assert_eq!(start, end, "a gap or an overlap");
        next
    });
    assert_eq!(end, file.len() as u64);
}

/// An index, in a `folder` that holds a checkpoint but for it: files, and a config.json if the index is to be read against one.
pub fn index(input: &[u8], folder: &Path) {
    fs::write(folder.join("model.safetensors.index.json"), input).expect("the folder can be written");
    let mut options = Options::default();
    options.header_cap = 1 << 20;
    options.threads = 1;
    options.tokenizer = Tokenizer::Unchecked;
    let report = validate(folder, &options).expect("the folder can be read");
    assert_eq!(report.ok, report.faults.iter().all(|fault| fault.severity != Severity::Error));
    assert!(report.tables.len() <= 1, "there is one layer");
    if report.ok {
        assert_eq!(report.tables.len(), 1);
    }
}

/// A config.json.
pub fn config(input: &[u8]) {
    let Ok(config) = ModelConfig::from_json(input) else { return };
    if let Some(quantization) = &config.quantization {
        let _ = QuantConfig::from_json(quantization);
    }
    // Primes of large tables take time that says nothing about the reading.
    let (layers, rows) = match &config.table {
        TableConfig::Engram(engram) => (engram.layer_ids.len(), engram.vocab_size),
        TableConfig::Ple(ple) => (ple.layer_ids.len(), ple.vocab_base),
    };
    if layers > 8 || rows > 1 << 16 {
        return;
    }
    let Ok(layout) = Layout::from_config(&config) else { return };
    assert_eq!(layout.layers().len(), layers);
    for layer in layout.layers() {
        assert_eq!(layer.sizes().len(), layout.columns());
        assert_eq!(layer.multipliers().len(), layout.ngram_size());
        let mut offset = 0;
        for (&size, &start) in layer.sizes().iter().zip(layer.offsets()) {
            assert_eq!(start, offset);
            assert!(size > 0);
            offset += size;
        }
        assert_eq!(offset, layer.total_rows());
        assert!(layer.total_rows() <= layer.padded_rows() && i32::try_from(layer.padded_rows()).is_ok());
    }
}

/// Requests, held against a small model of each family.
pub fn requests(input: &[u8]) {
    let Ok(requests) = Requests::from_json(input) else { return };
    for preset in [Preset::TinyEngram, Preset::TinyPle] {
        let config = preset.config();
        let layout = Layout::from_config(&config).expect("presets have a layout");
        let map = match &config.table {
            TableConfig::Engram(engram) => {
                let raw = engram.raw_vocab_size.unwrap_or(engram.compressed_vocab_size);
                let ids: Vec<u32> = (0..raw).map(|id| id.min(engram.compressed_vocab_size - 1)).collect();
                Some(TokenMap::new(&ids).expect("ids in the order of their first appearance"))
            }
            TableConfig::Ple(_) => None,
        };
        for map in [map.as_ref(), None] {
            let Ok(input) = requests.resolve(&config, &layout, map) else { continue };
            let batch = input.batch();
            let hasher = Hasher::new(&layout, input.fill()).expect("the fill fits the layout");
            let columns = layout.layers().len() * layout.columns();
            let mut ids = vec![i32::MIN; batch.tokens.len() * columns];
            hasher.ids(&batch, &mut ids).expect("resolved requests can be hashed");
            for (place, &id) in ids.iter().enumerate() {
                let layer = &layout.layers()[place / layout.columns() % layout.layers().len()];
                assert!(u32::try_from(id).is_ok_and(|id| id < layer.total_rows()), "id {id}");
            }
        }
    }
}

/// A quantization config, asked about tables under several names.
pub fn quant_config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(config) = QuantConfig::from_json(text) else { return };
    assert!(!config.method().is_empty() || matches!(config, QuantConfig::Other(_)));
    let prefixes =
        ["", "model.layers.1.ple.ple_embedding.ngram_embedding", "model.language_model.layers.1.ple.kv_proj"];
    for prefix in prefixes {
        for matching in [Matching::Exact, Matching::Substring, Matching::Suffix] {
            let selector = Selector::new().matching(matching).fused(&[("kv_proj", &["key_proj", "value_proj"])]);
            let selection = selector.select(Some(&config), prefix, None);
            assert_eq!(selection, selector.select(Some(&config), prefix, None), "it depends on nothing else");
            let declared = selector.select(Some(&config), prefix, Some("float8_e4m3fn"));
            assert_eq!(declared, Ok(engram_ple::Selection::E4m3Global));
        }
    }
}
