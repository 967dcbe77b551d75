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

// `bytes` of them at p, the rest 0. All of p, strides and sizes are multiples of `unit`.
__device__ uint4 load_bytes(const u8* p, u32 bytes, u32 unit) {
    if (unit >= 16) return *reinterpret_cast<const uint4*>(p);
    if (unit < 8) return load_single_bytes(p, bytes);
    const uint2* from = reinterpret_cast<const uint2*>(p);
    const uint2 low = from[0], high = bytes > 8 ? from[1] : uint2{0, 0};
    return {low.x, low.y, high.x, high.y};
}

__device__ void store_bytes(u8* p, uint4 v, u32 bytes, u32 unit) {
    if (unit >= 16) {
        *reinterpret_cast<uint4*>(p) = v;
    } else if (unit >= 8) {
        reinterpret_cast<uint2*>(p)[0] = {v.x, v.y};
        if (bytes > 8) reinterpret_cast<uint2*>(p)[1] = {v.z, v.w};
    } else {
        store_single_bytes(p, v, bytes);
    }
}

__device__ u32 columns_before(const Exchange& x, u32 rank) { return x.heads_a_rank == 0 ? 0 : min(rank * x.heads_a_rank, x.columns); }
__device__ u32 columns_of(const Exchange& x, u32 rank) {
    return x.heads_a_rank == 0 ? x.columns : min(x.heads_a_rank, x.columns - columns_before(x, rank));
}

// Place of a row: (token * layers + layer) * columns + column.
struct Place {
    u32 token, layer, column;

    static __device__ Place of(const Exchange& x, u32 index) {
        Place p;
        const u32 rest = x.by_columns.divide(index);
        p.column = index - rest * x.columns;
        p.token = x.by_layers.divide(rest);
        p.layer = rest - p.token * x.layers;
        return p;
    }
    __device__ u32 index(const Exchange& x) const { return (token * x.layers + layer) * x.columns + column; }
};

// This rank's id at a place; none past the tokens.
__device__ i32 id_at(const Exchange& x, const Place& p) {
    return p.token < x.tokens ? x.ids[i64(p.token) * x.token_stride + (p.layer * x.columns + p.column)] : -1;
}

constexpr u32 NOBODY = ~0u;

// Who sends the row of an id, if its column and the id itself have an owner.
__device__ u32 owner_of(const Exchange& x, const Place& p, i32 id) {
    if (id < 0) return NOBODY;
    if (x.heads_a_rank != 0) return p.column / x.heads_a_rank;
    const Layer layer = x.layer_info[p.layer];
    return u32(id) < layer.rows ? u32(id) / layer.rows_a_rank : NOBODY;
}

// A row that a lane knows and its warp moves.
struct Row {
    const u8* values = nullptr;      // null: a zero row
    const u8* scales = nullptr;
    u8* to = nullptr;                // null: no row
    u32 place = 0;

    __device__ void find(const Exchange& x, u32 layer, i32 id) {
        if (x.tables == nullptr) return;
        const Table t = x.tables[layer];
        const u32 local = u32(id) - t.first;         // below `rows` only for rows that are here
        if (local >= t.rows) return;
        values = t.values + local * t.value_stride;
        scales = t.scales + local * t.scale_stride;
    }
};

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

// What is moved of a row at a time; with it, for values that are decoded, their scale.
struct Piece {
    uint4 data = {0, 0, 0, 0};
    u32 code = 0;
};

__device__ bool decodes(const Exchange& x) { return x.form >= BF16; }

