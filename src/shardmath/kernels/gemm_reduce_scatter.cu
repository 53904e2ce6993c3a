// A product whose sums stay with their owners: tiles travel to them while the next ones are computed. See tile_sending.cuh.
//
//     warps 1, 2: send half a tile each
//
// The blocks that do not multiply add up chunks until all tiles have come; remaining_sums.cu does the rest.
#include "tile_sending.cuh"

using namespace shardmath;

constexpr u32 kParts = 2, kBars = 2 * kStages + 4;  // of half a tile, which are packed in the same place

struct Shared : Stages {
    u32 packed, ready, room;  // shared addresses
    __device__ Shared(u32 memory, u32 bars)
        : Stages(memory, bars), packed(behind()), ready(bars_behind()), room(ready + 16) {}
};

// Send half `half` of each tile, if it has rows. One thread.
__device__ inline void send_tiles(const Product& a, const Shared& s, u32 half, u64 launch) {
    const u32 packed = s.packed + half * kBlockBytes;
    Usable usable;
    u32 part = 0;
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit)) {
        const Tile tile = tile_of(a, unit);
        const bool sent = tile.rows() > 64 * half && usable.send_to(a, tile, launch);
        char* to = a.slots[tile.dst()] + (u64)tile.slot * kTileBytes + half * kHalfBytes;
        for (u32 p = 0; p < kParts; ++p, ++part) {
            mbarrier_wait(s.ready + 8 * half, part & 1);
            if (sent) bulk_store(to + p * kBlockBytes, packed, kBlockBytes);
            if (p + 1 < kParts)
                bulk_wait_read();
            else
                bulk_wait();
            mbarrier_arrive(s.room + 8 * half);
        }
        signal_sent(a, tile, sent);
    }
}

// The accumulators of half a tile: its left block, and, when that has been sent, its right one.
__device__ inline void pack(const Shared& s, u32 half, const float (&d)[128], u32 tile) {
    const u32 packed = s.packed + half * kBlockBytes;
#pragma unroll
    for (u32 p = 0; p < kParts; ++p) {
        mbarrier_wait(s.room + 8 * half, ((kParts * tile + p) & 1) ^ 1);
        if (p == 0)
            pack_block<0>(d, packed);
        else
            pack_block<1>(d, packed);
        fence_proxy_async_shared();
        mbarrier_arrive(s.ready + 8 * half);
    }
}

// Whether the last chunk's tiles were here when this was last asked: nobody waits for an answer. By a warp.
struct LastChunk {
    const u64* arrived;  // of the rank with the lane's number
    u64 wanted, seen = 0;

    __device__ LastChunk(const TileSumsArgument& a, u64 launch) {
        const u32 lane = threadIdx.x % 32, chunk = a.count - 1;
        arrived = a.arrived + (lane < kRanks ? lane : 0) * a.count + chunk;
        wanted = all_halves(a, chunk, launch);
    }
    __device__ bool operator()() {
        const bool here = __all_sync(~0u, seen >= wanted);
        seen = load_relaxed(arrived);
        return here;
    }
};

// Chunks as they come, as many as there is time for: peers and this rank's next kernel must not wait for it.
__device__ inline void reduce_concurrently(const Product& a, u64 launch) {
    LastChunk over(a.sums, launch);
    for (u32 chunk = 0; chunk + 1 < a.sums.count && !over(); ++chunk) {
        if (!wait_for_tiles(a.team, a.sums, chunk, launch)) return;
        reduce_pieces(a.sums, chunk, over);
    }
    wait_for_all(a, launch);
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_reduce_scatter(const __grid_constant__ Product a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[kBars];
    const u64 launch = a.sums.launch(a.team);
    if (blockIdx.x >= a.multipliers) return reduce_concurrently(a, launch);
    const Shared s((shared_address(memory) + 1023) & ~1023u, shared_address(bars));
    if (threadIdx.x == 0) {
        s.init();
        for (u32 half = 0; half < 2; ++half) {
            mbarrier_init(s.ready + 8 * half, kMultipliers);
            mbarrier_init(s.room + 8 * half, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (kCluster > 1) scattered_cluster_barrier();
    if (threadIdx.x < kMultipliers) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) load_tiles<false>(a, s);
        if (threadIdx.x == 32 || threadIdx.x == 64) send_tiles(a, s, threadIdx.x / 32 - 1, launch);
    } else {
        setmaxnreg_inc<232>();
        const u32 half = threadIdx.x / kMultipliers - 1;
        multiply_tiles<false>(a, s, half, [&](const float (&d)[128], u32 tile, u32) { pack(s, half, d, tile); });
    }
    __syncwarp();
    if (kCluster > 1) scattered_cluster_barrier();  // the other block may still write into this one's memory
}
