//! Hashing against a slow and obvious reference.

#![expect(clippy::unwrap_used, reason = "a test")]

use engram_core::{
    Batch, BatchError, DraftsError, Family, Hasher, History, LayerLayout, Layout, Path, Preset, Reciprocal,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn int(value: usize) -> i32 {
    i32::try_from(value).unwrap()
}

/// One request: its history row and its tokens.
#[derive(Debug, Clone)]
struct Request {
    history: Vec<i32>,
    tokens: Vec<i32>,
}

/// The token that counts `distance` places before token `place`, by the rules as they are written down.
fn looked_back(layout: &Layout, fill: i32, request: &Request, place: usize, distance: usize) -> i64 {
    let depth = layout.ngram_size() - 1;
    let source = |distance: usize| match (place.checked_sub(distance), layout.family()) {
        (Some(place), _) => request.tokens[place],
        (None, Family::Engram) => request.history[distance - place - 1],
        (None, Family::Ple) => request.history[depth - (distance - place)],
    };
    let counts = match layout.family() {
        Family::Engram => (0..=distance).all(|nearer| source(nearer) != -1) && source(distance) != -2,
        Family::Ple => (1..distance).all(|nearer| source(nearer) != fill),
    };
    i64::from(if counts { source(distance) } else { fill })
}

/// Ids and mixes of all tokens, one number at a time.
fn reference(layout: &Layout, fill: i32, requests: &[Request]) -> (Vec<i32>, Vec<i64>) {
    let (mut ids, mut mixes) = (vec![], vec![]);
    for request in requests {
        for place in 0..request.tokens.len() {
            for layer in layout.layers() {
                for order in 2..=layout.ngram_size() {
                    let mix = (0..order).fold(0, |mix, distance| {
                        let token = looked_back(layout, fill, request, place, distance);
                        mix ^ token.wrapping_mul(layer.multipliers()[distance])
                    });
                    mixes.push(mix);
                    for head in 0..layout.heads() {
                        let column = (order - 2) * layout.heads() + head;
                        let row = i128::from(mix).rem_euclid(layer.sizes()[column].into());
                        ids.push(i32::try_from(row + i128::from(layer.offsets()[column])).unwrap());
                    }
                }
            }
        }
    }
    (ids, mixes)
}

#[derive(Debug, Clone, Default)]
struct Arrays {
    tokens: Vec<i32>,
    starts: Vec<i32>,
    history: Vec<i32>,
}

impl Arrays {
    fn new(requests: &[Request]) -> Self {
        let mut arrays = Self { starts: vec![0], ..Self::default() };
        for request in requests {
            arrays.tokens.extend(&request.tokens);
            arrays.starts.push(int(arrays.tokens.len()));
            arrays.history.extend(&request.history);
        }
        arrays
    }

    fn batch(&self) -> Batch<'_> {
        Batch { tokens: &self.tokens, starts: &self.starts, history: &self.history }
    }
}

fn hashers(layout: &Layout, fill: i32) -> Vec<Hasher> {
    let hasher = Hasher::new(layout, fill).unwrap();
    let paths = [Path::Portable, Path::Avx512].into_iter().filter(|path| path.is_available());
    paths.map(|path| hasher.clone().with_path(path).unwrap()).collect()
}

/// Every path, with and without mixes, equals the reference.
fn check(layout: &Layout, fill: i32, requests: &[Request], padding: usize) {
    let (mut expected, mut expected_mixes) = reference(layout, fill, requests);
    let mut arrays = Arrays::new(requests);
    arrays.tokens.extend(std::iter::repeat_n(i32::MIN, padding));
    for hasher in hashers(layout, fill) {
        let tokens = arrays.tokens.len();
        expected.resize(tokens * hasher.ids_per_token(), -1);
        expected_mixes.resize(tokens * hasher.mixes_per_token(), -1);
        let mut ids = vec![i32::MIN; expected.len()];
        hasher.ids(&arrays.batch(), &mut ids).unwrap();
        assert_eq!(ids, expected, "{:?}", hasher.path());
        let mut mixes = vec![i64::MIN; expected_mixes.len()];
        ids.fill(i32::MIN);
        hasher.ids_and_mixes(&arrays.batch(), &mut ids, &mut mixes).unwrap();
        assert_eq!(ids, expected, "{:?}", hasher.path());
        assert_eq!(mixes, expected_mixes, "{:?}", hasher.path());
    }
}

