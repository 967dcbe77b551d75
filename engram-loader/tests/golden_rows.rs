//! Ids and bf16 bits of every golden checkpoint, through all three tiers.
#![expect(clippy::unwrap_used, reason = "a failure to set a test up fails the test")]

use engram_core::Hasher;
use engram_loader::{Checkpoint, Direct, Mapped, Options, Pool, Requests, Resident, Tokenizer};
use engram_ple::TableSource;
use half::bf16;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

#[test]
fn ids_and_rows_of_the_golden_checkpoints() {
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden/ckpt"));
    let mut checked = 0;
    for entry in std::fs::read_dir(golden).unwrap() {
        let folder = entry.unwrap().path();
        let mut expected: Value =
            serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let layers = expected.as_object_mut().unwrap().remove("layers").unwrap();
        expected.as_object_mut().unwrap().remove("eos");
        let requests = Requests::from_json(expected.to_string().as_bytes()).unwrap();

        let mut options = Options::default();
        options.tokenizer = Tokenizer::Unchecked;
        let checkpoint = Checkpoint::open(&folder, &options).unwrap();
        assert!(checkpoint.report().ok, "{:?}", checkpoint.report());
        let (config, layout) = (checkpoint.config().unwrap(), checkpoint.layout().unwrap());
        let input = requests.resolve(config, layout, None).unwrap();
        let hasher = Hasher::new(layout, input.fill()).unwrap();
        let mut ids = vec![0; input.batch().tokens.len() * hasher.ids_per_token()];
        hasher.ids(&input.batch(), &mut ids).unwrap();

        let layers = layers.as_array().unwrap();
        assert_eq!(layers.len(), layout.layers().len());
        for (place, layer) in layers.iter().enumerate() {
            let number = u32::try_from(layer["layer"].as_u64().unwrap()).unwrap();
            assert_eq!(layout.layers()[place].layer(), number);
            let tokens = ids.chunks_exact(hasher.ids_per_token());
            let ids: Vec<i32> =
                tokens.flat_map(|token| &token[place * layout.columns()..][..layout.columns()]).copied().collect();
            assert_eq!(ids, flat(&layer["ids"]), "{} layer {number}", folder.display());

            let table = checkpoint.catalog().table(number).unwrap().extents();
            let pool = Arc::new(Pool::new(2));
            let tiers: [Box<dyn TableSource>; 3] = [
                Box::new(Mapped::new(table.clone(), Arc::clone(&pool))),
                Box::new(Direct::new(table.clone(), 3)),
                Box::new(Resident::load(table, pool, &()).unwrap()),
            ];
            for source in tiers {
                let mut rows = vec![0; ids.len() * source.format().row_bytes()];
                source.gather(&ids, &mut rows).unwrap();
                let mut decoded = vec![bf16::ZERO; ids.len() * source.format().width()];
                source.format().decode_bf16(&rows, &mut decoded);
                let bits: Vec<i32> = decoded.iter().map(|value| value.to_bits().into()).collect();
                assert!(bits == flat(&layer["bf16_bits"]), "{} layer {number}", folder.display());
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 3 * 11, "tables times tiers");
}

/// All numbers of nested lists, in order.
fn flat(value: &Value) -> Vec<i32> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        number => vec![i32::try_from(number.as_i64().unwrap()).unwrap()],
    }
}
