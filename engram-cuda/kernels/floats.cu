// E4M3 rows by id, to 16-bit floats.

#include "e4m3.cuh"
#include "rows.cuh"

// Eight values under one scale, or one.
__device__ void store(u8* to, uint2 codes, float scale, bool f16) {
    const auto two = [&](u32 pair) {
        const float2 v = decode(pair);
        return narrow(v.x * scale, v.y * scale, f16);
    };
    *reinterpret_cast<uint4*>(to) = {two(codes.x & 0xffff), two(codes.x >> 16), two(codes.y & 0xffff), two(codes.y >> 16)};
}
__device__ void store(u8* to, u8 code, float scale, bool f16) {
    *reinterpret_cast<u16*>(to) = u16(narrow(decode(code).x * scale, 0, f16));
}

// E4M3 rows to bf16 or f16. Every product of value and scale is exact in f32, so it is rounded once, to the output type; a global
// scale is rounded to that type first, as the models are run. In: eight values at a time, aligned, or one.
template <typename In>
__device__ void dequantise(const Rows& a) {
    constexpr u32 VALUES = sizeof(In);
    constexpr u32 K = VALUES > 1 ? IN_FLIGHT : 1;
    const bool f16 = a.f16, global = a.scale_bytes == 0;
    const float global_scale = rounded(a.global_scale, f16);
    const Walk start(a);
    each_tile(a, a.slot, [&](const Place& p, u32 rows) {
        Walk walk = start;
        for (i32 left = walk.steps(rows); left > 0; left -= K) {
            In codes[K];
            float fixed[K];
            u32 code[K];
            u8* target[K];
#pragma unroll
            for (u32 k = 0; k < K; ++k) {
                const In* source = reinterpret_cast<const In*>(from_lane(p.values, walk.row));
                const u8* scales = from_lane(p.scales, walk.row);
                target[k] = from_lane(p.out, walk.row);
                if (walk.row >= rows) target[k] = nullptr;
                const bool here = source && target[k];
                codes[k] = load(source + walk.unit, here);
                code[k] = load(scales + walk.unit * VALUES / 32, here && !global);
                fixed[k] = here ? global_scale : 0;    // a zero row is 0 under any scale
                if (target[k]) target[k] += u64(walk.unit) * (2 * VALUES);
                walk.step();
            }
#pragma unroll
            for (u32 k = 0; k < K; ++k)
                if (target[k]) store(target[k], codes[k], global ? fixed[k] : e8m0(code[k]), f16);
        }
    });
}

__device__ void dequantise_few(const Rows& a) {
    const bool f16 = a.f16, global = a.scale_bytes == 0;
    one_unit(a, [&](const Place& p, u32 unit) {
        const bool here = p.values;
        const uint2 codes = load(reinterpret_cast<const uint2*>(p.values) + unit, here);
        const u32 code = load(p.scales + unit / 4, here && !global);
        const float fixed = here ? rounded(a.global_scale, f16) : 0;
        store(p.out + unit * 16, codes, global ? fixed : e8m0(code), f16);
    });
}

KERNEL(rows_float_8, dequantise<uint2>)
KERNEL(rows_float_1, dequantise<u8>)
KERNEL(few_float_8, dequantise_few)
