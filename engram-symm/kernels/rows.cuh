// Rows on their way: which they are, in chunks of 16 bytes, and into the form that is wanted.

#pragma once

#include "e4m3.cuh"
#include "exchange.cuh"

constexpr u32 CHUNK = 16;

__device__ u32 byte_of(uint4 v, u32 i) {
    const u64 half = i < 8 ? u64(v.y) << 32 | v.x : u64(v.w) << 32 | v.z;
    return u32(half >> i % 8 * 8) & 0xff;
}

// Rows of odd sizes or addresses: apart, since all others would carry the code along.
__device__ __noinline__ uint4 load_single_bytes(const u8* p, u32 bytes) {
    u64 low = 0, high = 0;
#pragma unroll 1
    for (u32 i = 0; i < bytes; ++i) (i < 8 ? low : high) |= u64(p[i]) << i % 8 * 8;
    return {u32(low), u32(low >> 32), u32(high), u32(high >> 32)};
}
__device__ __noinline__ void store_single_bytes(u8* p, uint4 v, u32 bytes) {
#pragma unroll 1
    for (u32 i = 0; i < bytes; ++i) p[i] = u8(byte_of(v, i));
}

__device__ __noinline__ void copy_single_bytes(const u8* from, u8* to, u32 bytes) {
#pragma unroll 1
    for (u32 i = 0; i < bytes; ++i) to[i] = from == nullptr ? 0 : from[i];
}

// `bytes` of them at p, 16 at most, the rest 0. All of p, strides and sizes are multiples of `unit`.
template <bool PLAIN = false>
__device__ uint4 load_bytes(const u8* p, u32 bytes, u32 unit) {
    if (unit >= 16) return *reinterpret_cast<const uint4*>(p);
    if (!PLAIN && unit < 8) return load_single_bytes(p, min(bytes, CHUNK));
    const uint2* from = reinterpret_cast<const uint2*>(p);
    const uint2 low = from[0], high = bytes > 8 ? from[1] : uint2{0, 0};
    return {low.x, low.y, high.x, high.y};
}

template <bool PLAIN = false>
__device__ void store_bytes(u8* p, uint4 v, u32 bytes, u32 unit) {
    if (unit >= 16) {
        *reinterpret_cast<uint4*>(p) = v;
    } else if (PLAIN || unit >= 8) {
        reinterpret_cast<uint2*>(p)[0] = {v.x, v.y};
        if (bytes > 8) reinterpret_cast<uint2*>(p)[1] = {v.z, v.w};
    } else {
        store_single_bytes(p, v, min(bytes, CHUNK));
    }
}

// With row ownership, rank 0 and every other one have all columns: heads_a_rank is 0.
__device__ u32 columns_before(const Exchange& x, u32 rank) { return min(rank * x.heads_a_rank, x.columns); }
__device__ u32 columns_of(const Exchange& x, u32 rank) {
    return x.heads_a_rank == 0 ? x.columns : min(x.heads_a_rank, x.columns - columns_before(x, rank));
}

// Place of a row: (token * layers + layer) * columns + column.
struct Place {
    u32 token, layer, column;
    u32 group;                       // token * layers + layer

    static __device__ Place of(const Exchange& x, u32 index) {
        Place p;
        const u32 rest = x.by_columns.divide(index);
        p.column = index - rest * x.columns;
        p.in_group(x, rest);
        return p;
    }
    __device__ void in_group(const Exchange& x, u32 of) {
        group = of;
        token = x.by_layers.divide(of);
        layer = of - token * x.layers;
    }
    __device__ u32 index(const Exchange& x) const { return group * x.columns + column; }
};

// This rank's id at a place; none past the tokens.
__device__ i32 id_at(const Exchange& x, const Place& p) {
    return p.token < x.tokens ? x.ids[i64(p.token) * x.token_stride + (p.layer * x.columns + p.column)] : -1;
}

// Whether a rank that has this column owns the row of the id.
template <bool PLAIN = false>
__device__ bool owns(const Exchange& x, u32 rank, u32 layer, i32 id) {
    if (PLAIN || x.heads_a_rank != 0) return id >= 0;
    const Layer of = x.layer_info[layer];
    return id >= 0 && u32(id) < of.rows && u32(id) - rank * of.rows_a_rank < of.rows_a_rank;
}
// Whether no rank does.
__device__ bool unowned(const Exchange& x, u32 layer, i32 id) { return id < 0 || (x.heads_a_rank == 0 && u32(id) >= x.layer_info[layer].rows); }

