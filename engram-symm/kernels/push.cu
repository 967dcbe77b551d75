// Exchanges without a barrier: ids are written to the ranks that own their rows, and rows to the ranks that asked.
//
// Ids travel in lines: 16 bytes, two ids and the call, so that a line says itself that it has arrived. Rows do so by lines, in chunks
// that are marked or cannot be the bytes that were there before; and by flags, one for all that a block sends to a rank. Either way a block waits for the blocks of its own number alone, so that not all blocks of a grid need be there
// at the same time.

#include "rows.cuh"

// A line holds the ids of two neighbouring columns of an owner. Its number: (token * layers + layer) * pairs + pair. Two sets of
// lines take turns: who writes the one of a step has completed the step before, for which all ranks have completed the one before
// that, and so have read its lines.
template <bool PLAIN>
__device__ Pair* line_at(const Exchange& x, const Step& step, u32 owner, u32 requester, u32 line) {
    const u32 set = (step.epoch() & 1) * x.world + requester;
    return reinterpret_cast<Pair*>(peer<PLAIN>(x, owner).data + x.lines) + (u64(set) * x.capacity * x.layers * x.pairs + line);
}

// The place of row `of` of an owner's, which are two a line; false where the owner has no such column.
__device__ bool find_place(const Exchange& x, u32 owner, u32 of, Place& p) {
    const u32 line = of / 2, rest = x.by_pairs.divide(line), column = (line - rest * x.pairs) * 2 + of % 2;
    p.column = columns_before(x, owner) + column;
    p.in_group(x, rest);
    return column < columns_of(x, owner);
}

// Which of the rows that land at a requester is that of a place: owner by owner, so that what an owner sends has no gaps. Links carry it
// a fifth faster than runs of its columns at their place in a token.
__device__ u32 landed(const Exchange& x, u32 owner, const Place& p) {
    const u32 before = columns_before(x, owner);
    return x.slot * x.layers * before + p.group * columns_of(x, owner) + (p.column - before);
}

// The ids of a line.
__device__ u64 line_ids(const Exchange& x, u32 owner, u32 line) {
    u32 ids[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        Place p;
        ids[half] = find_place(x, owner, line * 2 + half, p) ? u32(id_at(x, p)) : ~0u;
    }
    return u64(ids[1]) << 32 | ids[0];
}

__device__ i32 half_of(u64 ids, u32 half) { return i32(half == 0 ? u32(ids) : u32(ids >> 32)); }

// Lines go in tiles: tile t, of each owner, to block t % blocks, on all ranks alike. This warp's part of them.
struct Tiles {
    u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP;

    // How many of all tiles are this block's.
    static __device__ u32 count(u32 all) { return all > blockIdx.x ? (all - blockIdx.x - 1) / gridDim.x + 1 : 0; }
    // Line `lane` of a tile, or one past the last.
    static __device__ u32 line(const Exchange& x, u32 tile, u32 lane) {
        return lane < x.tile ? min(tile * x.tile + lane, x.line_count) : x.line_count;
    }
    // Rows of a tile of so many lines.
    static __device__ u32 rows(const Exchange& x, u32 tile, u32 lines) { return min(lines, x.line_count - tile * lines) * 2; }
    static __device__ u32 rows(const Exchange& x, u32 tile) { return rows(x, tile, x.tile); }
};

// Calls all ranks, and sends this block's ids to their owners, a tile a warp. False where the group sleeps or has failed.
template <bool PLAIN>
__device__ bool send_ids(const Exchange& x, Step& step) {
    const Tiles own;
    const u32 lane = threadIdx.x % WARP;
    u32 tile = blockIdx.x + own.warp * gridDim.x;
    u64 ids = 0;
    const auto first_ids = [&] {
        const u32 line = tile < x.tiles ? Tiles::line(x, tile, lane) : x.line_count;
        if (line < x.line_count) ids = line_ids(x, after(x, x.world > 1), line);
    };
    if (!enter(x, step, first_ids)) return false;
    if (blockIdx.x == 0) {
        if (threadIdx.x == blockDim.x - 1) begin(x);
        call_all(x, step, threadIdx.x, blockDim.x, [](u64* at, u64 call) { store(at, call); });
    }
    for (bool first = true; tile < x.tiles; tile += own.warps * gridDim.x, first = false) {
        const u32 line = Tiles::line(x, tile, lane);
        if (line == x.line_count) continue;
        for (u32 distance = 1; distance < x.world; ++distance) {
            const u32 owner = after(x, distance);
            if (!first || distance > 1) ids = line_ids(x, owner, line);
            store(line_at<PLAIN>(x, step, owner, x.rank, line), {ids, step.call});
        }
    }
    return true;
}

