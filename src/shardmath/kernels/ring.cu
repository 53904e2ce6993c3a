// A step of the ring that hands every rank's rows to its right neighbour, and on from there: what comes before
// and after a copy engine's copy. One thread, on a multiprocessor that the product leaves free.
#include "shards.cuh"

using namespace shardmath;

struct StepArgument {
    Team team;
    Words* own;
    Words* left;
    Words* right;
    int left_rank, right_rank;
    int sent;      // whose rows the copy before has brought to the right, or -1
    int begun;     // or which chunk of this rank's own, or -1
    int awaited;   // whose rows the copy that follows passes on, or -1
    int first;     // the right neighbour's memory is written after this step
    int last;      // nothing is read or written after this step
    int unused;
};

extern "C" __global__ void __launch_bounds__(32) ring_step(const __grid_constant__ StepArgument a) {
    Words& own = *a.own;
    const u64 launch = own.launches[kRing] + 1;
    if (own.spoiled != launch) {
        if (a.sent >= 0) signal(&a.right->arrived[a.sent], launch);
        if (a.begun >= 0) signal(&a.right->begun[a.begun], launch);
    }
    bool well = true;
    if (a.first)
        for (int part = 0; part < 2; ++part)
            well &= wait(a.team, &own.read[part], launch - 1, a.right_rank, kShard, part);
    if (a.awaited >= 0) well &= wait(a.team, &own.arrived[a.awaited], launch, a.awaited, kShard, a.awaited);
    if (!well) own.spoiled = launch;
    if (a.last) {
        own.launches[kRing] = launch;
        signal(&a.left->read[kRing], launch);
    }
}

struct ReaderArgument {
    Team team;
    Words* own;
    Words* left;
};

// In place of a product without columns: it has read all rows.
extern "C" __global__ void nothing_to_read(const __grid_constant__ ReaderArgument a) {
    signal(&a.left->read[kProducts], ++a.own->launches[kProducts]);
}
