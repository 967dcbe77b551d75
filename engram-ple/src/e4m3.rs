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

/// The code whose value is nearest, ties to the even code; magnitudes past 448 saturate, NaN stays NaN.
pub(crate) fn from_f64(value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | NAN;
    }
    let magnitude = value.abs().min(448.0);
    // Codes are 2^(exponent - 3) apart around `magnitude`, and never closer than 2^-9.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-6);
    let steps = (magnitude * 2f64.powi(3 - exponent)).round_ties_even();
    // A normal number is 8 to 16 steps (16 carries into the next exponent), a subnormal one 0 to 8.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 126")]
    let code = ((exponent + 6) * 8) as u8 + steps as u8;
    sign | code
}