const VOCAB: u32 = 40;

/// Layouts of every shape: small tables, and large ones that the vector path takes.
fn layouts() -> impl Strategy<Value = Layout> {
    let shape = (any::<bool>(), 2..=8_usize, 1..=12_usize, 1..=3_usize, any::<bool>());
    let layout = shape.prop_flat_map(|(engram, ngram_size, heads, layers, large)| {
        let columns = (ngram_size - 1) * heads;
        let size = if large { (1 << 14)..(1_i64 << 24) } else { 1..300 };
        let layer = (vec(any::<i64>(), ngram_size), vec(size, columns));
        (Just((engram, ngram_size, heads)), vec(layer, layers))
    });
    layout.prop_map(|((engram, ngram_size, heads), layers)| {
        let family = if engram { Family::Engram } else { Family::Ple };
        let layer = |(number, (multipliers, sizes)): (u32, (Vec<i64>, Vec<i64>))| {
            let high = i64::MAX / i64::from(VOCAB);
            let odd = |m: i64| if engram { (m.unsigned_abs() % high.unsigned_abs()).cast_signed() | 1 } else { m | 1 };
            let multipliers: Vec<i64> = multipliers.into_iter().map(odd).collect();
            let offsets: Vec<i64> =
                sizes.iter().scan(0, |sum, size| Some(std::mem::replace(sum, *sum + size))).collect();
            let rows = u32::try_from(sizes.iter().sum::<i64>()).unwrap();
            LayerLayout::from_constants(number, &multipliers, &sizes, &offsets, rows).unwrap()
        };
        let layers = (0..).zip(layers).map(layer).collect();
        Layout::from_layers(family, ngram_size, heads, VOCAB, layers).unwrap()
    })
}

/// Tokens among which dead ones (Engram) or the end of sequence (PLE, the fill) are frequent; -2 only in histories.
fn tokens(layout: &Layout, fill: i32, len: std::ops::RangeInclusive<usize>) -> BoxedStrategy<Vec<i32>> {
    match layout.family() {
        Family::Engram => vec(prop_oneof![4 => 0..int(VOCAB as usize), 1 => Just(-1)], len).boxed(),
        Family::Ple => vec(prop_oneof![4 => 0..int(VOCAB as usize), 1 => Just(fill), 1 => 0..=i32::MAX], len).boxed(),
    }
}

fn histories(layout: &Layout, fill: i32) -> BoxedStrategy<Vec<i32>> {
    let depth = layout.ngram_size() - 1;
    match layout.family() {
        Family::Engram => vec(-2..int(VOCAB as usize), depth).boxed(),
        Family::Ple => tokens(layout, fill, depth..=depth),
    }
}

fn requests() -> impl Strategy<Value = (Layout, i32, Vec<Request>)> {
    (layouts(), 0..int(VOCAB as usize)).prop_flat_map(|(layout, fill)| {
        let request = (histories(&layout, fill), tokens(&layout, fill, 0..=12));
        let request = request.prop_map(|(history, tokens)| Request { history, tokens });
        (Just(layout), Just(fill), vec(request, 0..5))
    })
}

