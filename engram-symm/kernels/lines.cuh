// Rows that say themselves that they have arrived, in chunks that are marked or cannot be the bytes that were there before.

#pragma once

#include "ids.cuh"

constexpr u32 K = 2;                 // chunks of a lane under way: two rows of 256 bytes are little more

// Marks that a chunk has not arrived. No four bytes of a row in a table that is free of NaN are all ones, whatever its format.
constexpr u64 ABSENT = ~0ull;
__device__ bool absent(u64 half) { return u32(half) == ~0u || u32(half >> 32) == ~0u; }

// Where a chunk lands. Marked, it takes two places there, each 8 bytes of the row and the call.
template <bool MARKED, bool PLAIN>
__device__ Pair* landing(const Exchange& x, u32 rank, u32 landed, u32 chunk) {
    Pair* row = reinterpret_cast<Pair*>(peer<PLAIN>(x, rank).data + x.landing);
    return row + (u64(landed) * x.chunks + chunk) * (MARKED ? 2 : 1);
}

template <bool MARKED>
__device__ void send_chunk(const Step& step, Pair* to, uint4 data) {
    const u64 low = u64(data.y) << 32 | data.x, high = u64(data.w) << 32 | data.z;
    if (!MARKED) return store(to, {low, high});
    store(to, {low, step.call});
    store(to + 1, {high, step.call});
}

template <bool MARKED>
__device__ bool receive_chunk(const Step& step, const Pair* at, uint4& data) {
    Pair v = load(at);
    bool here = !absent(v.low) && !absent(v.high);
    if (MARKED) {
        const Pair second = load(at + 1);
        here = v.high == step.call && second.high == step.call;
        v.high = second.low;
    }
    data = {u32(v.low), u32(v.low >> 32), u32(v.high), u32(v.high >> 32)};
    return here;
}

// Sends a part of a tile's rows to a requester as its ids come. A lane knows its chunks before it knows their ids.
template <bool MARKED, bool PLAIN>
__device__ bool serve_lines(const Exchange& x, const Step& step, u32 tile, u32 part, u32 requester) {
    const u32 all = Tiles::rows(x, tile) * x.chunks;
    if (const u32 base = part * K * WARP; base < all) {
        const Pair* line[K];
        Pair* to[K];
        u32 half[K], layer[K], chunk[K];
        u64 ids[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            line[k] = nullptr;
            if (base + k * WARP >= all) continue;
            const u32 at = base + k * WARP + threadIdx.x % WARP, row = x.by_chunks.divide(at), of = tile * x.tile * 2 + row;
            Place p;
            const bool here = find_place(x, x.rank, of, p) && at < all;
            chunk[k] = at - row * x.chunks, half[k] = of % 2, layer[k] = p.layer;
            if (here) line[k] = line_at<PLAIN>(x, step, x.rank, requester, of / 2);
            to[k] = landing<MARKED, PLAIN>(x, requester, landed(x, x.rank, p), chunk[k]);
            if (x.tables != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(x.tables + p.layer));
        }
        const bool came = wait(x, step, requester, IDS, [&] {
            bool ready = true;
#pragma unroll
            for (u32 k = 0; k < K; ++k) {
                if (line[k] == nullptr) continue;
                const Pair v = load(line[k]);
                ids[k] = v.low, ready = ready && v.high == step.call;
            }
            return ready;
        });
        if (!came) return false;
        uint4 data[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            data[k] = {0, 0, 0, 0};
            if (line[k] == nullptr) continue;
            const i32 id = half_of(ids[k], half[k]);
            if (!owns<PLAIN>(x, x.rank, layer[k], id)) {
                line[k] = nullptr;
                continue;
            }
            Row row;
            row.find(table_of(x, layer[k]), id);
            data[k] = load_chunk<PLAIN>(x, row.values, row.scales, chunk[k], x.unit);
        }
#pragma unroll
        for (u32 k = 0; k < K; ++k)
            if (line[k] != nullptr) send_chunk<MARKED>(step, to[k], data[k]);
    }
    return true;
}

