// The exchange with two barriers, as kernels that follow each other; and steps in which no rows move.

#include "rows.cuh"

// A step without rows, by one block. Nothing but the calls is to be seen in it, so they need not wait for what was written before;
// and what kernels before this one have written has been delivered.
__device__ void meet(const Exchange& x) {
    Step step;
    // A thread for every rank.
    u64* call = nullptr;
    if (!enter(x, step, [&] { call = other_call(x, threadIdx.x); })) return;
    if (call != nullptr) store(call, step.call);
    __syncthreads();
    // Not in the way of those who wait: by another warp. The step counts as complete for the kernels that follow this one.
    if (threadIdx.x == blockDim.x - 1) {
        begin(x);
        atomicAdd(&x.control->steps, STEP);
        alone(x, step);
    }
    all_called(x, step, threadIdx.x, blockDim.x);
    __syncthreads();
    admit_next();
}

// First kernel: the ids where all ranks can read them, and the first barrier.
__device__ void announce(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    i32* shared = reinterpret_cast<i32*>(peer(x, x.rank).data + x.shared_ids);
    const u32 ids = x.slot * x.layers * x.columns;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < ids; i += gridDim.x * blockDim.x) shared[i] = id_at(x, Place::of(x, i));
    if (!last_block(x)) return;
    if (threadIdx.x == 0) begin(x);
    call_all(x, step, threadIdx.x, blockDim.x, [](u64* at, u64 call) { store_release(at, call); });
    bool ok = all_called(x, step, threadIdx.x, blockDim.x);
    ok = __syncthreads_and((threadIdx.x > 0 || alone(x, step)) && ok);
    if (!ok && load(&x.control->claimer) == 1 + blockIdx.x) clear_outputs(x);
}

// Second kernel: the rows of this rank for all of them, in its own memory; then its part of the second barrier.
__device__ void serve(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return;
    const u32 lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const u32 columns = columns_of(x, x.rank), before = columns_before(x, x.rank);
    const u32 row_bytes = x.value_bytes + x.scale_bytes, all = x.slot * x.layers * columns;
    u8* shared = peer(x, x.rank).data + x.shared_rows;
    const u32 tiles = (all + TILE - 1) / TILE;
    for (u32 i = blockIdx.x + threadIdx.x / WARP * gridDim.x; i < tiles * x.world; i += gridDim.x * warps) {
        const u32 tile = i / x.world, requester = after(x, i - tile * x.world);
        const u32 first = tile * TILE, rows = min(TILE, all - first);
        const i32* ids = reinterpret_cast<const i32*>(peer(x, requester).data + x.shared_ids);
        Row row;
        if (lane < rows) {
            const u32 rest = (first + lane) / columns;
            Place p;
            p.column = before + first + lane - rest * columns;
            p.in_group(x, rest);
            const Table table = table_of(x, p.layer);
            const i32 id = ids[p.index(x)];
            const u32 owner = owner_of(x, p, id);
            if (owner == x.rank) row.find(table, id);
            if (x.heads_a_rank != 0 || owner == x.rank) row.to = shared + (u64(requester) * all + first + lane) * row_bytes;
            row.scales_to = row.to + x.value_bytes;
        }
        copy_rows(x, row, rows, {x.unit, x.unit});
    }
    if (!last_block(x)) return;
    for (u32 rank = threadIdx.x; rank < x.world; rank += blockDim.x)
        if (rank != x.rank) store_release(word(x, rank, x.rank, DONE), step.call);
}

// The second barrier.
__device__ bool all_served(const Exchange& x, const Step& step) {
    bool ok = true;
    for (u32 rank = threadIdx.x; ok && rank < x.world; rank += blockDim.x)
        ok = rank == x.rank || wait_for(x, step, rank, ROWS, own_word(x, rank, DONE));
    return __syncthreads_and(ok);
}

// Third kernel: the second barrier, and the rows of all owners into the output.
__device__ void pull(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return pass(x);
    const bool ok = all_served(x, step);
    const u32 row_bytes = x.value_bytes + x.scale_bytes;
    if (ok) {
        each_tile(x, 0, x.slot, blockIdx.x, gridDim.x, [&](u32 first, u32 rows) {
            Row row;
            row.place = first + threadIdx.x % WARP;
            if (threadIdx.x % WARP < rows) {
                const Place p = Place::of(x, row.place);
                const u32 owner = owner_of(x, p, id_at(x, p));
                row.to = output_row(x, x.out, p);
                if (owner != NOBODY) {
                    const u32 columns = columns_of(x, owner);
                    const u64 at = (u64(x.rank * x.slot + p.token) * x.layers + p.layer) * columns + (p.column - columns_before(x, owner));
                    row.values = peer(x, owner).data + x.shared_rows + at * row_bytes;
                    row.scales = row.values + x.value_bytes;
                }
            }
            put_rows(x, row, rows, x.unit);
        });
        pad_scales(x, x.slot, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    }
    leave(x, step, ok, [&] { clear_outputs(x); });
}

// In its place, for a caller who reads the owners' rows himself: one block.
__device__ void settle(const Exchange& x) {
    Step step;
    if (!enter(x, step)) return pass(x);
    leave(x, step, all_served(x, step), [] {});
}

KERNEL(barrier_meet, meet)
KERNEL(barrier_announce, announce)
KERNEL(barrier_serve, serve)
KERNEL(barrier_pull, pull)
KERNEL(barrier_settle, settle)
