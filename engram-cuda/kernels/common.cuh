// What every kernel shares. NVRTC compiles these files without any toolkit header.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffff;

// n / d for n <= 2^31 by a multiplication.
struct Divisor {
    u32 magic;
    u32 shift;

    __device__ u32 divide(u32 n) const { return u32(u64(n) * magic >> shift); }
};

template <bool WHICH, typename A, typename B>
struct If {
    using Type = A;
};
template <typename A, typename B>
struct If<false, A, B> {
    using Type = B;
};

// One layer's table, or the part of it that is here: rows first..first + rows. Packed rows have values and scales at equal strides.
struct Table {
    const u8* values;
    const u8* scales;
    u64 value_stride;          // bytes from row to row
    u64 scale_stride;
    u32 first;
    u32 rows;
};
static_assert(sizeof(Table) == 40, "kernels.rs mirrors this struct");

template <typename T>
__device__ T* from_lane(T* pointer, u32 lane) {
    return reinterpret_cast<T*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(pointer), lane));
}
