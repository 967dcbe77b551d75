//! Who owns what, against brute force and the engines' own cases.

#![expect(clippy::unwrap_used, reason = "a test")]

use engram_core::{
    HeadShards, LayerLayout, Layout, Overlap, Ownership, Preset, RowShards, ShardError, Slot, TableGroups, overlap,
};

fn layer(sizes: &[i64], spare_rows: u32) -> LayerLayout {
    let offsets: Vec<i64> = sizes.iter().scan(0, |sum, size| Some(std::mem::replace(sum, *sum + size))).collect();
    let rows = u32::try_from(sizes.iter().sum::<i64>()).unwrap() + spare_rows;
    LayerLayout::from_constants(0, &[1, 1], sizes, &offsets, rows).unwrap()
}

#[test]
fn heads_are_shared_out_once_each() {
    for columns in 1..=50 {
        for ranks in 1..=60 {
            let shards = HeadShards::new(columns, ranks).unwrap();
            let owned: Vec<usize> = (0..ranks).flat_map(|rank| shards.columns_of(rank)).collect();
            assert_eq!(owned, (0..columns).collect::<Vec<_>>(), "{columns} over {ranks}");
            for rank in 0..ranks {
                let own = shards.columns_of(rank);
                assert!(own.len() <= shards.per_rank());
                assert!(own.clone().all(|column| shards.owner_of_column(column) == Some(rank)));
            }
            assert_eq!(shards.owner_of_column(columns), None);
            assert!(shards.columns_of(ranks).is_empty() && shards.columns_of(usize::MAX).is_empty());
            let any_empty = (0..ranks).find(|&rank| shards.columns_of(rank).is_empty());
            let expected =
                any_empty.map_or(Ok(shards), |first_empty| Err(ShardError::EmptyRanks { columns, ranks, first_empty }));
            assert_eq!(shards.strict(), expected);
        }
    }
}

/// The world sizes that vLLM serves 24 heads on, and the cases that it refuses.
#[test]
fn strict_shards_are_those_of_vllm() {
    let strict = |heads, ranks| HeadShards::new(heads, ranks).unwrap().strict().is_ok();
    let accepted: Vec<usize> = (1..=48).filter(|&ranks| strict(24, ranks)).collect();
    assert_eq!(accepted, [1, 2, 3, 4, 5, 6, 8, 12, 24]);
    for (tensor, data, heads) in [(1, 4, 5), (2, 2, 5), (4, 1, 6), (8, 1, 6)] {
        let group = TableGroups::new(tensor, data, tensor * data).unwrap();
        assert!(!strict(heads, group.size()));
    }
    let zero = |what| Err(ShardError::Zero { what });
    assert_eq!(HeadShards::new(0, 1), zero("columns"));
    assert_eq!(HeadShards::new(1, 0), zero("ranks"));
    assert_eq!(RowShards::new(1, 0), Err(ShardError::Zero { what: "ranks" }));
}

/// 15 heads of prime sizes and 7 spare rows over 1, 2, 4 and 8 ranks: the parts rebuild the table, spare rows excepted.
#[test]
fn head_shards_rebuild_the_table() {
    let sizes = [17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73];
    let layer = layer(&sizes, 7);
    for ranks in [1, 2, 4, 8] {
        let shards = HeadShards::new(sizes.len(), ranks).unwrap();
        let ranges: Vec<_> = (0..ranks).map(|rank| shards.row_range(&layer, rank)).collect();
        let rows: Vec<u32> = ranges.iter().cloned().flatten().collect();
        assert_eq!(rows, (0..layer.total_rows()).collect::<Vec<_>>());
        for id in 0..layer.total_rows() {
            let owner = shards.owner_of_id(&layer, id.cast_signed()).unwrap();
            assert!(ranges[owner].contains(&id));
        }
        for nobody in [-1, i32::MIN, layer.total_rows().cast_signed(), i32::MAX] {
            assert_eq!(shards.owner_of_id(&layer, nobody), None);
            assert_eq!(Ownership::Heads(shards).owner_of_id(&layer, nobody), None);
        }
    }
    let empty = HeadShards::new(15, 16).unwrap();
    assert!(empty.row_range(&layer, 15).is_empty());
}