// Puts this rank's own rows of a tile into its output, and with row ownership the zero rows of ids that nobody owns.
template <bool PLAIN>
__device__ void serve_itself(const Exchange& x, u32 tile, u32 lines) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile, lines);
    Place p;
    Row row;
    if (lane < rows && find_place(x, x.rank, tile * lines * 2 + lane, p)) {
        const Table table = table_of(x, p.layer);
        const i32 id = id_at(x, p);
        const bool own = owns<PLAIN>(x, x.rank, p.layer, id);
        row.place = p.index(x);
        if (own) row.find(table, id);
        if (PLAIN || own || x.heads_a_rank != 0 || unowned(x, p.layer, id)) row.to = output_row(x, x.out, p);
    }
    put_rows<PLAIN>(x, row, rows, x.unit);
}

// Once a step: that all ranks call the same, and that it is the only step that runs here. By a warp.
__device__ bool agreed(const Exchange& x, const Step& step) {
    return all_called(x, step, threadIdx.x % WARP, WARP) && (threadIdx.x % WARP > 0 || alone(x, step));
}

// ---- By lines

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

// For many tokens: some warps of a block serve and the others collect, so that rows are on links and taken from them at the same time.

// Sends a tile's rows to a requester as its ids come, which each lane waits for alone.
__device__ bool serve_rows(const Exchange& x, const Step& step, u32 tile, u32 requester) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile), of = tile * x.tile * 2 + lane;
    Place p;
    Row row;
    bool came = true;
    if (lane < rows && find_place(x, x.rank, of, p)) {
        const Table table = table_of(x, p.layer);
        const Pair* line = line_at<true>(x, step, x.rank, requester, of / 2);
        Pair v;
        came = wait(x, step, requester, IDS, [&] { return v = load(line), v.high == step.call; });
        const i32 id = half_of(v.low, of % 2);
        if (came && owns<true>(x, x.rank, p.layer, id)) {
            row.find(table, id);
            row.to = reinterpret_cast<u8*>(landing<false, true>(x, requester, landed(x, x.rank, p), 0));
        }
    }
    if (!__all_sync(ALL_LANES, came)) return false;
    each_part<K, uint4>(rows, x.chunks, x.by_chunks,
        [&](u32 of, u32 chunk) { return load_chunk<true>(x, from_lane(row.values, of), from_lane(row.scales, of), chunk, x.unit); },
        [&](u32 of, u32 chunk, uint4 data, bool here) {
            Pair* to = reinterpret_cast<Pair*>(from_lane(row.to, of));
            if (here && to != nullptr) send_chunk<false>(step, to + chunk, data);
        });
    return true;
}

// Takes a tile's rows of an owner into the output as they come, and makes zero rows of those that it does not send.
__device__ bool collect_rows(const Exchange& x, const Step& step, u32 tile, u32 owner) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile), all = rows * x.chunks;
    Place p;
    u8 *from = nullptr, *to = nullptr, *scales_to = nullptr;
    if (lane < rows && find_place(x, owner, tile * x.tile * 2 + lane, p)) {
        if (owns<true>(x, owner, p.layer, id_at(x, p))) from = reinterpret_cast<u8*>(landing<false, true>(x, x.rank, landed(x, owner, p), 0));
        to = output_row(x, x.out, p);
        scales_to = x.form == MX ? scale_at(x, x.out_scales, p, p.column * x.scale_bytes) : to + x.value_bytes;
    }
