// Exchanges without a barrier: ids are written to the ranks that own their rows, and rows to the ranks that asked.
//
// By lines, for few tokens: what arrives says itself that it has. An id travels in 16 bytes together with the call, and a row in
// chunks that are marked or cannot be the bytes that were there before. By flags, for many: each block signals its share of the
// ids, and its share of the rows, to the blocks of the same number.

#include "rows.cuh"

// ---- By lines

// The line of two neighbouring columns of an owner, in that owner's memory. Two sets of them take turns: who writes the one of a
// step has completed the step before, for which all ranks have completed the one before that, and so have read its lines.
__device__ Pair* line_at(const Exchange& x, const Step& step, u32 owner, u32 requester, u32 index) {
    const u32 set = (step.epoch() & 1) * x.world + requester;
    return reinterpret_cast<Pair*>(x.peers[owner].data + x.lines) + (u64(set) * x.line_tokens * x.layers * x.pairs + index);
}

// A line's place: (token * layers + layer) * pairs + pair.
struct LinePlace {
    u32 token, layer, pair;

    static __device__ LinePlace of(const Exchange& x, u32 index) {
        LinePlace p;
        const u32 rest = x.by_pairs.divide(index);
        p.pair = index - rest * x.pairs;
        p.token = x.by_layers.divide(rest);
        p.layer = rest - p.token * x.layers;
        return p;
    }
};

// Sends this rank's ids to their owners, and the call to all.
__device__ void send_lines(const Exchange& x, const Step& step) {
    if (blockIdx.x == 0 && speaks(x)) store(word(x, threadIdx.x, x.rank, CALL), step.call);
    const u32 lines = x.slot * x.layers * x.pairs;
    const u32 first = blockIdx.x * THREADS + threadIdx.x;
    for (u32 distance = 1; distance < x.world; ++distance) {
        const u32 owner = after(x, distance);
        const u32 before = columns_before(x, owner), columns = columns_of(x, owner);
        for (u32 i = first; i < lines; i += gridDim.x * THREADS) {
            const LinePlace at = LinePlace::of(x, i);
            const u32 left = columns - min(columns, at.pair * 2);
            if (left == 0) continue;
            Place p = {at.token, at.layer, before + at.pair * 2};
            const u32 low = u32(id_at(x, p));
            ++p.column;
            const u32 high = left > 1 ? u32(id_at(x, p)) : NOBODY;
            store(line_at(x, step, owner, x.rank, i), {u64(high) << 32 | low, step.call});
        }
    }
}

// Marks that a chunk has not arrived. No four bytes of a row in a table that is free of NaN are all ones, whatever its format.
constexpr u64 ABSENT = ~0ull;
__device__ bool absent(u64 half) { return u32(half) == ~0u || u32(half >> 32) == ~0u; }

// With marks, a chunk of the landing holds 8 bytes of a row and the call.
template <bool MARKED>
__device__ u8* landing_chunk(const Exchange& x, u32 rank, u32 place, u32 chunk) {
    return x.peers[rank].data + x.landing + (u64(place) * x.landing_chunks + (MARKED ? 2 * chunk : chunk)) * CHUNK;
}

template <bool MARKED>
__device__ void send_chunk(const Step& step, u8* to, uint4 data) {
    Pair* pair = reinterpret_cast<Pair*>(to);
    const u64 low = u64(data.y) << 32 | data.x, high = u64(data.w) << 32 | data.z;
    if (MARKED) {
        store(pair, {low, step.call});
        store(pair + 1, {high, step.call});
    } else {
        store(pair, {low, high});
    }
}

template <bool MARKED>
__device__ bool receive_chunk(const Step& step, const u8* from, uint4& data) {
    const Pair* pair = reinterpret_cast<const Pair*>(from);
    Pair v = load(pair);
    if (MARKED) {
        const Pair second = load(pair + 1);
        if (v.high != step.call || second.high != step.call) return false;
        v.high = second.low;
    } else if (absent(v.low) || absent(v.high)) {
        return false;
    }
    data = {u32(v.low), u32(v.low >> 32), u32(v.high), u32(v.high >> 32)};
    return true;
}

