// A product whose sums go to all ranks: tiles travel to their owners, and their sums to everybody, while the
// next tiles are computed. See tile_sending.cuh.
//
//     warp 1: sends tiles      warps 2, 3: add up what has come, and send the sums
//
// Two blocks do not multiply, and wait until all tiles have come: then remaining_sums.cu does what is left.
#include "tile_sending.cuh"

using namespace shardmath;

constexpr u32 kBars = 2 * kStages + 6;

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
        mbarrier_wait(ready[half], parity);
        if (half < halves) bulk_store(to + half * kHalfBytes, from[half], kBlockBytes);
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
            bulk_wait_read_but<2>();  // the right ones
        else
            bulk_wait_read();
        for (u32 half = 0; half < 2; ++half) mbarrier_arrive(s.room + 8 * half);
        bulk_wait_read();
        for (u32 half = 0; half < 2; ++half)
            for (u32 block = 0; block < kCluster; ++block) release_to(s, stage, block);
        bulk_wait();
        signal_sent(a, tile, sent);
    }
}

// The accumulators of half a tile: no wait but for the tile before, and for a stage that is multiplied.
__device__ inline void pack(const Shared& s, u32 half, const float (&d)[128], u32 tile, u32 number) {
    const u32 stage = number % kStages;
    mbarrier_wait(s.room + 8 * half, (tile & 1) ^ 1);
    pack_block<0>(d, s.left(half));
    fence_proxy_async_shared();
    mbarrier_arrive(s.left_ready(half));
    mbarrier_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
    pack_block<1>(d, s.right(half, stage));
    fence_proxy_async_shared();
    mbarrier_arrive(s.right_ready(half));
}

// What has come, until this block has multiplied: then it makes room for those who do the rest.
__device__ inline void add_up(const TileSumsArgument& a, u64 launch, const volatile u32& over) {
    const auto is_over = [&] { return __any_sync(~0u, over); };
    for (u32 chunk = 0; chunk < a.count; ++chunk) {
        while (!here(a, chunk, launch)) {
            if (is_over()) return;
            __nanosleep(1000);  // looking takes power from those that multiply
        }
        reduce_pieces(a, chunk, is_over);
    }
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_all_reduce(const __grid_constant__ Product a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[kBars];
    __shared__ u32 over;
    const u64 launch = a.sums.launch(a.team);
    if (blockIdx.x >= a.multipliers) return wait_for_all(a, launch);
    const Shared s((shared_address(memory) + 1023) & ~1023u, shared_address(bars));
    if (threadIdx.x == 0) {
        over = 0;
        s.init();
        for (u32 i = 0; i < 4; ++i) mbarrier_init(s.ready + 8 * i, kMultipliers);
        for (u32 half = 0; half < 2; ++half) mbarrier_init(s.room + 8 * half, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (kCluster > 1) scattered_cluster_barrier();
    const u32 warp = threadIdx.x / 32;
    if (warp >= 4) {
        const u32 half = warp / 4 - 1;
        multiply_tiles<true>(a, s, half,
                             [&](const float (&d)[128], u32 tile, u32 number) { pack(s, half, d, tile, number); });
        if (threadIdx.x == kMultipliers) *(volatile u32*)&over = 1;
    } else {
        if (threadIdx.x == 0) load_tiles<true>(a, s);
        if (threadIdx.x == 32) send_tiles(a, s, launch);
        if (warp >= 2) add_up(a.sums, launch, over);
    }
    __syncwarp();
    if (kCluster > 1) scattered_cluster_barrier();  // the other block may still write into this one's memory
}
