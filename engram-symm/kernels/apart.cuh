// Rows by lines, for many tokens: some warps of a block serve and the others collect, so that rows are on links and taken from them at the
// same time.

#pragma once

#include "lines.cuh"

// Sends a tile's rows to a requester as its ids come, which each lane waits for alone.
__device__ bool serve_rows(const Exchange& x, const Step& step, u32 tile, u32 requester) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile), of = tile * x.tile * 2 + lane;
    Place p;
    Row row;
    bool came = true;
    if (lane < rows && find_place(x, x.rank, of, p)) {
        const Table table = table_of(x, p.layer);
        const Pair* line = line_at<true>(x, step, x.rank, requester, of / 2);
        Pair v;
        came = wait(x, step, requester, IDS, [&] { return v = load(line), v.high == step.call; });
        const i32 id = half_of(v.low, of % 2);
        if (came && owns<true>(x, x.rank, p.layer, id)) {
            row.find(table, id);
            row.to = reinterpret_cast<u8*>(landing<false, true>(x, requester, landed(x, x.rank, p), 0));
        }
    }
    if (!__all_sync(ALL_LANES, came)) return false;
    each_part<K, uint4>(rows, x.chunks, x.by_chunks,
        [&](u32 of, u32 chunk) { return load_chunk<true>(x, from_lane(row.values, of), from_lane(row.scales, of), chunk, x.unit); },
        [&](u32 of, u32 chunk, uint4 data, bool here) {
            Pair* to = reinterpret_cast<Pair*>(from_lane(row.to, of));
            if (here && to != nullptr) send_chunk<false>(step, to + chunk, data);
        });
    return true;
}

// Takes a tile's rows of an owner into the output as they come, and makes zero rows of those that it does not send.
__device__ bool collect_rows(const Exchange& x, const Step& step, u32 tile, u32 owner) {
    const u32 lane = threadIdx.x % WARP, rows = Tiles::rows(x, tile), all = rows * x.chunks;
    Place p;
    u8 *from = nullptr, *to = nullptr, *scales_to = nullptr;
    if (lane < rows && find_place(x, owner, tile * x.tile * 2 + lane, p)) {
        if (owns<true>(x, owner, p.layer, id_at(x, p))) from = reinterpret_cast<u8*>(landing<false, true>(x, x.rank, landed(x, owner, p), 0));
        to = output_row(x, x.out, p);
        scales_to = x.form == MX ? scale_at(x, x.out_scales, p, p.column * x.scale_bytes) : to + x.value_bytes;
    }
#pragma unroll 1
    for (u32 base = 0; base < all; base += K * WARP) {
        Pair* at[K];
        uint4 data[K];
        u32 row[K], chunk[K];
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const u32 number = min(base + k * WARP + lane, all - 1);
            row[k] = x.by_chunks.divide(number), chunk[k] = number - row[k] * x.chunks, data[k] = {0, 0, 0, 0};
            at[k] = reinterpret_cast<Pair*>(from_lane(from, row[k]));
            at[k] = at[k] == nullptr || base + k * WARP + lane >= all ? nullptr : at[k] + chunk[k];
        }
        const bool came = wait(x, step, owner, ROWS, [&] {
            bool ready = true;
#pragma unroll
            for (u32 k = 0; k < K; ++k)
                if (at[k] != nullptr) ready = receive_chunk<false>(step, at[k], data[k]) && ready;
            return ready;
        });
        if (!__all_sync(ALL_LANES, came)) return false;
#pragma unroll
        for (u32 k = 0; k < K; ++k) {
            const Part part(x, chunk[k]);
            u8* values_to = from_lane(to, row[k]);
            u8* groups_to = from_lane(scales_to, row[k]);
            if (base + k * WARP + lane >= all || values_to == nullptr) continue;
            if (part.scale && x.form == MX)
                store_groups(groups_to + part.from / 4 * 512, part.bytes, data[k]);
            else
                store_bytes<true>((part.scale ? groups_to : values_to) + part.from, data[k], part.bytes, x.out_unit);
            if (at[k] != nullptr) store(at[k], {ABSENT, ABSENT});
        }
    }
    return true;
}

__device__ void push_lines_apart_plain(const Exchange& x) {
    Step step;
    if (!send_ids<true>(x, step)) return pass(x);
    const Tiles own;
    const u32 tiles = own.count(x.tiles);
    const bool serves = own.warp < x.servers;
    const u32 warp = serves ? own.warp : own.warp - x.servers, warps = serves ? x.servers : own.warps - x.servers;
    if (!serves) serve_itself_by<true>(x, warp, warps, 0);
    // All ranks in turn, so that all links are busy.
    bool ok = true;
    u32 distance = warp, tile = blockIdx.x;
    while (ok && x.world > 1) {
        while (distance >= x.world - 1) distance -= x.world - 1, tile += gridDim.x;
        if (tile >= x.tiles) break;
        const u32 peer = after(x, distance + 1);
        ok = serves ? serve_rows(x, step, tile, peer) : collect_rows(x, step, tile, peer);
        distance += warps;
    }
    end_lines(x, step, ok);
}
