// Rows by id, as they are stored.

#include "rows.cuh"

// Moves a tile's rows: the first `value_units` units from `values`, the rest from `scales`; zeros where `values` is null.
template <typename Unit>
__device__ void move(const u8* values, const u8* scales, u8* to, u32 value_units, Walk walk, u32 rows) {
    constexpr u32 K = sizeof(Unit) > 4 ? IN_FLIGHT : 1;
    for (i32 left = walk.steps(rows); left > 0; left -= K) {
        Unit data[K];
        Unit* target[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const Unit* source = reinterpret_cast<const Unit*>(from_lane(values, walk.row));
            target[k] = reinterpret_cast<Unit*>(from_lane(to, walk.row));
            bool here = source;
            if (value_units < walk.units) {
                const Unit* other = reinterpret_cast<const Unit*>(from_lane(scales, walk.row));
                if (walk.unit >= value_units) source = other - value_units;
            }
            if (walk.row >= rows) target[k] = nullptr;
            here &= target[k] != nullptr;
            data[k] = load(source + walk.unit, here);
            if (target[k]) target[k] += walk.unit;
            walk.step();
        }
#pragma unroll
        for (u32 k = 0; k < K; ++k)
            if (target[k]) *target[k] = data[k];
    }
}

// Values and scales as they are: packed rows, and rows of unquantised formats.
template <typename Unit>
__device__ void copy(const Rows& a) {
    const Walk walk(a);
    const u32 value_units = a.value_bytes / u32(sizeof(Unit));
    each_tile(a, a.slot, [&](const Place& p, u32 rows) { move<Unit>(p.values, p.scales, p.out, value_units, walk, rows); });
}

// Rows in one piece.
template <typename Unit>
__device__ void copy_few(const Rows& a) {
    one_unit(a, [](const Place& p, u32 unit) {
        reinterpret_cast<Unit*>(p.out)[unit] = load(reinterpret_cast<const Unit*>(p.values) + unit, p.values != nullptr);
    });
}

// MX: values as they are, scales at (m, k) -> ((m / 128) * K4 + k / 4) * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4 for token m
// and group k, K4 = ceil(groups / 4), with zeros up to the next multiples of 128 tokens and 4 groups.
template <typename Unit, bool WORDS>
__device__ void mx(const Rows& a) {
    using Scale = typename If<WORDS, u32, u8>::Type;
    const u32 groups = a.scale_bytes;
    const u32 k4 = (a.columns * groups + 3) / 4;
    const Walk walk_values(a);
    each_tile(a, (a.slot + 127) / 128 * 128, [&](const Place& p, u32 rows) {
        move<Unit>(p.values, nullptr, p.token < a.slot ? p.out : nullptr, a.units, walk_values, rows);
        u8* to = a.out_scales + p.layer * a.out_scales_layer + u64(p.token / 128) * k4 * 512 + p.token % 32 * 16 + p.token % 128 / 32 * 4;
        // By bytes, the last column also fills up its last four groups.
        Walk walk(WORDS ? groups / 4 : groups + 3);
        for (i32 left = walk.steps(rows); left > 0; --left, walk.step()) {
            const Scale* source = reinterpret_cast<const Scale*>(from_lane(p.values ? p.scales : nullptr, walk.row));
            u8* target = from_lane(to, walk.row);
            const u32 column = __shfl_sync(ALL_LANES, p.column, walk.row);
            const u32 k = column * groups + walk.unit * u32(sizeof(Scale));
            const bool real = WORDS || walk.unit < groups;
            if (walk.row < rows && (real || (column + 1 == a.columns && k < k4 * 4)))
                *reinterpret_cast<Scale*>(target + u64(k / 4) * 512 + k % 4) = load(source + walk.unit, source && real);
        }
    });
}

KERNEL(rows_copy_16, copy<uint4>)
KERNEL(rows_copy_8, copy<uint2>)
KERNEL(rows_copy_4, copy<u32>)
KERNEL(rows_copy_1, copy<u8>)
KERNEL(few_copy_16, copy_few<uint4>)
KERNEL(few_copy_8, copy_few<uint2>)
KERNEL(rows_mx_8, (mx<uint2, true>))
KERNEL(rows_mx_1, (mx<u8, false>))
