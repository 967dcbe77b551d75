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
