// What pushes have in common: ids on their way in lines, the tiles in which lines are shared out between blocks, a rank's own rows, and what
// is checked once a step.
//
// A line is 16 bytes, two ids and the call, so that it says itself that it has arrived. A block waits for the blocks of its own number
// alone, so that not all blocks of a grid need be there at the same time.

#pragma once

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

// Which of the rows that land at a requester is that of a place: owner by owner, so that what an owner sends has no gaps. Links carry that
// faster than runs of its columns at their place in a token, which do not use all of them alike.
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
