// Rows that worker threads gather into pinned host memory, brought into device memory while the gather goes on.
//
// The memory is cut into chunks. Whoever has filled a chunk publishes it in `ready`: the number of the run above, the bytes to take
// below. Blocks wait for their chunks in turn and copy them; nothing but the host's threads is waited for, so any grid is right and no
// other kernel can stand in the way. A run that the host does not serve in time ends as zero rows: every slot becomes -1.

#include "common.cuh"

constexpr u32 THREADS = 256;
constexpr u32 IN_FLIGHT = 4;

struct State {
    u32 runs;                  // finished ones
    u32 blocks;                // that have finished in this run
    u32 expired;               // this run
    u32 reserved;
};

struct Stage {
    const u64* ready;          // pinned: run << 32 | bytes, one a chunk
    const u8* from;            // pinned
    u8* to;
    State* state;
    u32* status;               // pinned: runs finished, last run that expired
    i32* slots;                // where ids that name staged rows lie, within `to`
    u64 deadline_ns;
    u32 slot_count;
    u32 chunk_bytes;           // a multiple of 16
    u32 slot_chunks;           // chunks before the first area's
    u32 areas;
    u32 area_chunks;           // from area to area
    u32 used_chunks;           // of each area
};
static_assert(sizeof(State) == 16 && sizeof(Stage) == 80, "kernels.rs mirrors these structs");

__device__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
__device__ u64 acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ void release(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ u32 relaxed(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Written by the host while the kernel runs: never through a cache that does not see it.
__device__ uint4 from_host(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// Bytes to take of a chunk, none when time is over.
__device__ u32 await(const Stage& a, u32 chunk, u32 run, u64 start) {
    while (true) {
        const u64 ready = acquire(a.ready + chunk);
        if (u32(ready >> 32) == run) return u32(ready);
        if (relaxed(&a.state->expired) != 0) return 0;
        if (now_ns() - start > a.deadline_ns) {
            atomicExch(&a.state->expired, 1);
            return 0;
        }
        __nanosleep(100);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) stage(const __grid_constant__ Stage a) {
    __shared__ u32 shared;
    const u64 start = now_ns();
    const u32 run = relaxed(&a.state->runs) + 1;
    const u32 rows = a.areas * a.used_chunks;
    // Slots come last: they are known only when the threads have looked through everything.
    for (u32 k = blockIdx.x; k < rows + a.slot_chunks; k += gridDim.x) {
        const u32 chunk = k < rows ? a.slot_chunks + k / a.used_chunks * a.area_chunks + k % a.used_chunks : k - rows;
        if (threadIdx.x == 0) shared = await(a, chunk, run, start);
        __syncthreads();
        const u32 units = (shared + 15) / 16;
        const uint4* from = reinterpret_cast<const uint4*>(a.from + u64(chunk) * a.chunk_bytes);
        uint4* to = reinterpret_cast<uint4*>(a.to + u64(chunk) * a.chunk_bytes);
        for (u32 first = threadIdx.x; first < units; first += THREADS * IN_FLIGHT) {
            uint4 data[IN_FLIGHT];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; ++i)
                if (first + i * THREADS < units) data[i] = from_host(from + first + i * THREADS);
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; ++i)
                if (first + i * THREADS < units) to[first + i * THREADS] = data[i];
        }
        __syncthreads();
    }
    // The last block closes the run.
    if (threadIdx.x == 0) {
        __threadfence();
        // Wraps around to 0, so that even runs which overlap by mistake leave the count as they found it.
        shared = atomicInc(&a.state->blocks, gridDim.x - 1) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!shared) return;
    __threadfence();
    const bool expired = relaxed(&a.state->expired) != 0;
    if (expired)
        for (u32 i = threadIdx.x; i < a.slot_count; i += THREADS) a.slots[i] = -1;
    __syncthreads();
    if (threadIdx.x == 0) {
        a.state->runs = run;
        a.state->expired = 0;
        if (expired) release(a.status + 1, run);
        release(a.status, run);
    }
}
