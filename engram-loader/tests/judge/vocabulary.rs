//! The compressed vocabulary against the config.

use std::fs;
use std::path::Path;

use engram_loader::{Checkpoint, Error, FaultCode, Options, Tokenizer, validate};

use crate::sketch::{Sketch, codes, judge, judge_with};

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden/tokens/tokenizer.json");
/// Compressed ids of that tokenizer.
const COMPRESSED: u32 = 288;

#[test]
fn size_is_compared_with_the_config() {
    let mut sketch = Sketch::engram();
    for (size, expected) in
        [(COMPRESSED, &[][..]), (COMPRESSED - 1, &["vocab-mismatch"]), (COMPRESSED + 1, &["vocab-mismatch"])]
    {
        sketch.config["engram_compressed_vocab_size"] = size.into();
        let folder = sketch.write();
        let asked = judge_with(folder.path(), |options| options.tokenizer = Tokenizer::File(TOKENIZER.into()));
        assert_eq!(codes(&asked), expected);
        assert!(judge(folder.path()).faults.is_empty(), "without a tokenizer it is not checked");
        fs::copy(TOKENIZER, folder.path().join("tokenizer.json")).unwrap();
        assert_eq!(codes(&judge(folder.path())), expected);
        let checkpoint = Checkpoint::open(folder.path(), &Options::default()).unwrap();
        assert_eq!(checkpoint.token_map().is_some(), expected.is_empty());
        let allowed = judge_with(folder.path(), |options| options.allow = vec![FaultCode::VocabMismatch]);
        assert!(allowed.ok);
        let unchecked = judge_with(folder.path(), |options| options.tokenizer = Tokenizer::Unchecked);
        assert!(unchecked.faults.is_empty());
    }
}

#[test]
fn files_that_are_no_tokenizer() {
    let folder = Sketch::engram().write();
    let path = folder.path().join("tokenizer.json");
    for text in
        ["", "{}", "null", "not json", "version https://git-lfs.github.com/spec/v1", "{\"model\": {\"vocab\": {}}}"]
    {
        fs::write(&path, text).unwrap();
        let report = judge(folder.path());
        assert_eq!(codes(&report), ["vocab-mismatch"], "{text}");
        assert_eq!(report.faults[0].file.as_deref(), Some("tokenizer.json"));
        // PLE hashes raw ids and needs none.
        let ple = Sketch::ple("BF16", 4).write();
        fs::write(ple.path().join("tokenizer.json"), text).unwrap();
        assert!(judge(ple.path()).faults.is_empty());
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(codes(&judge(folder.path())), ["vocab-mismatch"]);
    let mut options = Options::default();
    options.tokenizer = Tokenizer::File(Path::new("/nowhere/tokenizer.json").into());
    assert!(
        matches!(validate(folder.path(), &options), Err(Error::Io { path, .. }) if path.ends_with("tokenizer.json"))
    );
}