// Sends the rows that others ask for as their ids come, a line a warp; and this rank its own.
template <bool MARKED>
__device__ bool serve_lines(const Exchange& x, Step& step) {
    const u32 lines = x.slot * x.layers * x.pairs, lane = threadIdx.x % WARP;
    const u32 before = columns_before(x, x.rank), columns = columns_of(x, x.rank);
    for (u32 i = blockIdx.x + threadIdx.x / WARP * gridDim.x; i < lines * x.world; i += gridDim.x * WARPS) {
        const u32 distance = i / lines + 1, index = i - (distance - 1) * lines;
        const bool self = distance == x.world;
        const u32 requester = self ? x.rank : after(x, distance);
        const LinePlace at = LinePlace::of(x, index);
        if (at.pair * 2 >= columns) continue;
        Place p = {at.token, at.layer, before + at.pair * 2 + lane % 2};
        const bool column = at.pair * 2 + lane % 2 < columns;
        i32 id = -1;
        if (self) {
            if (column && lane < 2) id = id_at(x, p);
        } else {
            const Pair* line = line_at(x, step, x.rank, requester, index);
            Pair v;
            const bool came = wait(x, step, requester, IDS, [&] {
                v = load(line);
                return v.high == step.call;
            });
            if (!__all_sync(ALL_LANES, came)) return false;
            id = i32(u32(lane % 2 == 0 ? v.low : v.low >> 32));
        }
        Row row;
        if (lane < 2 && column) {
            const u32 owner = owner_of(x, p, id);
            row.place = p.index(x);
            if (owner == x.rank) row.find(x, p.layer, id);
            if (self ? (x.heads_a_rank != 0 || owner == x.rank || owner == NOBODY) : owner == x.rank)
                row.to = self ? output_row(x, x.out, p) : landing_chunk<MARKED>(x, requester, row.place, 0);
        }
        if (self) {
            move_rows<2>(x, row, 2, x.table_unit, x.out_scales);
        } else {
            each_chunk<2>(2, x.chunks, x.by_chunks,
                [&](u32 lane, u32 chunk) {
                    const u8* from = from_lane(row.values, lane);
                    return load_piece(x, from, from_lane(row.scales, lane), chunk, x.table_unit);
                },
                [&](u32 lane, u32 chunk, const Piece& piece, bool here) {
                    u8* to = from_lane(row.to, lane);
                    if (here && to != nullptr) send_chunk<MARKED>(step, to + (MARKED ? 2 * chunk : chunk) * CHUNK, piece.data);
                });
        }
    }
    return true;
}

// Takes the rows that others send into the output, a row a warp, and makes zero rows of those that nobody sends.
template <bool MARKED>
__device__ bool collect_lines(const Exchange& x, Step& step) {
    const u32 lane = threadIdx.x % WARP;
    const u32 before = columns_before(x, x.rank), own = x.heads_a_rank == 0 ? 0 : columns_of(x, x.rank);
    const u32 others = x.columns - own, rows = x.slot * x.layers * others;
    for (u32 i = blockIdx.x + threadIdx.x / WARP * gridDim.x; i < rows; i += gridDim.x * WARPS) {
        const u32 rest = i / others;
        Place p;
        p.column = i - rest * others;
        if (p.column >= before && own > 0) p.column += own;
        p.token = x.by_layers.divide(rest);
        p.layer = rest - p.token * x.layers;
        const i32 id = id_at(x, p);
        const u32 owner = owner_of(x, p, id), place = p.index(x);
        // This rank has served itself, and with row ownership has made the zero rows.
        if (x.heads_a_rank == 0 && (owner == x.rank || owner == NOBODY)) continue;
        u8* to = output_row(x, x.out, p);
        bool ok = true;
        for (u32 chunk = lane; chunk < x.chunks; chunk += WARP) {
            Piece piece;
            if (owner != NOBODY) {
                const auto poll = [&](u32 which, uint4& data) {
                    const u8* from = landing_chunk<MARKED>(x, x.rank, place, which);
                    return wait(x, step, owner, ROWS, [&] { return receive_chunk<MARKED>(step, from, data); });
                };
                ok = ok && poll(chunk, piece.data);
                if (decodes(x) && x.scale_bytes > 0 && chunk < x.value_chunks) {
                    uint4 scales;
                    const u32 at = chunk * CHUNK / 32;
                    ok = ok && poll(x.value_chunks + at / CHUNK, scales);
                    const u32 words[4] = {scales.x, scales.y, scales.z, scales.w};
                    if (ok) piece.code = words[at % CHUNK / 4] >> at % 4 * 8 & 0xff;
                }
            }
            if (ok) put(x, to, x.out_scales, place, chunk, piece, owner == NOBODY);
        }
        if (!__all_sync(ALL_LANES, ok)) return false;
        // The permission to write here again is the next step's ids, which follow the end of this kernel.
        for (u32 chunk = lane; !MARKED && owner != NOBODY && chunk < x.chunks; chunk += WARP)
            store(reinterpret_cast<Pair*>(landing_chunk<MARKED>(x, x.rank, place, chunk)), {ABSENT, ABSENT});
    }
    return true;
}

