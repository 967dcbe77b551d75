// E4M3 values and E8M0 scales as numbers, and numbers as 16-bit floats.
#pragma once

#include "common.cuh"

// Two E4M3 codes, low byte first.
__device__ float2 decode(u32 pair) {
    float2 v;
#if __CUDA_ARCH__ >= 900
    asm("{.reg .b32 h; .reg .f16 lo, hi; cvt.rn.f16x2.e4m3x2 h, %2; mov.b32 {lo, hi}, h; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(v.x), "=f"(v.y) : "h"(u16(pair)));
#else
    // As f32 bits the code is the value times 2^-120, subnormal codes too (an f32 subnormal keeps them): no flush to zero here.
    const auto one = [](u32 code) {
        const float value = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * __uint_as_float((127 + 120) << 23);
        return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : value;
    };
    v.x = one(pair & 0xff), v.y = one(pair >> 8 & 0xff);
#endif
    return v;
}

// 2^(code - 127); code 0 is an f32 subnormal, 255 is NaN.
__device__ float e8m0(u32 code) {
    return __uint_as_float(code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23);
}

// Two f32 rounded to bf16, or to f16; `low` in the low half.
__device__ u32 narrow(float low, float high, bool f16) {
    u32 v;
    if (f16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// x as a bf16 or f16 holds it.
__device__ float rounded(float x, bool f16) {
    const u32 bits = narrow(x, 0, f16);
    float v = __uint_as_float(bits << 16);
    if (f16) asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(v) : "r"(bits));
    return v;
}
