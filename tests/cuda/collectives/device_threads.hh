// Enough of CUDA for kernels that work with peers to run on this computer's threads: one for each of the GPU's.
//
// Stores are seen in the order in which they are made, as on x86-64. What a kernel's words say in assembly is said
// here with the same names, in `device_words.hh`.
#pragma once

#include <emmintrin.h>
#include <sched.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
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

// One block of a launch.
struct Block {
    explicit Block(unsigned threads) : meeting(threads) {}
    std::barrier<> meeting;
    std::atomic<bool> every[2] = {true, true};
    alignas(16) char shared[1 << 16];
};

inline thread_local Extent threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};
inline thread_local Block* block_of_thread;
inline thread_local unsigned meetings;

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
