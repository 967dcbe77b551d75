//! Every small checkpoint of the golden data: the sound ones without a fault, the broken ones with exactly theirs.

use std::path::{Path, PathBuf};

use engram_loader::{FaultCode, Report, Severity};
use serde::Deserialize;

use crate::sketch::judge_with;

fn golden(rest: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden")).join(rest)
}

fn judge(folder: &Path, deep: bool) -> Report {
    judge_with(folder, |options| options.deep = deep)
}

#[test]
fn sound_checkpoints_have_no_fault() {
    let mut seen = 0;
    for entry in std::fs::read_dir(golden("ckpt")).unwrap() {
        let folder = entry.unwrap().path();
        for deep in [false, true] {
            let report = judge(&folder, deep);
            assert!(report.ok && report.faults.is_empty(), "{}: {:#?}", folder.display(), report.faults);
            assert!(!report.tables.is_empty());
        }
        seen += 1;
    }
    assert!(seen >= 8, "{seen} checkpoints");
}

#[derive(Deserialize)]
struct Broken {
    dir: String,
    fault: String,
    severity: String,
    deep: bool,
}

#[test]
fn broken_checkpoints_have_their_fault_alone() {
    let manifest = std::fs::read_to_string(golden("broken/manifest.json")).unwrap();
    let manifest: Vec<Broken> = serde_json::from_str(&manifest).unwrap();
    assert!(manifest.len() >= 25);
    for broken in manifest {
        let codes: Vec<FaultCode> = broken.fault.split('|').map(|code| code.parse().unwrap()).collect();
        if codes == [FaultCode::VocabMismatch] && cfg!(not(feature = "tokenizers")) {
            continue;
        }
        let folder = golden("broken").join(&broken.dir);
        let reports =
            if broken.deep { vec![judge(&folder, true)] } else { vec![judge(&folder, false), judge(&folder, true)] };
        for report in reports {
            let context = format!("{}: {:#?}", broken.dir, report.faults);
            let found: Vec<_> = report.faults.iter().filter(|fault| codes.contains(&fault.code)).collect();
            assert!(!found.is_empty(), "{context}");
            assert!(found.iter().all(|fault| fault.severity.to_string() == broken.severity), "{context}");
            let others = report.faults.iter().filter(|fault| !codes.contains(&fault.code));
            assert_eq!(others.filter(|fault| fault.severity == Severity::Error).count(), 0, "{context}");
            assert_eq!(report.ok, broken.severity == "warning", "{context}");
            // One cause, one fault; swapped tables are two at once.
            assert_eq!(report.faults.len(), if broken.dir == "tables-swapped" { 2 } else { 1 }, "{context}");
        }
        if broken.deep {
            assert!(judge(&folder, false).faults.is_empty(), "{}", broken.dir);
        }
    }
}
