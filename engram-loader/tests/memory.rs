//! Memory grows with what headers really hold, never with what they announce. Alone in its binary: the allocator counts for the whole
//! process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use engram_loader::{Options, Report, validate};
use serde_json::json;

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is also that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: usize = 1 << 20;

/// Judges a folder and gives the most memory that took, in bytes.
fn measure(folder: &Path, deep: bool) -> (Report, usize) {
    let mut options = Options::default();
    (options.deep, options.threads) = (deep, 2);
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let report = validate(folder, &options).expect("every file can be read");
    (report, PEAK.load(Ordering::Relaxed) - before)
}

/// A file of `len` bytes that begins with a prefix of `header_len` and then `head`; the rest is a hole.
fn sparse(path: &Path, header_len: u64, head: &[u8], len: u64) {
    let mut file = File::create(path).expect("created");
    file.write_all(&header_len.to_le_bytes()).expect("written");
    file.write_all(head).expect("written");
    file.set_len(len).expect("a file system with holes");
}

// One test, so that nothing else allocates meanwhile.
#[test]
fn memory_is_bounded_by_what_is_there() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder for the test");
    let path = folder.path().join("model.safetensors");

    // Announced, but not there.
    let nested = "[".repeat(1 << 20);
    let hostile: [(u64, &str); 8] = [
        (u64::MAX, "{}"),
        (1 << 40, "{}"),
        (255 << 20, ""),
        (255 << 20, "{"),
        (255 << 20, "{\"t\":{\"dtype\":\"U8\",\"shape\":["),
        (255 << 20, &nested),
        (2, "{}"),
        (62, "{\"t\":{\"dtype\":\"U8\",\"shape\":[18446744073709551615],\"data_offsets\":[0,1]}}"),
    ];
    for (header_len, head) in hostile {
        sparse(&path, header_len, head.as_bytes(), 8 << 30);
        let (report, peak) = measure(folder.path(), false);
        assert!(!report.ok && peak < MIB, "{peak} bytes for {header_len} {head:.40}: {:?}", report.faults);
    }

    // A sound table of 1.2 GiB, all zeros.
    let config = json!({"model_type": "qwen4_exp", "text_config": {
        "ple_layer_ids": [1], "ple_embed_dim": 2560, "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 500_000,
        "split_ngram_parts": 1, "eos_token_id": 3,
    }, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}});
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let rows = {
        let text = config.to_string();
        let config = engram_core::ModelConfig::from_json(text.as_bytes()).expect("a sound config");
        engram_core::Layout::from_config(&config).expect("a sound layout").layers()[0].padded_rows()
    };
    let table = "layers.0.ple.ple_embedding.ngram_embedding";
    let bytes = u64::from(rows) * 160;
    let header = json!({
        format!("{table}.weight_scale"): {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        format!("{table}.weight"): {"dtype": "F8_E4M3", "shape": [rows, 160], "data_offsets": [4, 4 + bytes]},
    })
    .to_string();
    let mut head = header.clone().into_bytes();
    head.extend_from_slice(&1.0_f32.to_le_bytes());
    sparse(&path, header.len() as u64, &head, 8 + header.len() as u64 + 4 + bytes);
    assert!(bytes > 1_200_000_000);
    let (report, peak) = measure(folder.path(), false);
    assert!(report.ok && peak < MIB, "{peak} bytes: {:?}", report.faults);
    let (report, peak) = measure(folder.path(), true);
    assert!(report.ok && report.files[0].xxh3.is_some() && peak < 8 * MIB, "{peak} bytes: {:?}", report.faults);
}
