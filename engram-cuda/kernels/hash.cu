// Row ids of n-grams for a ragged batch, both families. The rules, the inputs and their order are those of `engram_core::hash`.
//
// A block takes 16 tokens of one layer. Eight lanes serve a token, lane s the token s places back: together they find the token's
// request by a nine-way search, fetch the window, settle what a cut hides (one ballot) and fold the mixes (a prefix XOR). Then
// all threads turn mixes into ids.

#include "common.cuh"

constexpr u32 TOKENS = 16;     // tokens a block
constexpr u32 WINDOW = 8;      // longest n-gram = lanes a token
constexpr u32 THREADS = TOKENS * WINDOW;

// A column: x mod size by `engram_core::Reciprocal`, whose shift follows from the size; then its place in the table.
struct Column {
    u64 multiplier;
    u32 size;
    u32 offset;
};

struct Hash {
    const i32* tokens;         // [len]
    const i32* starts;         // [requests + 1]
    const i32* history;        // [requests][order - 1]
    const i64* multipliers;    // [layers][order]
    const Column* columns;     // [layers][(order - 1) * heads]
    i32* ids;                  // [len][layers][(order - 1) * heads]
    i64* mixes;                // [len][layers][order - 1], or null
    u32 len;
    u32 requests;
    u32 layers;
    u32 order;                 // longest n-gram, 2..=8
    u32 heads;                 // heads an order
    i32 fill;                  // Engram: compressed pad id; PLE: EOS
    float per_token;           // requests / len
    u32 across;                // columns that a block takes side by side, at most THREADS
    Divisor by_across;
    Divisor by_heads;
};
static_assert(sizeof(Column) == 16 && sizeof(Divisor) == 8 && sizeof(Hash) == 104, "kernels.rs mirrors these structs");

// How many of starts[1..=requests] are at most `token`, which is the token's request, or `requests` past the last boundary.
// Each round probes eight boundaries, one a lane: those around `guess` first, then eight that divide what is left.
__device__ u32 request_of(const Hash& a, i32 token, u32 guess, u32 lane, u32 shift) {
    const auto passed = [&](u64 boundary) {
        const bool reached = boundary <= a.requests && a.starts[boundary] <= token;
        return u32(__popc(__ballot_sync(ALL_LANES, reached) >> shift & 0xff));
    };
    const u32 base = guess - min(guess, WINDOW / 2);
    const u32 near = passed(base + lane + 1);
    u32 low = near > 0 ? base + near : 0, high = near < WINDOW ? base + near : a.requests;
    while (__any_sync(ALL_LANES, low < high)) {
        const u32 step = (high - low + WINDOW - 1) / WINDOW;
        const u64 boundary = low + u64(lane + 1) * step;
        low += passed(step != 0 && boundary <= high ? boundary : ~u64(0)) * step;
        if (step != 0) high = min(high, low + step - 1);
    }
    return low;
}

// x mod size for all 64-bit x, rounded down as Python does.
__device__ u32 remainder(i64 x, const Column& c) {
    const u64 sign = u64(x >> 63), y = u64(x) ^ sign;
    const u32 quotient = u32(__umul64hi(y << 1, c.multiplier) >> (32 - __clz(i32(c.size - 1))));
    return (u32(y) - quotient * c.size ^ u32(sign)) + (c.size & u32(sign));
}

__device__ void prefetch(const i32* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

template <bool ENGRAM>
__device__ void hash(const Hash& a) {
    __shared__ i64 mixes[TOKENS][WINDOW];
    __shared__ bool live[TOKENS];

    const u32 layer = blockIdx.y;
    const u32 first = blockIdx.x * TOKENS;
    // A thread keeps its column while it walks down the tokens. All that does not depend on the search is fetched ahead of it.
    const u32 columns = (a.order - 1) * a.heads;
    const u32 start = a.by_across.divide(threadIdx.x), down = a.by_across.divide(THREADS);
    u32 column = threadIdx.x - start * a.across;
    Column c = a.columns[layer * columns + column];
    {
        const u32 slot = threadIdx.x / WINDOW, back = threadIdx.x % WINDOW;
        const u32 shift = threadIdx.x % WARP / WINDOW * WINDOW;
        const u32 token = first + slot;
        const bool in_order = back < a.order;
        const i64 multiplier = in_order ? a.multipliers[layer * a.order + back] : 0;
        // Where the token's request is if all are of one length, as in decoding; there the history is needed, too.
        const u32 guess = min(u32(float(token) * a.per_token), a.requests);
        if (a.per_token > 1.0f / TOKENS && guess < a.requests && back > 0 && in_order)
            prefetch(a.history + u64(guess) * (a.order - 1) + back - 1);
        const u32 request = request_of(a, i32(token), guess, back, shift);
        const bool counted = token < a.len && request < a.requests;

        // Tokens before the request's first come from its history; Engram's is newest first, PLE's oldest first.
        i32 value = a.fill;
        bool inside = true;
        if (counted && in_order) {
            const u32 passed = u32(max(i32(token) - max(a.starts[request], 0), 0));
            inside = back <= passed;
            const u32 newest_first = back - 1 - passed;
            value = inside ? a.tokens[token - back]
                           : a.history[u64(request) * (a.order - 1) + (ENGRAM ? newest_first : a.order - 2 - newest_first)];
        }
        // What lies behind a cut is `fill`. Engram: a dead token (negative, in a history all but -2 = unknown) cuts itself and all
        // that is older. PLE: an EOS cuts what is older, unless it is the current token.
        const bool cut = ENGRAM ? value < 0 && (inside || value != -2) : value == a.fill && back > 0;
        const u32 cuts = __ballot_sync(ALL_LANES, cut) >> shift;
        if ((cuts & ((2u << back) - 1)) != 0 || (ENGRAM && value < 0)) value = a.fill;

        i64 mix = i64(u64(i64(value)) * u64(multiplier));
        for (u32 d = 1; d < WINDOW; d *= 2) {
            const i64 newer = __shfl_up_sync(ALL_LANES, mix, d, WINDOW);
            if (back >= d) mix ^= newer;
        }
        mixes[slot][back] = mix;
        if (back == 0) live[slot] = counted;
        if (a.mixes && token < a.len && back > 0 && in_order)
            a.mixes[(u64(token) * a.layers + layer) * (a.order - 1) + back - 1] = counted ? mix : -1;
    }
    __syncthreads();
    if (start >= down) return;
    while (true) {
        const u32 order = a.by_heads.divide(column) + 1;
        for (u32 t = start; t < TOKENS && first + t < a.len; t += down)
            a.ids[(u64(first + t) * a.layers + layer) * columns + column] = live[t] ? i32(remainder(mixes[t][order], c) + c.offset) : -1;
        column += a.across;
        if (column >= columns) break;
        c = a.columns[layer * columns + column];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) hash_engram(const __grid_constant__ Hash a) { hash<true>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) hash_ple(const __grid_constant__ Hash a) { hash<false>(a); }
