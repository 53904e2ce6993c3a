// Combine what has been fetched from all ranks: parts that lie one after the other in this GPU's memory.
//
// Compiled with ELEMENT and OPERATION as reduce.cu, and with the same bits: elements are combined in the
// order of the ranks, wherever that happens.
#include "elements.cuh"

using namespace shardmath;

typedef shardmath::ELEMENT Element;
typedef shardmath::OPERATION Op;

struct ReduceLocalArgument {
    const char* parts;
    unsigned long long stride;  // bytes from one rank's part to the next
    Element* output;
    unsigned long long count;
};

extern "C" __global__ void __launch_bounds__(256) reduce_local(const __grid_constant__ ReduceLocalArgument a) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += stride) {
        auto all = Wide<Element>::widen(((const Element*)a.parts)[i]);
#pragma unroll
        for (int rank = 1; rank < SHARDMATH_RANKS; ++rank)
            all = Op::combine(all, Wide<Element>::widen(((const Element*)(a.parts + rank * a.stride))[i]));
        a.output[i] = Wide<Element>::narrow(Finish<Op>::apply(all, SHARDMATH_RANKS));
    }
}