// MX scales that are not whole groups of four.
__device__ __noinline__ void put_odd_scales(const Exchange& x, u32 tile, u32 owner, u32 at, uint4 data) {
    const u32 row = x.by_chunks.divide(at);
    Place p;
    if (find_place(x, owner, tile * x.tile * 2 + row, p)) store_scales(x, x.out_scales, p, Part(x, at - row * x.chunks), data);
}

// Takes a part of a tile's chunks of an owner into the output as they come, and makes zero rows of those that nobody sends.
template <bool MARKED, bool PLAIN>
__device__ bool collect_chunks(const Exchange& x, const Step& step, u32 tile, u32 part, u32 owner) {
    const u32 all = Tiles::rows(x, tile) * x.chunks;
    if (const u32 base = part * K * WARP; base < all) {
        Pair* from[K];
        u8* to[K];
        u32 bytes[K];                // and 0x100 where they are MX scales
        uint4 data[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            from[k] = nullptr, to[k] = nullptr, data[k] = {0, 0, 0, 0};
            if (base + k * WARP >= all) continue;
            const u32 at = base + k * WARP + threadIdx.x % WARP, row = x.by_chunks.divide(at), chunk = at - row * x.chunks;
            Place p;
            if (!find_place(x, owner, tile * x.tile * 2 + row, p) || at >= all) continue;
            const bool sent = owns<PLAIN>(x, owner, p.layer, id_at(x, p));
            if (sent) from[k] = landing<MARKED, PLAIN>(x, x.rank, landed(x, owner, p), chunk);
            // With row ownership this rank has made the zero rows while it served itself.
            if (!PLAIN && !sent && x.heads_a_rank == 0) continue;
            const Part part(x, chunk);
            const bool scales = part.scale && x.form == MX;
            to[k] = scales ? scale_at(x, x.out_scales, p, p.column * x.scale_bytes + part.from)
                           : output_row(x, x.out, p) + (part.scale ? x.value_bytes : 0) + part.from;
            bytes[k] = part.bytes | (scales ? 0x100 : 0);
        }
        const bool came = wait(x, step, owner, ROWS, [&] {
            bool ready = true;
#pragma unroll
            for (u32 k = 0; k < K; ++k)
                if (from[k] != nullptr) ready = receive_chunk<MARKED>(step, from[k], data[k]) && ready;
            return ready;
        });
        if (!came) return false;
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            if (to[k] == nullptr) continue;
            if (!(bytes[k] & 0x100))
                store_bytes<PLAIN>(to[k], data[k], bytes[k], x.out_unit);
            else if (PLAIN || x.scale_bytes % 4 == 0)
                store_groups(to[k], bytes[k] & 0xff, data[k]);
            else
                put_odd_scales(x, tile, owner, base + k * WARP + threadIdx.x % WARP, data[k]);
            // The permission to write here again is the next step's ids, which follow the end of this kernel.
            if (!MARKED && from[k] != nullptr) store(from[k], {ABSENT, ABSENT});
        }
    }
    return true;
}

