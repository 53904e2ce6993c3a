// An exchange that runs beside the transforms which feed it. One launch pushes chunk after chunk, each when
// the stream that transforms has said that it is ready, and tells the peers when all of a chunk has arrived.
// It takes few multiprocessors: bulk copies go through shared memory, driven by one thread of each block.
//
// Compiled with PIECE (bytes of one copy), STAGES (pieces in shared memory) and AHEAD (pieces loaded before
// they are needed). Addresses, steps and sizes are multiples of 16. The tables are those of
// operators/fft/pipeline.py.
//
//   stream that transforms   chunk 0, ready | chunk 1, ready | ...      | arrived? transform | ...
//   stream that pushes       wait, push 0   | wait, push 1, signal | ...
#include "symm.cuh"

using namespace shardmath;

constexpr u32 kPiece = PIECE;
constexpr int kStages = STAGES;
constexpr int kAhead = AHEAD;
constexpr int kMostChunks = 62;

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

struct Box {  // `count` rows of `unit` bytes to one rank, each of which is cut into pieces
    long long from, to, from_step, to_step;
    u32 unit, count, pieces, target;
};
struct Chunk {
    u32 first, boxes;  // in the table
    u32 most;          // pieces of the largest box
    u32 needs;         // how many times the transforms have said "ready" before it can go
    u32 source;
    u32 signals;  // whether peers are told
};
// This rank's own; they count up from launch to launch.
struct Words {
    u64 ready;
    u64 done;  // what `ready` was when the last launch had ended
    u32 finished[kMostChunks];  // blocks that have pushed their share of a chunk; back at zero at its end
};
struct PushArgument {
    Team team;
    Words* words;
    const Chunk* chunks;
    const Box* boxes;
    u32 count, channel;
    const char* sources[2];
    char* targets[2 * kRanks];
};

extern __shared__ __align__(128) char stages[];
__shared__ u64 bars[kStages];

struct Held {  // what is loaded, or on its way
    char* to;
    u32 nbytes, chunk;
};
__shared__ Held held[kStages];

// The pieces of this block, in order.
struct Cursor {
    const PushArgument& a;
    u32 chunk = 0;
    u64 item;
    const char* from;
    char* to;
    u32 nbytes;

    __device__ explicit Cursor(const PushArgument& a) : a(a), item(blockIdx.x) {}

    __device__ bool find() {
        for (; chunk < a.count; ++chunk, item = blockIdx.x) {
            const Chunk c = a.chunks[chunk];
            for (; item < (u64)c.most * c.boxes; item += gridDim.x) {
                const u32 number = (u32)(item / c.boxes);
                const Box& box = a.boxes[c.first + (u32)(item - (u64)number * c.boxes)];
                if (number >= box.count * box.pieces) continue;
                const u32 row = number / box.pieces, start = (number - row * box.pieces) * kPiece;
                from = a.sources[c.source] + box.from + row * box.from_step + start;
                to = a.targets[box.target] + box.to + row * box.to_step + start;
                nbytes = box.unit - start < kPiece ? box.unit - start : kPiece;
                return true;
            }
        }
        return false;
    }
};

__device__ inline void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ inline void load(u64 number, const Cursor& at) {
    const u32 slot = (u32)(number % kStages), bar = shared_address(bars) + 8 * slot;
    // The stores from this stage have read it.
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kAhead) : "memory");
    held[slot] = {at.to, at.nbytes, at.chunk};
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(at.nbytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(stages) + slot * kPiece),
        "l"(at.from), "r"(at.nbytes), "r"(bar)
        : "memory");
}

__device__ inline void store(u64 number) {
    const u32 slot = (u32)(number % kStages), bar = shared_address(bars) + 8 * slot;
    const u32 parity = (u32)(number / kStages) & 1;
    asm volatile(
        "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(bar),
        "r"(parity)
        : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(held[slot].to),
                 "r"(shared_address(stages) + slot * kPiece), "r"(held[slot].nbytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// This block has pushed its share of a chunk. The last block to say so tells all ranks, this one too.
__device__ inline void finish(const PushArgument& a, u32 chunk, u64 base) {
    if (!a.chunks[chunk].signals) return;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    proxy_fence();
    __threadfence_system();
    if (atomicAdd(&a.words->finished[chunk], 1) != gridDim.x - 1) return;
    a.words->finished[chunk] = 0;
    __threadfence_system();
    if (chunk == a.count - 1) a.words->done = base + a.chunks[chunk].needs;
    Channel& own = a.team.own().channel(a.channel);
    for (int i = 1; i <= a.team.size; ++i) {
        const int peer = (a.team.rank + i) % a.team.size;
        const u64 value = own.sent[peer] + 1;
        own.sent[peer] = value;
        signal(&a.team.pad[peer]->channel(a.channel).signal[a.team.rank].low, value);
    }
}

extern "C" __global__ void push(const __grid_constant__ PushArgument a) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kStages; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bars) + 8 * i));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const u64 base = load_relaxed(&a.words->done);
    u64 seen = base, loaded = 0, stored = 0;
    u32 passed = 0;  // chunks that this block has finished
    Cursor at(a);
    bool more = at.find();
    for (;;) {
        while (more && loaded - stored < kAhead) {
            const u64 needed = base + a.chunks[at.chunk].needs;
            if (seen < needed) {
                seen = load_acquire(&a.words->ready);
                if (seen < needed) {
                    if (loaded > stored) break;  // first send what there is
                    for (; passed < at.chunk; ++passed) finish(a, passed, base);
                    if (!wait(a.team, &a.words->ready, needed, a.team.rank, kCollective, a.channel)) return;
                    seen = needed;
                }
                proxy_fence();
            }
            load(loaded++, at);
            at.item += gridDim.x;
            more = at.find();
        }
        if (stored == loaded) break;
        for (const u32 chunk = held[stored % kStages].chunk; passed < chunk; ++passed) finish(a, passed, base);
        store(stored++);
    }
    // Chunks of which this block has nothing are not finished before they are ready.
    for (; passed < a.count; ++passed) {
        const u64 needed = base + a.chunks[passed].needs;
        if (a.chunks[passed].signals && seen < needed) {
            if (!wait(a.team, &a.words->ready, needed, a.team.rank, kCollective, a.channel)) return;
            seen = needed;
        }
        finish(a, passed, base);
    }
}

struct AwaitArgument {
    Team team;
    Words* words;
    u32 channel, padding;
};

// One more chunk can be pushed: what the stream did before is done.
extern "C" __global__ void ready(const __grid_constant__ AwaitArgument a) {
    store_release(&a.words->ready, load_relaxed(&a.words->ready) + 1);
}

// Until every rank, this one too, has told of one more chunk. One block; thread i waits for rank i.
extern "C" __global__ void await_all(const __grid_constant__ AwaitArgument a) {
    for (int peer = threadIdx.x; peer < a.team.size; peer += blockDim.x) {
        Channel& own = a.team.own().channel(a.channel);
        const u64 target = own.taken[peer] + 1;
        if (wait(a.team, &own.signal[peer].low, target, peer, kCollective, a.channel)) own.taken[peer] = target;
    }
}
