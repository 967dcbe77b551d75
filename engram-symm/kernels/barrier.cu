// The exchange with two barriers, as kernels that follow each other; and steps in which no rows move.

#include "rows.cuh"

// Has all ranks come to this step. By one block; a thread speaks to each of the others.
__device__ bool meet_all(const Exchange& x, Step& step) {
    bool ok = threadIdx.x > 0 || begin(x, step);
    if (speaks(x)) {
        store_release(word(x, threadIdx.x, x.rank, CALL), step.call);
        ok = called(x, step, threadIdx.x);
    }
    return ok;
}

__device__ void meet(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    const bool ok = meet_all(x, step);
    leave(x, step, ok, [] {});
}

// First kernel: the ids where all ranks can read them, and the first barrier.
__device__ void announce(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    i32* shared = reinterpret_cast<i32*>(x.peers[x.rank].data + x.shared_ids);
    const u32 ids = x.slot * x.layers * x.columns;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < ids; i += gridDim.x * THREADS) shared[i] = id_at(x, Place::of(x, i));
    if (!last_block(x)) return;
    __threadfence_system();
    if (!__syncthreads_and(meet_all(x, step)) && load(&x.control->claimer) == 1 + blockIdx.x) clear_outputs(x);
}

// Second kernel: the rows of this rank for all of them, in its own memory; then its part of the second barrier.
__device__ void serve(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    const u32 lane = threadIdx.x % WARP;
    const u32 columns = columns_of(x, x.rank), before = columns_before(x, x.rank);
    const u32 row_bytes = x.value_bytes + x.scale_bytes, all = x.slot * x.layers * columns;
    u8* shared = x.peers[x.rank].data + x.shared_rows;
    const u32 tiles = (all + 7) / 8;
    for (u32 i = blockIdx.x + threadIdx.x / WARP * gridDim.x; i < tiles * x.world; i += gridDim.x * WARPS) {
        const u32 tile = i / x.world, requester = after(x, i - tile * x.world);
        const u32 first = tile * 8, rows = min(8u, all - first);
        const i32* ids = reinterpret_cast<const i32*>(x.peers[requester].data + x.shared_ids);
        Row row;
        if (lane < rows) {
            const u32 rest = (first + lane) / columns;
            Place p;
            p.column = before + first + lane - rest * columns;
            p.token = x.by_layers.divide(rest);
            p.layer = rest - p.token * x.layers;
            const i32 id = ids[p.index(x)];
            const u32 owner = owner_of(x, p, id);
            if (owner == x.rank) row.find(x, p.layer, id);
            if (x.heads_a_rank != 0 || owner == x.rank) row.to = shared + (u64(requester) * all + first + lane) * row_bytes;
        }
        each_chunk<4>(rows, x.chunks, x.by_chunks,
            [&](u32 lane, u32 chunk) {
                const u8* from = from_lane(row.values, lane);
                return load_piece(x, from, from_lane(row.scales, lane), chunk, x.table_unit);
            },
            [&](u32 lane, u32 chunk, const Piece& piece, bool here) {
                u8* to = from_lane(row.to, lane);
                const Part part(x, chunk);
                if (here && to != nullptr) store_bytes(to + (part.scale ? x.value_bytes : 0) + part.from, piece.data, part.bytes, x.row_unit);
            });
    }
    if (!last_block(x)) return;
    __threadfence_system();
    if (speaks(x)) store_release(word(x, threadIdx.x, x.rank, DONE), step.call);
}

// The second barrier.
__device__ bool all_served(const Exchange& x, Step& step) {
    bool ok = true;
    if (speaks(x)) ok = wait_for(x, step, threadIdx.x, ROWS, word(x, x.rank, threadIdx.x, DONE));
    return __syncthreads_and(ok);
}

// Third kernel: the second barrier, and the rows of all owners into the output.
__device__ void pull(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    const bool ok = all_served(x, step);
    const u32 lane = threadIdx.x % WARP;
    const u32 row_bytes = x.value_bytes + x.scale_bytes, all = x.slot * x.layers * x.columns;
    for (u32 first = (blockIdx.x + threadIdx.x / WARP * gridDim.x) * 8; ok && first < all; first += gridDim.x * WARPS * 8) {
        const u32 rows = min(8u, all - first);
        Row row;
        if (lane < rows) {
            row.place = first + lane;
            const Place p = Place::of(x, row.place);
            const u32 owner = owner_of(x, p, id_at(x, p));
            row.to = output_row(x, x.out, p);
            if (owner != NOBODY) {
                const u32 columns = columns_of(x, owner);
                const u64 at = (u64(x.rank * x.slot + p.token) * x.layers + p.layer) * columns + (p.column - columns_before(x, owner));
                row.values = x.peers[owner].data + x.shared_rows + at * row_bytes;
                row.scales = row.values + x.value_bytes;
            }
        }
        move_rows<4>(x, row, rows, x.row_unit, x.out_scales);
    }
    if (ok) pad_scales(x);
    leave(x, step, ok, [&] { clear_outputs(x); });
}

// In its place, for a caller who reads the owners' rows himself: one block.
__device__ void settle(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    leave(x, step, all_served(x, step), [] {});
}

KERNEL(barrier_meet, meet)
KERNEL(barrier_announce, announce)
KERNEL(barrier_serve, serve)
KERNEL(barrier_pull, pull)
KERNEL(barrier_settle, settle)
