//! E4M3FN: one sign, four exponent (bias 7) and three mantissa bits. No infinities; `S.1111.111` is NaN; the largest value is 448.

/// The NaN code, sign aside.
pub(crate) const NAN: u8 = 0x7f;

/// The value of a code, exactly.
pub(crate) const fn to_f32(code: u8) -> f32 {
    let sign = ((code & 0x80) as u32) << 24;
    let magnitude = code & 0x7f;
    if magnitude == NAN {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    if magnitude < 8 {
        // Subnormal: a multiple of 2^-9.
        let value = magnitude as f32 / 512.0;
        return f32::from_bits(sign | value.to_bits());
    }
    f32::from_bits(sign | (((magnitude as u32) << 20) + ((127 - 7) << 23)))
}

/// The bits of the bf16 of a code's magnitude, exactly, for codes up to 126.
///
/// Numbers in the order of their codes have concave exponents, so that the bits are the least of a few linear functions: one for the
/// normal codes and one for each binade of the subnormal ones. Comparisons and shifts only, which compile to vector code.
#[inline(always)]
pub(crate) const fn bf16_bits(magnitude: u8) -> i16 {
    const fn least(a: i16, b: i16) -> i16 {
        if a < b { a } else { b }
    }
    let m = magnitude as i16;
    let normal = (120 << 7) + (m << 4);
    let from_four = (120 << 7) - (4 << 5) + (m << 5);
    let from_two = (119 << 7) - (2 << 6) + (m << 6);
    let from_one = (118 << 7) - (1 << 7) + (m << 7);
    let bits = least(least(normal, from_four), least(from_two, from_one));
    if m == 0 { 0 } else { bits }
}

/// The code whose value is nearest, ties to the even code; magnitudes past 448 saturate, NaN stays NaN.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the sign is one bit, and codes have seven")]
pub(crate) const fn from_f64(value: f64) -> u8 {
    let sign = (value.to_bits() >> 56) as u8 & 0x80;
    let magnitude = value.abs().min(448.0);
    let code = if magnitude < 1.0 / 64.0 {
        // Subnormal: next to 2^43 doubles are 2^-9 apart, so that the addition rounds to as many steps.
        const ANCHOR: f64 = (1u64 << 43) as f64;
        (magnitude + ANCHOR).to_bits() as u8
    } else {
        // Rounded to three bits of mantissa; a carry runs into the exponent, as it should.
        let bits = magnitude.to_bits();
        let rounded = (bits + ((1 << 48) - 1) + (bits >> 49 & 1)) >> 49;
        (rounded - ((1023 - 7) << 3)) as u8
    };
    sign | if value.is_nan() { NAN } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_bits_are_those_of_the_value() {
        for code in 0..NAN {
            assert_eq!(u32::from(bf16_bits(code).cast_unsigned()) << 16, to_f32(code).to_bits(), "{code}");
        }
    }
}
