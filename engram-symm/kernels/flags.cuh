// Rows with a flag for all that a block sends to a rank.

#pragma once

#include "ids.cuh"

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
