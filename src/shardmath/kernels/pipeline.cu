// An exchange that runs beside the transforms which feed it. One launch pushes chunk after chunk, each when
// the stream that transforms has said that it is ready, and tells the peers when all of a chunk has arrived.
// It takes few multiprocessors: bulk copies go through shared memory, driven by one warp of each block.
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
constexpr int kLag = 4;  // pieces that are on their way while a chunk before them is waited for
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

struct Piece {
    const char* from;
    char* to;
    u32 nbytes, chunk, needs;
};

extern __shared__ __align__(128) char stages[];
__shared__ u64 bars[kStages];
__shared__ Piece held[kStages];  // what is loaded, or on its way
__shared__ Piece found[32];

// The pieces of this block, in order: the warp looks up as many at once as it has threads.
struct Cursor {
    const PushArgument& a;
    u32 chunk = 0;
    u64 item;

    __device__ explicit Cursor(const PushArgument& a) : a(a), item(blockIdx.x) {}

    // How many have been found; none at the end.
    __device__ u32 find() {
        while (chunk < a.count) {
            const Chunk c = a.chunks[chunk];
            const u64 most = (u64)c.most * c.boxes, own = item + (u64)threadIdx.x * gridDim.x;
            Piece piece;
            bool is_there = false;
            if (own < most) {
                const u32 number = (u32)(own / c.boxes);
                const Box box = a.boxes[c.first + (u32)(own - (u64)number * c.boxes)];
                if (number < box.count * box.pieces) {
                    const u32 row = number / box.pieces, start = (number - row * box.pieces) * kPiece;
                    piece.from = a.sources[c.source] + box.from + row * box.from_step + start;
                    piece.to = a.targets[box.target] + box.to + row * box.to_step + start;
                    piece.nbytes = box.unit - start < kPiece ? box.unit - start : kPiece;
                    piece.chunk = chunk;
                    piece.needs = c.needs;
                    is_there = true;
                }
            }
            item += 32 * (u64)gridDim.x;
            if (item >= most) ++chunk, item = blockIdx.x;
            const u32 who = __ballot_sync(~0u, is_there);
            if (is_there) found[__popc(who & ((1u << threadIdx.x) - 1))] = piece;
            __syncwarp();
            if (who) return __popc(who);
        }
        return 0;
    }
};

__device__ inline void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// What one thread of the block does with its pieces.
struct Pusher {
    const PushArgument& a;
    const u64 base;
    u64 seen, loaded = 0, stored = 0;
    u32 finished = 0;  // chunks before this one are told of,
    u32 issued = 0;    // and those before this one are all on their way, by store number
    u64 mark = 0;

    __device__ explicit Pusher(const PushArgument& a) : a(a), base(load_relaxed(&a.words->done)), seen(base) {}

    __device__ bool push(const Piece& piece) {
        const u64 needed = base + piece.needs;
        if (seen < needed) {
            seen = load_acquire(&a.words->ready);
            if (seen < needed) {
                flush(piece.chunk);  // first what there is
                if (!await(needed)) return false;
            }
            proxy_fence();
        }
        load(piece);
        if (loaded - stored >= kAhead) store();
        return true;
    }

    // Chunks of which this block has nothing are not finished before they are ready.
    __device__ bool end() {
        flush(finished);
        for (; finished < a.count; ++finished) {
            const u64 needed = base + a.chunks[finished].needs;
            if (a.chunks[finished].signals && seen < needed && !await(needed)) return false;
            finish();
        }
        return true;
    }

    __device__ bool await(u64 needed) {
        if (!wait(a.team, &a.words->ready, needed, a.team.rank, kCollective, a.channel)) return false;
        seen = needed;
        return true;
    }

    __device__ void load(const Piece& piece) {
        const u32 slot = (u32)(loaded++ % kStages), bar = shared_address(bars) + 8 * slot;
        // The stores from this stage have read it.
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kAhead) : "memory");
        held[slot] = piece;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(piece.nbytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                shared_address(stages) + slot * kPiece),
            "l"(piece.from), "r"(piece.nbytes), "r"(bar)
            : "memory");
    }

    __device__ void store() {
        const u32 slot = (u32)(stored % kStages), bar = shared_address(bars) + 8 * slot;
        const u32 parity = (u32)(stored / kStages) & 1;
        const Piece piece = held[slot];
        if (piece.chunk > issued) {
            if (finished < issued) drain();
            issued = piece.chunk;
            mark = stored;
            while (finished < issued && !a.chunks[finished].signals) ++finished;
        }
        asm volatile(
            "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
            "@!done bra again;\n\t}" ::"r"(bar),
            "r"(parity)
            : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(piece.to),
                     "r"(shared_address(stages) + slot * kPiece), "r"(piece.nbytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        ++stored;
        if (finished < issued && stored - mark == kLag) {
            asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLag) : "memory");
            finish_issued();
        }
    }

    // Send all that is loaded; all chunks before `chunk` are then on their way.
    __device__ void flush(u32 chunk) {
        while (stored < loaded) store();
        if (chunk > issued) issued = chunk;
        drain();
    }

    __device__ void drain() {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        finish_issued();
    }

    __device__ void finish_issued() {
        for (; finished < issued; ++finished) finish();
    }

    // This block has pushed its share of chunk number `finished`, and that has arrived. The last block to
    // say so tells all ranks, this one too.
    __device__ void finish() {
        const u32 chunk = finished;
        if (!a.chunks[chunk].signals) return;
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
};

// One warp a block.
extern "C" __global__ void push(const __grid_constant__ PushArgument a) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bars) + 8 * i));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    Pusher pusher(a);
    Cursor at(a);
    bool good = true;
    while (const u32 count = at.find()) {
        if (threadIdx.x == 0)
            for (u32 i = 0; good && i < count; ++i) good = pusher.push(found[i]);
        __syncwarp();
        if (!__shfl_sync(~0u, good, 0)) return;
    }
    if (threadIdx.x == 0) pusher.end();
}

struct AwaitArgument {
    Team team;
    Words* words;
    u32 channel, padding;
};

// One more chunk can be pushed: what the stream did before is done.
extern "C" __global__ void ready(const __grid_constant__ AwaitArgument a) {
    await_earlier();
    store_release(&a.words->ready, load_relaxed(&a.words->ready) + 1);
}

// Until every rank, this one too, has told of one more chunk. One block; thread i waits for rank i.
extern "C" __global__ void await_all(const __grid_constant__ AwaitArgument a) {
    await_earlier();
    for (int peer = threadIdx.x; peer < a.team.size; peer += blockDim.x) {
        Channel& own = a.team.own().channel(a.channel);
        const u64 target = own.taken[peer] + 1;
        if (wait(a.team, &own.signal[peer].low, target, peer, kCollective, a.channel)) own.taken[peer] = target;
    }
}
