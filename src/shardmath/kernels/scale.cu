// Real numbers multiplied by a factor, from one strided array into another of the same shape: in place, or
// from half precision to float32 and back. Compiled with SOURCE and TARGET, types of elements.cuh, and VECTOR,
// the number of adjacent elements along the last dimension that are read and written at once.
#include "elements.cuh"

using namespace shardmath;

constexpr int kDims = 8;

template <class Element>
struct __align__(VECTOR * sizeof(Element)) Vector {
    Element part[VECTOR];
};

struct Dim {  // strides in bytes; the last dimension is the densest of the target, counted in vectors
    uint64 extent;
    int64 source, target;
};

struct ScaleArgument {
    const char* source;
    char* target;
    double factor;
    uint64 count;
    uint64 ndim;
    Dim dims[kDims];
};

extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ ScaleArgument a) {
    typedef Wide<SOURCE> In;
    typedef Wide<TARGET> Out;
    typedef typename Out::type Number;
    const uint64 stride = (uint64)gridDim.x * blockDim.x;
    for (uint64 i = (uint64)blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += stride) {
        int64 source = 0, target = 0;
        uint64 index = i;
        for (int d = (int)a.ndim - 1; d > 0; --d) {
            const uint64 quotient = index / a.dims[d].extent;
            const int64 at = (int64)(index - quotient * a.dims[d].extent);
            source += at * a.dims[d].source;
            target += at * a.dims[d].target;
            index = quotient;
        }
        if (a.ndim) {
            source += (int64)index * a.dims[0].source;
            target += (int64)index * a.dims[0].target;
        }
        const Vector<SOURCE> given = *(const Vector<SOURCE>*)(a.source + source);
        Vector<TARGET> made;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k)
            made.part[k] = Out::narrow((Number)In::widen(given.part[k]) * (Number)a.factor);
        *(Vector<TARGET>*)(a.target + target) = made;
    }
}
