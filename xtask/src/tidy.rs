//! `cargo xtask tidy`: the invariants of ARCHITECTURE.md that a machine can check. All violations are listed, not only the first.

use crate::process::{cargo, output};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Which crates of the workspace a crate may depend on; `true`: only behind its feature `cuda`.
const MAY_DEPEND_ON: [(&str, &[(&str, bool)]); 5] = [
    ("engram-core", &[]),
    ("engram-ple", &[("engram-core", false)]),
    ("engram-loader", &[("engram-core", false), ("engram-ple", false)]),
    ("engram-cuda", &[("engram-core", false), ("engram-ple", false)]),
    ("engram-symm", &[("engram-core", false), ("engram-ple", false), ("engram-cuda", true)]),
];

/// Folders whose sources never name CUDA: they build and pass their tests without it.
const NEVER_NAME_CUDA: [&str; 4] = ["engram-core/", "engram-ple/", "engram-loader/", "engram-symm/src/protocol"];

/// The only sources of crates that otherwise refuse `unsafe`, and what they need it for.
const UNSAFE_ALLOWED: [(&str, &[&str]); 4] = [
    ("engram-core/src/", &["engram-core/src/hash/avx512.rs"]),
    ("engram-ple/src/", &["engram-ple/src/dispatch.rs"]),
    ("xtask/src/", &["xtask/src/nvrtc.rs"]),
    ("tests/src/", &[]),
];

/// Crates whose types may appear in public items.
const MAY_BE_PUBLIC: [&str; 4] = ["std", "core", "alloc", "half"];

/// Every folder at the top of the repository that holds code.
const TOP_LEVEL: [&str; 8] =
    ["engram-core", "engram-cuda", "engram-symm", "engram-ple", "engram-loader", "xtask", "tests", "fuzz"];

pub(crate) fn run() -> Result<()> {
    let files = tracked_files()?;
    let mut faults = Vec::new();
    top_level(&files, &mut faults);
    dependencies(&mut faults)?;
    sources(&files, &mut faults)?;
    documents(&mut faults);
    for (name, _) in MAY_DEPEND_ON {
        public_types(name, &mut faults)?;
    }
    if !faults.is_empty() {
        bail!("{} violations\n{}", faults.len(), faults.join("\n"));
    }
    crate::print_line(&format!("tidy: {} files keep the invariants", files.len()));
    Ok(())
}