template <bool MARKED>
__device__ void push_lines(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    send_lines(x, step);
    bool ok = blockIdx.x + threadIdx.x > 0 || begin(x, step);
    ok = ok && serve_lines<MARKED>(x, step) && collect_lines<MARKED>(x, step);
    if (ok) pad_scales(x);
    if (ok && blockIdx.x == 0 && speaks(x)) ok = called(x, step, threadIdx.x);
    leave(x, step, ok, [&] { clear_outputs(x); });
}

// ---- By flags

// Flags lie in the memory of whoever waits for them: those for ids, then those for rows.
__device__ u64* flag_at(const Exchange& x, u32 owner, u32 phase, u32 from) {
    return reinterpret_cast<u64*>(x.peers[owner].signals + x.flags) + ((phase * x.world + from) * x.flag_blocks + blockIdx.x);
}

// This block's share of n rows.
struct Share {
    u32 first, last;
    explicit __device__ Share(u32 n) : first(u32(u64(n) * blockIdx.x / gridDim.x)), last(u32(u64(n) * (blockIdx.x + 1) / gridDim.x)) {}
};

// The place of row i of those that `owner` may have to send: (token * layers + layer) * its columns + column.
__device__ Place place_of(const Exchange& x, u32 owner, u32 i) {
    const u32 columns = columns_of(x, owner), rest = i / columns;
    Place p;
    p.column = columns_before(x, owner) + i - rest * columns;
    p.token = x.by_layers.divide(rest);
    p.layer = rest - p.token * x.layers;
    return p;
}

__device__ i32* pushed_ids(const Exchange& x, u32 owner, u32 requester) {
    const u64 ids = u64(x.capacity) * x.layers * columns_of(x, owner);
    return reinterpret_cast<i32*>(x.peers[owner].data + x.pushed_ids) + requester * ids;
}

__device__ u8* pushed_row(const Exchange& x, u32 rank, u32 place) { return x.peers[rank].data + x.pushed_rows + u64(place) * x.chunks * CHUNK; }

// Tells every rank that this block has written its share: `phase` of this step.
__device__ void raise_flags(const Exchange& x, const Step& step, u32 phase) {
    __syncthreads();
    if (speaks(x)) store_release(flag_at(x, threadIdx.x, phase, x.rank), step.call);
}

__device__ void send_ids(const Exchange& x, const Step& step) {
    if (blockIdx.x == 0 && speaks(x)) store(word(x, threadIdx.x, x.rank, CALL), step.call);
    for (u32 distance = 1; distance < x.world; ++distance) {
        const u32 owner = after(x, distance);
        const Share share(x.slot * x.layers * columns_of(x, owner));
        i32* to = pushed_ids(x, owner, x.rank);
        for (u32 i = share.first + threadIdx.x; i < share.last; i += THREADS) to[i] = id_at(x, place_of(x, owner, i));
    }
    raise_flags(x, step, IDS);
}

constexpr u32 TILE = 8;              // rows that a warp moves at a time
constexpr u32 IN_FLIGHT = 4;         // loads of a lane

