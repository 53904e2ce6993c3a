// The kernel of ring_all_reduce.py.
#include "symm.cuh"
using namespace shardmath;

// Every block carries its slice of each chunk round the ring, on a channel of its own. In symmetric memory
// lie `count` elements, and from `room` on as many more for what the left neighbour sends.
extern "C" __global__ void ring(const __grid_constant__ SymmetricMemory memory, long long count, long long room) {
    const int size = memory.size, rank = memory.rank, right = (rank + 1) % size, left = (rank + size - 1) % size;
    const long long slices = (long long)size * gridDim.x, slice = ((count + slices - 1) / slices + 3) / 4 * 4;
    float* mine = memory.peer<float>(rank);
    float* theirs = memory.peer<float>(right);
    const auto start = [&](int chunk) {
        const long long at = ((chunk + 2 * size) % size * (long long)gridDim.x + blockIdx.x) * slice;
        return at < count ? at : count;
    };
    const auto length = [&](long long at) { return at + slice < count ? slice : count - at; };

    for (int step = 0; step < size - 1; ++step) {
        const long long out = start(rank - step), in = start(rank - step - 1);
        put_signal(memory, right, blockIdx.x, theirs + room + out, mine + out, 4 * length(out));
        if (!wait_signal(memory, left, blockIdx.x)) return;  // the host will report who was late
        for (long long i = threadIdx.x; i < length(in); i += blockDim.x) mine[in + i] += mine[room + in + i];
        __syncthreads();  // the sums are there before any thread sends them on
    }
    // Nobody adds to a chunk any more when it comes complete: each rank has had its turn with it.
    for (int step = 0; step < size - 1; ++step) {
        const long long out = start(rank + 1 - step);
        put_signal(memory, right, blockIdx.x, theirs + out, mine + out, 4 * length(out));
        if (!wait_signal(memory, left, blockIdx.x)) return;
    }
}