proptest! {
    #[test]
    fn batches_equal_the_reference((layout, fill, requests) in requests(), padding in 0..4_usize) {
        check(&layout, fill, &requests, padding);
    }

    /// A request cut into parts of any length, each hashed from the history that the parts before left, while drafts are
    /// hashed and taken back in between.
    #[test]
    fn parts_with_carried_history_equal_the_whole(
        (layout, fill, whole, parts) in (layouts(), 0..int(VOCAB as usize)).prop_flat_map(|(layout, fill)| {
            let whole = (histories(&layout, fill), tokens(&layout, fill, 0..=40));
            let whole = whole.prop_map(|(history, tokens)| Request { history, tokens });
            let parts = vec((0..6_usize, tokens(&layout, fill, 0..=5)), 1..12);
            (Just(layout), Just(fill), whole, parts)
        })
    ) {
        let hasher = Hasher::new(&layout, fill).unwrap();
        let (expected, _) = reference(&layout, fill, std::slice::from_ref(&whole));
        let mut oldest_first = whole.history.clone();
        if layout.family() == Family::Engram {
            oldest_first.reverse();
        }
        let mut history = History::resume(&hasher, &oldest_first).unwrap();
        let mut row = vec![0; layout.ngram_size() - 1];
        history.write_row(&mut row);
        prop_assert_eq!(&row, &whole.history);
        let hash = |tokens: &[i32], history: &History| {
            let mut row = vec![0; layout.ngram_size() - 1];
            history.write_row(&mut row);
            let mut ids = vec![0; tokens.len() * hasher.ids_per_token()];
            let starts = [0, int(tokens.len())];
            hasher.ids(&Batch { tokens, starts: &starts, history: &row }, &mut ids).unwrap();
            ids
        };
        let (mut found, mut rest) = (vec![], &*whole.tokens);
        for (len, drafts) in parts.iter().chain([&(whole.tokens.len(), vec![])]) {
            let (part, after) = rest.split_at((*len).min(rest.len()));
            found.extend(hash(part, &history));
            history.push(part).unwrap();
            history.push(drafts).unwrap();
            hash(&[0], &history);
            history.roll_back(drafts.len()).unwrap();
            if drafts.len() % 2 == 0 {
                history.commit(history.drafts()).unwrap();
            }
            rest = after;
        }
        prop_assert_eq!(found, expected);
    }

    /// Equal mixes mean equal ids, which is what finding distinct n-grams rests on.
    #[test]
    fn ids_follow_from_mixes((layout, fill, requests) in requests()) {
        let arrays = Arrays::new(&requests);
        let hasher = Hasher::new(&layout, fill).unwrap();
        let mut ids = vec![0; arrays.tokens.len() * hasher.ids_per_token()];
        let mut mixes = vec![0; arrays.tokens.len() * hasher.mixes_per_token()];
        hasher.ids_and_mixes(&arrays.batch(), &mut ids, &mut mixes).unwrap();
        let mut seen = std::collections::HashMap::new();
        for (place, (ids, mix)) in ids.chunks(layout.heads()).zip(&mixes).enumerate() {
            let known = seen.entry((place % hasher.mixes_per_token(), mix)).or_insert(ids);
            prop_assert_eq!(*known, ids);
        }
    }
}

/// All sequences of three kinds of tokens, after all histories, for 2- to 4-grams.
#[test]
fn every_short_sequence_equals_the_reference() {
    for (family, kinds, before) in
        [(Family::Engram, [0, 1, -1], vec![0, 1, -1, -2]), (Family::Ple, [0, 1, 2], vec![0, 1, 2])]
    {
        let layer = LayerLayout::from_constants(0, &[3, 5, 7, 9], &[97, 89, 83], &[0, 97, 186], 269).unwrap();
        let layout = Layout::from_layers(family, 4, 1, VOCAB, vec![layer]).unwrap();
        let sequences = |kinds: &[i32], len: u32| {
            let count = kinds.len().pow(len);
            let digit = |number: usize, place: u32| kinds[number / kinds.len().pow(place) % kinds.len()];
            (0..count).map(|number| (0..len).map(|place| digit(number, place)).collect()).collect::<Vec<Vec<i32>>>()
        };
        let mut requests = vec![];
        for history in sequences(&before, 3) {
            for tokens in sequences(&kinds, 4) {
                requests.push(Request { history: history.clone(), tokens });
            }
        }
        check(&layout, 1, &requests, 0);
    }
}

