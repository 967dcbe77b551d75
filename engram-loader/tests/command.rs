//! The `engram` command as others run it: what it prints, and how it exits.
#![cfg(feature = "cli")]
#![expect(clippy::unwrap_used, reason = "a failure to set a test up fails the test")]

use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden");

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engram"));
    command.args(args);
    command
}

fn engram(args: &[&str]) -> Output {
    command(args).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn exits(args: &[&str], code: i32) -> Output {
    let output = engram(args);
    assert_eq!(output.status.code(), Some(code), "engram {}\n{}", args.join(" "), stderr(&output));
    assert!(!stderr(&output).contains("panicked"), "engram {}\n{}", args.join(" "), stderr(&output));
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn json_of(args: &[&str], code: i32) -> Value {
    serde_json::from_slice(&exits(args, code).stdout).unwrap()
}

fn golden(path: &str) -> String {
    format!("{GOLDEN}/{path}")
}

fn checkpoints() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(golden("ckpt")).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    assert_eq!(folders.len(), 8);
    folders
}

/// The requests of a golden checkpoint as JSON, and the layers that are expected.
fn requests(folder: &Path) -> (String, Value) {
    let mut expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let layers = expected.as_object_mut().unwrap().remove("layers").unwrap();
    expected.as_object_mut().unwrap().remove("eos");
    (expected.to_string(), layers)
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn hash_gives_the_golden_ids() {
    let folder = tempfile::tempdir().unwrap();
    for checkpoint in checkpoints() {
        let (text, layers) = requests(&checkpoint);
        let file = folder.path().join("requests.json");
        std::fs::write(&file, &text).unwrap();
        let config = checkpoint.join("config.json");
        for model in [&checkpoint, &config] {
            let output = json_of(&["hash", model.to_str().unwrap(), "--requests", file.to_str().unwrap()], 0);
            assert_eq!(keys(&output), ["family", "layers"]);
            let family = if text.contains("compressed") { "engram" } else { "ple" };
            assert_eq!(output["family"], family);
            assert_eq!(output["layers"].as_array().unwrap().len(), layers.as_array().unwrap().len());
            for (found, expected) in output["layers"].as_array().unwrap().iter().zip(layers.as_array().unwrap()) {
                assert_eq!(keys(found), ["columns", "ids", "layer"]);
                assert_eq!((&found["layer"], &found["ids"]), (&expected["layer"], &expected["ids"]));
                assert_eq!(found["columns"], expected["ids"][0].as_array().unwrap().len());
            }
        }
        // From stdin, into a file: the same.
        let out = folder.path().join("ids.json");
        let args = ["hash", checkpoint.to_str().unwrap(), "--requests", "-", "--out", out.to_str().unwrap()];
        let mut child =
            command(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stdout.is_empty());
        let written: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
        assert_eq!(written["layers"][0]["ids"], layers[0]["ids"]);
    }
}

#[test]
fn lookup_gives_the_golden_rows_from_every_tier() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("requests.json"), folder.path().join("rows.safetensors"));
    for checkpoint in checkpoints() {
        let (text, layers) = requests(&checkpoint);
        std::fs::write(&file, &text).unwrap();
        let run = |more: &[&str]| {
            let path = [checkpoint.to_str().unwrap(), file.to_str().unwrap(), out.to_str().unwrap()];
            exits(&[&["lookup", path[0], "--requests", path[1], "--out", path[2]], more].concat(), 0);
            std::fs::read(&out).unwrap()
        };
        for tier in [&[][..], &["--tier", "mapped"], &["--tier", "direct"], &["--tier", "resident"]] {
            let bytes = run(tier);
            let rows = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(rows.names().len(), layers.as_array().unwrap().len());
            for layer in layers.as_array().unwrap() {
                let view = rows.tensor(&format!("layer.{}.rows", layer["layer"])).unwrap();
                let bits = &layer["bf16_bits"];
                let shape = [bits, &bits[0], &bits[0][0]].map(|level| level.as_array().unwrap().len());
                assert_eq!((view.dtype(), view.shape()), (Dtype::BF16, &shape[..]));
                let found: Vec<u64> =
                    view.data().chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]).into()).collect();
                assert!(found == flat(bits), "{} {tier:?}", checkpoint.display());
            }
        }
        for (name, dtype, width) in [("f16", Dtype::F16, 2), ("f32", Dtype::F32, 4), ("bf16", Dtype::BF16, 2)] {
            let bytes = run(&["--dtype", name]);
            let rows = SafeTensors::deserialize(&bytes).unwrap();
            for (_, view) in rows.tensors() {
                assert_eq!(view.dtype(), dtype);
                assert_eq!(view.data().len(), view.shape().iter().product::<usize>() * width);
            }
        }
    }
    // Only the output and the requests are there, nothing half-written.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

