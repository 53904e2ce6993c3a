// How the warps of a kernel that multiplies add up what has come for this rank, and tell all ranks.
//
// The adders are warps of the blocks that multiply. Each takes its share of one chunk after another:
//
//     two of a block     the early chunks, while the others multiply
//     the eight others   the late chunks, when they have multiplied
//
// They may leave before all tiles have come, and say how far they got: takers do the rest. A peer's tiles of this
// launch say that it has begun it, so that it no longer reads what was there before.
#pragma once

#include "taking.cuh"

namespace shardmath {

constexpr u32 kEarlyAdders = 2, kLateAdders = 8, kAdders = kEarlyAdders + kLateAdders;
constexpr u64 kPatience = 2000000;  // nanoseconds that a block waits for peers after it has multiplied

// -- whose share ---------------------------------------------------------------------------------------

// One of the adders of `blocks` blocks.
struct Adder {
    u32 block, number, blocks;
    __device__ bool early() const { return number < kEarlyAdders; }
    // Its place among those that add up the same chunks, and how many they are.
    __device__ u32 place() const {
        return early() ? block * kEarlyAdders + number : block * kLateAdders + number - kEarlyAdders;
    }
    __device__ u32 places() const { return blocks * (early() ? kEarlyAdders : kLateAdders); }
    __device__ u32 first(const TakeArgument& a) const { return early() ? 0 : a.count - a.late; }
    __device__ u32 chunks(const TakeArgument& a) const { return early() ? a.count - a.late : a.late; }
    __device__ Done& done(const TakeArgument& a) const { return a.done[block * kAdders + number]; }
};

// -- waiting -------------------------------------------------------------------------------------------

// How long a block that multiplies waits for peers: a little while after it has multiplied. Then it makes room,
// because peers may wait for another kernel of this GPU.
struct Patience {
    const volatile u32* over;  // whether the block has multiplied
    u64 end = 0;
    __device__ bool lost() {
        bool lost = false;
        if (*over) {
            const u64 now = nanoseconds();
            if (end == 0) end = now + kPatience;
            lost = now > end;
        }
        return __any_sync(~0u, lost);
    }
};

// -- adding --------------------------------------------------------------------------------------------

// This adder's share of a chunk that is here. The last of all tells the peers; a rank that has given up does not.
__device__ inline void add_share(const Team& team, const TakeArgument& a, const Adder& adder, u32 chunk, u64 launch) {
    take<(kRanks > 8 ? 1 : kRanks > 4 ? 2 : 4)>(a, chunk, adder.place(), adder.places());
    __syncwarp();
    if (threadIdx.x % 32) return;
    fence();  // what this warp has written to peers comes first
    if (add_here(&a.summed[chunk], 1) + 1 < (launch + 1) * adder.places()) return;
    if (load_relaxed(&team.own().failed)) return;
    for (int i = 1; i <= kRanks; ++i) store_release(&a.ready[(team.rank + i) % kRanks][chunk], launch + 1);
}

// Whether `mine` is true for all late adders of this block, who wait for each other.
__device__ inline bool all_late_adders(bool mine) {
    u32 all;
    asm volatile(
        "{\n\t.reg .pred mine, all;\n\tsetp.ne.u32 mine, %1, 0;\n\tbarrier.cta.red.and.pred all, 1, %2, mine;\n\t"
        "selp.u32 %0, 1, 0, all;\n\t}"
        : "=r"(all)
        : "r"((u32)mine), "n"(kLateAdders * 32)
        : "memory");
    return all;
}

// Wait, but not for ever, until `found()` is true for all threads of the first of them.
template <class Found>
__device__ inline bool patiently(const Adder& adder, Patience& patience, Found found) {
    bool is = true;
    if (adder.number == kEarlyAdders)
        while (!(is = found()) && !patience.lost()) {}
    return all_late_adders(is);
}

}  // namespace shardmath