/// Mixes next to multiples of the divisors, at both ends of the 64-bit range, on every path.
#[test]
fn remainders_are_exact_at_the_edges() {
    let mut divisors = vec![1 << 14, (1 << 14) + 1, 16_000_057, 20_000_171, (1 << 27) - 39, i64::from(i32::MAX) >> 4];
    divisors.extend((15..27).flat_map(|power| [(1_i64 << power) - 1, 1 << power, (1 << power) + 1]));
    divisors.sort_unstable();
    for chosen in [&divisors[..], &[i32::MAX.into()], &[i64::from(i32::MAX) - 18], &[1 << 30]] {
        let sizes = &chosen[..chosen.len().min(16)];
        let offsets: Vec<i64> = sizes.iter().scan(0, |sum, size| Some(std::mem::replace(sum, *sum + size))).collect();
        let rows = u32::try_from(sizes.iter().sum::<i64>()).unwrap();
        let mut mixes = vec![];
        for &size in chosen {
            let last = i64::MAX / size;
            for quotient in [0, 1, 2, 1 << 20, 1 << 31, last / 3, last - 1, last] {
                let multiple = quotient.min(last) * size;
                mixes.extend(
                    (-2..=2).flat_map(|step: i64| [multiple.wrapping_add(step), (-multiple).wrapping_add(step)]),
                );
                mixes.push(multiple.wrapping_add(size / 2));
            }
        }
        // With tokens [1] after [0], the mix is the first multiplier, which must be odd.
        mixes.retain(|mix| mix % 2 != 0);
        mixes.extend([i64::MAX, i64::MIN + 1, -1, 1]);
        for mixes in mixes.chunks(256) {
            let layer = |&mix: &i64| LayerLayout::from_constants(0, &[mix, 1], sizes, &offsets, rows).unwrap();
            let layout =
                Layout::from_layers(Family::Ple, 2, sizes.len(), 1, mixes.iter().map(layer).collect()).unwrap();
            check(&layout, 7, &[Request { history: vec![0], tokens: vec![1] }], 0);
        }
    }
}

/// Blocks end inside requests, pieces of the pool too.
#[test]
fn long_batches_equal_the_reference_on_any_number_of_threads() {
    for preset in [Preset::DeepseekV41Flash, Preset::Qwen38FlashNext] {
        let layout = Layout::from_config(&preset.config()).unwrap();
        let (fill, depth) = (3, layout.ngram_size() - 1);
        let mut state = 1_u32;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        let requests: Vec<Request> = [0, 1, 2_500, 0, 17, 4_096, 1, 3_000, 0]
            .map(|len| {
                let mut token = || match random(9) {
                    0 => [-1, fill][usize::from(layout.family() == Family::Ple)],
                    _ => random(layout.vocab_size().min(99_092)).cast_signed(),
                };
                Request { history: (0..depth).map(|_| token()).collect(), tokens: (0..len).map(|_| token()).collect() }
            })
            .to_vec();
        check(&layout, fill, &requests, 5);
        let mut arrays = Arrays::new(&requests);
        arrays.tokens.extend([7; 3_000]);
        let hasher = Hasher::new(&layout, fill).unwrap();
        let mut expected = vec![0; arrays.tokens.len() * hasher.ids_per_token()];
        let mut expected_mixes = vec![0; arrays.tokens.len() * hasher.mixes_per_token()];
        hasher.ids_and_mixes(&arrays.batch(), &mut expected, &mut expected_mixes).unwrap();
        let (per_token, mixes_per_token) = (hasher.ids_per_token(), hasher.mixes_per_token());
        for part in [1, 7, 1_000, 4_096, 20_000] {
            let (mut ids, mut mixes) = (vec![0; expected.len()], vec![0; expected_mixes.len()]);
            let parts = ids.chunks_mut(part * per_token).zip(mixes.chunks_mut(part * mixes_per_token)).enumerate();
            for (place, (ids, mixes)) in parts {
                hasher.ids_and_mixes_from(&arrays.batch(), place * part, ids, mixes).unwrap();
                ids.fill(0);
                hasher.ids_from(&arrays.batch(), place * part, ids).unwrap();
            }
            assert_eq!(ids, expected, "parts of {part} tokens");
            assert_eq!(mixes, expected_mixes, "parts of {part} tokens");
        }
        let tokens = arrays.tokens.len();
        let mut ids = vec![0; 2 * per_token];
        for (first, len) in [(tokens - 1, 2 * per_token), (tokens + 1, 0), (usize::MAX, per_token), (0, per_token + 1)]
        {
            let error = hasher.ids_from(&arrays.batch(), first, &mut ids[..len]).unwrap_err();
            assert!(matches!(error, BatchError::Length { .. }), "{error}");
        }
        arrays.tokens[9_000] = -7;
        let error = hasher.ids_from(&arrays.batch(), 8_999, &mut ids).unwrap_err();
        assert!(matches!(error, BatchError::Token { what: "token", place: 9_000, found: -7, .. }), "{error}");
    }
}

