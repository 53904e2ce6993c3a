// A product whose sums go to all ranks: tiles travel to their owners, and their sums to everybody, while the
// next tiles are computed. See sent.cuh and adding.cuh.
//
//     warp 1: sends tiles      warps 2, 3: add up what has come of the early chunks      8 warps, at last: the late chunks
//
// The blocks that do not multiply take what those have left.
#include "adding.cuh"
#include "gathering.cuh"
#include "sent.cuh"

using namespace shardmath;

constexpr u32 kBars = 2 * kStages + 6;

struct EverywhereArgument {
    Product product;
    GatherArgument gather;
};

struct Shared : Stages {
    u32 packed, ready, room;  // shared addresses
    __device__ Shared(u32 memory, u32 bars)
        : Stages(memory, bars), packed(behind()), ready(bars_behind()), room(ready + 32) {}
    // Where half a tile is packed: its left block, and its right one in the stage behind the tile's last step.
    __device__ u32 left(u32 half) const { return packed + half * kBlockBytes; }
    __device__ u32 right(u32 half, u32 stage) const { return a(stage) + half * kBlockBytes; }
    __device__ u32 left_ready(u32 half) const { return ready + 8 * half; }
    __device__ u32 right_ready(u32 half) const { return ready + 16 + 8 * half; }
};

// The blocks on one side of a tile, when its halves are packed. One thread.
__device__ inline void send_side(char* to, u32 halves, const u32 (&from)[2], const u32 (&ready)[2], u32 parity) {
    for (u32 half = 0; half < 2; ++half) {
        bar_wait(ready[half], parity);
        if (half < halves) store_bulk(to + half * kHalfBytes, from[half], kBlockBytes);
    }
}

// Send each tile. One thread.
__device__ inline void send_tiles(const Product& a, const Shared& s, u64 launch) {
    Usable usable;
    u32 number = 0, parity = 0;
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit), parity ^= 1) {
        const Tile tile = tile_of(a, unit);
        const u32 halves = (tile.rows() > 0) + (tile.rows() > 64);
        const u32 sent = halves && usable.send_to(a, tile, launch) ? halves : 0;
        number += a.steps;
        const u32 stage = number++ % kStages;
        char* const to = a.slots[tile.dst()] + (u64)tile.slot * kTileBytes;
        send_side(to, sent, {s.left(0), s.left(1)}, {s.left_ready(0), s.left_ready(1)}, parity);
        send_side(to + kBlockBytes, sent, {s.right(0, stage), s.right(1, stage)},
                  {s.right_ready(0), s.right_ready(1)}, parity);
        if (sent == 2)
            stores_have_read_but<2>();  // the right ones
        else
            stores_have_read();
        for (u32 half = 0; half < 2; ++half) bar_arrive(s.room + 8 * half);
        stores_have_read();
        for (u32 half = 0; half < 2; ++half)
            for (u32 block = 0; block < kCluster; ++block) release_to(s, stage, block);
        stores_are_done();
        tell_sent(a, tile, sent);
    }
}

// The accumulators of half a tile: no wait but for the tile before, and for a stage that is multiplied.
__device__ inline void pack(const Shared& s, u32 half, const float (&d)[128], u32 tile, u32 number) {
    const u32 stage = number % kStages;
    bar_wait(s.room + 8 * half, (tile & 1) ^ 1);
    pack_block<0>(d, s.left(half));
    fence_async_shared();
    bar_arrive(s.left_ready(half));
    bar_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
    pack_block<1>(d, s.right(half, stage));
    fence_async_shared();
    bar_arrive(s.right_ready(half));
}

// -- what they do with the tiles that come ------------------------------------------------------------

// The chunks of others' sums that an adder copies: the first, and how many.
__device__ inline u32 first_copied(const EverywhereArgument& a, const Adder& adder) {
    return adder.early() ? 0 : a.gather.early;
}
__device__ inline u32 copied_chunks(const EverywhereArgument& a, const Adder& adder) {
    return adder.early() ? a.gather.early : a.gather.chunks - a.gather.early;
}

__device__ inline void copy_share(const EverywhereArgument& a, const Adder& adder, u32 number) {
    copy_chunk(a.gather, first_copied(a, adder) + number, adder.place(), adder.places());
}

// A warp of a block that multiplies has come so far. By all of its threads.
__device__ inline void leave(const EverywhereArgument& a, const Adder& adder, Done done) {
    if (threadIdx.x % 32) return;
    adder.done(a.product.take) = done;
    if (done.added < adder.chunks(a.product.take) || done.copied < copied_chunks(a, adder))
        add_here(&a.product.take.ledger[a.product.team.rank]->leavers, 1);
}

