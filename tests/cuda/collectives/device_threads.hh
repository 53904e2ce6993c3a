// Enough of CUDA for kernels that work with peers to run on this computer's threads: one for each of the GPU's.
//
// Stores are seen in the order in which they are made, as on x86-64. What a kernel's words say in assembly is said
// here with the same names, in `device_words.hh`. Headers of C only: those of C++ for threads take
// longer to compile than all else here.
#pragma once

#include <emmintrin.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

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
    pthread_barrier_t meeting;
    unsigned count;
    alignas(8) char given[2][32 * 8];
};

// One block of a launch.
struct Block {
    pthread_barrier_t meeting;
    Warp warps[32];
    bool every[2] = {true, true};
    alignas(16) char shared[1 << 16];
};

inline thread_local Extent threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};
inline thread_local Block* block_of_thread;
inline thread_local unsigned meetings, shuffles;

inline void __syncthreads() { pthread_barrier_wait(&block_of_thread->meeting); }
inline bool __syncthreads_and(bool here) {
    bool& every = block_of_thread->every[meetings++ & 1];
    if (!here) __atomic_store_n(&every, false, __ATOMIC_SEQ_CST);
    __syncthreads();
    const bool all = __atomic_load_n(&every, __ATOMIC_SEQ_CST);
    __syncthreads();
    __atomic_store_n(&every, true, __ATOMIC_SEQ_CST);  // nobody uses it before the next but one
    return all;
}
inline Warp& own_warp() { return block_of_thread->warps[threadIdx.x / 32]; }
inline void __syncwarp() { pthread_barrier_wait(&own_warp().meeting); }
// What each thread of this warp gives. Nobody gives to this place again before all have read it.
template <typename T>
const T* given_by_warp(T value) {
    T* const given = (T*)own_warp().given[shuffles++ & 1];
    given[threadIdx.x % 32] = value;
    __syncwarp();
    return given;
}
template <typename T>
T __shfl_sync(unsigned, T value, unsigned lane) {
    return given_by_warp(value)[lane];
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const unsigned* const given = given_by_warp(value);
    for (unsigned lane = 0; lane < own_warp().count; ++lane) value = given[lane] > value ? given[lane] : value;
    return value;
}
inline unsigned __reduce_min_sync(unsigned all, unsigned value) { return ~__reduce_max_sync(all, ~value); }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
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
    long long before = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while (value < before && !__atomic_compare_exchange_n(word, &before, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return before;
}
inline float rsqrt(float x) { return 1 / __builtin_sqrtf(x); }
inline double rsqrt(double x) { return 1 / __builtin_sqrt(x); }

constexpr unsigned kNoThread = ~0u;

// Runs `kernel` on every thread of a grid, and returns when all have ended. Thread `late` of the
// first block starts 20 ms after the others.
template <typename Kernel>
void run_grid(unsigned blocks, unsigned threads, unsigned late, Kernel kernel) {
    struct Launch {
        Kernel& kernel;
        unsigned blocks, threads, late;
        Block* memory;
    };
    struct Thread {
        Launch* launch;
        unsigned block, number;
        pthread_t id;
    };
    Launch launch{kernel, blocks, threads, late, new Block[blocks]};
    Thread* all = new Thread[blocks * threads];
    const auto begin = [](void* place) -> void* {
        const Thread& own = *static_cast<Thread*>(place);
        const Launch& of = *own.launch;
        threadIdx = {own.number, 0, 0}, blockIdx = {own.block, 0, 0};
        blockDim = {of.threads, 1, 1}, gridDim = {of.blocks, 1, 1};
        block_of_thread = &of.memory[own.block], meetings = shuffles = 0;
        if (own.number == of.late && own.block == 0) usleep(20000);
        of.kernel();
        return nullptr;
    };
    for (unsigned b = 0; b < blocks; ++b) {
        pthread_barrier_init(&launch.memory[b].meeting, nullptr, threads);
        for (unsigned first = 0; first < threads; first += 32) {
            Warp& warp = launch.memory[b].warps[first / 32];
            warp.count = threads - first < 32 ? threads - first : 32;
            pthread_barrier_init(&warp.meeting, nullptr, warp.count);
        }
    }
    for (unsigned i = 0; i < blocks * threads; ++i) {
        all[i] = {&launch, i / threads, i % threads, 0};
        if (pthread_create(&all[i].id, nullptr, begin, &all[i])) __builtin_trap();
    }
    for (unsigned i = 0; i < blocks * threads; ++i) pthread_join(all[i].id, nullptr);
    for (unsigned b = 0; b < blocks; ++b) {
        pthread_barrier_destroy(&launch.memory[b].meeting);
        for (unsigned first = 0; first < threads; first += 32)
            pthread_barrier_destroy(&launch.memory[b].warps[first / 32].meeting);
    }
    delete[] all;
    delete[] launch.memory;
}