#pragma unroll 1
    for (u32 base = 0; base < all; base += K * WARP) {
        Pair* at[K];
        uint4 data[K];
        u32 row[K], chunk[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const u32 number = min(base + k * WARP + lane, all - 1);
            row[k] = x.by_chunks.divide(number), chunk[k] = number - row[k] * x.chunks, data[k] = {0, 0, 0, 0};
            at[k] = reinterpret_cast<Pair*>(from_lane(from, row[k]));
            at[k] = at[k] == nullptr || base + k * WARP + lane >= all ? nullptr : at[k] + chunk[k];
        }
        const bool came = wait(x, step, owner, ROWS, [&] {
            bool ready = true;
#pragma unroll
            for (u32 k = 0; k < K; ++k)
                if (at[k] != nullptr) ready = receive_chunk<false>(step, at[k], data[k]) && ready;
            return ready;
        });
        if (!__all_sync(ALL_LANES, came)) return false;
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const Part part(x, chunk[k]);
            u8* values_to = from_lane(to, row[k]);
            u8* groups_to = from_lane(scales_to, row[k]);
            if (base + k * WARP + lane >= all || values_to == nullptr) continue;
            if (part.scale && x.form == MX)
                store_groups(groups_to + part.from / 4 * 512, part.bytes, data[k]);
            else
                store_bytes<true>((part.scale ? groups_to : values_to) + part.from, data[k], part.bytes, x.out_unit);
            if (at[k] != nullptr) store(at[k], {ABSENT, ABSENT});
        }
    }
    return true;
}

__device__ void push_lines_apart_plain(const Exchange& x) {
    Step step;
    if (!send_ids<true>(x, step)) return pass(x);
    const Tiles own;
    const u32 tiles = own.count(x.tiles);
    const bool serves = own.warp < x.servers;
    const u32 warp = serves ? own.warp : own.warp - x.servers, warps = serves ? x.servers : own.warps - x.servers;
    if (!serves) serve_itself_by<true>(x, warp, warps, 0);
    // All ranks in turn, so that all links are busy.
    bool ok = true;
    u32 distance = warp, tile = blockIdx.x;
    while (ok && x.world > 1) {
        while (distance >= x.world - 1) distance -= x.world - 1, tile += gridDim.x;
        if (tile >= x.tiles) break;
        const u32 peer = after(x, distance + 1);
        ok = serves ? serve_rows(x, step, tile, peer) : collect_rows(x, step, tile, peer);
        distance += warps;
    }
    end_lines(x, step, ok);
}

// ---- By flags

// Flags lie in the memory of whoever waits for them: those for ids, then those for rows.
__device__ u64* flag_at(const Exchange& x, u32 owner, u32 phase, u32 from) {
    return reinterpret_cast<u64*>(peer(x, owner).signals + x.flags) + ((phase * x.world + from) * x.flag_blocks + blockIdx.x);
}

// Where a row lands that does not go straight to the output, or with MX its scales: whole chunks.
template <bool PLAIN>
__device__ u8* pushed_row(const Exchange& x, u32 rank, u32 landed) {
    const u32 chunks = PLAIN || x.straight ? x.chunks - x.value_chunks : x.chunks;
    return peer<PLAIN>(x, rank).data + x.pushed_rows + u64(landed) * chunks * CHUNK;
}

// Tells every rank that this block has written its share: `phase` of this step.
__device__ void raise_flags(const Exchange& x, const Step& step, u32 phase) {
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < x.world; rank += blockDim.x)
        if (rank != x.rank) store_release(flag_at(x, rank, phase, x.rank), step.call);
}

// A rank whose block has no columns to serve waits for nobody's ids, so that its flag may be the next step's already: that says as much
// of this one. A flag that was never raised is 0.
__device__ bool await_flag(const Exchange& x, const Step& step, u32 phase, u32 from) {
    const u64* at = flag_at(x, x.rank, phase, from);
    return __all_sync(ALL_LANES, wait(x, step, from, phase, [&] {
        const u64 flag = load_acquire(at);
        return flag == step.call || (flag != 0 && step.ahead(flag) == 1);
    }));
}

