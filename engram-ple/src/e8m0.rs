//! E8M0: a power of two in one byte. Code `c` is 2^(c - 127), 0 included; 255 is NaN; there is no zero.

/// The NaN code.
pub(crate) const NAN: u8 = 0xff;

/// The value of a code, exactly. As an f64 it is a normal number, 2^-127 too, and safe in a thread that treats subnormals as zero.
pub(crate) const fn to_f64(code: u8) -> f64 {
    if code == NAN { f64::NAN } else { f64::from_bits((1023 - 127 + code as u64) << 52) }
}

/// The smallest scale under which `amax` does not exceed 448, the largest E4M3 value; 0 for an `amax` of 0.
///
/// `amax` is a magnitude, not NaN. Infinity counts as the largest finite number.
pub(crate) fn for_amax(amax: f32) -> u8 {
    let bits = amax.min(f32::MAX).to_bits();
    // 448 is 1.75 * 2^8: amax = m * 2^e needs 2^(e - 8), or twice that once m is past 1.75.
    let past = u32::from(bits & 0x007f_ffff > 0x0060_0000);
    #[expect(clippy::cast_possible_truncation, reason = "below 256")]
    let code = ((bits >> 23) + past).saturating_sub(8) as u8;
    code
}