// The same for rows that are decoded: a row a warp, since all its chunks need its scales.
template <bool MARKED>
__device__ __noinline__ bool collect_decoded(const Exchange& x, Step step, u32 tile, u32 part, u32 owner) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile);
    for (u32 row = part; row < rows; row += x.parts) {
        Place p;
        if (!find_place(x, owner, tile * x.tile * 2 + row, p)) continue;
        const i32 id = id_at(x, p);
        const bool sent = owns(x, owner, p.layer, id);
        if (!sent && x.heads_a_rank == 0) continue;
        const u32 place = landed(x, owner, p);
        bool came = true;
        for (u32 chunk = lane; chunk < x.chunks && sent; chunk += WARP) {
            uint4 data;
            came = came && wait(x, step, owner, ROWS, [&] { return receive_chunk<MARKED>(step, landing<MARKED, false>(x, x.rank, place, chunk), data); });
        }
        if (!__all_sync(ALL_LANES, came)) return false;
        for (u32 chunk = lane; chunk < x.value_chunks; chunk += WARP) {
            uint4 data = {0, 0, 0, 0}, scales;
            float scale = 0;
            if (sent) {
                const u32 at = chunk * CHUNK / 32;
                receive_chunk<MARKED>(step, landing<MARKED, false>(x, x.rank, place, chunk), data);
                if (x.scale_bytes > 0) receive_chunk<MARKED>(step, landing<MARKED, false>(x, x.rank, place, x.value_chunks + at / CHUNK), scales);
                scale = x.scale_bytes > 0 ? e8m0(byte_of(scales, at % CHUNK)) : rounded(x.layer_info[p.layer].global_scale, x.form == F16);
            }
            const Part part(x, chunk);
            store_floats(output_row(x, x.out, p) + part.from * 2, data, scale, part.bytes, x.form == F16);
        }
        __syncwarp();
        for (u32 chunk = lane; chunk < x.chunks && sent && !MARKED; chunk += WARP) store(landing<MARKED, false>(x, x.rank, place, chunk), {ABSENT, ABSENT});
    }
    return true;
}

template <bool MARKED, bool PLAIN>
__device__ bool collect_lines(const Exchange& x, const Step& step, u32 tile, u32 part, u32 owner) {
    if (!PLAIN && decodes(x)) return collect_decoded<MARKED>(x, step, tile, part, owner);
    return collect_chunks<MARKED, PLAIN>(x, step, tile, part, owner);
}

// This rank's own rows, by some warps but the last, which has other things to do; from the first one on that is at rest.
template <bool PLAIN>
__device__ void serve_itself_by(const Exchange& x, u32 warp, u32 warps, u32 at_rest) {
    const u32 all = warps - 1;
    if (warp == all) return;
    const u32 first = (warp + all - at_rest % all) % all;
    for (u32 tile = blockIdx.x + first * gridDim.x; tile * x.self_tile < x.line_count; tile += all * gridDim.x) serve_itself<PLAIN>(x, tile, x.self_tile);
}

// The last warp has the fewest jobs, none in a small step.
__device__ void end_lines(const Exchange& x, const Step& step, bool ok) {
    const u32 warps = blockDim.x / WARP;
    if (threadIdx.x / WARP == warps - 1) {
        pad_scales(x, x.slot, blockIdx.x * WARP + threadIdx.x % WARP, gridDim.x * WARP);
        if (ok && blockIdx.x == 0) ok = agreed(x, step);
    }
    leave(x, step, ok, [&] { clear_outputs(x); });
}

template <bool MARKED, bool PLAIN>
__device__ void push_lines(const Exchange& x) {
    Step step;
    if (!send_ids<PLAIN>(x, step)) return pass(x);
    const Tiles own;
    // First what others wait for, then its own, then what others send: a warp that waits for rows has served all that it has to. What
    // others send from the first warp on that had nothing to serve.
    const u32 parts = own.count(x.tiles) * x.parts;
    bool ok = true;
    u32 next = own.warp;
    for (u32 distance = 1; distance < x.world; ++distance, next -= parts)
#pragma unroll 1
        for (; next < parts; next += own.warps) {
            const u32 tile = x.by_parts.divide(next);
            ok = ok && serve_lines<MARKED, PLAIN>(x, step, blockIdx.x + tile * gridDim.x, next - tile * x.parts, after(x, distance));
        }
    serve_itself_by<PLAIN>(x, own.warp, own.warps, 2 * parts * (x.world - 1));
    // Serving may fail in some lanes of a warp alone, and all of them have to meet where rows are decoded.
    if (!PLAIN) ok = __all_sync(ALL_LANES, ok);
    for (u32 distance = 1; distance < x.world; ++distance, next -= parts)
#pragma unroll 1
        for (; next < parts; next += own.warps) {
            const u32 tile = x.by_parts.divide(next);
            ok = ok && collect_lines<MARKED, PLAIN>(x, step, blockIdx.x + tile * gridDim.x, next - tile * x.parts, after(x, distance));
        }
    end_lines(x, step, ok);
}
