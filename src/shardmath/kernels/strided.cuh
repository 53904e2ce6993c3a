// Elements of two strided arrays of the same shape, by number.
#pragma once

#include "elements.cuh"

namespace shardmath {

constexpr int kDims = 65;  // as many as an array of NumPy's has, and one for the parts of complex numbers

struct Dim {  // strides in bytes
    uint64 extent;
    int64 source, target;
};

struct Places {  // an element of each array, in bytes from the first, and its index along one dimension
    int64 source, target;
    uint64 index;
};

struct Strided {
    const char* source;
    char* target;
    uint64 count, ndim;
    Dim dims[kDims];

    // Neighbours along the last dimension have numbers next to each other. `axis` is a dimension.
    __device__ Places places(uint64 number, uint64 axis = 0) const {
        Places found = {0, 0, 0};
        for (int d = (int)ndim - 1; d >= 0; --d) {
            const uint64 quotient = d ? number / dims[d].extent : 0;
            const uint64 at = number - quotient * dims[d].extent;
            found.source += (int64)at * dims[d].source;
            found.target += (int64)at * dims[d].target;
            if (d == axis) found.index = at;
            number = quotient;
        }
        return found;
    }
};

}  // namespace shardmath
