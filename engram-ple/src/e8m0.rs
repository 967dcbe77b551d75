//! E8M0: a power of two in one byte. Code `c` is 2^(c - 127), 0 included; 255 is NaN; there is no zero.

/// The NaN code.
pub(crate) const NAN: u8 = 0xff;

/// The value of a code, exactly; code 0 is the subnormal 2^-127.
pub(crate) const fn to_f32(code: u8) -> f32 {
    f32::from_bits(match code {
        0 => 1 << 22,
        NAN => 0x7fc0_0000,
        _ => (code as u32) << 23,
    })
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
