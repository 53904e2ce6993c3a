// Blocks that compute tiles of the same columns load B together: each a part of it, for all of their cluster.
//
// Compiled with CLUSTER, the number of blocks: 1 where each loads for itself.
#pragma once

#include "hopper.cuh"

namespace shardmath {

constexpr u32 kCluster = CLUSTER;

__device__ inline u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return kCluster == 1 ? 0 : rank;
}

// By all threads, those of each warp together.
__device__ inline void cluster_barrier() {
    if (kCluster == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrive at the barrier in shared memory that a block of the cluster has at the same place.
__device__ inline void arrive_at(u32 bar, u32 block) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(bar),
        "r"(block)
        : "memory");
}

// A stage has been multiplied by this warp: to the barriers `empty` of all blocks that write into it.
__device__ inline void release(u32 empty, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    if (kCluster == 1) {
        if (lane == 0) mbarrier_arrive(empty + 8 * stage);
    } else if (lane < kCluster) {
        arrive_at(empty + 8 * stage, lane);
    }
}

constexpr u32 kBand = 16 / kCluster;  // tiles above each other that are computed at about the same time

// A place in a rectangle of units, `unit_rows` above each other and `across` wide; a unit is a tile of each block of
// a cluster. Columns come one after another, in bands of kBand units: what is in flight at once needs little of A
// and B.
struct Unit {
    u32 row, column;
    __device__ Unit(u32 number, u32 unit_rows, u32 across) {
        const u32 band = number / (kBand * across), within = number % (kBand * across);
        const u32 left = unit_rows - band * kBand, high = left < kBand ? left : kBand;
        row = band * kBand + within % high;
        column = within / high;
    }
};

// Load a box to the same place in all blocks of the cluster, and tell the barriers of all.
__device__ inline void tma_load_multicast(u32 to, const TensorMap* from, u32 x, u32 y, u32 bar) {
    if (kCluster == 1) return tma_load(to, from, x, y, bar);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(from), "r"(x), "r"(y), "r"(bar), "h"((unsigned short)((1u << kCluster) - 1))
        : "memory");
}

}  // namespace shardmath