#[test]
fn a_real_table_over_eight_ranks() {
    let layout = Layout::from_config(&Preset::DeepseekV41Flash.config()).unwrap();
    let shards = HeadShards::new(24, 8).unwrap();
    let rows: Vec<usize> = (0..8).map(|rank| shards.row_range(&layout.layers()[0], rank).len()).collect();
    assert_eq!(rows.iter().sum::<usize>(), 384_006_168);
    assert!(rows.iter().all(|rows| (48_000_000..48_010_000).contains(rows)));
    let rows = RowShards::new(320_001_536, 8).unwrap();
    assert_eq!(rows.range(7), 280_001_344..320_001_536);
}

#[test]
fn rows_are_shared_out_once_each() {
    for rows in 0..40 {
        for ranks in 1..=45 {
            let shards = RowShards::new(rows, ranks).unwrap();
            let owned: Vec<u64> = (0..ranks).flat_map(|rank| shards.range(rank)).collect();
            assert_eq!(owned, (0..rows).collect::<Vec<_>>(), "{rows} over {ranks}");
            for rank in 0..ranks {
                assert!(shards.range(rank).all(|row| shards.owner_of(row.cast_signed()) == Some(rank)));
            }
            assert_eq!(shards.owner_of(-1), None);
            assert_eq!(shards.owner_of(rows.cast_signed()), None);
            assert!(shards.range(ranks).is_empty());
        }
    }
}

#[test]
fn ownership_speaks_for_both() {
    let layer = layer(&[5, 7], 4);
    let heads = Ownership::Heads(HeadShards::new(2, 2).unwrap());
    let rows = Ownership::Rows(RowShards::new(16, 2).unwrap());
    assert_eq!((heads.ranks(), rows.ranks()), (2, 2));
    assert_eq!((heads.columns_of(2, 1), rows.columns_of(2, 1)), (1..2, 0..2));
    assert_eq!((heads.row_range(&layer, 1), rows.row_range(&layer, 1)), (5..12, 8..16));
    assert_eq!((heads.owner_of_id(&layer, 6), rows.owner_of_id(&layer, 6)), (Some(1), Some(0)));
    assert_eq!((heads.owner_of_id(&layer, 12), rows.owner_of_id(&layer, 12)), (None, Some(1)));
    assert_eq!(rows.owner_of_id(&layer, -1), None);
}

#[test]
fn overlaps_equal_brute_force() {
    assert_eq!(overlap(2..7, 4..8), Ok(Some(Overlap { source_start: 2, destination_start: 0, rows: 3 })));
    assert_eq!(overlap(10..15, 4..8), Ok(None));
    assert_eq!(overlap(0..4, 2..6), Ok(Some(Overlap { source_start: 2, destination_start: 0, rows: 2 })));
    assert_eq!(overlap(4..8, 2..6), Ok(Some(Overlap { source_start: 0, destination_start: 2, rows: 2 })));
    for bounds in 0..9_i64.pow(4) {
        let [a, b, c, d] = [0, 1, 2, 3].map(|place| bounds / 9_i64.pow(place) % 9 - 1);
        let sane = |start: i64, end: i64| 0 <= start && start <= end;
        let found = overlap(a..b, c..d);
        if !sane(a, b) || !sane(c, d) {
            let (start, end) = if sane(a, b) { (c, d) } else { (a, b) };
            assert_eq!(found, Err(ShardError::RowRange { start, end }));
            continue;
        }
        let common: Vec<i64> = (a..b).filter(|row| (c..d).contains(row)).collect();
        let expected = common.first().map(|first| Overlap {
            source_start: (first - a).unsigned_abs(),
            destination_start: (first - c).unsigned_abs(),
            rows: common.len() as u64,
        });
        assert_eq!(found, Ok(expected), "{a}..{b} and {c}..{d}");
    }
}

