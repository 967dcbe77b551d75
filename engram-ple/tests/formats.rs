//! Decode and encode against the golden data, and against a reference that works in f64 from the formats' definitions.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking, and its numbers are small"
)]

use engram_ple::{Error, FormatKind, OutputType, TableFormat};
use half::{bf16, f16};
use proptest::prelude::*;

/// A binary floating-point type: bits after the leading one, exponents of the smallest and the largest normal number.
#[derive(Clone, Copy)]
struct Float {
    fraction: i32,
    smallest: i32,
    largest: i32,
}

const BF16: Float = Float { fraction: 7, smallest: -126, largest: 127 };
const F16: Float = Float { fraction: 10, smallest: -14, largest: 15 };
const F32: Float = Float { fraction: 23, smallest: -126, largest: 127 };

impl Float {
    /// Nearest, ties to even; infinite past the range.
    fn round(self, value: f64) -> f64 {
        if value == 0.0 || !value.is_finite() {
            return value;
        }
        let exponent = (value.abs().log2().floor() as i32).max(self.smallest);
        // log2 may be off by one next to a power of two.
        let exponent = if value.abs() >= 2f64.powi(exponent + 1) { exponent + 1 } else { exponent };
        let exponent =
            if exponent > self.smallest && value.abs() < 2f64.powi(exponent) { exponent - 1 } else { exponent };
        let step = 2f64.powi(exponent - self.fraction);
        let rounded = (value / step).round_ties_even() * step;
        if rounded.abs() >= 2f64.powi(self.largest + 1) { f64::INFINITY.copysign(value) } else { rounded }
    }
}

fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn e8m0(code: u8) -> f64 {
    if code == 255 { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
}

/// Equal to the bit of the sign of zero; any NaN equals any NaN.
fn same(found: f64, expected: f64) -> bool {
    found.is_nan() && expected.is_nan() || found.to_bits() == expected.to_bits()
}

fn format(kind: FormatKind, width: usize) -> TableFormat {
    TableFormat::new(kind, width, None).unwrap()
}

fn global(width: usize, scale: f32) -> TableFormat {
    TableFormat::new(FormatKind::E4m3Global, width, Some(scale)).unwrap()
}

/// Decodes whole rows to all three types, as f64.
fn decode(format: &TableFormat, rows: &[u8]) -> [Vec<f64>; 3] {
    let elements = rows.len() / format.row_bytes() * format.width();
    let (mut b, mut h, mut f) = (vec![bf16::ONE; elements], vec![f16::ONE; elements], vec![1f32; elements]);
    format.decode_bf16(rows, &mut b);
    format.decode_f16(rows, &mut h);
    format.decode_f32(rows, &mut f);
    [
        b.into_iter().map(bf16::to_f64).collect(),
        h.into_iter().map(f16::to_f64).collect(),
        f.into_iter().map(f64::from).collect(),
    ]
}

/// Checks a decoded row of all three types against `expected(element, type)`.
#[track_caller]
fn check(found: &[Vec<f64>; 3], expected: impl Fn(usize, Float) -> f64) {
    for (found, float) in found.iter().zip([BF16, F16, F32]) {
        for (element, &found) in found.iter().enumerate() {
            let expected = expected(element, float);
            assert!(same(found, expected), "element {element}: {found:e}, not {expected:e} ({} bits)", float.fraction);
        }
    }
}

fn golden() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/golden/formats.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn integers(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|value| u32::try_from(value.as_u64().unwrap()).unwrap()).collect()
}

fn every_code() -> Vec<u8> {
    (0..=255).collect()
}

#[test]
fn golden_e4m3_codes() {
    let expected = integers(&golden()["e4m3fn_f32_bits"]);
    let [_, _, found] = decode(&global(256, 1.0), &every_code());
    for (&found, expected) in found.iter().zip(expected) {
        assert!(same(found, f64::from(f32::from_bits(expected))), "{found} is not {expected:08x}");
    }
}