constexpr u32 NOBODY = ~0u;

// Who owns it, of all ranks.
__device__ u32 owner_of(const Exchange& x, const Place& p, i32 id) {
    if (unowned(x, p.layer, id)) return NOBODY;
    return x.heads_a_rank != 0 ? p.column / x.heads_a_rank : u32(id) / x.layer_info[p.layer].rows_a_rank;
}

// A row that a lane knows and its warp moves.
struct Row {
    const u8* values = nullptr;      // null: a zero row
    const u8* scales = nullptr;
    u8* to = nullptr;                // null: no row
    u8* scales_to = nullptr;
    u32 place = 0;

    __device__ void find(const Table& t, i32 id) {
        const u32 local = u32(id) - t.first;         // below `rows` only for rows that are here
        if (local >= t.rows) return;
        values = t.values + local * t.value_stride;
        scales = t.scales + local * t.scale_stride;
    }
};

__device__ Table table_of(const Exchange& x, u32 layer) { return x.tables == nullptr ? Table{} : x.tables[layer]; }

// Bytes of a row in a chunk, and where they begin among its values or scales.
struct Part {
    bool scale;
    u32 from, bytes;

    __device__ Part(const Exchange& x, u32 chunk) {
        scale = chunk >= x.value_chunks;
        from = (scale ? chunk - x.value_chunks : chunk) * CHUNK;
        bytes = min(CHUNK, (scale ? x.scale_bytes : x.value_bytes) - from);
    }
};

__device__ bool decodes(const Exchange& x) { return x.form >= BF16; }

template <bool PLAIN = false>
__device__ uint4 load_chunk(const Exchange& x, const u8* values, const u8* scales, u32 chunk, u32 unit) {
    if (values == nullptr) return {0, 0, 0, 0};
    const Part part(x, chunk);
    return load_bytes<PLAIN>((part.scale ? scales : values) + part.from, part.bytes, unit);
}

// Where the row of a place begins in an output.
__device__ u8* output_row(const Exchange& x, u8* out, const Place& p) {
    return out + (p.token * x.out_token + p.layer * x.out_layer + p.column * x.out_column);
}

// MX: scale of token m and group k.
__device__ u8* scale_at(const Exchange& x, u8* scales, const Place& p, u32 k) {
    const u32 m = p.token;
    return scales + p.layer * x.scales_layer + (u64(m / 128) * x.scale_tiles + k / 4) * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4;
}

__device__ __noinline__ void store_single_scales(const Exchange& x, u8* scales, const Place& p, u32 first, u32 bytes, u32 real, uint4 data) {
#pragma unroll 1
    for (u32 i = 0; i < bytes; ++i) *scale_at(x, scales, p, first + i) = i < real ? u8(byte_of(data, i)) : 0;
}

// Groups of four, 512 bytes apart.
__device__ void store_groups(u8* at, u32 bytes, uint4 data) {
    u32* to = reinterpret_cast<u32*>(at);
    to[0] = data.x;
    if (bytes > 4) to[128] = data.y;
    if (bytes > 8) to[256] = data.z;
    if (bytes > 12) to[384] = data.w;
}

template <bool PLAIN = false>
__device__ void store_scales(const Exchange& x, u8* scales, const Place& p, const Part& part, uint4 data) {
    const u32 first = p.column * x.scale_bytes + part.from;
    if (PLAIN || x.scale_bytes % 4 == 0) return store_groups(scale_at(x, scales, p, first), part.bytes, data);
    // The last row of a token fills up the groups of its tile.
    const bool last = p.column + 1 == x.columns && part.from + part.bytes == x.scale_bytes;
    const u32 bytes = last ? x.scale_tiles * 4 - first : part.bytes;
    store_single_scales(x, scales, p, first, bytes, part.bytes, data);
}

__device__ u32 two_floats(u32 pair, float scale, bool f16) {
    const float2 v = decode(pair);
    return narrow(v.x * scale, v.y * scale, f16);
}