/// Block size 4, dead tokens 14 and 22: prompts and decodes in chunks of 1, 2 and 1 equal the run at once, and do not
/// without their look-back.
#[test]
fn a_look_back_window_reproduces_the_single_run() {
    let offsets = [0, 97, 186, 269, 348, 421];
    let layer = LayerLayout::from_constants(0, &[3, 5, 7, 9], &[97, 89, 83, 79, 73, 71], &offsets, 492).unwrap();
    let layout = Layout::from_layers(Family::Engram, 4, 2, 50, vec![layer]).unwrap();
    let hasher = Hasher::new(&layout, 0).unwrap();
    let kill = |token: i32| if token == 14 || token == 22 { -1 } else { token };
    let prompts = [[11, 12, 13, 14, 15, 16].map(kill).to_vec(), [31, 32, 33, 34, 35].map(kill).to_vec()];
    let decodes = [[21, 22, 23, 24].map(kill), [41, 42, 43, 44].map(kill)];
    let hash = |tokens: &[i32], history: &[i32]| {
        let mut ids = vec![0; tokens.len() * hasher.ids_per_token()];
        hasher.ids(&Batch { tokens, starts: &[0, int(tokens.len())], history }, &mut ids).unwrap();
        ids
    };
    for (prompt, decode) in prompts.iter().zip(decodes) {
        let whole = hash(&[prompt, &decode[..]].concat(), &[-1; 3]);
        let mut history = History::new(&hasher);
        let (mut carried, mut lost) = (vec![], vec![]);
        for chunk in [&prompt[..], &decode[..1], &decode[1..3], &decode[3..]] {
            let mut row = [0; 3];
            history.write_row(&mut row);
            carried.extend(hash(chunk, &row));
            lost.extend(hash(chunk, &[-1; 3]));
            history.push(chunk).unwrap();
        }
        assert_eq!(carried, whole);
        assert_ne!(lost, whole);
    }
}

/// Rows as the engines' model runners gather them.
#[test]
fn history_rows() {
    let engram = Hasher::new(&Layout::from_config(&Preset::DeepseekV41Flash.config()).unwrap(), 2).unwrap();
    let ple = Hasher::new(&Layout::from_config(&Preset::Qwen38FlashNext.config()).unwrap(), 99).unwrap();
    let row = |history: &History, depth: usize| {
        let mut row = vec![7; depth];
        history.write_row(&mut row);
        row
    };
    assert_eq!(row(&History::new(&engram), 3), [-1, -1, -1]);
    assert_eq!(row(&History::new(&ple), 2), [99, 99]);
    let tokens = [11, 12, 13, 14, 15, 16, 21, 22];
    assert_eq!(row(&History::resume(&engram, &tokens).unwrap(), 3), [22, 21, 16]);
    assert_eq!(row(&History::resume(&engram, &[5]).unwrap(), 3), [5, -1, -1]);
    assert_eq!(row(&History::resume(&engram, &[-2, 5]).unwrap(), 3), [5, -2, -1]);
    assert_eq!(row(&History::resume(&ple, &[20]).unwrap(), 2), [99, 20]);
    assert_eq!(row(&History::resume(&ple, &[1, 2, 3]).unwrap(), 2), [2, 3]);

    let mut history = History::resume(&ple, &[1, 2]).unwrap();
    history.push(&[3, 99, 4]).unwrap();
    assert_eq!((history.drafts(), row(&history, 2)), (3, vec![99, 4]));
    history.roll_back(2).unwrap();
    assert_eq!((history.drafts(), row(&history, 2)), (1, vec![2, 3]), "drafts back across the end of a sequence");
    assert_eq!(history.commit(2), Err(DraftsError { asked: 2, there: 1 }));
    history.commit(1).unwrap();
    assert_eq!(history.roll_back(1), Err(DraftsError { asked: 1, there: 0 }));
    assert_eq!(row(&history, 2), [2, 3]);

    let mut history = History::new(&engram);
    for bad in [-2, -3, 99_092, i32::MAX, i32::MIN] {
        let error = history.push(&[5, bad]).unwrap_err();
        assert!(matches!(error, BatchError::Token { place: 1, found, low: -1, high: 99_091, .. } if found == bad));
    }
    assert_eq!(history.drafts(), 0, "a refused push leaves nothing");
    assert!(History::resume(&engram, &[-3]).is_err());
    assert!(History::resume(&ple, &[-1]).is_err());
}