#[test]
fn golden_e8m0_codes() {
    let expected = integers(&golden()["e8m0_f32_bits"]);
    let format = format(FormatKind::E4m3E8m0x32, 32);
    for (scale, expected) in every_code().into_iter().zip(expected) {
        let mut row = vec![0x38; 32];
        row.push(scale);
        let [_, _, found] = decode(&format, &row);
        assert!(same(found[0], f64::from(f32::from_bits(expected))), "scale {scale}: {}", found[0]);
    }
}

#[test]
fn golden_global_scales() {
    for case in golden()["fp8_global_bf16"].as_array().unwrap() {
        let scale = f32::from_bits(u32::try_from(case["scale_f32_bits"].as_u64().unwrap()).unwrap());
        let mut found = [bf16::ZERO; 256];
        global(256, scale).decode_bf16(&every_code(), &mut found);
        for (code, (found, expected)) in found.into_iter().zip(integers(&case["bf16_bits"])).enumerate() {
            let expected = bf16::from_bits(u16::try_from(expected).unwrap());
            assert!(same(found.to_f64(), expected.to_f64()), "scale {scale:e}, code {code}: {found} is not {expected}");
        }
    }
}

#[test]
fn golden_block_scales() {
    for case in golden()["fp8_block32_bf16"].as_array().unwrap() {
        let scale = u8::try_from(case["scale_code"].as_u64().unwrap()).unwrap();
        let row = [every_code(), vec![scale; 8]].concat();
        let mut found = [bf16::ZERO; 256];
        format(FormatKind::E4m3E8m0x32, 256).decode_bf16(&row, &mut found);
        for (code, (found, expected)) in found.into_iter().zip(integers(&case["bf16_bits"])).enumerate() {
            let expected = bf16::from_bits(u16::try_from(expected).unwrap());
            assert!(same(found.to_f64(), expected.to_f64()), "scale {scale}, code {code}: {found} is not {expected}");
        }
    }
}

#[test]
fn every_code_under_every_block_scale() {
    let rows: Vec<u8> = every_code().into_iter().flat_map(|scale| [every_code(), vec![scale; 8]].concat()).collect();
    let found = decode(&format(FormatKind::E4m3E8m0x32, 256), &rows);
    check(&found, |element, float| {
        float.round(e4m3(element.to_le_bytes()[0]) * e8m0(u8::try_from(element / 256).unwrap()))
    });
}

#[test]
fn each_group_has_its_own_scale() {
    let scales = [0, 120, 127, 255, 130, 8, 254, 200];
    let row = [every_code(), scales.to_vec()].concat();
    let found = decode(&format(FormatKind::E4m3E8m0x32, 256), &row);
    check(&found, |element, float| float.round(e4m3(element.to_le_bytes()[0]) * e8m0(scales[element / 32])));
}

/// The code and the scale are rounded to the output type, and then their product.
fn global_reference(code: u8, scale: f32, float: Float) -> f64 {
    float.round(float.round(e4m3(code)) * float.round(f64::from(scale)))
}

#[test]
fn every_code_under_global_scales() {
    let scales = [
        1.99e-4,
        1.0,
        0.25,
        448.0,
        1.0e-40,
        65504.0,
        65520.0,
        1.0e38,
        -3.7,
        0.0,
        -0.0,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NAN,
        6.1e-5,
        5.9e-8,
        2.0e-8,
        0.100_000_01,
        1.003_906_2,
        1.003_906_4,
    ];
    for scale in scales {
        let found = decode(&global(256, scale), &every_code());
        check(&found, |element, float| global_reference(element.to_le_bytes()[0], scale, float));
    }
}