// 16 values under one scale, or fewer.
__device__ __noinline__ void store_floats(u8* to, uint4 data, float scale, u32 count, bool f16) {
    if (count == 16 && u64(to) % 16 == 0) {
        const auto eight = [&](u32 low, u32 high) {
            return uint4{two_floats(low & 0xffff, scale, f16), two_floats(low >> 16, scale, f16), two_floats(high & 0xffff, scale, f16), two_floats(high >> 16, scale, f16)};
        };
        reinterpret_cast<uint4*>(to)[0] = eight(data.x, data.y);
        reinterpret_cast<uint4*>(to)[1] = eight(data.z, data.w);
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) reinterpret_cast<u16*>(to)[i] = u16(two_floats(byte_of(data, i), scale, f16));
}

// The scale of 16 values that are decoded; `scales` is null for a zero row, which is 0 under any scale.
__device__ float scale_of(const Exchange& x, const u8* scales, u32 place, u32 chunk) {
    if (scales == nullptr) return 0;
    if (x.scale_bytes > 0) return e8m0(scales[chunk * CHUNK / 32]);
    return rounded(x.layer_info[Place::of(x, place).layer].global_scale, x.form == F16);
}

// Has a warp move parts of rows that its lanes know, K of each lane under way at a time. load(row, part) gives one, and
// store(row, part, value, here) takes it where `here`; `row` is a lane's number, and all lanes call both.
template <u32 K, typename T, typename Load, typename Store>
__device__ void each_part(u32 rows, u32 parts, Divisor by_parts, Load load, Store store) {
    const u32 lane = threadIdx.x % WARP, all = rows * parts;
    for (u32 base = 0; base < all; base += K * WARP) {
        T value[K];
        u32 row[K], part[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const u32 at = min(base + k * WARP + lane, all - 1);
            row[k] = by_parts.divide(at), part[k] = at - row[k] * parts;
            value[k] = load(row[k], part[k]);
        }
#pragma unroll
        for (u32 k = 0; k < K; ++k) store(row[k], part[k], value[k], base + k * WARP + lane < all);
    }
}

// What the rows of a tile are copied between: what their addresses, strides and sizes are multiples of.
struct Units {
    u32 from, to;
};

// What copying values needs of an exchange. By value, since a function that is called, and not inlined, would read parameters by
// generic loads.
struct Values {
    u32 bytes, halves, chunks;
    Divisor by_halves, by_chunks;

    __device__ explicit Values(const Exchange& x)
        : bytes(x.value_bytes), halves(x.halves), chunks(x.value_chunks), by_halves(x.by_halves), by_chunks(x.by_value_chunks) {}
};

// A tile's values as they are. One copy in a kernel.
__device__ __noinline__ void copy_values(Values x, Row row, u32 rows, Units units) {
    if (min(units.from, units.to) == 8 && x.bytes % 8 == 0) {
        // Side by side, so that a warp's loads and stores are whole lines all the same.
        each_part<4, uint2>(rows, x.halves, x.by_halves,
            [&](u32 lane, u32 half) {
                const uint2* from = reinterpret_cast<const uint2*>(from_lane(row.values, lane));
                return from == nullptr ? uint2{0, 0} : from[half];
            },
            [&](u32 lane, u32 half, uint2 value, bool here) {
                uint2* to = reinterpret_cast<uint2*>(from_lane(row.to, lane));
                if (here && to != nullptr) to[half] = value;
            });
    } else if (min(units.from, units.to) >= 16) {
        each_part<4, uint4>(rows, x.chunks, x.by_chunks,
            [&](u32 lane, u32 chunk) {
                const u8* from = from_lane(row.values, lane);
                return from == nullptr ? uint4{0, 0, 0, 0} : reinterpret_cast<const uint4*>(from)[chunk];
            },
            [&](u32 lane, u32 chunk, uint4 value, bool here) {
                u8* to = from_lane(row.to, lane);
                if (here && to != nullptr) reinterpret_cast<uint4*>(to)[chunk] = value;
            });
    } else if (row.to != nullptr) {
        copy_single_bytes(row.values, row.to, x.bytes);
    }
}

template <bool PLAIN = false>
__device__ void copy_scales(const Exchange& x, const Row& row, Units units) {
#pragma unroll 1
    for (u32 chunk = x.value_chunks; chunk < x.chunks; ++chunk) {
        const Part part(x, chunk);
        store_bytes<PLAIN>(row.scales_to + part.from, load_chunk<PLAIN>(x, row.values, row.scales, chunk, units.from), part.bytes, units.to);
    }
}

