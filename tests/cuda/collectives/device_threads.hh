// Enough of CUDA for kernels that work with peers to run on this computer's threads: one for each of the GPU's.
//
// Stores are seen in the order in which they are made, as on x86-64. What a kernel's words say in assembly is said
// here with the same names, in `device_words.hh`.
#pragma once

#include <emmintrin.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct Extent {
    unsigned x = 0, y = 0, z = 0;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// Threads of a block in a row, and what they give each other, in two places in turn.
struct Warp {
    explicit Warp(unsigned threads) : meeting(threads) {}
    std::barrier<> meeting;
    unsigned long long given[2][32];
};

// One block of a launch.
struct Block {
    explicit Block(unsigned threads) : meeting(threads) {
        for (unsigned first = 0; first < threads; first += 32)
            warps.push_back(std::make_unique<Warp>(threads - first < 32 ? threads - first : 32));
    }
    std::barrier<> meeting;
    std::vector<std::unique_ptr<Warp>> warps;
    std::atomic<bool> every[2] = {true, true};
    alignas(16) char shared[1 << 16];
};

inline thread_local Extent threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};
inline thread_local Block* block_of_thread;
inline thread_local unsigned meetings, shuffles;

inline void __syncwarp() {}  // threads come on anyway
inline void __syncthreads() { block_of_thread->meeting.arrive_and_wait(); }
inline bool __syncthreads_and(bool here) {
    std::atomic<bool>& every = block_of_thread->every[meetings++ & 1];
    if (!here) every = false;
    __syncthreads();
    const bool all = every;
    __syncthreads();
    every = true;  // nobody uses it before the next but one
    return all;
}
inline bool __syncthreads_or(bool here) { return !__syncthreads_and(!here); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned long long atomicAdd(unsigned long long* word, unsigned long long value) {
    return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
}
inline unsigned long long atomicMax(unsigned long long* word, unsigned long long value) {
    unsigned long long before = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while (before < value && !__atomic_compare_exchange_n(word, &before, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return before;
}
inline long long atomicMin(long long* word, long long value) {
    long long held = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while (value < held && !__atomic_compare_exchange_n(word, &held, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return held;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    Warp& warp = *block_of_thread->warps[threadIdx.x / 32];
    unsigned long long* const given = warp.given[shuffles++ & 1];
    memcpy(&given[threadIdx.x % 32], &value, sizeof value);
    warp.meeting.arrive_and_wait();
    memcpy(&value, &given[lane], sizeof value);  // nobody gives into this place before all have taken
    return value;
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int lane) {
    return __shfl_sync(lanes, value, threadIdx.x % 32 ^ lane);
}

// All threads of a launch of one kernel, from the first to the last.
template <class Kernel>
void launch(unsigned blocks, unsigned threads, Kernel kernel) {
    std::vector<std::thread> all;
    std::vector<std::unique_ptr<Block>> made;
    for (unsigned b = 0; b < blocks; ++b) made.push_back(std::make_unique<Block>(threads));
    for (unsigned b = 0; b < blocks; ++b)
        for (unsigned t = 0; t < threads; ++t)
            all.emplace_back([=, block = made[b].get()] {
                threadIdx = {t, 0, 0}, blockIdx = {b, 0, 0};
                blockDim = {threads, 1, 1}, gridDim = {blocks, 1, 1};
                block_of_thread = block, meetings = shuffles = 0;
                kernel();
            });
    for (auto& each : all) each.join();
}
