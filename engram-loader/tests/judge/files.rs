//! Faults of files, headers and the index.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use engram_loader::{Error, Header, Options, validate};
use safetensors::SafeTensors;
use serde_json::json;

use crate::sketch::{ENGRAM, PLE, Sketch, bytes, codes, encode, file, judge, judge_with, raw, tensor};

const CAP: u64 = engram_loader::DEFAULT_HEADER_CAP;

/// The code that a file of these bytes gets; "" for none. Whatever is accepted, the safetensors crate accepts too.
fn code(contents: &[u8]) -> String {
    code_under(CAP, contents)
}

fn code_under(cap: u64, contents: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    fs::write(&path, contents).unwrap();
    match Header::read(&path, cap) {
        Ok(header) => {
            let defined = header.tensors().iter().all(|tensor| tensor.dtype().bits().is_some());
            assert!(!defined || SafeTensors::deserialize(contents).is_ok(), "{:?}", String::from_utf8_lossy(contents));
            String::new()
        }
        Err(Error::Refused(fault)) => fault.code.to_string(),
        Err(error) => panic!("{error}"),
    }
}

/// The code of a header with `data` bytes behind it.
fn header(text: &str, data: usize) -> String {
    code(&raw(text, &vec![0; data]))
}

#[test]
fn files_of_another_kind_are_named() {
    let kinds: [(&[u8], &str); 14] = [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\n  <HTML><body>404", "HTML"),
        (b"<?xml version=\"1.0\"?><Error>", "HTML or XML"),
        (b"PK\x03\x04\x14\0\0\0\x08\0", "ZIP"),
        (b"\x80\x02}q\0X\x01\0\0\0", "pickle"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0", "pickle"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0", "gzip"),
        (b"\x28\xb5\x2f\xfd\x04\0\0\0\0", "Zstandard"),
        (b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        (b"\x93NUMPY\x01\0v\0{'descr'", "NumPy"),
        (b"\x89HDF\r\n\x1a\n\0\0", "HDF5"),
        (b"BZh91AY&SY", "bzip2"),
    ];
    for (contents, name) in kinds {
        let sketch = Sketch::engram();
        let folder = sketch.write();
        fs::write(folder.path().join(file(1)), contents).unwrap();
        let report = judge(folder.path());
        assert_eq!(codes(&report), ["not-safetensors"], "{name}");
        assert!(report.faults[0].message.contains(name), "{}", report.faults[0]);
        assert_eq!((report.tables.len(), report.files.len()), (1, 2));
    }
    // The first bytes of a sound file may equal a magic number: 0x8b1f is a length like any other.
    for len in [0x0280, 0x8b1f, 0x4b50] {
        let object = r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
        assert_eq!(header(&format!("{object:len$}"), 0), "");
    }
}

#[test]
fn special_files_are_refused_without_waiting() {
    let start = Instant::now();
    let place = |make: &dyn Fn(&Path)| {
        let folder = Sketch::engram().write();
        let path = folder.path().join(file(2));
        fs::remove_file(&path).unwrap();
        make(&path);
        let report = judge(folder.path());
        (codes(&report).join(" "), report.faults[0].message.clone())
    };
    let (code, message) = place(&|path| fs::create_dir(path).unwrap());
    assert!(code == "not-safetensors" && message.contains("a folder"), "{message}");
    let (code, message) = place(&|path| {
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    });
    assert!(code == "not-safetensors" && message.contains("a FIFO"), "{message}");
    let (code, message) = place(&|path| symlink("/dev/zero", path).unwrap());
    assert!(code == "not-safetensors" && message.contains("a device"), "{message}");
    let (code, message) = place(&|path| drop(std::os::unix::net::UnixListener::bind(path).unwrap()));
    assert!(code == "not-safetensors" && message.contains("socket"), "{message}");
    let (code, _) = place(&|path| symlink("nowhere", path).unwrap());
    assert_eq!(code, "missing-file");
    let (code, _) = place(&|path| symlink(path, path).unwrap());
    assert_eq!(code, "missing-file");
    let (code, message) = place(&|path| fs::write(path.with_extension("safetensors.incomplete"), "").unwrap());
    assert!(code == "missing-file" && message.contains("interrupted"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn links_to_files_elsewhere_are_followed() {
    let folder = Sketch::engram().write();
    let blobs = tempfile::tempdir().unwrap();
    let (link, blob) = (folder.path().join(file(1)), blobs.path().join("5f2c"));
    fs::rename(&link, &blob).unwrap();
    symlink(&blob, &link).unwrap();
    assert_eq!(codes(&judge(folder.path())), [""; 0]);
}

#[test]
fn lengths() {
    for short in 1..8 {
        assert_eq!(code(&vec![2; short]), "header-length", "{short}");
    }
    let object = "{}";
    for length in [3, 8, 1 << 31, 1 << 32, u64::MAX - 8, u64::MAX - 7, u64::MAX] {
        let mut contents = raw(object, b"");
        contents[..8].copy_from_slice(&length.to_le_bytes());
        assert_eq!(code(&contents), "header-length", "{length}");
    }
    assert_eq!(code(&0_u64.to_le_bytes()), "header-json");
    assert_eq!(code(&[0; 4096]), "header-json");
    let padded = format!("{object:100}");
    assert_eq!(code_under(100, &raw(&padded, b"")), "");
    assert_eq!(code_under(99, &raw(&padded, b"")), "header-length");
}

#[test]
fn headers_that_are_no_objects_of_tensors() {
    let tensor = |entry: &str| header(&format!("{{\"t\":{entry}}}"), 0);
    assert_eq!(header("{}", 0), "");
    for text in
        [" {}", "[]", "null", "\"{}\"", "{", "{}x", "{\"t\"}", "{\"t\":{}}", "{'t':{}}", "{}\0", "\u{feff}{}", "{,}"]
    {
        assert_eq!(header(text, 0), "header-json", "{text:?}");
    }
    assert_eq!(header("{}  \n\t ", 0), "");
    assert_eq!(tensor(r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#), "");
    assert_eq!(tensor(r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0],"note":{"a":[1,null,-2.5e3,"x"]}}"#), "");
    let wrong = [
        r#"{"shape":[0],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[0]}"#,
        r#"{"dtype":8,"shape":[0],"data_offsets":[0,0]}"#,
        r#"{"dtype":null,"shape":[0],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":0,"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[0.5],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[1e2],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":["0"],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[0],"data_offsets":[0]}"#,
        r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}"#,
        r#"{"dtype":"U8","shape":[0],"data_offsets":[-1,0]}"#,
        r#"{"dtype":"U8","shape":[0],"data_offsets":{"0":0}}"#,
        r#"{"dtype":"U8","shape":[0],"data_offsets":[0,1e400]}"#,
        "[]",
        "null",
        "7",
    ];
    for entry in wrong {
        assert_eq!(tensor(entry), "header-json", "{entry}");
    }
    for metadata in ["[]", "1", r#""x""#, r#"{"a":1}"#, r#"{"a":null}"#, r#"{"a":{"b":"c"}}"#] {
        assert_eq!(header(&format!("{{\"__metadata__\":{metadata}}}"), 0), "header-json", "{metadata}");
    }
    let nested = |depth| format!("{{\"__metadata__\":{}{}}}", "{\"a\":".repeat(depth), "}".repeat(depth));
    assert_eq!(header(&nested(200), 0), "header-json");
    assert_eq!(header(&nested(200_000), 0), "header-json");
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(tensor(&format!(r#"{{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":{deep}}}"#)), "header-json");
    let mut text = raw(r#"{"__metadata__":{"a":"?"}}"#, b"");
    *text.iter_mut().rev().nth(3).unwrap() = 0xff;
    assert_eq!(code(&text), "header-json");
}

#[test]
fn names_met_twice() {
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let twice = [
        format!(r#"{{"t":{entry},"t":{entry}}}"#),
        format!(
            r#"{{"t":{entry},"u":{{"dtype":"U8","shape":[0],"data_offsets":[1,1]}},"t":{{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}}}"#
        ),
        format!(r#"{{"t":{entry},"\u0074":{entry}}}"#),
        r#"{"t":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}"#.to_owned(),
        r#"{"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#.to_owned(),
        r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}}"#.to_owned(),
        r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1,"x":1}}"#.to_owned(),
        format!(r#"{{"__metadata__":{{}},"t":{entry},"__metadata__":{{}}}}"#),
        format!(r#"{{"__metadata__":{{"a":"1","a":"1"}},"t":{entry}}}"#),
    ];
    for text in twice {
        assert_eq!(header(&text, 1), "duplicate-key", "{text}");
    }
    let folder = Sketch::engram().write();
    let path = folder.path().join("model.safetensors.index.json");
    let first = file(1);
    for text in [
        format!(r#"{{"weight_map":{{"a":"{first}","a":"{first}"}}}}"#),
        format!(r#"{{"weight_map":{{"a":"{first}"}},"weight_map":{{"a":"{first}"}}}}"#),
        format!(r#"{{"metadata":{{}},"weight_map":{{"a":"{first}"}},"metadata":{{}}}}"#),
    ] {
        fs::write(&path, text).unwrap();
        assert_eq!(codes(&judge(folder.path())), ["duplicate-key"]);
    }
}

#[test]
fn offsets_sizes_and_ends() {
    let two = |a: [u64; 2], b: [u64; 2], data| {
        let entry = |range: [u64; 2]| json!({"dtype": "U8", "shape": [range[1].saturating_sub(range[0])], "data_offsets": range});
        header(&format!("{{\"a\":{},\"b\":{}}}", entry(a), entry(b)), data)
    };
    assert_eq!(two([0, 4], [4, 6], 6), "");
    assert_eq!(two([4, 6], [0, 4], 6), "");
    assert_eq!(two([0, 4], [4, 4], 4), "");
    assert_eq!(two([0, 0], [0, 0], 0), "");
    assert_eq!(two([0, 4], [0, 4], 4), "bad-offsets");
    assert_eq!(two([0, 4], [3, 6], 6), "bad-offsets");
    assert_eq!(two([0, 4], [5, 6], 6), "bad-offsets");
    assert_eq!(two([1, 4], [4, 6], 6), "bad-offsets");
    assert_eq!(two([0, 6], [2, 4], 6), "bad-offsets");
    assert_eq!(two([0, 4], [6, 4], 6), "bad-offsets");
    assert_eq!(two([0, 4], [u64::MAX - 3, 4], 6), "bad-offsets");
    assert_eq!(two([0, 4], [4, u64::MAX], 6), "bad-offsets");
    assert_eq!(two([0, 4], [4, u64::MAX - 8], 6), "bad-offsets");
    assert_eq!(two([0, 4], [4, 6], 5), "truncated");
    assert_eq!(two([0, 4], [4, 6], 0), "truncated");
    assert_eq!(two([0, 4], [4, u64::from(u32::MAX)], 6), "truncated");
    assert_eq!(two([0, 4], [4, 6], 7), "trailing-bytes");
    assert_eq!(two([0, 4], [4, 6], 6 + 4096), "trailing-bytes");
    assert_eq!(header("{}", 1), "trailing-bytes");

    let one = |dtype: &str, shape: &str, len: u64| {
        let text = format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{len}]}}}}"#);
        header(&text, usize::try_from(len).unwrap())
    };
    assert_eq!(one("F32", "[]", 4), "");
    assert_eq!(one("F4", "[2,3]", 3), "");
    assert_eq!(one("F4", "[3]", 2), "size-mismatch");
    assert_eq!(one("F4", "[3]", 1), "size-mismatch");
    assert_eq!(one("F6_E2M3", "[4]", 3), "");
    assert_eq!(one("F32", "[2]", 4), "size-mismatch");
    assert_eq!(one("F32", "[4294967296,4294967296]", 0), "size-mismatch");
    assert_eq!(one("F64", "[2305843009213693952]", 0), "size-mismatch");
    assert_eq!(one("U8", "[18446744073709551615,2,0]", 0), "size-mismatch");
    assert_eq!(one("U8", "[0,18446744073709551615,2]", 0), "");
    // Structure is judged without knowing the dtype.
    for dtype in ["X99", "f8_e8m0", "", "F8_E4M3FNUZ "] {
        assert_eq!(one(dtype, "[7]", 3), "", "{dtype}");
        let text = format!(r#"{{"t":{{"dtype":"{dtype}","shape":[7],"data_offsets":[18446744073709551612,4]}}}}"#);
        assert_eq!(header(&text, 3), "bad-offsets", "{dtype}");
    }
}

#[test]
fn one_cause_in_a_file_is_one_fault() {
    let weight = format!("{ENGRAM}weight");
    let broken = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>), cut: isize| {
        let folder = Sketch::engram().write();
        let path = folder.path().join(file(1));
        let contents = fs::read(&path).unwrap();
        let length = usize::try_from(u64::from_le_bytes(contents[..8].try_into().unwrap())).unwrap();
        let mut header = serde_json::from_slice(&contents[8..8 + length]).unwrap();
        change(&mut header);
        let mut data = contents[8 + length..].to_vec();
        data.resize(data.len().strict_add_signed(cut), 0);
        fs::write(path, raw(&serde_json::Value::from(header).to_string(), &data)).unwrap();
        let report = judge_with(folder.path(), |options| options.deep = true);
        // The other file's table is judged and read all the same.
        assert_eq!(report.tables.iter().filter(|table| table.layer == 3).count(), 1);
        codes(&report)
    };
    let scale = format!("{ENGRAM}scale");
    let end = |header: &serde_json::Map<String, serde_json::Value>, name: &str| {
        header[name]["data_offsets"][1].as_u64().unwrap()
    };
    assert_eq!(broken(&|_| (), 0), [""; 0]);
    // The last tensor's offsets are wrong; the file's length is right.
    for by in [1, 8, 1 << 40] {
        assert_eq!(broken(&|h| h[&scale]["data_offsets"][1] = json!(end(h, &scale) + by), 0), ["size-mismatch"]);
    }
    assert_eq!(broken(&|h| h[&scale]["data_offsets"][1] = json!(end(h, &scale) - 1), 0), ["size-mismatch"]);
    // One in the middle: neighbours no longer fit.
    assert_eq!(broken(&|h| h[&weight]["data_offsets"][1] = json!(end(h, &weight) + 1), 0), ["bad-offsets"]);
    assert_eq!(broken(&|h| h[&weight]["data_offsets"][1] = json!(end(h, &weight) - 1), 0), ["bad-offsets"]);
    assert_eq!(broken(&|h| h[&weight]["data_offsets"] = json!([9, 8]), 0), ["bad-offsets"]);
    assert_eq!(broken(&|h| drop(h.remove("layers.1.engram.q_weight")), 0), ["bad-offsets", "index-stale"]);
    assert_eq!(broken(&|_| (), -1), ["truncated"]);
    assert_eq!(broken(&|_| (), -500), ["truncated"]);
    assert_eq!(broken(&|_| (), 1), ["trailing-bytes"]);
    // Two causes are two faults.
    assert_eq!(broken(&|h| h[&weight]["shape"] = json!([121, 64]), 3), ["size-mismatch", "trailing-bytes"]);
    assert_eq!(
        broken(
            &|h| {
                h[&weight]["shape"] = json!([121, 64]);
                h[&scale]["shape"] = json!([121, 2]);
            },
            0
        ),
        ["size-mismatch", "size-mismatch"]
    );
}

#[test]
fn index_against_headers() {
    let change = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let sketch = Sketch::ple("F8_E4M3", 4);
        let folder = sketch.write();
        let mut index = sketch.index();
        change(index["weight_map"].as_object_mut().unwrap());
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        let report = judge(folder.path());
        (codes(&report).join(" "), report.faults.first().map(|fault| fault.message.clone()).unwrap_or_default())
    };
    let shard = |number| format!("{PLE}ngram_embedding.shard_{number}.weight");
    assert_eq!(change(&|_| ()).0, "");
    let (code, message) = change(&|map| map[&shard(1)] = json!(file(1)));
    assert!(code == "index-stale" && message.contains("it is in model-00002"), "{message}");
    let (code, message) = change(&|map| drop(map.insert("ghost".into(), json!(file(1)))));
    assert!(code == "index-stale" && message.contains("no file has it"), "{message}");
    let (code, message) = change(&|map| drop(map.insert("ghost".into(), json!("gone.safetensors"))));
    assert!(code == "missing-file" && message.contains("nothing"), "{message}");
    assert_eq!(change(&|map| drop(map.remove(&shard(2)))).0, "unindexed-tensor");
    assert_eq!(change(&|map| drop(map.remove(&format!("{PLE}ngram_embedding.weight_scale")))).0, "unindexed-tensor");
    assert_eq!(change(&|map| drop(map.remove(&format!("{PLE}layer_multipliers")))).0, "unindexed-tensor");
    // A shard by another name in the index than in the file is one thing placed wrongly and one not placed.
    let renamed = change(&|map| {
        let place = map.remove(&shard(3)).unwrap();
        map.insert(shard(4), place);
    });
    assert_eq!(renamed.0, "index-stale unindexed-tensor");
    for outside in ["/etc/passwd", "../x.safetensors", "a/../../x", "..", "", ".", "./", "a\0b"] {
        assert_eq!(change(&|map| map[&shard(0)] = json!(outside)).0, "index-json", "{outside:?}");
    }
    assert_eq!(change(&|map| map[&shard(0)] = json!(format!("./{}", file(1)))).0, "");
    for wrong in [json!(1), json!(null), json!(["x"])] {
        assert_eq!(change(&|map| map[&shard(0)] = wrong.clone()).0, "index-json");
    }
    let folder = Sketch::ple("F8_E4M3", 4).write();
    for text in [
        "",
        "[]",
        "{}",
        "null",
        "{\"weight_map\":{}",
        "{\"weight_map\":[]}",
        "{\"weight_map\":null}",
        "{\"weight_map\":{}}x",
    ] {
        fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
        assert_eq!(codes(&judge(folder.path())), ["index-json"], "{text:?}");
    }
    fs::write(folder.path().join("model.safetensors.index.json"), "{\"weight_map\":{}}").unwrap();
    assert_eq!(codes(&judge(folder.path())), ["(stray-file)", "(stray-file)", "table-missing"]);
}

#[test]
fn an_index_may_have_another_name() {
    let sketch = Sketch::engram();
    let folder = sketch.write();
    let usual = folder.path().join("model.safetensors.index.json");
    let other = folder.path().join("quant_model_weights.safetensors.index.json");
    fs::rename(&usual, &other).unwrap();
    fs::write(folder.path().join("old.safetensors"), encode(&[])).unwrap();
    assert_eq!(codes(&judge(folder.path())), ["(stray-file)"]);
    // The usual name wins; two unusual ones are too many.
    fs::write(&usual, sketch.index().to_string()).unwrap();
    fs::write(&other, "no index").unwrap();
    assert_eq!(codes(&judge(folder.path())), ["(stray-file)"]);
    fs::rename(&usual, folder.path().join("a.safetensors.index.json")).unwrap();
    assert_eq!(codes(&judge(folder.path())), ["index-json"]);
}

#[test]
fn one_tensor_in_two_files() {
    for indexed in [true, false] {
        let mut sketch = Sketch::engram();
        sketch.indexed = indexed;
        let copy = sketch.find(&format!("{ENGRAM}weight")).clone();
        sketch.add(2, copy);
        sketch.add(2, tensor("layers.1.engram.q_weight", "U8", &[3], bytes(3)));
        assert_eq!(sketch.faults(), ["duplicate-tensor", "duplicate-tensor"]);
    }
    // An old copy that the index does not name is only in the way.
    let sketch = Sketch::engram();
    let folder = sketch.write();
    fs::copy(folder.path().join(file(1)), folder.path().join("copy.safetensors")).unwrap();
    assert_eq!(codes(&judge(folder.path())), ["(stray-file)"]);
}

#[test]
fn a_hidden_file_is_the_only_fault() {
    for indexed in [true, false] {
        for number in [1, 2] {
            for sketch in [Sketch::engram(), Sketch::ple("F8_E4M3", 4), Sketch::ple("BF16", 4)] {
                let sketch = Sketch { indexed, ..sketch };
                let folder = sketch.write();
                fs::write(folder.path().join(file(number)), "version https://git-lfs.github.com/spec/v1").unwrap();
                let report = judge(folder.path());
                assert_eq!(codes(&report), ["not-safetensors"]);
                if indexed {
                    fs::remove_file(folder.path().join(file(number))).unwrap();
                    assert_eq!(codes(&judge(folder.path())), ["missing-file"]);
                }
            }
        }
    }
}

#[test]
fn paths_that_cannot_be_read_are_errors() {
    let folder = Sketch::engram().write();
    let missing = folder.path().join("nothing");
    assert!(matches!(validate(&missing, &Options::default()), Err(Error::Io { path, .. }) if path == missing));
    let path = folder.path().join("config.json");
    assert!(matches!(validate(&path, &Options::default()), Err(Error::NotAFolder { path: p }) if p == path));
    // A file that the system opens and then refuses to read: the memory of a process at address 0.
    let unreadable = folder.path().join(file(1));
    fs::remove_file(&unreadable).unwrap();
    symlink("/proc/self/mem", &unreadable).unwrap();
    match validate(folder.path(), &Options::default()) {
        Err(Error::Io { path, .. }) => assert_eq!(path, unreadable),
        // Its length is given as 0, so that it may also look empty.
        Ok(report) => assert_eq!(codes(&report), ["not-safetensors"]),
        Err(error) => panic!("{error}"),
    }
    drop(File::open(folder.path()).unwrap());
}
