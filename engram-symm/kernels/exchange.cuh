// What the kernels of an exchange share: the step that they do a part of, waiting for other ranks, and faults.
//
// The words that ranks leave in each other's memory are those of the protocol (src/protocol). The control line is a rank's own, and
// differs from the one that the host keeps: blocks of a kernel come and go, and nobody is there to count them. So a step adds
// 2^16 to `steps`, in parts: block 0 what the others leave of it, each of the others 1. Whoever starts a step reads how many are
// complete, without waiting for anybody.

#pragma once

#include "common.cuh"

constexpr u32 THREADS = 512;         // a block at most
constexpr u32 BLOCKS = 2;            // a multiprocessor: two exchanges at once, or one and a kernel of the model
constexpr u32 NEAR = 8;
constexpr u64 STEP = 1 << 16;

constexpr u32 LINE = 128;            // signals: the control line, then a line a rank
enum Word : u32 { CALL = 0, DONE = 8, POISON = 16, OURS = 24, THEIRS = 32 };
enum Operation : u32 { BARRIER = 1, PUSH = 2 };
enum Kind : u32 { DEADLINE = 1, MISMATCH = 2, OVERLAP = 3 };
enum Phase : u32 { IDS = 0, ROWS = 1 };
enum State : u64 { AWAKE = 0, ASLEEP = 1, FAILED = 2 };
enum Form : u32 { COPY, MX, BF16, F16 };

// A rank's own line.
struct Control {
    u64 steps;                       // complete ones, times 2^16
    u64 state;
    u64 starts;                      // steps that were begun
    u64 claimer;                     // 1 + the block that recorded the fault
    u32 arrived;                     // blocks of a kernel of which the last one goes on
};

// A rank's memory, as this one reaches it.
struct Peer {
    u8* signals;
    u8* data;
};

// How one layer is shared and scaled.
struct Layer {
    u32 rows_a_rank;                 // row ownership: rank r owns the ids from r * rows_a_rank on, that many
    u32 rows;                        // row ownership: ids below this have an owner
    float global_scale;              // formats with a scale a table, to 16-bit floats
    u32 padding;
};

// Offsets are in bytes from the start of a rank's data. `own` columns are those a rank owns; with row ownership, all.
struct Exchange {
    Control* control;
    const Peer* far;                 // [world]
    const Table* tables;             // [layers], or null for a rank without tables
    const Layer* layer_info;         // [layers]
    const i32* ids;                  // of (token, layer, column): ids[token * token_stride + layer * columns + column]
    i64 token_stride;
    u64* report;                     // host: fault, ours, theirs; and 1 where the exchange was found asleep
    u64 deadline_ns;
    u8* out;                         // rows of this rank: byte of (token, layer, column) by the strides below
    u8* out_scales;
    u64 out_token, out_layer, out_column;
    u64 scales_layer;                // MX: bytes from a layer's scales to the next one's
    u64 peer_out;                    // offset of the output in data, where it is there
    u64 shared_ids, shared_rows;     // Barrier: i32 [slot][layers][columns], and rows [requester][slot][layers][own][row_bytes]
    u64 lines;                       // Push: [2][requester][capacity][layers][pairs] lines of 16 bytes
    u64 landing;                     // Push by lines: rows of chunks, owner by owner as landed() has them
    u64 pushed_rows;                 // Push by flags: the same, or their scales' chunks alone
    u64 flags;                       // Push by flags: in signals, u64 [2][world][flag_blocks], each written by one block of one rank
    u32 rank, world, layers, columns;
    u32 heads_a_rank;                // head ownership: rank r owns the columns from r * heads_a_rank on, that many; 0: rows are owned
    u32 capacity;
    u32 tokens, slot;
    u32 operation;
    u32 form;
    u32 straight;                    // Push by flags: rows go straight to the output of whoever asked
    u32 flagged_ids;                 // Push by flags: ids have a flag too, as where 16 bytes may not arrive as one
    u32 value_bytes, scale_bytes;
    u32 value_chunks, chunks;        // chunks of a row: 16 bytes of values, then 16 bytes of scales
    u32 unit, out_unit;              // bytes that addresses, strides and sizes of tables and packed rows are multiples of, and of outputs
    u32 scale_tiles;                 // MX: tiles of 4 groups side by side
    u32 pairs;                       // Push: lines that a layer's ids take, of the most columns that a rank owns
    u32 line_count;                  // Push: lines of an owner
    u32 flag_blocks;
    u32 tile, tiles;                 // Push: lines that go to a block together, 1..=32, or 1..=8 to one warp, and how many times that gives
    u32 parts;                       // Push by lines: jobs of a tile, each of up to K * 32 chunks
    u32 self_tile;                   // Push by lines: lines that a warp takes at a time of those that this rank sends to itself
    u32 servers;                     // Push by lines apart: warps of a block that serve; the others collect
    u32 halves;                      // units of 8 bytes in a row's values
    Divisor by_columns, by_layers, by_chunks, by_value_chunks, by_halves, by_pairs, by_parts;
    Peer near[NEAR];                 // the first ones: parameters are near, memory is not
};
static_assert(sizeof(Control) == 40 && sizeof(Peer) == 16 && sizeof(Layer) == 16 && sizeof(Exchange) == 464, "kernels.rs mirrors these structs");