#[test]
fn the_global_scale_is_rounded_before_the_product() {
    // 1.00390625 + 2^-13 lies just past halfway to the next bf16, 1.0078125; 1.875 times it, unrounded, would round down.
    let scale = 257.0 / 256.0 + 2f32.powi(-13);
    let mut found = [bf16::ZERO];
    let code = 0x3f;
    global(1, scale).decode_bf16(&[code], &mut found);
    assert_eq!(found[0], bf16::from_f32(1.875 * 1.007_812_5));
    assert_ne!(found[0], bf16::from_f32(1.875 * scale));
}

#[test]
fn every_bf16_and_f16_pattern() {
    for kind in [FormatKind::Bf16, FormatKind::F16] {
        let format = format(kind, 256);
        let rows: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let value = |element: usize| {
            let bits = u16::try_from(element).unwrap();
            if kind == FormatKind::Bf16 { bf16::from_bits(bits).to_f64() } else { f16::from_bits(bits).to_f64() }
        };
        check(&decode(&format, &rows), |element, float| float.round(value(element)));

        // The storage type passes through bit by bit, NaN payloads too.
        let (mut b, mut h) = (vec![bf16::ZERO; 1 << 16], vec![f16::ZERO; 1 << 16]);
        let bits: Vec<u16> = if kind == FormatKind::Bf16 {
            format.decode_bf16(&rows, &mut b);
            b.into_iter().map(bf16::to_bits).collect()
        } else {
            format.decode_f16(&rows, &mut h);
            h.into_iter().map(f16::to_bits).collect()
        };
        assert!(bits.into_iter().eq(0..=u16::MAX));

        // And back, but for the payloads of NaN.
        let numbers: Vec<f32> = (0..1 << 16).map(|element| value(element) as f32).collect();
        let mut encoded = vec![0; 2 << 16];
        format.encode(&numbers, &mut encoded);
        for (element, bytes) in encoded.chunks(2).enumerate() {
            assert!(value(element).is_nan() || bytes == &rows[element * 2..][..2], "{element:04x}");
        }
    }
}

#[test]
fn ties_and_their_neighbours_from_f32() {
    // Every bf16 with the rest of an f32 on, before and after halfway; every midpoint of f16 and its neighbours.
    let mut numbers = Vec::new();
    for high in 0..=u16::MAX {
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            numbers.push(f32::from_bits(u32::from(high) << 16 | low));
        }
        let (a, b) = (f16::from_bits(high), f16::from_bits(high.wrapping_add(1)));
        let middle = ((a.to_f64() + b.to_f64()) / 2.0) as f32;
        numbers.extend([middle, middle.next_up(), middle.next_down()]);
    }
    let width = 1 << 8;
    numbers.resize(numbers.len().next_multiple_of(width), 0.0);
    let rows: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    check(&decode(&format(FormatKind::F32, width), &rows), |element, float| float.round(f64::from(numbers[element])));

    for (kind, float) in [(FormatKind::Bf16, BF16), (FormatKind::F16, F16), (FormatKind::F32, F32)] {
        let format = format(kind, width);
        let mut encoded = vec![0; numbers.len() / width * format.row_bytes()];
        format.encode(&numbers, &mut encoded);
        let [_, _, found] = decode(&format, &encoded);
        for (&found, &number) in found.iter().zip(&numbers) {
            assert!(same(found, float.round(f64::from(number))), "{kind}: {number:e} became {found:e}");
        }
    }
}

/// The code whose value is nearest, of two equally near ones the even, found by trying all.
fn nearest(value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    // Far past the range all codes would look equally near.
    let distance = |code: u8| (e4m3(code) - value.abs().min(1000.0)).abs();
    let best = (0..0x7f).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap();
    if value.is_nan() { sign | 0x7f } else { sign | best }
}