// Sends the rows that others ask for, and this rank its own, in turn, so that links and memory are busy at once.
__device__ bool serve_shares(const Exchange& x, Step& step) {
    const u32 lane = threadIdx.x % WARP;
    const u32 columns = columns_of(x, x.rank);
    const Share share(x.slot * x.layers * columns);
    const u32 tiles = (share.last - share.first + TILE - 1) / TILE;
    for (u32 i = threadIdx.x / WARP; i < tiles * x.world; i += WARPS) {
        const u32 tile = i / x.world, requester = after(x, i - tile * x.world);
        const bool self = requester == x.rank;
        if (!self && !__all_sync(ALL_LANES, wait_for(x, step, requester, IDS, flag_at(x, x.rank, IDS, requester)))) return false;
        const u32 first = share.first + tile * TILE, rows = min(TILE, share.last - first);
        Row row;
        if (lane < rows) {
            const Place p = place_of(x, x.rank, first + lane);
            const i32 id = self ? id_at(x, p) : pushed_ids(x, x.rank, requester)[first + lane];
            const u32 owner = owner_of(x, p, id);
            row.place = p.index(x);
            if (owner == x.rank) row.find(x, p.layer, id);
            if (self && (x.heads_a_rank != 0 || owner == x.rank || owner == NOBODY)) row.to = output_row(x, x.out, p);
            if (!self && owner == x.rank) row.to = x.direct ? output_row(x, x.peers[requester].data + x.peer_out, p) : pushed_row(x, requester, row.place);
        }
        if (self || x.direct) {
            move_rows<IN_FLIGHT>(x, row, rows, x.table_unit, self ? x.out_scales : x.peers[requester].data + x.peer_scales);
        } else {
            each_chunk<IN_FLIGHT>(rows, x.chunks, x.by_chunks,
                [&](u32 lane, u32 chunk) {
                    const u8* from = from_lane(row.values, lane);
                    return load_piece(x, from, from_lane(row.scales, lane), chunk, x.table_unit);
                },
                [&](u32 lane, u32 chunk, const Piece& piece, bool here) {
                    u8* to = from_lane(row.to, lane);
                    if (here && to != nullptr) reinterpret_cast<uint4*>(to)[chunk] = piece.data;
                });
        }
    }
    return true;
}

// Takes this block's share of what each owner has sent, where it did not go straight to the output, and makes zero rows of what no
// owner sends.
__device__ bool collect_shares(const Exchange& x, Step& step) {
    const u32 lane = threadIdx.x % WARP;
    for (u32 distance = 1; distance < x.world; ++distance) {
        const u32 owner = after(x, distance);
        const Share share(x.slot * x.layers * columns_of(x, owner));
        for (u32 first = share.first + threadIdx.x / WARP * TILE; first < share.last; first += WARPS * TILE) {
            const u32 rows = min(TILE, share.last - first);
            Row row;
            if (lane < rows) {
                const Place p = place_of(x, owner, first + lane);
                const u32 sender = owner_of(x, p, id_at(x, p));
                const bool sent = sender == owner, zero = x.heads_a_rank != 0 && sender == NOBODY;
                row.place = p.index(x);
                if (zero || (sent && !x.direct)) row.to = output_row(x, x.out, p);
                if (sent && !x.direct) row.values = pushed_row(x, x.rank, row.place), row.scales = row.values + x.value_chunks * CHUNK;
            }
            if (!__any_sync(ALL_LANES, row.to != nullptr)) continue;
            if (!x.direct && !__all_sync(ALL_LANES, wait_for(x, step, owner, ROWS, flag_at(x, x.rank, ROWS, owner)))) return false;
            move_rows<IN_FLIGHT>(x, row, rows, CHUNK, x.out_scales);
        }
    }
    return true;
}

__device__ void push_flags(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    send_ids(x, step);
    bool ok = blockIdx.x + threadIdx.x > 0 || begin(x, step);
    ok = ok && serve_shares(x, step);
    // No flag without the rows.
    if (__syncthreads_and(ok)) {
        raise_flags(x, step, ROWS);
        ok = collect_shares(x, step);
        if (ok) pad_scales(x);
        // Also the permission to overwrite the ids.
        if (ok && speaks(x)) ok = wait_for(x, step, threadIdx.x, ROWS, flag_at(x, x.rank, ROWS, threadIdx.x));
        if (ok && blockIdx.x == 0 && speaks(x)) ok = called(x, step, threadIdx.x);
    } else {
        ok = false;
    }
    leave(x, step, ok, [&] { clear_outputs(x); });
}

KERNEL(push_lines_unmarked, push_lines<false>)
KERNEL(push_lines_marked, push_lines<true>)
KERNEL(push_by_flags, push_flags)