#[test]
fn batches_that_are_none_are_refused() {
    let layout = Layout::from_config(&Preset::TinyEngram.config()).unwrap();
    let hasher = Hasher::new(&layout, 2).unwrap();
    let run = |tokens: &[i32], starts: &[i32], history: &[i32]| {
        let mut ids = vec![0; tokens.len() * hasher.ids_per_token()];
        hasher.ids(&Batch { tokens, starts, history }, &mut ids)
    };
    assert_eq!(run(&[], &[0], &[]), Ok(()), "no requests");
    assert_eq!(run(&[], &[0, 0, 0], &[-1; 6]), Ok(()), "empty requests");
    assert_eq!(run(&[1], &[], &[]), Err(BatchError::FirstStart { found: None }));
    assert_eq!(run(&[1], &[1, 1], &[-1; 3]), Err(BatchError::FirstStart { found: Some(1) }));
    assert_eq!(run(&[1], &[-1, 1], &[-1; 3]), Err(BatchError::FirstStart { found: Some(-1) }));
    for found in [i32::MIN, -1, 0, 3, i32::MAX] {
        let low = 1;
        assert_eq!(run(&[1, 1], &[0, 1, found], &[-1; 6]), Err(BatchError::Start { place: 2, found, low, high: 2 }));
    }
    let length = |what, found, expected| Err(BatchError::Length { what, found, expected });
    assert_eq!(run(&[1], &[0, 1], &[-1; 2]), length("history", 2, 3));
    assert_eq!(run(&[1], &[0, 1], &[-1; 4]), length("history", 4, 3));
    let token = |what, place, found, low| Err(BatchError::Token { what, place, found, low, high: 499 });
    for found in [i32::MIN, -2, 500, i32::MAX] {
        assert_eq!(run(&[1, found], &[0, 2], &[-1; 3]), token("token", 1, found, -1));
    }
    for found in [i32::MIN, -3, 500, i32::MAX] {
        assert_eq!(run(&[1], &[0, 1], &[0, found, 0]), token("history entry", 1, found, -2));
    }
    let batch = Batch { tokens: &[1], starts: &[0, 1], history: &[-1; 3] };
    let per_token = hasher.ids_per_token();
    assert_eq!(hasher.ids(&batch, &mut [0; 11]), length("ids", 11, per_token));
    assert_eq!(hasher.ids_and_mixes(&batch, &mut [0; 12], &mut [0; 7]), length("mixes", 7, 6));
    for fill in [-1, 500, i32::MIN] {
        let expected = BatchError::Token { what: "fill", place: 0, found: fill, low: 0, high: 499 };
        assert_eq!(Hasher::new(&layout, fill).unwrap_err(), expected);
    }
    let ple = Hasher::new(&Layout::from_config(&Preset::TinyPle.config()).unwrap(), i32::MAX).unwrap();
    let mut ids = [0; 4];
    let error = ple.ids(&Batch { tokens: &[-1], starts: &[0, 1], history: &[0; 2] }, &mut ids).unwrap_err();
    assert_eq!(error.to_string(), "token 0 is -1, expected 0 to 2147483647");
}

/// What a kernel computes from the public constants.
#[test]
fn reciprocals_give_the_quotient_by_their_constants() {
    for divisor in [1, 2, 3, 5, 16_000_057, 1 << 30, i32::MAX.unsigned_abs()] {
        let reciprocal = Reciprocal::new(divisor).unwrap();
        for x in [0, 1, 2, u64::from(divisor) - 1, divisor.into(), i64::MAX.unsigned_abs() / 3, i64::MAX.unsigned_abs()]
        {
            let high = u64::try_from((u128::from(2 * x) * u128::from(reciprocal.multiplier())) >> 64).unwrap();
            assert_eq!(high >> reciprocal.shift(), x / u64::from(divisor), "{x} / {divisor}");
        }
    }
}