// Kernels start early, where devices can do that (Ptx::starting_early in engram-cuda): they are in place when the kernel ahead of them in
// their stream is done, and wait for that before they do anything.
__device__ void await_turn() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel come into place. For a block that waits for other ranks no more: as long as it does there has to be room for what
// other streams run, since another rank may have to get through that before it comes to this step.
__device__ void admit_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#define KERNEL(name, body) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ Exchange x) { \
        await_turn(); \
        body(x); \
    }

// Signals. Scope is the system: other ranks are on other devices.
__device__ u64 load(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ u64 load_acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ void store(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ void store_release(u64* p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// 16 bytes as one: what is loaded was stored by one store.
struct alignas(16) Pair {
    u64 low, high;
};
__device__ Pair load(const Pair* p) {
    Pair v;
    asm volatile("{.reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}" : "=l"(v.low), "=l"(v.high) : "l"(p) : "memory");
    return v;
}
__device__ void store(Pair* p, Pair v) {
    asm volatile("{.reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v;}" ::"l"(p), "l"(v.low), "l"(v.high) : "memory");
}

__device__ u64 nanoseconds() {
    u64 v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}

// PLAIN kernels are for what is common: few ranks, whole heads, wide units, nothing decoded. They have little code, of which each
// instruction counts where a step takes a few thousand cycles.
//
// A far rank is loaded by an instruction of its own: as a choice between two addresses, of a parameter and of memory, each use would
// load the parameter as if it were memory.
template <bool PLAIN = false>
__device__ Peer peer(const Exchange& x, u32 rank) {
    if (PLAIN || rank < NEAR) return x.near[rank];
    u64 signals, data;
    asm("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(signals), "=l"(data) : "l"(x.far + rank));
    return {reinterpret_cast<u8*>(signals), reinterpret_cast<u8*>(data)};
}

// The word of the line that rank `from` writes in the memory of rank `owner`.
__device__ u64* word(const Exchange& x, u32 owner, u32 from, u32 at) {
    return reinterpret_cast<u64*>(peer(x, owner).signals + LINE * (1 + from) + at);
}
// The same in this rank's own memory, where the control line is the first one.
__device__ u64* own_word(const Exchange& x, u32 from, u32 at) {
    return reinterpret_cast<u64*>(reinterpret_cast<u8*>(x.control) + LINE * (1 + from) + at);
}

// The rank `distance` after this one.
__device__ u32 after(const Exchange& x, u32 distance) {
    const u32 rank = x.rank + distance;
    return rank < x.world ? rank : rank - x.world;
}

// A step as a thread sees it.
struct Step {
    u64 steps;                       // complete before it
    u64 call;                        // epoch << 32 | operation << 24 | slot

    __device__ u32 epoch() const { return u32(call >> 32); }
    // How far another call is ahead of this one's.
    __device__ i32 ahead(u64 other) const { return i32(u32(other >> 32) - epoch()); }
};

// The control line, for all threads of a block: `meanwhile` is done while it is on its way. One of them asks, since what many ask for
// at once they get one after the other. False where the group sleeps or has failed.
template <typename Meanwhile>
__device__ bool enter(const Exchange& x, Step& step, Meanwhile meanwhile) {
    __shared__ u64 shared[2];
    Pair control;
    if (threadIdx.x == 0) control = load(reinterpret_cast<const Pair*>(x.control));
    meanwhile();
    if (threadIdx.x == 0) shared[0] = control.low, shared[1] = control.high;
    __syncthreads();
    step.steps = shared[0];
    step.call = u64(u32((step.steps >> 16) + 1)) << 32 | x.operation << 24 | x.slot;
    if (shared[1] == ASLEEP && blockIdx.x + threadIdx.x == 0) store(x.report + 3, 1);
    return shared[1] == AWAKE;
}
__device__ bool enter(const Exchange& x, Step& step) {
    return enter(x, step, [] {});
}

// Records a fault as this rank's, unless there is one, and tells it to the other ranks.
__device__ __noinline__ void fail(const Exchange& x, u64 fault, u64 ours, u64 theirs, bool tell) {
    if (atomicCAS(&x.control->state, u64(AWAKE), u64(FAILED)) != AWAKE) return;
    x.control->claimer = 1 + blockIdx.x;
    for (u32 distance = 0; distance < (tell ? x.world : 1); ++distance) {
        const u32 owner = after(x, distance);
        store(word(x, owner, x.rank, OURS), ours);
        store(word(x, owner, x.rank, THEIRS), theirs);
        store_release(word(x, owner, x.rank, POISON), fault);
    }
    store(x.report + 1, ours);
    store(x.report + 2, theirs);
    store_release(x.report, fault);
}

__device__ u64 fault_of(u32 epoch, u32 culprit, u32 phase, u32 kind) { return u64(epoch) << 32 | culprit << 16 | phase << 8 | kind; }

__device__ __noinline__ void mismatch(const Exchange& x, const Step& step, u32 peer, u64 theirs) {
    fail(x, fault_of(step.epoch(), peer, 0, MISMATCH), step.call, theirs, true);
}

// Takes over what `peer` reports, if anything, as far as it concerns this step: who calls the next step has done its part of this one.
__device__ bool learn(const Exchange& x, const Step& step, u32 peer) {
    const u64 fault = load_acquire(own_word(x, peer, POISON));
    if (fault == 0) return false;
    u64 ours = load(own_word(x, peer, OURS)), theirs = load(own_word(x, peer, THEIRS));
    if ((fault & 0xff) != MISMATCH) return fail(x, fault, ours, theirs, false), true;
    // The two calls differ, so that at least one is not this rank's: its rank is who disagrees.
    u32 culprit = u32(fault >> 16) & 0xffff;
    if (theirs == step.call) culprit = peer, theirs = ours;
    if (step.ahead(theirs) == 1) return false;
    fail(x, fault_of(step.epoch(), culprit, 0, MISMATCH), step.call, theirs, false);
    return true;
}

// Who keeps the group from going on: `owing`, or whoever that rank waits for itself. Reads other ranks' memory.
__device__ u64 blame(const Exchange& x, const Step& step, u32 owing, u32 phase) {
    u32 epoch = step.epoch();
    for (u32 distance = x.world - 1; distance > 0; --distance) {
        const u32 peer = after(x, distance);
        if (step.ahead(load(own_word(x, peer, CALL))) < 0) owing = peer, phase = IDS;
    }
    for (u32 hops = 0; hops < x.world && (phase == IDS || x.operation == BARRIER); ++hops) {
        const u32 stuck_in = phase == IDS ? epoch - 1 : epoch;
        u32 next = x.world;
        for (u32 other = 0; other < x.world && next == x.world; ++other)
            if (other != owing && other != x.rank && i32(u32(load_acquire(word(x, owing, other, CALL)) >> 32) - stuck_in) < 0) next = other;
        if (next == x.world) break;
        owing = next, phase = IDS, epoch = stuck_in;
    }
    return fault_of(epoch, owing, phase, DEADLINE);
}

// A rank whose call is missing may itself be held up by another one, and then says so before long.
constexpr u64 GRACE_NS = 50'000'000;

// Whether to give up waiting for `owing`: because the group has failed, because a rank calls another thing, or because of the time.
__device__ __noinline__ bool given_up(const Exchange& x, Step step, u32 owing, u32 phase, u64 since) {
    if (load(&x.control->state) != AWAKE) return true;
    for (u32 distance = 1; distance < x.world; ++distance) {
        const u32 peer = after(x, distance);
        if (learn(x, step, peer)) return true;
        const u64 theirs = load(own_word(x, peer, CALL));
        const i32 ahead = step.ahead(theirs);
        // One ahead has completed this step; one behind has yet to come.
        if ((ahead == 0 && theirs != step.call) || ahead < -1 || ahead > 1) return mismatch(x, step, peer, theirs), true;
    }
    const u64 grace = phase == IDS && x.world > 2 ? GRACE_NS : 0;
    if (nanoseconds() - since < x.deadline_ns + grace) return false;
    fail(x, blame(x, step, owing, phase), 0, 0, true);
    return true;
}

// Polls until `ready()`; false when the group fails before.
template <typename Ready>
__device__ bool wait(const Exchange& x, const Step& step, u32 owing, u32 phase, Ready ready) {
    u64 since = 0;
    for (u32 polls = 1; !ready(); ++polls) {
        if (polls % 32 != 0) continue;
        if (since == 0) since = nanoseconds();
        if (given_up(x, step, owing, phase, since)) return false;
    }
    return true;
}

// Waits for a word that another rank leaves in this one's memory, and for all that it wrote before.
__device__ bool wait_for(const Exchange& x, const Step& step, u32 owing, u32 phase, const u64* at) {
    return wait(x, step, owing, phase, [&] { return load_acquire(at) == step.call; });
}

// Waits until `peer` has made the same call.
__device__ bool called(const Exchange& x, const Step& step, u32 peer) {
    u64 theirs;
    const bool came = wait(x, step, peer, IDS, [&] { return step.ahead(theirs = load_acquire(own_word(x, peer, CALL))) >= 0; });
    if (!came || theirs == step.call || step.ahead(theirs) == 1) return came;
    mismatch(x, step, peer, theirs);
    return false;
}

// Counts the step as begun. One thread, once a step.
__device__ void begin(const Exchange& x) { atomicAdd(&x.control->starts, u64(1)); }

// Two steps at a time are an error, since they would take each other's signals for their own.
__device__ bool alone(const Exchange& x, const Step& step) {
    if (load(&x.control->starts) <= (step.steps >> 16) + 1) return true;
    fail(x, fault_of(step.epoch(), x.rank, 0, OVERLAP), 0, 0, true);
    return false;
}

// Where another rank sees what this one calls; null for this rank itself, and past the last one.
__device__ u64* other_call(const Exchange& x, u32 rank) {
    return rank < x.world && rank != x.rank ? word(x, rank, x.rank, CALL) : nullptr;
}

// Tells all ranks what this one calls, a thread a rank; and waits until they have called the same.
template <typename Store>
__device__ void call_all(const Exchange& x, const Step& step, u32 thread, u32 threads, Store store) {
    for (u32 rank = thread; rank < x.world; rank += threads)
        if (u64* call = other_call(x, rank)) store(call, step.call);
}
__device__ bool all_called(const Exchange& x, const Step& step, u32 thread, u32 threads) {
    bool ok = true;
    for (u32 rank = thread; rank < x.world; rank += threads) ok = ok && (rank == x.rank || called(x, step, rank));
    return ok;
}

// The last of a kernel's blocks gets true, once the others have done what comes before this.
__device__ bool last_block(const Exchange& x) {
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(&x.control->arrived, 1u);
        if (before == gridDim.x - 1) x.control->arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return before == gridDim.x - 1;
}

// What block 0 adds to `steps` is what the others leave of a step.
__device__ u64 own_part() { return blockIdx.x == 0 ? STEP - (gridDim.x - 1) : 1; }

// Whether all blocks but this one have left; waits for them a second at most.
__device__ void wait_for_blocks(const Exchange& x, const Step& step) {
    const u64 start = nanoseconds(), before = step.steps / STEP * STEP;
    while (load(&x.control->steps) - before < STEP - own_part() && nanoseconds() - start < 1'000'000'000) {}
}

// For a block that can do nothing from the start: if that is because the group has failed, who waits for all blocks of that step need not
// wait for this one.
__device__ void pass(const Exchange& x) {
    if (threadIdx.x == 0 && load(&x.control->state) == FAILED) atomicAdd(&x.control->steps, own_part());
}

// The end of a step's last kernel. Where it failed, the block that recorded the fault calls `clear` when no other block writes any more.
template <typename Clear>
__device__ void leave(const Exchange& x, const Step& step, bool ok, Clear clear) {
    if (!__syncthreads_and(ok)) {
        const bool claimed = load(&x.control->claimer) == 1 + blockIdx.x;
        if (claimed) {
            if (threadIdx.x == 0) wait_for_blocks(x, step);
            __syncthreads();
            clear();
        }
    }
    admit_next();
    if (threadIdx.x == 0) atomicAdd(&x.control->steps, own_part());
}
