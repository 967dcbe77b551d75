// What a prefetcher copies: ids before an exchange, rows after it. A kernel and no copy of the driver's, because a graph may be replayed
// while the exchange sleeps, and the rows are nowhere then.

#include "common.cuh"

// Lines of bytes, at equal distances.
struct Take {
    const u64* state;                // of the exchange: ASLEEP while it has no memory
    const u8* from;
    u8* to;
    u64 from_pitch, to_pitch;        // bytes from a line to the next
    u64 width;                       // bytes of a line
    u32 lines;
    u32 padding;
};
static_assert(sizeof(Take) == 56, "prefetch.rs mirrors this struct");

constexpr u64 ASLEEP = 1;

// All numbers of `x` are multiples of a T's size. Blocks side by side share a line.
template <typename T>
__device__ void take(const Take& x) {
    u64 state;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(state) : "l"(x.state) : "memory");
    const u64 at = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * sizeof(T);
    if (state == ASLEEP || at >= x.width) return;
    for (u32 line = blockIdx.y; line < x.lines; line += gridDim.y)
        *reinterpret_cast<T*>(x.to + line * x.to_pitch + at) = *reinterpret_cast<const T*>(x.from + line * x.from_pitch + at);
}

#define KERNEL(name, T) \
    extern "C" __global__ void name(const __grid_constant__ Take x) { take<T>(x); }

KERNEL(take_16, uint4)
KERNEL(take_4, u32)
KERNEL(take_1, u8)