fn tracked_files() -> Result<Vec<String>> {
    let listed = output(Command::new("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    Ok(listed.lines().filter(|file| Path::new(file).exists()).map(str::to_owned).collect())
}

fn top_level(files: &[String], faults: &mut Vec<String>) {
    let folders: BTreeSet<&str> = files.iter().filter_map(|file| file.split_once('/')).map(|(top, _)| top).collect();
    for folder in folders.into_iter().filter(|top| !top.starts_with('.') && *top != "docs" && !TOP_LEVEL.contains(top))
    {
        faults.push(format!("{folder}/: not a folder of the workspace's layout"));
    }
}

/// Dependencies between crates point one way; `cust` stands behind engram-cuda's feature alone.
fn dependencies(faults: &mut Vec<String>) -> Result<()> {
    let metadata: Value =
        serde_json::from_str(&output(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--locked"]))?)?;
    for package in metadata["packages"].as_array().context("packages")? {
        let name = package["name"].as_str().context("name")?;
        let Some((_, allowed)) = MAY_DEPEND_ON.iter().find(|(crate_name, _)| *crate_name == name) else { continue };
        for dependency in package["dependencies"].as_array().context("dependencies")? {
            let (on, optional) = (dependency["name"].as_str().context("name")?, dependency["optional"] == true);
            let normal = dependency["kind"].is_null();
            if on.starts_with("engram-")
                && normal
                && !allowed.iter().any(|(may, behind_feature)| *may == on && (!behind_feature || optional))
            {
                faults.push(format!("{name}: may not depend on {on}"));
            }
            if on.starts_with("cust") && normal && (name != "engram-cuda" || !optional) {
                faults.push(format!("{name}: {on} belongs behind engram-cuda's feature `cuda`"));
            }
        }
        if package["features"]["default"].as_array().is_some_and(|features| features.iter().any(|f| f == "cuda")) {
            faults.push(format!("{name}: feature `cuda` is on by default"));
        }
    }
    Ok(())
}

fn sources(files: &[String], faults: &mut Vec<String>) -> Result<()> {
    for file in files.iter().filter(|file| file.ends_with(".rs") && *file != "xtask/src/tidy.rs") {
        let text = std::fs::read_to_string(file)?;
        for (line, number) in text.lines().zip(1..) {
            let mut fault = |what: &str| faults.push(format!("{file}:{number}: {what}"));
            if NEVER_NAME_CUDA.iter().any(|folder| file.starts_with(folder))
                && line.to_ascii_lowercase().contains("cuda")
            {
                fault("names CUDA");
            }
            let code = line.split("//").next().unwrap_or_default();
            if has_word(code, "unsafe") {
                let refused = UNSAFE_ALLOWED
                    .iter()
                    .find(|(folder, allowed)| file.starts_with(folder) && !allowed.contains(&file.as_str()));
                if refused.is_some() {
                    fault("`unsafe` outside the one module that may");
                }
            }
            if line.contains("build_global") {
                fault("takes over rayon's global pool, which belongs to the program");
            }
            if ["TODO", "FIXME", "todo!(", "unimplemented!("].iter().any(|mark| line.contains(mark)) {
                fault("unfinished");
            }
            if line.trim() == "#[ignore]" {
                fault("an ignored test says why");
            }
        }
    }
    Ok(())
}

fn has_word(code: &str, word: &str) -> bool {
    let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(part_of_name) && !code[at + word.len()..].starts_with(part_of_name))
}

fn documents(faults: &mut Vec<String>) {
    for file in
        ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE", "Cargo.lock", "deny.toml"]
    {
        if !Path::new(file).exists() {
            faults.push(format!("{file}: missing"));
        }
    }
    for (name, _) in MAY_DEPEND_ON {
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            if !Path::new(name).join(file).exists() {
                faults.push(format!("{name}/{file}: missing"));
            }
        }
    }
}

/// Foreign types stay out of public items: read from rustdoc's own description of the crate.
fn public_types(name: &str, faults: &mut Vec<String>) -> Result<()> {
    output(
        cargo()
            // The JSON output is unstable; this switch admits it on a stable toolchain.
            .env("RUSTC_BOOTSTRAP", "1")
            .args([
                "rustdoc",
                "--quiet",
                "--package",
                name,
                "--lib",
                "--",
                "-Zunstable-options",
                "--output-format",
                "json",
            ]),
    )?;
    let path = crate::process::target().join("doc").join(format!("{}.json", name.replace('-', "_")));
    let described: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    let crate_of: BTreeMap<&str, &str> = described["paths"]
        .as_object()
        .context("paths")?
        .iter()
        .filter_map(|(id, path)| Some((id.as_str(), path["path"][0].as_str()?)))
        .collect();
    for item in described["index"].as_object().context("index")?.values() {
        let inner = &item["inner"];
        // Foreign traits may be implemented; a derive's output is no part of a signature.
        if item["crate_id"] != 0 || inner.get("impl").is_some() || !attributes_are_own(item) {
            continue;
        }
        let mut used = BTreeSet::new();
        resolved_types(inner, &crate_of, &mut used);
        for foreign in used.into_iter().filter(|used| !MAY_BE_PUBLIC.contains(used) && !used.starts_with("engram_")) {
            faults.push(format!(
                "{name}: the public item `{}` names a type of {foreign}",
                item["name"].as_str().unwrap_or("?")
            ));
        }
    }
    Ok(())
}

/// False for methods that a derive generated.
fn attributes_are_own(item: &Value) -> bool {
    !item["attrs"].to_string().contains("automatically_derived")
}

fn resolved_types<'a>(value: &'a Value, crate_of: &BTreeMap<&'a str, &'a str>, used: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(map) => {
            if let Some(id) = map.get("resolved_path").map(|path| path["id"].to_string()) {
                used.extend(crate_of.get(id.as_str()).copied());
            }
            map.values().for_each(|inner| resolved_types(inner, crate_of, used));
        }
        Value::Array(list) => list.iter().for_each(|inner| resolved_types(inner, crate_of, used)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::has_word;

    #[test]
    fn unsafe_is_found_as_a_word_only() {
        assert!(has_word("    unsafe { x }", "unsafe"));
        assert!(!has_word("#![deny(unsafe_code)]", "unsafe"));
    }
}