__device__ Piece load_piece(const Exchange& x, const u8* values, const u8* scales, u32 chunk, u32 unit) {
    Piece piece;
    if (values == nullptr) return piece;
    const Part part(x, chunk);
    piece.data = load_bytes((part.scale ? scales : values) + part.from, part.bytes, unit);
    if (decodes(x) && x.scale_bytes > 0 && !part.scale) piece.code = scales[part.from / 32];
    return piece;
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

__device__ __noinline__ void store_single_scales(const Exchange& x, u8* scales, const Place& p, u32 first, u32 bytes, uint4 data) {
#pragma unroll 1
    for (u32 i = 0; i < bytes; ++i) *scale_at(x, scales, p, first + i) = i < CHUNK ? u8(byte_of(data, i)) : 0;
}

__device__ void store_scales(const Exchange& x, u8* scales, const Place& p, const Part& part, uint4 data) {
    const u32 first = p.column * x.scale_bytes + part.from;
    // The last row of a token fills up the groups of its tile.
    const bool last = p.column + 1 == x.columns && part.from + part.bytes == x.scale_bytes;
    const u32 bytes = last ? x.scale_tiles * 4 - first : part.bytes;
    if (x.scale_bytes % 4 != 0) return store_single_scales(x, scales, p, first, bytes, data);
    const u32 words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        if (i * 4 < bytes) *reinterpret_cast<u32*>(scale_at(x, scales, p, first + i * 4)) = words[i];
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

// Writes a chunk of a row into an output; `to` is where the row begins there, `zero` says that it is a zero row.
__device__ void put(const Exchange& x, u8* to, u8* scales, u32 place, u32 chunk, const Piece& piece, bool zero) {
    const Part part(x, chunk);
    if (decodes(x)) {
        if (part.scale) return;
        const bool f16 = x.form == F16;
        float scale = 0;             // a zero row is 0 under any scale
        if (!zero) scale = x.scale_bytes > 0 ? e8m0(piece.code) : rounded(x.layer_info[Place::of(x, place).layer].global_scale, f16);
        store_floats(to + part.from * 2, piece.data, scale, part.bytes, f16);
    } else if (!part.scale) {
        store_bytes(to + part.from, piece.data, part.bytes, x.out_unit);
    } else if (x.form == MX) {
        store_scales(x, scales, Place::of(x, place), part, piece.data);
    } else {
        store_bytes(to + x.value_bytes + part.from, piece.data, part.bytes, x.out_unit);
    }
}

// Has a warp move the chunks of rows that its lanes know, K of each lane under way at a time: load(row, chunk) gives a piece,
// store(row, chunk, piece, here) takes it, where `here`. `row` is a lane's number; all lanes call both.
template <u32 K, typename Load, typename Store>
__device__ void each_chunk(u32 rows, u32 chunks, Divisor by_chunks, Load load, Store store) {
    const u32 lane = threadIdx.x % WARP, all = rows * chunks;
    for (u32 base = 0; base < all; base += K * WARP) {
        Piece piece[K];
        u32 row[K], chunk[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const u32 at = min(base + k * WARP + lane, all - 1);
            row[k] = by_chunks.divide(at), chunk[k] = at - row[k] * chunks;
            piece[k] = load(row[k], chunk[k]);
        }
#pragma unroll
        for (u32 k = 0; k < K; ++k) store(row[k], chunk[k], piece[k], base + k * WARP + lane < all);
    }
}

// Moves a tile's rows into an output.
template <u32 K>
__device__ void move_rows(const Exchange& x, const Row& row, u32 rows, u32 unit, u8* scales) {
    each_chunk<K>(rows, x.chunks, x.by_chunks,
        [&](u32 lane, u32 chunk) {
            const u8* from = from_lane(row.values, lane);
            return load_piece(x, from, from_lane(row.scales, lane), chunk, unit);
        },
        [&](u32 lane, u32 chunk, const Piece& piece, bool here) {
            const bool zero = from_lane(row.values, lane) == nullptr;
            u8* to = from_lane(row.to, lane);
            const u32 place = __shfl_sync(ALL_LANES, row.place, lane);
            if (here && to != nullptr) put(x, to, scales, place, chunk, piece, zero);
        });
}

// Zero rows from the first token to one past the last, by all threads of a block.
__device__ void clear_rows(const Exchange& x, u32 first, u32 last) {
    const u32 chunks = (last - first) * x.layers * x.columns * x.chunks;
    for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
        const u32 row = x.by_chunks.divide(i), place = first * x.layers * x.columns + row;
        put(x, output_row(x, x.out, Place::of(x, place)), x.out_scales, place, i - row * x.chunks, Piece(), true);
    }
}

// MX: scales of 0 from the slot's end to that of its tile, by all blocks.
__device__ void pad_scales(const Exchange& x) {
    if (x.form != MX) return;
    const u32 from = x.slot, count = ((x.slot + 127) / 128 * 128 - from) * x.layers * x.columns;
    const u32 scale_chunks = x.chunks - x.value_chunks;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        const Place p = Place::of(x, from * x.layers * x.columns + i);
        for (u32 chunk = 0; chunk < scale_chunks; ++chunk) store_scales(x, x.out_scales, p, Part(x, x.value_chunks + chunk), {0, 0, 0, 0});
    }
}

// The outputs of a step that failed.
__device__ void clear_outputs(const Exchange& x) {
    clear_rows(x, 0, x.slot);
    if (x.form != MX) return;
    const u32 count = ((x.slot + 127) / 128 * 128 - x.slot) * x.layers * x.columns;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        const Place p = Place::of(x, x.slot * x.layers * x.columns + i);
        for (u32 chunk = x.value_chunks; chunk < x.chunks; ++chunk) store_scales(x, x.out_scales, p, Part(x, chunk), {0, 0, 0, 0});
    }
}
