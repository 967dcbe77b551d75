//! Made-up checkpoints, read back with the safetensors crate.
#![expect(clippy::unwrap_used, reason = "a failure to set a test up fails the test")]

use engram_core::Preset;
use engram_loader::{Error, Pool, Synth};
use engram_ple::{FormatKind, TableSource};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

fn write(synth: &Synth, out: &Path) {
    synth.write(out, &Pool::new(2), &()).unwrap();
}

/// Every tensor of a folder: dtype, shape, bytes. The index has to name exactly these.
fn tensors(folder: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("model.safetensors.index.json")).unwrap()).unwrap();
    let mut tensors = BTreeMap::new();
    let mut weight_map = serde_json::Map::new();
    let mut total = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            for (name, view) in file.tensors() {
                total += view.data().len();
                weight_map.insert(name.clone(), path.file_name().unwrap().to_str().unwrap().into());
                let tensor = (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec());
                assert!(tensors.insert(name, tensor).is_none());
            }
        }
    }
    assert_eq!(index["weight_map"], serde_json::Value::Object(weight_map));
    assert_eq!(index["metadata"]["total_size"], total);
    tensors
}

#[test]
fn tables_hold_the_rows_of_the_synthetic_source() {
    let folder = tempfile::tempdir().unwrap();
    for (preset, names) in [
        (Preset::TinyEngram, ["layers.1.engram.embed.", "layers.3.engram.embed."].as_slice()),
        (Preset::TinyPle, &["model.language_model.layers.1.ple.ple_embedding.ngram_embedding."]),
    ] {
        for kind in FormatKind::ALL {
            let synth = Synth::new(preset, 0.5, Some(kind), 3).unwrap();
            let out = folder.path().join(format!("{preset}-{kind}"));
            write(&synth, &out);
            let tensors = tensors(&out);
            for (table, name) in synth.tables().unwrap().iter().zip(names) {
                let (mut values, mut scales) = (Vec::new(), Vec::new());
                let mut row = vec![0; table.format().row_bytes()];
                for at in 0..table.rows() {
                    table.read_range(at..at + 1, &mut row).unwrap();
                    values.extend_from_slice(&row[..table.format().value_bytes()]);
                    scales.extend_from_slice(&row[table.format().value_bytes()..]);
                }
                let stored: Vec<u8> = match preset {
                    Preset::TinyPle => {
                        (0..4).flat_map(|k| tensors[&format!("{name}shard_{k}.weight")].2.clone()).collect()
                    }
                    _ => tensors[&format!("{name}weight")].2.clone(),
                };
                assert!(stored == values, "{preset} {kind}");
                let suffix = if preset == Preset::TinyPle { "weight_scale" } else { "scale" };
                let scale = tensors.get(&format!("{name}{suffix}"));
                match kind {
                    FormatKind::E4m3E8m0x32 => assert!(scale.unwrap().2 == scales),
                    FormatKind::E4m3Global => {
                        assert_eq!(scale.unwrap().2, table.format().global_scale().unwrap().to_le_bytes());
                    }
                    _ => assert!(scale.is_none()),
                }
            }
        }
    }
}

#[test]
fn the_official_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("engram");
    write(&Synth::new(Preset::DeepseekV41Flash, 0.00001, None, 0).unwrap(), &out);
    let files = std::fs::read_dir(&out).unwrap().count();
    assert_eq!(files, 48 + 2);
    let index = std::fs::read_to_string(out.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["weight_map"]["layers.1.engram.embed.weight"], "model-00047-of-00048.safetensors");
    assert_eq!(index["weight_map"]["layers.1.engram.embed.scale"], "model-00047-of-00048.safetensors");
    assert_eq!(index["weight_map"]["layers.14.engram.embed.weight"], "model-00048-of-00048.safetensors");
    let (dtype, shape, _) = &tensors(&out)["layers.14.engram.embed.scale"];
    assert_eq!((dtype.as_str(), shape[1]), ("F8_E8M0", 8));

    let out = folder.path().join("ple");
    write(&Synth::new(Preset::Qwen38FlashNext, 0.0001, None, 0).unwrap(), &out);
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 131 + 2);
    let tensors = tensors(&out);
    let module = "model.language_model.layers.1.ple.ple_embedding.";
    assert_eq!(tensors[&format!("{module}layer_multipliers")].0, "I64");
    assert_eq!(tensors[&format!("{module}ngram_heads_offsets")].1, [16]);
    assert_eq!(tensors[&format!("{module}ngram_heads_vocab_sizes")].1, [16]);
    assert_eq!(tensors[&format!("{module}ngram_embedding.shard_127.weight")].0, "BF16");
    assert_eq!(tensors[&format!("{module}ngram_embedding.shard_0.weight")].1[1], 160);
}

#[test]
fn same_seed_same_bytes_and_another_seed_others() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str, seed| {
        let out = folder.path().join(name);
        write(&Synth::new(Preset::TinyPle, 1.0, None, seed).unwrap(), &out);
        std::fs::read(out.join("model-00002-of-00003.safetensors")).unwrap()
    };
    let first = make("a", 1);
    assert!(first == make("b", 1));
    assert!(first != make("c", 2));
}

#[test]
fn nothing_is_overwritten_and_nothing_half_written_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let synth = Synth::new(Preset::TinyEngram, 1.0, None, 0).unwrap();
    let pool = Pool::new(1);
    let out = folder.path().join("ckpt");
    std::fs::create_dir(&out).unwrap();
    // An empty folder is taken.
    synth.write(&out, &pool, &()).unwrap();
    assert!(matches!(synth.write(&out, &pool, &()), Err(Error::Exists { .. })));
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(matches!(synth.write(&file, &pool, &()), Err(Error::Exists { .. })));
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    assert!(matches!(synth.write(&link, &pool, &()), Err(Error::Exists { .. })));
    assert!(matches!(synth.write(&folder.path().join("no/such/folder"), &pool, &()), Err(Error::Io { .. })));
    // Something that appears meanwhile is not overwritten either.
    struct Meanwhile<'a>(&'a Path);
    impl engram_loader::Progress for Meanwhile<'_> {
        fn begin(&self, _: &str, _: u64) {
            std::fs::create_dir(self.0).unwrap();
            std::fs::write(self.0.join("theirs"), "x").unwrap();
        }
        fn advance(&self, _: u64) {}
    }
    let raced = folder.path().join("raced");
    assert!(matches!(synth.write(&raced, &pool, &Meanwhile(&raced)), Err(Error::Exists { .. })));
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["ckpt", "file", "link", "raced"]);
}

#[test]
fn scales_that_give_no_table() {
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-12, 1e9, 100.0] {
        assert!(matches!(Synth::new(Preset::DeepseekV41Flash, scale, None, 0), Err(Error::Config(_))), "{scale}");
    }
}
