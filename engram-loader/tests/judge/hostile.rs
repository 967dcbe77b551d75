//! Bytes changed, cut and moved at random: always a report, and never one that the safetensors crate disagrees with.

use std::fs;
use std::time::{Duration, Instant};

use engram_loader::{Error, Header, Report};
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::sketch::{Sketch, file, judge_with, raw};

fn judge(folder: &std::path::Path) -> Report {
    judge_with(folder, |options| options.deep = true)
}

fn sketches() -> impl Strategy<Value = Sketch> {
    let sketches = [Sketch::engram(), Sketch::ple("F8_E4M3", 4), Sketch::ple("BF16", 12)];
    (0..sketches.len(), any::<bool>()).prop_map(move |(which, indexed)| Sketch { indexed, ..sketches[which].clone() })
}

/// Time grows with the bytes, not with their square, whatever is repeated.
#[test]
fn many_names_take_no_long_time() {
    let start = Instant::now();
    let names = |each: &dyn Fn(usize) -> String| (0..300_000).map(each).collect::<Vec<_>>().join(",");
    let folder = Sketch::engram().write();
    let keys = names(&|number| format!("\"k{number}\":0"));
    let header = format!("{{\"t\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],{keys}}}}}");
    fs::write(folder.path().join(file(1)), raw(&header, b"")).unwrap();
    assert!(Header::read(&folder.path().join(file(1)), u64::MAX).is_ok());
    let files = names(&|number| format!("\"t{number}\":\"f{number}\""));
    fs::write(folder.path().join("model.safetensors.index.json"), format!("{{{keys},\"weight_map\":{{{files}}}}}"))
        .unwrap();
    // Every file is missing, two are strays, and two tables are nowhere.
    assert_eq!(judge(folder.path()).faults.len(), 300_000 + 4);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

/// What can happen to a file.
#[derive(Debug, Clone)]
enum Change {
    Set(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Append(Vec<u8>),
    Swap(prop::sample::Index, prop::sample::Index, usize),
    Insert(prop::sample::Index, Vec<u8>),
}

fn change() -> impl Strategy<Value = Change> {
    use prop::collection::vec;
    let at = any::<prop::sample::Index>;
    let text =
        prop_oneof![Just(b'0'), Just(b'9'), Just(b'"'), Just(b'{'), Just(b'}'), Just(b'['), Just(b','), any::<u8>()];
    prop_oneof![
        4 => (at(), text).prop_map(|(place, byte)| Change::Set(place, byte)),
        1 => at().prop_map(Change::Cut),
        1 => vec(any::<u8>(), 1..20).prop_map(Change::Append),
        1 => (at(), at(), 1_usize..40).prop_map(|(a, b, len)| Change::Swap(a, b, len)),
        1 => (at(), vec(any::<u8>(), 1..20)).prop_map(|(place, bytes)| Change::Insert(place, bytes)),
    ]
}

impl Change {
    /// Applies the change to the first `reach` bytes.
    fn apply(&self, contents: &mut Vec<u8>, reach: usize) {
        let reach = reach.min(contents.len());
        if reach == 0 {
            return;
        }
        match self {
            Self::Set(place, byte) => contents[place.index(reach)] = *byte,
            Self::Cut(place) => contents.truncate(place.index(reach)),
            Self::Append(bytes) => contents.extend_from_slice(bytes),
            Self::Swap(a, b, len) => {
                let (a, b) = (a.index(reach), b.index(reach));
                (0..*len).filter(|i| a + i < reach && b + i < reach).for_each(|i| contents.swap(a + i, b + i));
            }
            Self::Insert(place, bytes) => {
                let place = place.index(reach);
                contents.splice(place..place, bytes.iter().copied());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_files_are_judged(
        sketch in sketches(),
        which in 0_usize..4,
        changes in prop::collection::vec(change(), 1..4),
        everywhere in any::<bool>(),
    ) {
        let folder = sketch.write();
        let names = [file(1), file(2), "config.json".into(), "model.safetensors.index.json".into()];
        let path = folder.path().join(&names[which]);
        prop_assume!(path.exists());
        let mut contents = fs::read(&path).unwrap();
        for change in &changes {
            change.apply(&mut contents, if everywhere { usize::MAX } else { 1400 });
        }
        fs::write(&path, &contents).unwrap();
        let report = judge(folder.path());
        prop_assert_eq!(&report, &judge(folder.path()), "the same again");
        if which < 2 {
            match Header::read(&path, u64::MAX) {
                Ok(header) if header.tensors().iter().all(|tensor| tensor.dtype().bits().is_some()) => {
                    let accepted = SafeTensors::deserialize(&contents);
                    prop_assert!(accepted.is_ok(), "{accepted:?}");
                    let accepted = accepted.unwrap();
                    prop_assert_eq!(accepted.len(), header.tensors().len());
                    for tensor in header.tensors() {
                        let view = accepted.tensor(tensor.name()).unwrap();
                        let shape: Vec<u64> = view.shape().iter().map(|&extent| extent as u64).collect();
                        prop_assert_eq!(&shape[..], tensor.shape());
                        let range = tensor.byte_range();
                        let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                        prop_assert_eq!(view.data(), &contents[range]);
                    }
                }
                Ok(_) => {}
                Err(Error::Refused(fault)) => {
                    prop_assert!(!report.ok, "{}", fault);
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
    }

    #[test]
    fn any_bytes_are_judged(contents in prop::collection::vec(any::<u8>(), 0..200), len in prop::option::of(0_u64..300)) {
        let folder = tempfile::tempdir().unwrap();
        let mut contents = contents;
        if let (Some(len), Some(prefix)) = (len, contents.first_chunk_mut::<8>()) {
            *prefix = len.to_le_bytes();
        }
        fs::write(folder.path().join("x.safetensors"), &contents).unwrap();
        fs::write(folder.path().join("config.json"), &contents).unwrap();
        fs::write(folder.path().join("model.safetensors.index.json"), &contents).unwrap();
        prop_assert!(!judge(folder.path()).ok);
    }

    #[test]
    fn order_is_nothing(sketch in sketches(), seed in any::<u64>()) {
        let mut shuffled = sketch.clone();
        for tensors in shuffled.files.values_mut() {
            let mut state = seed;
            for place in (1..tensors.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                tensors.swap(place, usize::try_from(state >> 33).unwrap() % (place + 1));
            }
        }
        let report = judge(shuffled.write().path());
        prop_assert!(report.ok && report.faults.is_empty());
        prop_assert_eq!(report.tables, judge(sketch.write().path()).tables);
    }
}
