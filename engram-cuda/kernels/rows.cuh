// Rows by id, out of tables in device memory or in pinned host memory.
//
// A warp takes a tile of up to 32 rows at a time. Lane i resolves row i of the tile (id, owner, addresses); then all lanes move
// the rows' units (16 bytes on the fast path) side by side, so that lanes stay busy whatever the width, with several loads in
// flight before the first store. Warps walk over the tiles, hence any grid is right: a small one leaves multiprocessors to others.

#pragma once

#include "common.cuh"

constexpr u32 THREADS = 256;
constexpr u32 BLOCKS = 5;      // a multiprocessor, which caps registers at 48
constexpr u32 IN_FLIGHT = 4;   // loads of a lane

struct Rows {
    const void* ids;           // id of (token, layer, column): ids[token * token_stride + (first + layer * columns + column) / share]
    i64 token_stride;
    const Table* tables;       // [layers]
    u8* out;                   // byte of (token, layer, column): token * out_token + layer * out_layer + column * out_column
    u64 out_token;
    u64 out_layer;
    u64 out_column;
    u32 tokens;                // rows of tokens..slot are zero rows
    u32 slot;
    u32 first;                 // first column of the view
    u32 layers;
    u32 columns;
    u32 share;                 // so many columns have one id i in common and take rows i * share + 0, 1, ..
    u16 wide;                  // ids are i64, else i32
    u16 f16;                   // rows_float: f16, else bf16
    u32 value_bytes;           // a row
    u32 scale_bytes;
    u32 units;                 // units a row has
    u32 tile;                  // rows a warp takes at a time, 1..=32
    float global_scale;
    u8* out_scales;            // rows_mx: byte of layer: layer * out_scales_layer
    u64 out_scales_layer;
    Divisor by_across;         // layers * columns
    Divisor by_columns;
    Divisor by_share;
    Divisor by_units;
};
static_assert(sizeof(Rows) == 152, "kernels.rs mirrors this struct");

// Where one row is and goes; `values` is null for a zero row, `out` for a lane without a row.
struct Place {
    const u8* values = nullptr;
    const u8* scales = nullptr;
    u8* out = nullptr;
    u32 token = 0, layer = 0, column = 0;

    // SHARED: columns may have ids in common.
    template <bool SHARED>
    static __device__ Place of(const Rows& a, u32 token, u32 layer, u32 column) {
        Place p;
        p.token = token, p.layer = layer, p.column = column;
        p.out = a.out + (token * a.out_token + layer * a.out_layer + column * a.out_column);
        if (token >= a.tokens) return p;
        const Table t = a.tables[layer];
        u32 group = a.first + layer * a.columns + column, member = 0;
        if (SHARED) {
            member = group;
            group = a.by_share.divide(group);
            member -= group * a.share;
        }
        const i64 at = i64(token) * a.token_stride + group;
        i64 id = a.wide ? static_cast<const i64*>(a.ids)[at] : static_cast<const i32*>(a.ids)[at];
        if (SHARED && id >= 0) id = id * a.share + member;
        const u64 local = u64(id) - t.first;    // below `rows` only for rows that are here
        if (local < t.rows) {
            p.values = t.values + u32(local) * t.value_stride;
            p.scales = t.scales + u32(local) * t.scale_stride;
        }
        return p;
    }
};

__device__ Place place(const Rows& a, u32 row) {
    const u32 token = a.by_across.divide(row);
    const u32 across = row - token * (a.layers * a.columns);
    const u32 layer = a.by_columns.divide(across);
    return Place::of<true>(a, token, layer, across - layer * a.columns);
}

// Calls job(lane i's place: row i of the tile) for all tiles of this warp, of which all lanes take part. Neighbouring tiles go to
// different blocks, so that few rows spread over all multiprocessors.
template <typename Job>
__device__ void each_tile(const Rows& a, u32 tokens, Job job) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 rows = tokens * a.layers * a.columns;
    const u32 stride = gridDim.x * (blockDim.x / WARP) * a.tile;
    for (u32 first = (warp * gridDim.x + blockIdx.x) * a.tile; first < rows; first += stride) {
        const u32 here = min(a.tile, rows - first);
        Place p;
        if (lane < here) p = place(a, first + lane);
        job(p, here);
    }
}

// A lane's way over the units of a tile's rows: lane 0 takes the first unit, lane 1 the second, and so on.
struct Walk {
    u32 row, unit;
    u32 units, row_step, unit_step;

    __device__ Walk(u32 units, u32 rows_a_warp, u32 row) : row(row), units(units), row_step(rows_a_warp) {
        unit = threadIdx.x % WARP - row * units;
        unit_step = WARP - rows_a_warp * units;
    }
    explicit __device__ Walk(const Rows& a) : Walk(a.units, a.by_units.divide(WARP), a.by_units.divide(threadIdx.x % WARP)) {}
    explicit __device__ Walk(u32 units) : Walk(units, WARP / units, threadIdx.x % WARP / units) {}
    __device__ void step() {
        row += row_step, unit += unit_step;
        if (unit >= units) unit -= units, ++row;
    }
    __device__ u32 steps(u32 rows) const { return (rows * units + WARP - 1) / WARP; }
};

// *p where `here`, else zeros, without a branch. Table rows are read once: past L1.
__device__ uint4 load(const uint4* p, bool here) {
    uint4 v;
    asm volatile("{.reg .pred here; setp.ne.u32 here, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
        "@here ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"(u32(here)));
    return v;
}
__device__ uint2 load(const uint2* p, bool here) {
    uint2 v;
    asm volatile("{.reg .pred here; setp.ne.u32 here, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;\n"
        "@here ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];}"
        : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"(u32(here)));
    return v;
}
template <typename T>
__device__ T load(const T* p, bool here) {
    return here ? __ldg(p) : T(0);
}

// Few rows, a thread a unit and an id a column: then a lookup takes little more than its two dependent reads. A block has units x
// columns threads and serves a token and layer: the grid is tokens x layers x ceil(columns / a block's).
template <typename Job>
__device__ void one_unit(const Rows& a, Job job) {
    const u32 column = blockIdx.z * blockDim.y + threadIdx.y;
    if (column < a.columns) job(Place::of<false>(a, blockIdx.x, blockIdx.y, column), threadIdx.x);
}

#define KERNEL(name, body) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ Rows a) { body(a); }