/// Numbers on, between and around the codes.
fn around_codes() -> Vec<f32> {
    let mut numbers =
        vec![0.0, 448.0, 449.0, 463.9, 464.0, 464.1, 1.0e30, f32::INFINITY, f32::MIN_POSITIVE, 1.0e-45, f32::NAN];
    for code in 0..0x7e {
        let (a, b) = (e4m3(code), e4m3(code + 1));
        for value in [a, (a + b) / 2.0, a + (b - a) * 0.3] {
            let value = value as f32;
            numbers.extend([value, value.next_up(), value.next_down()]);
        }
    }
    numbers.iter().flat_map(|&number| [number, -number]).collect()
}

#[test]
fn e4m3_encode_finds_the_nearest_code() {
    for scale in [1.0, 0.5, 1.99e-4, 3.0, 1.0e-38] {
        let numbers: Vec<f32> = around_codes().iter().map(|number| number * scale).collect();
        let format = global(numbers.len(), scale);
        let mut codes = vec![0; numbers.len()];
        format.encode(&numbers, &mut codes);
        for (&number, code) in numbers.iter().zip(codes) {
            let expected = nearest(f64::from(number) / f64::from(scale));
            assert_eq!(code, expected, "{number:e} under {scale:e}");
        }
    }
}

#[test]
fn e4m3_encode_returns_every_code() {
    let format = global(256, 1.0);
    let mut numbers = [0.0; 256];
    format.decode_f32(&every_code(), &mut numbers);
    let mut codes = [0; 256];
    format.encode(&numbers, &mut codes);
    for (code, (found, number)) in codes.into_iter().zip(numbers).enumerate() {
        assert!(usize::from(found) == code || number.is_nan() && found & 0x7f == 0x7f, "{code} became {found}");
    }
}

/// The block scale: the smallest power of two under which the largest magnitude is at most 448; 0 for zeros.
fn block_scale(numbers: &[f32]) -> u8 {
    let amax =
        numbers.iter().filter(|number| !number.is_nan()).fold(0f64, |amax, &number| amax.max(f64::from(number).abs()));
    let amax = amax.min(f64::from(f32::MAX));
    (0..=254).find(|&code| amax <= 448.0 * e8m0(code)).unwrap()
}

#[track_caller]
fn check_block_encode(numbers: &[f32]) {
    let format = format(FormatKind::E4m3E8m0x32, numbers.len());
    let mut row = vec![0xaa; format.row_bytes()];
    format.encode(numbers, &mut row);
    let (values, scales) = row.split_at(numbers.len());
    for ((numbers, values), &scale) in numbers.chunks(32).zip(values.chunks(32)).zip(scales) {
        assert_eq!(scale, block_scale(numbers), "{numbers:?}");
        for (&number, &value) in numbers.iter().zip(values) {
            assert_eq!(value, nearest(f64::from(number) / e8m0(scale)), "{number:e} under {scale}");
        }
    }
}

#[test]
fn block_encode_at_the_edges() {
    let mut numbers = vec![0.0; 32];
    check_block_encode(&numbers);
    for edge in [
        448.0,
        448.000_03,
        447.999_97,
        1.75,
        1.750_000_1,
        f32::MAX,
        f32::MIN_POSITIVE,
        1.0e-45,
        f32::INFINITY,
        3.0e-39,
        5.0e-37,
    ] {
        numbers[7] = -edge;
        check_block_encode(&numbers);
    }
    numbers[8] = f32::NAN;
    check_block_encode(&numbers);
    check_block_encode(&[f32::NAN; 32]);
}

#[test]
fn zeros_encode_to_a_zero_row() {
    for kind in FormatKind::ALL {
        let scale = (kind == FormatKind::E4m3Global).then_some(0.1);
        let format = TableFormat::new(kind, 64, scale).unwrap();
        let mut row = vec![0xff; format.row_bytes()];
        format.encode(&[0.0; 64], &mut row);
        assert!(row.iter().all(|&byte| byte == 0), "{kind}");
        assert_eq!(decode(&format, &row), [vec![0.0; 64], vec![0.0; 64], vec![0.0; 64]]);
    }
}