#[test]
fn groups_place_their_ranks() {
    let heads = TableGroups::new(2, 2, 4).unwrap();
    let places = |place: fn(TableGroups, usize, usize) -> Result<usize, ShardError>| {
        [(0, 0), (1, 0), (0, 1), (1, 1)].map(|(tensor, data)| place(heads, tensor, data).unwrap())
    };
    assert_eq!(places(TableGroups::head_rank), [0, 2, 1, 3], "tensor-parallel rank first");
    assert_eq!(places(TableGroups::row_rank), [0, 1, 2, 3], "data-parallel rank first");
    let split = TableGroups::new(2, 4, 4).unwrap();
    assert_eq!((split.size(), split.sharing()), (4, 2));
    assert_eq!(split.row_rank(1, 3), Ok(3));
    assert_eq!(split.head_rank(2, 0), Err(ShardError::Rank { what: "tensor-parallel rank", found: 2, ranks: 2 }));
    assert_eq!(split.row_rank(0, 4), Err(ShardError::Rank { what: "data-parallel rank", found: 4, ranks: 4 }));

    let error = TableGroups::new(4, 4, 6).unwrap_err();
    assert_eq!(error.to_string(), "table group size is 6, expected a multiple of the tensor-parallel size 4");
    assert!(matches!(TableGroups::new(4, 4, 2), Err(ShardError::Indivisible { found: 2, divisor: 4, .. })));
    assert!(matches!(TableGroups::new(1, 4, 3), Err(ShardError::Indivisible { found: 4, divisor: 3, .. })));
    for (tensor, data, group) in [(0, 1, 1), (1, 0, 1), (1, 1, 0)] {
        assert!(matches!(TableGroups::new(tensor, data, group), Err(ShardError::Zero { .. })));
    }
}

#[test]
fn slots_follow_the_busiest_rank_that_shares() {
    let groups = TableGroups::new(1, 4, 2).unwrap();
    let slot = |slot, offset| Ok(Slot { slot, offset });
    assert_eq!(groups.slot(&[4096, 2, 1, 3], 0), slot(4096, 0), "other groups do not count");
    assert_eq!(groups.slot(&[4096, 2, 1, 3], 1), slot(4096, 4096));
    assert_eq!(groups.slot(&[4096, 2, 1, 3], 2), slot(3, 0));
    assert_eq!(groups.slot(&[4096, 2, 1, 3], 3), slot(3, 3));
    assert_eq!(groups.slot(&[0, 0, 7, 0], 1), slot(0, 0), "nobody has tokens");
    assert_eq!(TableGroups::new(1, 4, 4).unwrap().slot(&[7, 0, 5, 1], 3), slot(7, 21));
    assert_eq!(TableGroups::new(2, 2, 4).unwrap().slot(&[2, 3], 1), slot(3, 3));

    assert_eq!(groups.slot(&[], 0), Err(ShardError::CountsMissing { ranks: 2 }));
    assert_eq!(groups.slot(&[1, 2, 3], 0), Err(ShardError::CountsLength { found: 3, expected: 4 }));
    assert_eq!(groups.slot(&[1; 5], 0), Err(ShardError::CountsLength { found: 5, expected: 4 }));
    assert_eq!(groups.slot(&[1; 4], 4), Err(ShardError::Rank { what: "data-parallel rank", found: 4, ranks: 4 }));

    let four = Slot { slot: 4, offset: 0 };
    assert_eq!([0, 2, 4].map(|tokens| four.padding(tokens)), [Ok(4), Ok(2), Ok(0)]);
    assert_eq!(four.padding(5), Err(ShardError::SlotExceeded { tokens: 5, slot: 4 }));
}
