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

// Load a box to the same place in all blocks of the cluster, and tell the barriers of all.
__device__ inline void load_box_for_all(u32 to, const TensorMap* from, u32 x, u32 y, u32 bar) {
    if (kCluster == 1) return load_box(to, from, x, y, bar);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(from), "r"(x), "r"(y), "r"(bar), "h"((unsigned short)((1u << kCluster) - 1))
        : "memory");
}

}  // namespace shardmath