#[test]
fn results_past_the_range_are_infinite() {
    let format = format(FormatKind::E4m3E8m0x32, 32);
    let mut row = vec![0x7e; 32];
    row.push(254);
    row[1] = 0xfe;
    for found in decode(&format, &row) {
        assert_eq!(found[..2], [f64::INFINITY, f64::NEG_INFINITY]);
    }
    // 448 * 2^8 is past f16 only.
    row[32] = 127 + 8;
    assert_eq!(decode(&format, &row).map(|found| found[0]), [114_688.0, f64::INFINITY, 114_688.0]);
}

#[test]
fn row_sizes() {
    let sizes = |format: &TableFormat| (format.value_bytes(), format.scale_bytes(), format.row_bytes());
    assert_eq!(sizes(&format(FormatKind::E4m3E8m0x32, 256)), (256, 8, 264));
    assert_eq!(sizes(&global(160, 1.0)), (160, 0, 160));
    assert_eq!(sizes(&format(FormatKind::Bf16, 160)), (320, 0, 320));
    assert_eq!(sizes(&format(FormatKind::F16, 160)), (320, 0, 320));
    assert_eq!(sizes(&format(FormatKind::F32, 160)), (640, 0, 640));
}

#[test]
fn formats_that_cannot_be() {
    let new = TableFormat::new;
    let width = |kind, width, multiple| Err(Error::Width { kind, width, multiple });
    assert_eq!(new(FormatKind::Bf16, 0, None), width(FormatKind::Bf16, 0, 1));
    assert_eq!(new(FormatKind::Bf16, usize::MAX, None), width(FormatKind::Bf16, usize::MAX, 1));
    assert_eq!(new(FormatKind::E4m3E8m0x32, 48, None), width(FormatKind::E4m3E8m0x32, 48, 32));
    let kind = FormatKind::E4m3Global;
    assert_eq!(new(kind, 160, None), Err(Error::GlobalScaleMissing { kind }));
    let kind = FormatKind::F16;
    assert_eq!(new(kind, 160, Some(1.0)), Err(Error::GlobalScaleUnexpected { kind }));
}

#[test]
fn formats_are_equal_by_the_bits_of_their_scale() {
    assert_eq!(global(160, 0.5), global(160, 0.5).clone());
    assert_eq!(global(160, f32::NAN), global(160, f32::NAN));
    assert_ne!(global(160, 0.0), global(160, -0.0));
    assert_ne!(global(160, 0.5), global(128, 0.5));
    assert_ne!(format(FormatKind::Bf16, 160), format(FormatKind::F16, 160));
}

#[test]
fn names() {
    let names = ["bf16", "f16", "f32", "e4m3-global", "e4m3-e8m0-32"];
    assert_eq!(FormatKind::ALL.map(|kind| kind.to_string()), names);
    assert_eq!(names.map(|name| name.parse::<FormatKind>().unwrap()), FormatKind::ALL);
    assert_eq!("E4M3".parse::<FormatKind>(), Err(Error::UnknownFormat { name: "E4M3".to_owned() }));
    for output in [OutputType::Bf16, OutputType::F16, OutputType::F32] {
        assert_eq!(output.to_string().parse(), Ok(output));
    }
    assert_eq!("f64".parse::<OutputType>(), Err(Error::UnknownOutputType { name: "f64".to_owned() }));
}

