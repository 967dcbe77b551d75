//! Times how long the compressed vocabulary of a tokenizer.json takes, its parsing included.
//! usage: token_map TOKENIZER_JSON REPEATS     prints one JSON line: seconds (median), counts and the map's SHA-256.

use std::error::Error;
use std::time::Instant;

use engram_core::TokenMap;
use sha2::{Digest, Sha256};

#[expect(clippy::print_stdout, reason = "the result of the program")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let text = std::fs::read(args.next().ok_or("no tokenizer.json named")?)?;
    let repeats: usize = args.next().as_deref().unwrap_or("5").parse()?;
    let mut seconds = Vec::new();
    let mut map = TokenMap::from_tokenizer_json(&text)?;
    for _ in 0..repeats {
        let start = Instant::now();
        map = TokenMap::from_tokenizer_json(&text)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let bytes: Vec<u8> = map.ids().iter().flat_map(|id| id.to_le_bytes()).collect();
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let line = serde_json::json!({
        "tokens": map.ids().len(), "compressed": map.compressed_len(), "seconds": seconds[repeats / 2], "sha256": digest,
    });
    println!("{line}");
    Ok(())
}
