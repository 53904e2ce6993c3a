// Contiguous stretches pushed into their places on the peers. Addresses and sizes are multiples of 16.
#include "symm.cuh"

using namespace shardmath;

constexpr int kPushThreads = 256;

struct PushArgument {
    u64 most;  // bytes of the longest stretch
    const char* from[kRanks];
    char* to[kRanks];
    u64 nbytes[kRanks];
};

// Every thread takes 16 bytes of each stretch, then of each stretch again: all links have their share all the time,
// and no rank hears more from one peer than from another.
extern "C" __global__ void __launch_bounds__(kPushThreads) push(const __grid_constant__ PushArgument a) {
    const u64 stride = (u64)gridDim.x * blockDim.x * sizeof(Packet);
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * sizeof(Packet); at < a.most; at += stride) {
        Packet held[kRanks];
#pragma unroll
        for (int i = 0; i < kRanks; ++i)
            if (at < a.nbytes[i]) held[i] = *(const Packet*)(a.from[i] + at);
#pragma unroll
        for (int i = 0; i < kRanks; ++i)
            if (at < a.nbytes[i]) *(Packet*)(a.to[i] + at) = held[i];
    }
}