/// Rows of a format, each with some bytes forced to 0x7f or 0xff so that NaN codes and scales turn up.
fn rows_with_nan() -> impl Strategy<Value = (TableFormat, Vec<u8>)> {
    let format = (0..FormatKind::ALL.len(), 1usize..5).prop_map(|(kind, groups)| {
        let kind = FormatKind::ALL[kind];
        TableFormat::new(kind, groups * 32, (kind == FormatKind::E4m3Global).then_some(0.5)).unwrap()
    });
    format.prop_flat_map(|format| {
        let bytes = format.row_bytes();
        let quiet = proptest::collection::vec(0u8..0x7c, 0..600 * 3);
        let spikes =
            proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0x7f), Just(0xff)]), 0..12);
        (Just(format), 0usize..600, quiet, spikes).prop_map(move |(format, count, quiet, spikes)| {
            let mut rows: Vec<u8> = quiet.into_iter().chain(std::iter::repeat(1)).take(count * bytes).collect();
            for (at, byte) in spikes {
                if !rows.is_empty() {
                    let at = at.index(rows.len());
                    rows[at] = byte;
                    // Two neighbours make NaN of the wide floats likely.
                    rows[at.saturating_sub(1)] = byte;
                }
            }
            (format, rows)
        })
    })
}

proptest! {
    #[test]
    fn global_scales(scale in any::<u32>().prop_map(f32::from_bits)) {
        let found = decode(&global(256, scale), &every_code());
        check(&found, |element, float| global_reference(element.to_le_bytes()[0], scale, float));
    }

    #[test]
    fn numbers_through_every_unquantised_format(bits in proptest::collection::vec(any::<u32>(), 64)) {
        let numbers: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for (kind, stored) in [(FormatKind::Bf16, BF16), (FormatKind::F16, F16), (FormatKind::F32, F32)] {
            let format = format(kind, 64);
            let mut row = vec![0; format.row_bytes()];
            format.encode(&numbers, &mut row);
            check(&decode(&format, &row), |element, float| float.round(stored.round(f64::from(numbers[element]))));
        }
    }

    #[test]
    fn block_encode(exponent in -140i32..130, numbers in proptest::collection::vec(-1.0f32..1.0, 64)) {
        let numbers: Vec<f32> = numbers.into_iter().map(|number| (f64::from(number) * 2f64.powi(exponent)) as f32).collect();
        check_block_encode(&numbers);
    }

    #[test]
    fn encoding_what_was_decoded_changes_no_number(values in proptest::collection::vec(any::<u8>(), 64), scales in proptest::collection::vec(30u8..220, 2)) {
        let format = format(FormatKind::E4m3E8m0x32, 64);
        let row = [values, scales].concat();
        let mut numbers = [0.0; 64];
        format.decode_f32(&row, &mut numbers);
        let mut again = vec![0; format.row_bytes()];
        format.encode(&numbers, &mut again);
        let mut decoded = [0.0; 64];
        format.decode_f32(&again, &mut decoded);
        for (&a, &b) in numbers.iter().zip(&decoded) {
            prop_assert!(same(f64::from(a), f64::from(b)), "{a:e} {b:e}");
        }
    }

    #[test]
    fn nan_rows_are_those_that_decode_to_nan((format, rows) in rows_with_nan()) {
        let (bytes, width) = (format.row_bytes(), format.width());
        let [_, _, numbers] = decode(&format, &rows);
        let expected: Vec<usize> =
            numbers.chunks(width).enumerate().filter(|(_, row)| row.iter().any(|n| n.is_nan())).map(|(row, _)| row).collect();
        prop_assert_eq!(format.nan_rows(&rows).collect::<Vec<_>>(), &expected[..]);
        prop_assert_eq!(format.has_nan(&rows), !expected.is_empty());
        for (row, bytes) in rows.chunks(bytes).enumerate() {
            prop_assert_eq!(format.has_nan(bytes), expected.contains(&row));
        }

        // The same rows with values and scales apart.
        let part = |range: std::ops::Range<usize>| -> Vec<u8> {
            rows.chunks(bytes).flat_map(|row| row[range.clone()].to_vec()).collect()
        };
        let (values, scales) = (part(0..format.value_bytes()), part(format.value_bytes()..bytes));
        let mut apart: Vec<usize> = format.nan_value_rows(&values).chain(format.nan_scale_rows(&scales)).collect();
        apart.sort_unstable();
        apart.dedup();
        prop_assert_eq!(apart, expected);
    }
}