// A tile's rows as they are: values to `to`, scales to `scales_to`.
template <bool PLAIN = false>
__device__ void copy_rows(const Exchange& x, const Row& row, u32 rows, Units units) {
    copy_values(Values(x), row, rows, units);
    if (row.to != nullptr) copy_scales<PLAIN>(x, row, units);
}

template <bool PLAIN = false>
__device__ void put_scales(const Exchange& x, const Row& row, u32 unit) {
#pragma unroll 1
    for (u32 chunk = x.value_chunks; chunk < x.chunks; ++chunk)
        store_scales<PLAIN>(x, x.out_scales, Place::of(x, row.place), Part(x, chunk), load_chunk<PLAIN>(x, row.values, row.scales, chunk, unit));
}

__device__ __noinline__ void decode_rows(const Exchange& x, Row row, u32 rows, u32 unit) {
    const bool f16 = x.form == F16;
    each_part<2, uint4>(rows, x.value_chunks, x.by_value_chunks,
        [&](u32 lane, u32 chunk) { return load_chunk(x, from_lane(row.values, lane), nullptr, chunk, unit); },
        [&](u32 lane, u32 chunk, uint4 value, bool here) {
            const u8* values = from_lane(row.values, lane);
            const u8* scales = from_lane(row.scales, lane);
            u8* to = from_lane(row.to, lane);
            const u32 place = __shfl_sync(ALL_LANES, row.place, lane);
            const Part part(x, chunk);
            if (here && to != nullptr)
                store_floats(to + part.from * 2, value, scale_of(x, values == nullptr ? nullptr : scales, place, chunk), part.bytes, f16);
        });
}

// A tile's rows in the form that is wanted, into this rank's output. Where they come from is a multiple of `unit`.
template <bool PLAIN = false>
__device__ void put_rows(const Exchange& x, Row row, u32 rows, u32 unit) {
    row.scales_to = row.to + x.value_bytes;
    if (!PLAIN && decodes(x)) return decode_rows(x, row, rows, unit);
    copy_values(Values(x), row, rows, {unit, x.out_unit});
    if (row.to == nullptr) return;
    if (x.form == MX)
        put_scales<PLAIN>(x, row, unit);
    else
        copy_scales<PLAIN>(x, row, {unit, x.out_unit});
}

constexpr u32 TILE = 16;             // rows that a warp moves at a time, a lane a row

// All places from the first token to one past the last, in tiles over the grid's warps: job(first place, places).
template <typename Job>
__device__ void each_tile(const Exchange& x, u32 first_token, u32 last_token, u32 block, u32 blocks, Job job) {
    const u32 warps = blockDim.x / WARP, first = first_token * x.layers * x.columns, last = last_token * x.layers * x.columns;
    for (u32 i = first + (block + threadIdx.x / WARP * blocks) * TILE; i < last; i += blocks * warps * TILE) job(i, min(TILE, last - i));
}

// MX: scales of 0 from the last of so many tokens to the end of its tile of 128, by so many threads.
__device__ void pad_scales(const Exchange& x, u32 all, u32 thread, u32 threads) {
    const u32 tokens = all % 128;
    if (x.form != MX || tokens == 0) return;
    for (u32 i = thread; i < x.layers * x.scale_tiles * 32; i += threads) {
        const u32 first = i % 32, rest = i / 32, layer = rest / x.scale_tiles, tile = rest - layer * x.scale_tiles;
        u32* at = reinterpret_cast<u32*>(x.out_scales + layer * x.scales_layer + (u64(all / 128) * x.scale_tiles + tile) * 512 + first * 16);
#pragma unroll
        for (u32 quarter = 0; quarter < 4; ++quarter)
            if (quarter * 32 + first >= tokens) at[quarter] = 0;
    }
}

// The outputs of a step that failed, by one block: all of them, since a larger step may have left more rows than this one.
__device__ __noinline__ void clear_outputs(const Exchange& x) {
    each_tile(x, 0, x.capacity, 0, 1, [&](u32 first, u32 rows) {
        Row row;
        row.place = first + threadIdx.x % WARP;
        if (threadIdx.x % WARP < rows) row.to = output_row(x, x.out, Place::of(x, row.place));
        put_rows(x, row, rows, x.unit);
    });
    pad_scales(x, x.capacity, threadIdx.x, blockDim.x);
}
