// An exchange that overlaps with the transforms which feed it. One launch pushes chunk after chunk, each when
// the user's stream has counted "ready" up far enough, and signals all ranks when all of a chunk has arrived.
// It takes few multiprocessors: bulk copies go through shared memory, driven by one warp of each block.
//
// Compiled with COPY_BYTES (of one bulk copy), STAGES (copies in shared memory) and PREFETCH (copies loaded
// ahead of the one that is stored). Addresses, pitches and sizes are multiples of 16. The tables are those of
// operators/fft/pushes.py.
//
//   user's stream    transform 0, ready | transform 1, ready   | ...    | wait, transform | ...
//   push stream      wait               | push 0, wait, push 1, signal  | ...
#include "symm.cuh"

using namespace shardmath;

constexpr u32 kCopyBytes = COPY_BYTES;
constexpr int kStages = STAGES;
constexpr int kPrefetch = PREFETCH;
constexpr int kInFlight = 4;  // stores in flight while those of the chunk before them are waited for
constexpr int kMaxChunks = 62;

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

struct Rows {  // `count` rows of `width` bytes to one rank, each of which takes so many bulk copies
    long long source, target, source_pitch, target_pitch;
    u32 width, count, copies, peer;
};
struct Chunk {
    u32 first, rows;  // in the table
    u32 max_copies;   // the most of one entry
    u32 ready_count;  // it can go when the transforms have been ready so often
    u32 exchange;
    u32 signals;  // whether all ranks are told when it has arrived
};
// Of this rank; they count up from launch to launch.
struct Counters {
    u64 ready;
    u64 done;  // what `ready` was when the last launch had ended
    u32 finished[kMaxChunks];  // blocks that have pushed their part of a chunk; back at zero at its end
};
struct PushArgument {
    Team team;
    Counters* counters;
    const Chunk* chunks;
    const Rows* rows;
    u32 count, channel;
    const char* sources[2];
    char* targets[2 * kRanks];
};

struct BulkCopy {
    const char* source;
    char* target;
    u32 nbytes, chunk, ready_count;
};

extern __shared__ __align__(128) char stages[];
__shared__ u64 barriers[kStages];
__shared__ BulkCopy staged[kStages];  // what is in each stage, or on its way there
__shared__ BulkCopy next[32];

// The copies of this block, in order: the warp looks up as many at once as it has threads.
struct CopyIterator {
    const PushArgument& a;
    u32 chunk = 0;
    u64 item;

    __device__ explicit CopyIterator(const PushArgument& a) : a(a), item(blockIdx.x) {}

    // Fills `next`. How many there are; none at the end.
    __device__ u32 advance() {
        while (chunk < a.count) {
            const Chunk c = a.chunks[chunk];
            const u64 total = (u64)c.max_copies * c.rows, own = item + (u64)threadIdx.x * gridDim.x;
            BulkCopy copy;
            bool valid = false;
            if (own < total) {
                const u32 number = (u32)(own / c.rows);
                const Rows rows = a.rows[c.first + (u32)(own - (u64)number * c.rows)];
                if (number < rows.count * rows.copies) {
                    const u32 row = number / rows.copies, start = (number - row * rows.copies) * kCopyBytes;
                    copy.source = a.sources[c.exchange] + rows.source + row * rows.source_pitch + start;
                    copy.target = a.targets[rows.peer] + rows.target + row * rows.target_pitch + start;
                    copy.nbytes = rows.width - start < kCopyBytes ? rows.width - start : kCopyBytes;
                    copy.chunk = chunk;
                    copy.ready_count = c.ready_count;
                    valid = true;
                }
            }
            item += 32 * (u64)gridDim.x;
            if (item >= total) ++chunk, item = blockIdx.x;
            const u32 lanes = __ballot_sync(~0u, valid);
            if (valid) next[__popc(lanes & ((1u << threadIdx.x) - 1))] = copy;
            __syncwarp();
            if (lanes) return __popc(lanes);
        }
        return 0;
    }
};

__device__ inline void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// One thread of the block issues its copies: each is loaded into a stage, and stored PREFETCH copies later.
struct Pusher {
    const PushArgument& a;
    const u64 base;
    u64 ready, loaded = 0, stored = 0;  // `ready` as last seen; copies
    u32 finished = 0;      // chunks before this one are finished,
    u32 issued = 0;        // and all stores of those before this one are issued:
    u64 issued_store = 0;  // those before this store

