// Exchanges of rows, made as one permutation. Includes nothing but what types are.
#pragma once

#include "elements.cuh"
#include "matrix.cuh"

namespace shardmath {

// Row begin + i is exchanged with row pivots[begin + i] - first, one after the other: up to kCount exchanges, by a
// block of as many threads, in shared memory. A slot stands for a row: first those from `begin` on, then the others,
// at the first pivot that names each.
template <int kCount>
struct Permutation {
    int32 row[2 * kCount], source[2 * kCount], partner[kCount];

    // Find out where rows come to lie, before columns are permuted.
    __device__ void find(const int32* pivots, i64 first, i64 begin, int count, bool backward) {
        const int t = threadIdx.x;
        const i64 pivot = t < count ? pivots[begin + t] - first : 0;
        row[t] = (int32)(begin + t);
        row[kCount + t] = (int32)pivot;
        source[t] = t;
        source[kCount + t] = kCount + t;
        __syncthreads();
        if (t < count) {
            if (pivot >= begin && pivot < begin + count) {
                partner[t] = (int32)(pivot - begin);
            } else {
                int at = 0;
                while (row[kCount + at] != (int32)pivot) ++at;
                partner[t] = kCount + at;
            }
        }
        __syncthreads();
        if (t == 0)
            for (int k = 0; k < count; ++k) {
                const int i = backward ? count - 1 - k : k, j = partner[i];
                const int32 held = source[i];
                source[i] = source[j];
                source[j] = held;
            }
        __syncthreads();
    }

    // Permute a column, whose elements are contiguous.
    template <class Element>
    __device__ void apply(Element* column) const {
        const int t = threadIdx.x;
        Element held[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = half * kCount + t;
            if (source[slot] != slot) held[half] = column[row[source[slot]]];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = half * kCount + t;
            if (source[slot] != slot) column[row[slot]] = held[half];
        }
    }
};

}  // namespace shardmath
