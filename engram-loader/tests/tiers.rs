//! The three tiers against rows picked one by one: uneven shards, unaligned offsets, repeats, short files, files that change.
#![expect(clippy::unwrap_used, reason = "a failure to set a test up fails the test")]

use engram_loader::{Direct, Error, Extent, Mapped, Pool, Progress, Resident, TableExtents, TableFile};
use engram_ple::{FormatKind, SourceError, SynthSource, TableFormat, TableSource};
use proptest::prelude::*;
use std::error::Error as _;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A folder on the file system that the build is on, which takes O_DIRECT on most machines.
fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A folder in memory, where the machine has one.
fn memory() -> Option<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").ok()
}

/// How one plane of a table is laid out: shard lengths in rows, and for each shard a file and the bytes before it.
#[derive(Debug, Clone)]
struct Plan {
    shards: Vec<(u64, usize, u64)>,
}

#[derive(Debug, Clone)]
struct Case {
    format: TableFormat,
    rows: u64,
    values: Plan,
    scales: Plan,
    shuffle: u64,
}

const FILES: usize = 3;

fn plan(rows: u64) -> impl Strategy<Value = Plan> {
    prop::collection::vec((0..rows + 1, 0..FILES, 0u64..5000), 1..9).prop_map(move |cuts| {
        let mut ends: Vec<u64> = cuts.iter().map(|cut| cut.0).chain([rows]).collect();
        ends.sort_unstable();
        let mut start = 0;
        let shards = ends
            .iter()
            .zip(cuts.iter().cycle())
            .map(|(&end, &(_, file, gap))| {
                let rows = end - start;
                start = end;
                (rows, file, gap)
            })
            .collect();
        Plan { shards }
    })
}

