// Real numbers multiplied by a factor, from one strided array into another of the same shape: in place, or
// from half precision to float32 and back. Compiled with SOURCE and TARGET, types of elements.cuh, and VECTOR,
// the number of adjacent elements along the last dimension that are read and written at once: dimensions are
// counted in these.
#include "strided.cuh"

using namespace shardmath;

template <class Element>
struct __align__(VECTOR * sizeof(Element)) Vector {
    Element part[VECTOR];
};

struct ScaleArgument {
    Strided arrays;
    double factor;
};

extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ ScaleArgument a) {
    typedef Wide<SOURCE> In;
    typedef Wide<TARGET> Out;
    typedef typename Out::type Number;
    const uint64 stride = (uint64)gridDim.x * blockDim.x;
    for (uint64 i = (uint64)blockIdx.x * blockDim.x + threadIdx.x; i < a.arrays.count; i += stride) {
        const Places at = a.arrays.places(i);
        const Vector<SOURCE> given = *(const Vector<SOURCE>*)(a.arrays.source + at.source);
        Vector<TARGET> made;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k)
            made.part[k] = Out::narrow((Number)In::widen(given.part[k]) * (Number)a.factor);
        *(Vector<TARGET>*)(a.arrays.target + at.target) = made;
    }
}