// Sends a tile's rows to a requester as its ids come.
template <bool PLAIN>
__device__ bool serve_tile(const Exchange& x, const Step& step, u32 tile, u32 requester) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile), of = tile * x.tile * 2 + lane;
    if (!PLAIN && x.flagged_ids && !await_flag(x, step, IDS, requester)) return false;
    Place p;
    Row row;
    bool came = true;
    if (lane < rows && find_place(x, x.rank, of, p)) {
        const Table table = table_of(x, p.layer);
        const Pair* line = line_at<PLAIN>(x, step, x.rank, requester, of / 2);
        Pair v;
        if (!PLAIN && x.flagged_ids)
            v.low = load(&line->low);
        else
            came = wait(x, step, requester, IDS, [&] { return v = load(line), v.high == step.call; });
        const i32 id = half_of(v.low, of % 2);
        if (came && owns<PLAIN>(x, x.rank, p.layer, id)) {
            row.place = p.index(x);
            row.find(table, id);
            u8* landing = pushed_row<PLAIN>(x, requester, landed(x, x.rank, p));
            row.to = PLAIN || x.straight ? output_row(x, peer<PLAIN>(x, requester).data + x.peer_out, p) : landing;
            row.scales_to = !PLAIN && !x.straight ? landing + x.value_chunks * CHUNK : x.form == MX ? landing : row.to + x.value_bytes;
        }
    }
    if (!__all_sync(ALL_LANES, came)) return false;
    // What lands is a multiple of whole chunks.
    copy_rows<PLAIN>(x, row, rows, {x.unit, x.straight && x.form != MX ? x.out_unit : min(x.unit, CHUNK)});
    return true;
}

// Takes a tile's rows of an owner that did not go straight to the output, and makes zero rows of what nobody sends.
template <bool PLAIN>
__device__ void collect_tile(const Exchange& x, u32 tile, u32 owner) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile);
    Place p;
    Row row;
    if (lane < rows && find_place(x, owner, tile * x.tile * 2 + lane, p)) {
        const bool sent = owns<PLAIN>(x, owner, p.layer, id_at(x, p));
        row.place = p.index(x);
        if (sent) {
            row.values = pushed_row<PLAIN>(x, x.rank, landed(x, owner, p));
            row.scales = PLAIN || x.straight ? row.values : row.values + x.value_chunks * CHUNK;
        }
        if (sent && (PLAIN || x.straight) && x.form == MX) put_scales<PLAIN>(x, row, CHUNK);
        if (sent ? !PLAIN && !x.straight : PLAIN || x.heads_a_rank != 0) row.to = output_row(x, x.out, p);
    }
    if (__any_sync(ALL_LANES, row.to != nullptr)) put_rows<PLAIN>(x, row, rows, CHUNK);
}

// Whether no other rank has reported a fault. Rows go straight into the output of a rank that asks, so that nothing may be sent any
// more to one that has given up.
__device__ bool unharmed(const Exchange& x, const Step& step) {
    bool fine = true;
    for (u32 rank = threadIdx.x; rank < x.world; rank += blockDim.x) fine = fine && (rank == x.rank || !learn(x, step, rank));
    return __syncthreads_and(fine);
}

template <bool PLAIN>
__device__ void push_flags(const Exchange& x) {
    Step step;
    if (!send_ids<PLAIN>(x, step)) return pass(x);
    if (!PLAIN && x.flagged_ids) raise_flags(x, step, IDS);
    const Tiles own;
    bool ok = unharmed(x, step);
    // Serves all ranks in turn, this one too, so that links and memory are busy at once.
    u32 distance = own.warp, tile = blockIdx.x;
    while (ok) {
        while (distance >= x.world) distance -= x.world, tile += gridDim.x;
        if (tile >= x.tiles) break;
        if (distance == x.world - 1)
            serve_itself<PLAIN>(x, tile, x.tile);
        else
            ok = serve_tile<PLAIN>(x, step, tile, after(x, distance + 1));
        distance += own.warps;
    }
    // No flag without the rows.
    ok = __syncthreads_and(ok);
    if (ok) {
        raise_flags(x, step, ROWS);
        pad_scales(x, x.slot, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
        for (u32 distance = 1; distance < x.world && ok; ++distance) {
            const u32 owner = after(x, distance);
            // Also the permission to write to that rank again.
            ok = await_flag(x, step, ROWS, owner);
            for (u32 tile = blockIdx.x + own.warp * gridDim.x; tile < x.tiles && ok; tile += own.warps * gridDim.x) collect_tile<PLAIN>(x, tile, owner);
        }
        if (ok && blockIdx.x == 0 && own.warp == own.warps - 1) ok = agreed(x, step);
    }
    leave(x, step, ok, [&] { clear_outputs(x); });
}

KERNEL(push_lines_plain, (push_lines<false, true>))
KERNEL(push_lines_apart, push_lines_apart_plain)
KERNEL(push_lines_unmarked, (push_lines<false, false>))
KERNEL(push_lines_marked, (push_lines<true, false>))
KERNEL(push_flags_plain, push_flags<true>)
KERNEL(push_flags_any, push_flags<false>)