fn format() -> impl Strategy<Value = TableFormat> {
    prop_oneof![
        (90usize..=320).prop_map(|width| TableFormat::new(FormatKind::E4m3Global, width, Some(0.5)).unwrap()),
        (1usize..=9).prop_map(|groups| TableFormat::new(FormatKind::E4m3E8m0x32, groups * 32, None).unwrap()),
        (45usize..=160).prop_map(|width| TableFormat::new(FormatKind::Bf16, width, None).unwrap()),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    (format(), 1u64..400, any::<u64>()).prop_flat_map(|(format, rows, shuffle)| {
        (plan(rows), plan(rows)).prop_map(move |(values, scales)| Case {
            format: format.clone(),
            rows,
            values,
            scales,
            shuffle,
        })
    })
}

/// Writes the case's files and gives the table, and all its packed rows.
fn write(case: &Case, folder: &Path) -> (TableExtents, Vec<u8>) {
    let source = SynthSource::new(case.format.clone(), case.shuffle, 1, case.rows);
    let row_bytes = case.format.row_bytes();
    let mut packed = vec![0; usize::try_from(case.rows).unwrap() * row_bytes];
    source.read_range(0..case.rows, &mut packed).unwrap();
    let paths: Vec<PathBuf> = (0..FILES).map(|file| folder.join(format!("file-{file}"))).collect();
    let mut bytes = vec![Vec::new(); FILES];
    let mut lay = |plan: &Plan, part: std::ops::Range<usize>| {
        let (mut extents, mut start) = (Vec::new(), 0);
        for &(rows, file, gap) in &plan.shards {
            let out = &mut bytes[file];
            out.resize(out.len() + usize::try_from(gap).unwrap(), 0xee);
            extents.push(Extent { file, offset: out.len() as u64, rows: start..start + rows });
            for row in packed
                .chunks_exact(row_bytes)
                .skip(usize::try_from(start).unwrap())
                .take(usize::try_from(rows).unwrap())
            {
                out.extend_from_slice(&row[part.clone()]);
            }
            start += rows;
        }
        // In any order: neither the order of files nor that of tensors in them says which rows come first.
        let by = usize::try_from(case.shuffle % extents.len() as u64).unwrap();
        extents.rotate_left(by);
        extents
    };
    let values = lay(&case.values, 0..case.format.value_bytes());
    let scales =
        if case.format.scale_bytes() > 0 { lay(&case.scales, case.format.value_bytes()..row_bytes) } else { vec![] };
    for (path, bytes) in paths.iter().zip(&bytes) {
        std::fs::write(path, bytes).unwrap();
    }
    let files: Vec<TableFile> = paths
        .iter()
        .zip(&bytes)
        .map(|(path, bytes)| TableFile { path: path.clone(), bytes: bytes.len() as u64 })
        .collect();
    (TableExtents::new(case.format.clone(), case.rows, files, values, scales).unwrap(), packed)
}

fn tiers(table: &TableExtents, threads: usize) -> [(&'static str, Box<dyn TableSource>); 3] {
    let pool = Arc::new(Pool::new(threads));
    [
        ("mapped", Box::new(Mapped::new(table.clone(), Arc::clone(&pool)))),
        ("direct", Box::new(Direct::new(table.clone(), threads))),
        ("resident", Box::new(Resident::load(table, pool, &()).unwrap())),
    ]
}

fn naive(packed: &[u8], row_bytes: usize, ids: &[i32]) -> Vec<u8> {
    let mut out = Vec::new();
    for &id in ids {
        match usize::try_from(id) {
            Ok(row) => out.extend_from_slice(&packed[row * row_bytes..][..row_bytes]),
            Err(_) => out.resize(out.len() + row_bytes, 0),
        }
    }
    out
}

fn check(table: &TableExtents, packed: &[u8], ids: &[i32], range: std::ops::Range<u64>, threads: usize) {
    let row_bytes = table.format().row_bytes();
    let expected = naive(packed, row_bytes, ids);
    for (tier, source) in tiers(table, threads) {
        let mut out = vec![0xaa; ids.len() * row_bytes];
        source.gather(ids, &mut out).unwrap();
        assert!(out == expected, "{tier}: gather of {} ids", ids.len());
        let expected =
            &packed[usize::try_from(range.start).unwrap() * row_bytes..usize::try_from(range.end).unwrap() * row_bytes];
        let mut out = vec![0xaa; expected.len()];
        source.read_range(range.clone(), &mut out).unwrap();
        assert!(out == expected, "{tier}: rows {range:?}");
    }
}

fn ids(rows: u64, seed: u64, count: usize) -> Vec<i32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    // Repeats, gaps and both ends of the table.
    (0..count)
        .map(|_| match next() % 8 {
            0 => -1,
            1 => i32::try_from(rows - 1).unwrap(),
            2 => 0,
            _ => i32::try_from(next() % rows).unwrap(),
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn tiers_equal_rows_picked_one_by_one(case in case(), seed in any::<u64>(), count in 0usize..300, threads in 1usize..4) {
        let folder = memory().unwrap_or_else(disk);
        let (table, packed) = write(&case, folder.path());
        let from = seed % (case.rows + 1);
        let range = from..from + (seed >> 32) % (case.rows - from + 1);
        check(&table, &packed, &ids(case.rows, seed, count), range, threads);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The same on a disk, where direct reads have alignments to keep and files end inside a block.
    #[test]
    fn tiers_equal_rows_picked_one_by_one_on_disk(case in case(), seed in any::<u64>()) {
        let folder = disk();
        let (table, packed) = write(&case, folder.path());
        check(&table, &packed, &ids(case.rows, seed, 200), 0..case.rows, 3);
    }
}

fn e4m3(width: usize) -> TableFormat {
    TableFormat::new(FormatKind::E4m3Global, width, Some(1.0)).unwrap()
}

/// A table of one file, filled with synthetic rows.
fn one_file(path: &Path, format: &TableFormat, rows: u64) -> (TableExtents, Vec<u8>) {
    let mut packed = vec![0; usize::try_from(rows).unwrap() * format.row_bytes()];
    SynthSource::new(format.clone(), 7, 1, rows).read_range(0..rows, &mut packed).unwrap();
    std::fs::write(path, &packed).unwrap();
    let file = TableFile { path: path.into(), bytes: packed.len() as u64 };
    (TableExtents::whole_file(format.clone(), file).unwrap(), packed)
}

#[test]
fn large_gathers_run_in_parts() {
    let folder = disk();
    let (table, packed) = one_file(&folder.path().join("t"), &e4m3(160), 50_001);
    for count in [4095, 4096, 4097, 100_000] {
        check(&table, &packed, &ids(table.rows(), 11, count), 3..50_001, 2);
    }
}

#[test]
fn rows_that_straddle_blocks_and_the_last_row_of_an_odd_sized_file() {
    let folder = disk();
    for (width, rows) in [(160, 1001), (264, 333), (4095, 9), (5000, 7)] {
        let (table, packed) = one_file(&folder.path().join("t"), &e4m3(width), rows);
        assert_ne!(packed.len() % 512, 0);
        let all: Vec<i32> = (0..i32::try_from(rows).unwrap()).collect();
        check(&table, &packed, &all, 0..rows, 2);
        let last: Vec<i32> = vec![i32::try_from(rows - 1).unwrap()];
        check(&table, &packed, &last, rows - 1..rows, 2);
    }
}

#[test]
fn requests_that_cannot_be_answered() {
    let folder = disk();
    let (table, _) = one_file(&folder.path().join("t"), &e4m3(100), 10);
    for (tier, source) in tiers(&table, 2) {
        let mut row = [0; 100];
        for id in [10, i32::MAX, -2, i32::MIN] {
            assert!(source.gather(&[id], &mut row).unwrap_err().is_out_of_range(), "{tier}: {id}");
        }
        assert!(source.gather(&[1, 2], &mut row).unwrap_err().is_length(), "{tier}");
        assert!(source.read_range(9..11, &mut [0; 200]).unwrap_err().is_out_of_range(), "{tier}");
        assert!(source.read_range(u64::MAX..u64::MAX, &mut []).unwrap_err().is_out_of_range(), "{tier}");
        source.gather(&[], &mut []).unwrap();
        source.read_range(4..4, &mut []).unwrap();
    }
}

#[test]
fn extents_that_make_no_table() {
    let folder = disk();
    let path = folder.path().join("t");
    std::fs::write(&path, [0; 1000]).unwrap();
    let make = |extents: &[(usize, u64, std::ops::Range<u64>)]| {
        let files = vec![TableFile { path: path.clone(), bytes: 1000 }];
        let extents =
            extents.iter().map(|(file, offset, rows)| Extent { file: *file, offset: *offset, rows: rows.clone() });
        TableExtents::new(e4m3(100), 8, files, extents.collect(), vec![])
    };
    assert!(make(&[(0, 0, 0..8)]).is_ok());
    assert!(make(&[(0, 400, 4..8), (0, 0, 0..4), (0, 1000, 8..8)]).is_ok());
    for bad in [
        &[(0, 0, 0..7)][..],
        &[(0, 0, 1..8)],
        &[(0, 0, 0..9)],
        &[(0, 0, 0..5), (0, 400, 4..8)],
        &[(0, 0, 0..3), (0, 400, 4..8)],
        &[(1, 0, 0..8)],
        &[(0, 201, 0..8)],
        &[(0, u64::MAX - 3, 0..8)],
        &[],
    ] {
        assert!(matches!(make(bad), Err(Error::Extents { .. })), "{bad:?}");
    }
}

#[test]
fn a_file_whose_rows_nobody_wants_is_never_opened() {
    let folder = disk();
    let format = e4m3(100);
    let (_, packed) = one_file(&folder.path().join("there"), &format, 10);
    let files = vec![
        TableFile { path: folder.path().join("there"), bytes: 1000 },
        TableFile { path: folder.path().join("gone"), bytes: 1000 },
    ];
    let extents = [0, 1].map(|file| Extent { file, offset: 0, rows: file as u64 * 10..(file as u64 + 1) * 10 });
    let table = TableExtents::new(format, 20, files, extents.to_vec(), vec![]).unwrap();
    let pool = Arc::new(Pool::new(1));
    let sources: [Box<dyn TableSource>; 2] =
        [Box::new(Mapped::new(table.clone(), Arc::clone(&pool))), Box::new(Direct::new(table.clone(), 2))];
    for source in sources {
        let mut out = vec![0; 300];
        source.gather(&[9, -1, 0], &mut out).unwrap();
        assert_eq!(out, naive(&packed, 100, &[9, -1, 0]));
        let error = source.gather(&[9, 10, 0], &mut out).unwrap_err();
        assert_eq!(error.rows(), Some(10..11));
        assert!(matches!(cause(&error), Error::Io { path, .. } if path.ends_with("gone")), "{error:?}");
    }
    assert!(matches!(Resident::load(&table, pool, &()), Err(Error::Io { path, .. }) if path.ends_with("gone")));
}

fn cause(error: &SourceError) -> &Error {
    assert!(error.is_read());
    error.source().unwrap().downcast_ref().unwrap()
}

#[test]
fn a_file_truncated_after_opening_is_an_error_in_the_direct_and_mapped_tiers() {
    for folder in [Some(disk()), memory()].into_iter().flatten() {
        let path = folder.path().join("t");
        let (table, packed) = one_file(&path, &e4m3(160), 1000);
        let [(_, mapped), (_, direct), (_, resident)] = tiers(&table, 2);
        let (ids, mut out) = ([0, 999], [0; 320]);
        mapped.gather(&ids, &mut out).unwrap();
        direct.gather(&ids, &mut out).unwrap();
        // In the middle of a row, and of a block.
        File::options().write(true).open(&path).unwrap().set_len(100_001).unwrap();
        let error = direct.gather(&ids, &mut out).unwrap_err();
        assert!(matches!(cause(&error), Error::Truncated { expected: 160_000, found: 100_001, .. }), "{error:?}");
        let error = direct.read_range(0..1000, &mut vec![0; 160_000]).unwrap_err();
        assert!(matches!(cause(&error), Error::Truncated { .. }), "{error:?}");
        direct.gather(&[0, 1], &mut out).unwrap();
        assert_eq!(out[..], packed[..320]);
        // Gathers of the mapped tier look every 100 ms.
        std::thread::sleep(Duration::from_millis(150));
        let error = mapped.gather(&ids, &mut out).unwrap_err();
        assert!(matches!(cause(&error), Error::Truncated { found: 100_001, .. }), "{error:?}");
        // Gone for good, but the resident tier has its own copy.
        std::fs::remove_file(&path).unwrap();
        resident.gather(&ids, &mut out).unwrap();
        assert_eq!(out[..], naive(&packed, 160, &ids));
    }
}

#[test]
fn a_file_rewritten_while_mapped_is_an_error() {
    let folder = disk();
    let path = folder.path().join("t");
    let (table, _) = one_file(&path, &e4m3(160), 100);
    let mapped = Mapped::new(table, Arc::new(Pool::new(1)));
    mapped.gather(&[3], &mut [0; 160]).unwrap();
    mapped.check().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    File::options().write(true).open(&path).unwrap().write_all_at(b"new", 0).unwrap();
    assert!(matches!(mapped.check(), Err(Error::Changed { .. })));
}

#[test]
fn a_file_truncated_while_the_resident_tier_loads_is_an_error() {
    /// Truncates a file once the first part of it is loaded.
    struct Truncate(File);
    impl Progress for Truncate {
        fn begin(&self, _: &str, _: u64) {}
        fn advance(&self, _: u64) {
            self.0.set_len(9 << 20).unwrap();
        }
    }
    for folder in [Some(disk()), memory()].into_iter().flatten() {
        let path = folder.path().join("t");
        let (table, _) = one_file(&path, &e4m3(4096), 8192);
        let truncate = Truncate(File::options().write(true).open(&path).unwrap());
        let error = Resident::load(&table, Arc::new(Pool::new(1)), &truncate).unwrap_err();
        assert!(matches!(error, Error::Truncated { expected: 33_554_432, found: 9_437_184, .. }), "{error:?}");
        // Too short from the start.
        let error = Resident::load(&table, Arc::new(Pool::new(1)), &()).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. }), "{error:?}");
    }
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting() {
    let folder = disk();
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    for path in [pipe, folder.path().to_path_buf(), "/dev/zero".into()] {
        let table = TableExtents::whole_file(e4m3(10), TableFile { path, bytes: 100 }).unwrap();
        let pool = Arc::new(Pool::new(1));
        for source in [
            Box::new(Mapped::new(table.clone(), Arc::clone(&pool))) as Box<dyn TableSource>,
            Box::new(Direct::new(table.clone(), 1)),
        ] {
            let error = source.gather(&[1], &mut [0; 10]).unwrap_err();
            assert!(matches!(cause(&error), Error::NotAFile { .. }), "{error:?}");
        }
        assert!(matches!(Resident::load(&table, pool, &()), Err(Error::NotAFile { .. })));
    }
}

#[test]
fn a_resident_table_larger_than_memory_is_refused_before_it_is_touched() {
    let folder = disk();
    let path = folder.path().join("t");
    let bytes = 1 << 43;
    File::create(&path).unwrap().set_len(bytes).unwrap();
    let table = TableExtents::whole_file(e4m3(1 << 20), TableFile { path, bytes }).unwrap();
    let error = Resident::load(&table, Arc::new(Pool::new(1)), &()).unwrap_err();
    assert!(matches!(error, Error::Memory { bytes: b, .. } if b == bytes), "{error:?}");
}

#[test]
fn rows_past_two_and_four_gigabytes() {
    let folder = disk();
    let path = folder.path().join("t");
    let (width, rows) = (256u64, 20_000_000u64);
    let file = File::create(&path).unwrap();
    file.set_len(rows * width).unwrap();
    // Rows on both sides of byte 2^31 and 2^32, and the last one: each holds its own number.
    let marked = [8_388_607u32, 8_388_608, 16_777_215, 16_777_216, 19_999_999];
    for row in marked {
        file.write_all_at(&row.to_le_bytes().repeat(64), u64::from(row) * width).unwrap();
    }
    let table = TableExtents::whole_file(e4m3(256), TableFile { path, bytes: rows * width }).unwrap();
    let ids = marked.map(|row| i32::try_from(row).unwrap());
    let pool = Arc::new(Pool::new(1));
    for source in
        [Box::new(Mapped::new(table.clone(), pool)) as Box<dyn TableSource>, Box::new(Direct::new(table.clone(), 2))]
    {
        let mut out = [0; 5 * 256];
        source.gather(&ids, &mut out).unwrap();
        assert_eq!(out[..], marked.map(|row| row.to_le_bytes().repeat(64)).concat());
        source.read_range(16_777_214..16_777_217, &mut out[..768]).unwrap();
        assert_eq!(out[256..768], [16_777_215u32, 16_777_216].map(|row| row.to_le_bytes().repeat(64)).concat());
    }
}

#[test]
fn a_resident_budget_lets_mapped_pages_go() {
    let folder = disk();
    let path = folder.path().join("t");
    let (table, packed) = one_file(&path, &e4m3(256), 100_000);
    let mapped = Mapped::new(table, Arc::new(Pool::new(1))).with_resident_budget(0).unwrap();
    let ids: Vec<i32> = (0..100_000).step_by(7).collect();
    let mut out = vec![0; ids.len() * 256];
    mapped.gather(&ids, &mut out).unwrap();
    let before = mapped_kib(&path);
    std::thread::sleep(Duration::from_millis(150));
    mapped.gather(&[-1], &mut out[..256]).unwrap();
    assert!(before >= 20_000 && mapped_kib(&path) == 0, "{before} KiB, then {} KiB", mapped_kib(&path));
    mapped.gather(&ids, &mut out).unwrap();
    assert_eq!(out, naive(&packed, 256, &ids));
}

/// How much of a mapped file is in this process's memory.
fn mapped_kib(path: &Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    lines.find_map(|line| line.strip_prefix("Rss:")).unwrap().trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[test]
fn the_direct_tier_says_how_it_reads() {
    let folder = disk();
    let (table, _) = one_file(&folder.path().join("t"), &e4m3(100), 10);
    let direct = Direct::new(table, 1);
    assert_eq!(direct.access().to_string(), "no file was read");
    direct.gather(&[1], &mut [0; 100]).unwrap();
    let access = direct.access();
    assert_eq!(access.direct + access.buffered, 1);
    assert!(access.to_string().contains("O_DIRECT"));
}