fn flat(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        number => vec![number.as_u64().unwrap()],
    }
}

/// Faults that `hash` and `lookup` see too: those of tables, found without reading rows.
#[test]
fn broken_checkpoints_are_refused_by_validate_hash_and_lookup() {
    let manifest: Value = serde_json::from_slice(&std::fs::read(golden("broken/manifest.json")).unwrap()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let rows = out.path().join("rows.safetensors");
    for entry in manifest.as_array().unwrap() {
        let folder = golden(&format!("broken/{}", entry["dir"].as_str().unwrap()));
        let codes: Vec<&str> = entry["fault"].as_str().unwrap().split('|').collect();
        let is_error = entry["severity"] == "error";
        let deep: &[&str] = if entry["deep"] == true { &["--deep"] } else { &[] };
        let args = [&["validate", folder.as_str(), "--format", "json"], deep].concat();
        let report = json_of(&args, i32::from(is_error));
        assert_eq!(report["ok"], !is_error);
        let faults = report["faults"].as_array().unwrap();
        let named = |fault: &&Value| codes.contains(&fault["code"].as_str().unwrap());
        let fault = faults.iter().find(named).unwrap_or_else(|| panic!("{folder}: {report}"));
        assert_eq!(fault["severity"], entry["severity"]);
        for fault in faults {
            assert!(keys(fault).iter().all(|key| ["code", "severity", "file", "tensor", "message"].contains(key)));
            assert!(fault["severity"] == "warning" || codes.contains(&fault["code"].as_str().unwrap()), "{fault}");
        }
        // The same in text, on stdout.
        let text = exits(&[&["validate", folder.as_str()], deep].concat(), i32::from(is_error)).stdout;
        let text = String::from_utf8(text).unwrap();
        assert!(
            codes.iter().any(|code| text.contains(&format!("{}[{code}]", entry["severity"].as_str().unwrap()))),
            "{text}"
        );

        let made_from = Path::new(GOLDEN).join("ckpt").join(entry["made_from"].as_str().unwrap());
        let file = out.path().join("requests.json");
        std::fs::write(&file, requests(&made_from).0).unwrap();
        let refused = is_error && deep.is_empty();
        let arguments = [folder.as_str(), "--requests", file.to_str().unwrap()];
        let hash = exits(&[&["hash"], &arguments[..]].concat(), i32::from(refused));
        assert_eq!(hash.stdout.is_empty(), refused);
        let lookup =
            exits(&[&["lookup"], &arguments[..], &["--out", rows.to_str().unwrap()]].concat(), i32::from(refused));
        for output in [hash, lookup] {
            assert!(!refused || codes.iter().any(|code| stderr(&output).contains(code)), "{}", stderr(&output));
        }
        assert_eq!(rows.exists(), !refused, "{folder}");
        let _ = std::fs::remove_file(&rows);
    }
}

#[test]
fn allowed_errors_are_warnings() {
    for (folder, code) in [("multiplier-changed", "constants-mismatch"), ("scale-zero", "scale-value")] {
        let folder = golden(&format!("broken/{folder}"));
        let report = json_of(&["validate", &folder, "--allow", code, "--format", "json"], 0);
        assert_eq!((&report["ok"], &report["faults"][0]["severity"]), (&json!(true), &json!("warning")));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"requests": [{"tokens": [1, 2, 3]}]}"#).unwrap();
        let requests = file.path().to_str().unwrap();
        exits(&["hash", &folder, "--requests", requests], 1);
        exits(&["hash", &folder, "--requests", requests, "--allow", code], 0);
    }
}