    __device__ explicit Pusher(const PushArgument& a) : a(a), base(load_relaxed(&a.counters->done)), ready(base) {}

    __device__ bool push(const BulkCopy& copy) {
        const u64 needed = base + copy.ready_count;
        if (ready < needed) {
            ready = load_acquire(&a.counters->ready);
            if (ready < needed) {
                flush(copy.chunk);  // meanwhile, what is loaded
                if (!await_ready(needed)) return false;
            }
            proxy_fence();
        }
        load(copy);
        if (loaded - stored >= kPrefetch) store();
        return true;
    }

    // Chunks of which this block has nothing are not finished before they are ready.
    __device__ bool end() {
        flush(finished);
        for (; finished < a.count; ++finished) {
            const u64 needed = base + a.chunks[finished].ready_count;
            if (a.chunks[finished].signals && ready < needed && !await_ready(needed)) return false;
            finish();
        }
        return true;
    }

    __device__ bool await_ready(u64 needed) {
        if (!wait(a.team, &a.counters->ready, needed, a.team.rank, kCollective, a.channel)) return false;
        ready = needed;
        return true;
    }

    __device__ void load(const BulkCopy& copy) {
        const u32 stage = (u32)(loaded++ % kStages), barrier = shared_address(barriers) + 8 * stage;
        // The store from this stage has read it.
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kPrefetch) : "memory");
        staged[stage] = copy;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(copy.nbytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                shared_address(stages) + stage * kCopyBytes),
            "l"(copy.source), "r"(copy.nbytes), "r"(barrier)
            : "memory");
    }

    __device__ void store() {
        const u32 stage = (u32)(stored % kStages), barrier = shared_address(barriers) + 8 * stage;
        const u32 parity = (u32)(stored / kStages) & 1;
        const BulkCopy copy = staged[stage];
        if (copy.chunk > issued) {
            if (finished < issued) drain();
            issued = copy.chunk;
            issued_store = stored;
            while (finished < issued && !a.chunks[finished].signals) ++finished;
        }
        asm volatile(
            "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
            "@!done bra again;\n\t}" ::"r"(barrier),
            "r"(parity)
            : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(copy.target),
                     "r"(shared_address(stages) + stage * kCopyBytes), "r"(copy.nbytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        ++stored;
        if (finished < issued && stored - issued_store == kInFlight) {
            asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kInFlight) : "memory");
            finish_issued();
        }
    }

    // Store all that is loaded: then all stores of the chunks before `chunk` are issued.
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

    // This block's part of chunk number `finished` has arrived. The last block of which that is so signals
    // all ranks, this one too.
    __device__ void finish() {
        const u32 chunk = finished;
        if (!a.chunks[chunk].signals) return;
        proxy_fence();
        __threadfence_system();
        if (atomicAdd(&a.counters->finished[chunk], 1) != gridDim.x - 1) return;
        a.counters->finished[chunk] = 0;
        __threadfence_system();
        if (chunk == a.count - 1) a.counters->done = base + a.chunks[chunk].ready_count;
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
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers) + 8 * i));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    Pusher pusher(a);
    CopyIterator copies(a);
    bool good = true;
    while (const u32 count = copies.advance()) {
        if (threadIdx.x == 0)
            for (u32 i = 0; good && i < count; ++i) good = pusher.push(next[i]);
        __syncwarp();
        if (!__shfl_sync(~0u, good, 0)) return;
    }
    if (threadIdx.x == 0) pusher.end();
}

struct ReadyArgument {
    Team team;
    Counters* counters;
    u32 channel, padding;
};

// What the stream did before is done: chunks that need no more can be pushed.
extern "C" __global__ void signal_ready(const __grid_constant__ ReadyArgument a) {
    await_earlier();
    store_release(&a.counters->ready, load_relaxed(&a.counters->ready) + 1);
}

// Until every rank, this one too, has signalled one more chunk. One block; thread i waits for rank i.
extern "C" __global__ void wait_for_chunk(const __grid_constant__ ReadyArgument a) {
    await_earlier();
    for (int peer = threadIdx.x; peer < a.team.size; peer += blockDim.x) {
        Channel& own = a.team.own().channel(a.channel);
        const u64 target = own.taken[peer] + 1;
        if (wait(a.team, &own.signal[peer].low, target, peer, kCollective, a.channel)) own.taken[peer] = target;
    }
}