// The early chunks, beside the warps that multiply.
__device__ inline void add_early(const EverywhereArgument& a, const Adder& adder, u64 launch, const volatile u32* over) {
    Patience patience{over};
    const u32 chunks = adder.chunks(a.product.take), copies = copied_chunks(a, adder);
    Done done{0, 0};
    while (done.added < chunks || done.copied < copies) {
        if (done.added < chunks && here(a.product.take, done.added, launch)) {
            add_share(a.product.team, a.product.take, adder, done.added++, launch);
        } else if (done.copied < copies && sums_here(a.gather, done.copied, 1, launch)) {
            copy_share(a, adder, done.copied++);
        } else if (patience.lost()) {
            break;
        } else {
            __nanosleep(1000);  // looking takes power from those that multiply
        }
    }
    leave(a, adder, done);
}

// The late chunks, by the warps that have multiplied; then they copy the peers' sums that come last.
__device__ inline void add_late(const EverywhereArgument& a, const Adder& adder, u64 launch, const volatile u32* over) {
    Patience patience{over};
    const u32 chunks = adder.chunks(a.product.take), first = adder.first(a.product.take), copies = copied_chunks(a, adder);
    Done done{0, 0};
    while (done.added < chunks) {
        const u32 chunk = first + done.added;
        if (!patiently(adder, patience, [&] { return here(a.product.take, chunk, launch); })) return leave(a, adder, done);
        add_share(a.product.team, a.product.take, adder, chunk, launch);
        ++done.added;
    }
    const u32 from = first_copied(a, adder);
    if (copies && patiently(adder, patience, [&] { return sums_here(a.gather, from, copies, launch); })) {
        for (; done.copied < copies; ++done.copied) copy_share(a, adder, done.copied);
    }
    leave(a, adder, done);
}

// What the adders have left, when all of them have ended: all sums first, for which peers wait.
__device__ inline void take_rest(const EverywhereArgument& a, u64 launch) {
    constexpr u32 kWarps = kThreads / 32;
    const u32 first = (blockIdx.x - a.product.multipliers) * kWarps + threadIdx.x / 32;
    const u32 warps = (gridDim.x - a.product.multipliers) * kWarps, adders = a.product.multipliers * kAdders;
    const Ledger& own = *a.product.take.ledger[a.product.team.rank];
    while (load_acquire(&own.blocks) < a.product.multipliers) __nanosleep(200);
    if (load_acquire(&own.leavers) == 0) return;
    for (u32 i = first; i < adders; i += warps) {
        const Adder adder{i / kAdders, i % kAdders, a.product.multipliers};
        for (u32 number = adder.done(a.product.take).added; number < adder.chunks(a.product.take); ++number) {
            const u32 chunk = adder.first(a.product.take) + number;
            if (!wait_for_tiles(a.product.team, a.product.take, chunk, launch)) return;
            add_share(a.product.team, a.product.take, adder, chunk, launch);
        }
    }
    for (u32 i = first; i < adders; i += warps) {
        const Adder adder{i / kAdders, i % kAdders, a.product.multipliers};
        for (u32 number = adder.done(a.product.take).copied; number < copied_chunks(a, adder); ++number) {
            if (!wait_for_sums(a.product.team, a.gather, first_copied(a, adder) + number, 1, launch)) return;
            copy_share(a, adder, number);
        }
    }
}

// -- the kernel ----------------------------------------------------------------------------------------

__device__ inline void run_multiplier(const EverywhereArgument& a, const Shared& s, u64 launch) {
    __shared__ u32 over;
    const Product& product = a.product;
    if (threadIdx.x == 0) {
        over = 0;
        s.init();
        for (u32 i = 0; i < 4; ++i) bar_init(s.ready + 8 * i, kMultipliers);
        for (u32 half = 0; half < 2; ++half) bar_init(s.room + 8 * half, 1);
        bars_visible();
    }
    __syncthreads();
    if (kCluster > 1) scattered_cluster_barrier();
    const u32 warp = threadIdx.x / 32;
    if (warp >= 4) {
        const u32 half = warp / 4 - 1;
        multiply_tiles<true>(product, s, half,
                             [&](const float (&d)[128], u32 tile, u32 number) { pack(s, half, d, tile, number); });
        if (threadIdx.x == kMultipliers) *(volatile u32*)&over = 1;
        add_late(a, {blockIdx.x, kEarlyAdders + warp - 4, product.multipliers}, launch, &over);
    } else {
        if (threadIdx.x == 0) load_tiles<true>(product, s);
        if (threadIdx.x == 32) send_tiles(product, s, launch);
        if (warp >= 2) add_early(a, {blockIdx.x, warp - 2, product.multipliers}, launch, &over);
    }
    __syncwarp();
    if (kCluster > 1) scattered_cluster_barrier();  // the other block may still write into this one's memory
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    everywhere(const __grid_constant__ EverywhereArgument a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[kBars];
    const u64 launch = a.product.take.launch(a.product.team);
    if (blockIdx.x < a.product.multipliers)
        run_multiplier(a, Shared((shared_address(memory) + 1023) & ~1023u, shared_address(bars)), launch);
    else
        take_rest(a, launch);
    __syncthreads();
    if (threadIdx.x == 0) end_block(a.product.team, a.product.take.ledger);
}