#[test]
fn stored_constants_are_used_where_they_are_allowed_to_differ() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), r#"{"requests": [{"tokens": [1, 2, 3, 4, 5, 6]}]}"#).unwrap();
    let requests = file.path().to_str().unwrap();
    let changed = golden("broken/multiplier-changed");
    let stored = json_of(&["hash", &changed, "--requests", requests, "--allow", "constants-mismatch"], 0);
    let computed = json_of(&["hash", &golden("ckpt/ple-fp8-global"), "--requests", requests], 0);
    assert_ne!(stored["layers"], computed["layers"]);
}

#[test]
fn raw_tokens_and_the_tokenizer() {
    let tokenizer = golden("tokens/tokenizer.json");
    let expected: Value = serde_json::from_slice(&std::fs::read(golden("tokens/expected.json")).unwrap()).unwrap();
    // A model whose compressed vocabulary is that of the tokenizer.
    let size = expected["compressed"].as_u64().unwrap_or_else(|| panic!("{expected}"));
    let config = std::fs::read_to_string(golden("ckpt/engram-fp8-block32/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["engram_compressed_vocab_size"] = size.into();
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("config.json"), folder.path().join("requests.json"));
    std::fs::write(&path, config.to_string()).unwrap();
    let hash = |text: &str, more: &[&str], code| {
        std::fs::write(&file, text).unwrap();
        exits(&[&["hash", path.to_str().unwrap(), "--requests", file.to_str().unwrap()], more].concat(), code)
    };
    let raw = r#"{"requests": [{"tokens": [3, 4, 5]}]}"#;
    let with_tokenizer = ["--tokenizer", tokenizer.as_str()];
    assert!(stderr(&hash(raw, &[], 1)).contains("tokenizer"));
    let by_raw = hash(raw, &with_tokenizer, 0).stdout;
    let map = &expected["map"];
    let text = json!({"token_space": "compressed", "requests": [{"tokens": [map[3], map[4], map[5]]}]}).to_string();
    assert_eq!(hash(&text, &with_tokenizer, 0).stdout, by_raw);
    // One that lies beside the config is found.
    std::fs::copy(&tokenizer, folder.path().join("tokenizer.json")).unwrap();
    assert_eq!(hash(raw, &[], 0).stdout, by_raw);
    // Of another size than the config says.
    config["engram_compressed_vocab_size"] = (size + 1).into();
    std::fs::write(&path, config.to_string()).unwrap();
    assert!(stderr(&hash(raw, &[], 1)).contains("vocab-mismatch"));
    assert!(stderr(&hash(raw, &["--allow", "vocab-mismatch"], 0)).contains("warning[vocab-mismatch]"));
}

#[test]
fn a_tokenizer_of_another_size_hashes_what_the_config_has_room_for() {
    let folder = golden("broken/tokenizer-of-another-size");
    let file = tempfile::NamedTempFile::new().unwrap();
    let hash = |text: &str, more: &[&str], code| {
        std::fs::write(file.path(), text).unwrap();
        stderr(&exits(&[&["hash", &folder, "--requests", file.path().to_str().unwrap()], more].concat(), code))
    };
    let (few, allow) = (r#"{"requests": [{"tokens": [3, 4]}]}"#, ["--allow", "vocab-mismatch"]);
    assert!(hash(few, &[], 1).contains("error[vocab-mismatch]"));
    assert!(hash(few, &allow, 0).contains("warning[vocab-mismatch]"));
    // The config has 50 compressed ids.
    let message = hash(r#"{"requests": [{"tokens": [3, 200]}]}"#, &allow, 1);
    assert!(message.contains("request 0: tokens[1] is 200"), "{message}");
}

#[test]
fn requests_at_fault_are_named() {
    let folder = golden("ckpt/ple-bf16");
    let file = tempfile::NamedTempFile::new().unwrap();
    let out = tempfile::tempdir().unwrap();
    let rows = out.path().join("rows.safetensors");
    for (text, word) in [
        (r#"{"requests": [{"tokens": []}, {"tokens": [1, 4294967296]}]}"#, "request 1: tokens[1] is 4294967296"),
        (r#"{"requests": [{"tokens": [1], "contexts": []}]}"#, "unknown field `contexts`"),
        ("not JSON", "requests"),
    ] {
        std::fs::write(file.path(), text).unwrap();
        let requests = file.path().to_str().unwrap();
        let output = exits(&["hash", &folder, "--requests", requests], 1);
        assert!(stderr(&output).contains(word) && output.stdout.is_empty(), "{}", stderr(&output));
        let output = exits(&["lookup", &folder, "--requests", requests, "--out", rows.to_str().unwrap()], 1);
        assert!(stderr(&output).contains(word), "{}", stderr(&output));
    }
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn usage_errors_and_paths_that_are_not_there() {
    let folder = golden("ckpt/ple-bf16");
    let ids = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(ids.path(), r#"{"requests": []}"#).unwrap();
    let requests = ids.path().to_str().unwrap();
    let file = golden("ckpt/ple-bf16/model-00001-of-00002.safetensors");
    let empty = tempfile::tempdir().unwrap();
    let out = empty.path().join("out");
    let out = out.to_str().unwrap();
    for args in [
        &[][..],
        &["nonsense"],
        &["validate"],
        &["validate", "/no/such/folder"],
        &["validate", &file],
        &["validate", &folder, "--nonsense"],
        &["validate", &folder, "--format", "xml"],
        &["validate", &folder, "--allow", "nonsense"],
        &["validate", &folder, "--allow", "truncated"],
        &["validate", &folder, "--tokenizer", "/no/such/file"],
        &["inspect", "/no/such/folder"],
        &["inspect", &file],
        &["hash", &folder],
        &["hash", "/no/such/folder", "--requests", requests],
        &["hash", &folder, "--requests", "/no/such/file"],
        &["hash", &folder, "--requests", &folder],
        &["hash", &folder, "--requests", requests, "--allow", "shard-missing"],
        &["hash", &folder, "--requests", requests, "--out", "/no/such/folder/ids"],
        &["lookup", &folder, "--requests", requests],
        &["lookup", &folder, "--requests", requests, "--out", "/no/such/folder/rows"],
        &["lookup", &folder, "--requests", requests, "--out", out, "--dtype", "f64"],
        &["lookup", &folder, "--requests", requests, "--out", out, "--tier", "tape"],
        &["synth", "--preset", "tiny-ple", "--scale", "1", "--out", &folder],
        &["synth", "--preset", "tiny-ple", "--scale", "0", "--out", out],
        &["synth", "--preset", "tiny-ple", "--scale", "-1", "--out", out],
        &["synth", "--preset", "tiny-ple", "--scale", "nan", "--out", out],
        &["synth", "--preset", "deepseek-v4.1-flash", "--scale", "9", "--out", out],
        &["synth", "--preset", "huge", "--scale", "1", "--out", out],
        &["synth", "--preset", "tiny-ple", "--scale", "1", "--out", out, "--table-format", "int8"],
        &["synth", "--preset", "tiny-ple", "--scale", "1", "--out", "/no/such/folder/checkpoint"],
        &["bench", "hash", "--preset", "tiny-ple", "--tokens", "0"],
        &["bench", "hash", "--preset", "tiny-ple", "--tokens", "-5"],
        &["bench", "hash", "--preset", "tiny-ple", "--tokens", "4000000000"],
        &["bench", "rows", "/no/such/file", "--row-bytes", "160"],
        &["bench", "rows", &file],
        &["bench", "rows", &file, "--row-bytes", "0"],
        &["bench", "rows", &file, "--row-bytes", "99999999999"],
        &["bench", "rows", &file, "--row-bytes", "1000000", "--rows", "4000000000"],
        &["bench", "rows", &folder, "--row-bytes", "160"],
    ] {
        let output = exits(args, 2);
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
    for args in [&["--help"][..], &["help"], &["--version"], &["validate", "--help"], &["bench", "rows", "--help"]] {
        let output = exits(args, 0);
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn checkpoints_that_nobody_made() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    let report = json_of(&["validate", empty, "--format", "json"], 1);
    assert_eq!((&report["family"], &report["faults"][0]["code"]), (&Value::Null, &json!("config-missing")));
    let inspected = json_of(&["inspect", empty, "--format", "json"], 1);
    assert_eq!(inspected, json!({"family": null, "tables": [], "layout": []}));
    exits(&["inspect", empty], 1);
    exits(&["bench", "rows", empty], 1);
    let config = folder.path().join("other.json");
    std::fs::write(&config, r#"{"model_type": "llama"}"#).unwrap();
    let requests = folder.path().join("requests.json");
    std::fs::write(&requests, r#"{"requests": []}"#).unwrap();
    exits(&["hash", config.to_str().unwrap(), "--requests", requests.to_str().unwrap()], 1);
}

#[test]
fn what_never_ends_is_not_read_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let pipe = pipe.to_str().unwrap();
    let config = golden("ckpt/ple-bf16/config.json");
    let requests = folder.path().join("requests.json");
    std::fs::write(&requests, r#"{"requests": []}"#).unwrap();
    let requests = requests.to_str().unwrap();
    for (args, kind) in [
        (&["hash", pipe, "--requests", requests][..], "a FIFO, expected a regular file"),
        (&["hash", "/dev/zero", "--requests", requests], "a character device, expected a regular file"),
        (&["hash", &config, "--requests", "/dev/zero"], "a character device, expected a file or a pipe"),
        (&["bench", "rows", pipe, "--row-bytes", "10"], "a FIFO, expected a regular file"),
        (&["bench", "rows", "/dev/zero", "--row-bytes", "10"], "a character device, expected a regular file"),
    ] {
        let message = stderr(&exits(args, 1));
        assert!(message.contains(kind), "{args:?}: {message}");
    }
    // Longer than any requests are.
    let endless = std::fs::File::create(folder.path().join("endless")).unwrap();
    endless.set_len((256 << 20) + 1).unwrap();
    let endless = folder.path().join("endless");
    let message = stderr(&exits(&["hash", &config, "--requests", endless.to_str().unwrap()], 1));
    assert!(message.contains("more than 256.0 MiB are not read"), "{message}");
    // Requests may come through a pipe that has a name.
    let writer = std::thread::spawn({
        let pipe = pipe.to_owned();
        move || std::fs::write(pipe, r#"{"requests": [{"tokens": [1]}]}"#).unwrap()
    });
    exits(&["hash", &config, "--requests", pipe], 0);
    writer.join().unwrap();
}

#[test]
fn the_system_is_quoted_once_and_by_the_name_that_was_given() {
    let folder = golden("ckpt/ple-bf16");
    let ids = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(ids.path(), r#"{"requests": []}"#).unwrap();
    let requests = ids.path().to_str().unwrap();
    let synth = ["synth", "--preset", "tiny-ple", "--scale", "1", "--out", "/no/such/x"];
    for (args, place) in [
        (&["validate", "/no/such/x"][..], "/no/such/x"),
        (&["hash", "/no/such/x", "--requests", requests], "/no/such/x"),
        (&["hash", &folder, "--requests", "/no/such/x"], "/no/such/x"),
        (&["hash", &folder, "--requests", requests, "--out", "/no/such/x"], "--out /no/such/x: /no/such"),
        (&["lookup", &folder, "--requests", requests, "--out", "/no/such/x"], "--out /no/such/x: /no/such"),
        (&synth, "--out /no/such/x: /no/such"),
    ] {
        let expected = format!("engram: {place}: No such file or directory (os error 2)\n");
        assert_eq!(stderr(&exits(args, 2)), expected, "{args:?}");
    }
    for scale in ["-1", "nan", "0"] {
        let message = stderr(&exits(&["synth", "--preset", "tiny-ple", "--scale", scale, "--out", "/no/x"], 2));
        assert!(message.to_lowercase().contains(&format!("--scale {scale}")), "{message}");
    }
}

/// A copy of a golden checkpoint, to be changed.
fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(golden(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

#[test]
fn results_do_not_replace_what_they_are_made_from() {
    let copy = copy_of("ckpt/ple-bf16");
    let folder = copy.path().to_str().unwrap();
    let ids = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(ids.path(), r#"{"requests": [{"tokens": [1]}]}"#).unwrap();
    let requests = ids.path().to_str().unwrap();
    let other = tempfile::tempdir().unwrap();
    let link = other.path().join("link");
    std::os::unix::fs::symlink(copy.path().join("model-00002-of-00002.safetensors"), &link).unwrap();
    let own = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"];
    for out in own.map(|name| copy.path().join(name)).iter().chain([&link]) {
        let before = std::fs::read(out).unwrap();
        for command in ["lookup", "hash"] {
            let output = exits(&[command, folder, "--requests", requests, "--out", out.to_str().unwrap()], 2);
            assert!(stderr(&output).contains("the model's own"), "{}", stderr(&output));
        }
        assert!(std::fs::read(out).unwrap() == before);
    }
    let config = copy.path().join("config.json");
    let config = config.to_str().unwrap();
    exits(&["hash", config, "--requests", requests, "--out", config], 2);
    // Any other file is replaced, in the checkpoint's folder too.
    let out = copy.path().join("rows.of-requests");
    for _ in 0..2 {
        exits(&["lookup", folder, "--requests", requests, "--out", out.to_str().unwrap()], 0);
    }
}

#[test]
fn a_tokenizer_is_judged_alike_for_a_checkpoint_and_for_its_config() {
    let copy = copy_of("ckpt/engram-fp8-block32");
    let tokenizer = copy.path().join("tokenizer.json");
    let _ = std::fs::remove_file(&tokenizer);
    let ids = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(ids.path(), r#"{"token_space": "compressed", "pad_id": 1, "requests": [{"tokens": [3]}]}"#).unwrap();
    let requests = ids.path().to_str().unwrap();
    let config = copy.path().join("config.json");
    for model in [copy.path(), &config] {
        let hash = |more: &[&str], code| {
            stderr(&exits(&[&["hash", model.to_str().unwrap(), "--requests", requests], more].concat(), code))
        };
        assert_eq!(hash(&[], 0), "not checked: compressed vocabulary: there is no tokenizer.json\n");
        assert!(hash(&["--tokenizer", "/no/such/file"], 2).contains("/no/such/file"));
        std::fs::write(&tokenizer, "garbage").unwrap();
        for more in [&[][..], &["--tokenizer", tokenizer.to_str().unwrap()], &["--tokenizer", "/dev/zero"]] {
            assert!(hash(more, 1).contains("error[vocab-mismatch]"));
            let message = hash(&[more, &["--allow", "vocab-mismatch"]].concat(), 0);
            assert!(message.starts_with("warning[vocab-mismatch]") && message.lines().count() == 1, "{message}");
        }
        std::fs::remove_file(&tokenizer).unwrap();
    }
}

#[test]
fn every_fault_code_is_documented_once() {
    let readme = include_str!("../README.md");
    for code in engram_loader::FaultCode::ALL {
        assert_eq!(readme.matches(&format!("\n| `{code}` |")).count(), 1, "{code}");
    }
}

#[test]
fn help_tells_what_a_script_needs() {
    for (args, words) in [
        (&["--help"][..], &["Exit codes", "stdout", "stderr"][..]),
        (&["validate", "--help"], &["Exit codes", "stdout"]),
        (&["hash", "--help"], &["Exit codes", "stderr", "token_space", "lookback", "context"]),
        (&["lookup", "--help"], &["Exit codes", "stderr", "token_space", "lookback", "context"]),
        (&["synth", "--help"], &["an empty one to fill"]),
    ] {
        let help = String::from_utf8(exits(args, 0).stdout).unwrap();
        for word in words {
            assert!(help.contains(word), "{args:?}: {word}");
        }
    }
}

#[test]
fn a_file_that_may_not_be_read_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let folder = copy_of("ckpt/ple-bf16");
    let file = folder.path().join("model-00002-of-00002.safetensors");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o000)).unwrap();
    // Root reads it all the same.
    let code = if std::fs::File::open(&file).is_ok() { 0 } else { 2 };
    let output = exits(&["validate", folder.path().to_str().unwrap()], code);
    assert!(code == 0 || stderr(&output).contains("model-00002-of-00002.safetensors"));
}

#[test]
fn what_validate_and_inspect_print() {
    for checkpoint in checkpoints() {
        let folder = checkpoint.to_str().unwrap();
        let report = json_of(&["validate", folder, "--format", "json"], 0);
        assert_eq!(keys(&report), ["family", "faults", "files", "not_checked", "ok", "tables"]);
        assert_eq!((&report["ok"], &report["faults"]), (&json!(true), &json!([])), "{folder}");
        for table in report["tables"].as_array().unwrap() {
            assert_eq!(keys(table), ["bytes", "format", "layer", "row_width", "rows", "shards"]);
        }
        for file in report["files"].as_array().unwrap() {
            assert_eq!(keys(file), ["bytes", "file"]);
        }
        let deep = json_of(&["validate", folder, "--deep", "--format", "json"], 0);
        for file in deep["files"].as_array().unwrap() {
            assert_eq!(keys(file), ["bytes", "file", "xxh3"]);
            let hash = file["xxh3"].as_str().unwrap();
            assert!(hash.len() == 32 && hash.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f')));
        }
        let both = json_of(&["validate", folder, "--sha256", "--format", "json"], 0);
        assert_eq!(both["files"][0]["xxh3"], deep["files"][0]["xxh3"]);
        assert_eq!(both["files"][0]["sha256"].as_str().unwrap().len(), 64);

        let inspected = json_of(&["inspect", folder, "--format", "json"], 0);
        assert_eq!(keys(&inspected), ["family", "layout", "tables"]);
        assert_eq!(inspected["tables"], report["tables"]);
        for (layout, table) in inspected["layout"].as_array().unwrap().iter().zip(report["tables"].as_array().unwrap())
        {
            let padded = if inspected["family"] == "ple" { "padded_rows" } else { "total_rows" };
            assert_eq!((&layout["layer"], &layout[padded]), (&table["layer"], &table["rows"]));
            for list in ["sizes", "offsets", "multipliers"] {
                assert!(!layout[list].as_array().unwrap().is_empty());
            }
        }
        for args in [&["validate", folder][..], &["validate", folder, "--sha256"], &["inspect", folder]] {
            let output = exits(args, 0);
            let text = String::from_utf8(output.stdout).unwrap();
            // No escape sequences, no bars, and nothing on stderr: nobody is at the terminal.
            assert!(!text.contains('\x1b') && !text.contains('\r') && output.stderr.is_empty(), "{text}");
        }
    }
}

#[test]
fn synthetic_checkpoints_are_sound() {
    let folder = tempfile::tempdir().unwrap();
    for (preset, scale) in
        [("deepseek-v4.1-flash", "0.00002"), ("qwen3.8-flash-next", "0.00002"), ("tiny-engram", "1"), ("tiny-ple", "1")]
    {
        for format in [None, Some("bf16"), Some("f16"), Some("f32"), Some("e4m3-global"), Some("e4m3-e8m0-32")] {
            let out = folder.path().join(format!("{preset}-{}", format.unwrap_or("official")));
            let path = out.to_str().unwrap();
            let mut args = vec!["synth", "--preset", preset, "--scale", scale, "--out", path];
            args.extend(format.iter().flat_map(|format| ["--table-format", format]));
            let output = exits(&args, 0);
            assert!(output.stdout.is_empty());
            let report = json_of(&["validate", path, "--deep", "--format", "json"], 0);
            assert_eq!(report["faults"], json!([]), "{preset} {format:?}");
            if let Some(format) = format {
                assert_eq!(report["tables"][0]["format"], format);
            }
        }
    }
}

#[test]
fn a_full_disk_leaves_nothing() {
    // A small file system of one's own takes privileges, so the limit is one on the size of files: writing past it fails alike.
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "ulimit -f 100; trap '' XFSZ; exec {} synth --preset tiny-engram --scale 1 --out {}",
        env!("CARGO_BIN_EXE_engram"),
        folder.path().join("checkpoint").display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let folder = golden("ckpt/ple-bf16");
    let file = tempfile::NamedTempFile::new().unwrap();
    let tokens = vec![1; 200_000];
    std::fs::write(file.path(), json!({"requests": [{"tokens": tokens}]}).to_string()).unwrap();
    let args = ["hash", &folder, "--requests", file.path().to_str().unwrap()];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 10];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn benchmarks_print_what_others_read() {
    let hash = |preset: &str, more: &[&str]| {
        let args = ["bench", "hash", "--preset", preset, "--tokens", "1000", "--format", "json"];
        json_of(&[&args, more].concat(), 0)
    };
    for (preset, ids) in [("deepseek-v4.1-flash", 48), ("qwen3.8-flash-next", 16)] {
        let best = hash(preset, &["--threads", "1"]);
        assert!(best["ns_per_token"].as_f64().unwrap() > 0.0);
        assert_eq!((&best["ids_per_token"], &best["threads"]), (&json!(ids), &json!(1)));
        // Every way to compute them gives the same ids.
        assert_eq!(hash(preset, &["--threads", "2"])["checksum"], best["checksum"]);
        assert_eq!(hash(preset, &["--threads", "1", "--path", "portable"])["checksum"], best["checksum"]);
    }
    // numpy_hash.py with 1000 tokens gives this sum.
    assert_eq!(hash("deepseek-v4.1-flash", &[])["checksum"], 9_217_757_380_067_i64);

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![7; 200_000]).unwrap();
    for tier in ["mapped", "direct", "resident"] {
        for args in [&[file.path().to_str().unwrap(), "--row-bytes", "160"][..], &[&golden("ckpt/engram-fp8-block32")]]
        {
            let more = ["--tier", tier, "--rows", "5000", "--format", "json"];
            let result = json_of(&[&["bench", "rows"], args, &more].concat(), 0);
            assert_eq!(result["tier"], tier);
            assert!(result["ns_per_row"].as_f64().unwrap() > 0.0 && result["bytes_per_s"].as_f64().unwrap() > 0.0);
        }
    }
}

#[test]
fn the_demo_runs_through() {
    let output = exits(&["demo"], 0);
    let text = String::from_utf8(output.stdout).unwrap();
    for word in
        ["DeepSeek-V4.1-Flash", "Qwen3.8-Flash-Next", "synthesised", "proved", "hashed", "mapped", "direct", "resident"]
    {
        assert!(text.contains(word), "{text}");
    }
}
