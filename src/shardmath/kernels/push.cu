// Large contiguous stretches pushed into their place on the peers by the bulk copy engine of each
// multiprocessor: memory to shared memory, and from there over the link. One thread of a block drives it.
//
// Compiled with PIECE (bytes of one copy), STAGES (pieces in shared memory) and AHEAD (pieces loaded before
// they are needed). Addresses and sizes are multiples of 16.
#include "symm.cuh"

using namespace shardmath;

constexpr u32 kPiece = PIECE;
constexpr int kStages = STAGES;
constexpr int kAhead = AHEAD;

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

struct Pipeline {
    u32 stage;    // shared addresses
    u32 arrived;

    __device__ void start() const {
        for (int i = 0; i < kStages; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived + 8 * i));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __device__ void load(u64 number, const char* from, u32 nbytes) const {
        const u32 bar = arrived + 8 * (u32)(number % kStages);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(nbytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                stage + (u32)(number % kStages) * kPiece),
            "l"(from), "r"(nbytes), "r"(bar)
            : "memory");
    }
    __device__ void await(u64 number) const {
        const u32 bar = arrived + 8 * (u32)(number % kStages), parity = (u32)(number / kStages) & 1;
        asm volatile(
            "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
            "@!done bra again;\n\t}" ::"r"(bar),
            "r"(parity)
            : "memory");
    }
    __device__ void store(u64 number, char* to, u32 nbytes) const {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(stage + (u32)(number % kStages) * kPiece), "r"(nbytes)
                     : "memory");
    }
    __device__ void commit() const { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
    // Until the stage that piece `number` + kAhead will use has been read by the stores from it.
    __device__ void make_room() const {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kAhead) : "memory");
    }
    __device__ void drain() const { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
};

extern __shared__ __align__(128) char stages[];
__shared__ u64 bars[kStages];

// `source(i, from, nbytes)` and `targets(i, send)` describe piece i of this block's `count`.
template <class Source, class Targets>
__device__ inline void push(u64 count, Source source, Targets targets) {
    const Pipeline pipe = {shared_address(stages), shared_address(bars)};
    pipe.start();
    for (u64 i = 0; i < count && i < kAhead; ++i) source(i, pipe);
    for (u64 i = 0; i < count; ++i) {
        pipe.await(i);
        targets(i, pipe);
        pipe.commit();
        if (i + kAhead < count) {
            pipe.make_room();
            source(i + kAhead, pipe);
        }
    }
    pipe.drain();
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ inline u64 share(u64 items) {  // how many of the items, dealt out in turn, are this block's
    return items > blockIdx.x ? (items - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
}

struct ScatterArgument {
    u64 most;  // bytes of the longest stretch
    const char* from[kRanks];
    char* to[kRanks];
    u64 nbytes[kRanks];
};

// Each stretch to its own place: all_to_all. One stretch after the other, each rank's in another order, so
// that at any time every rank hears from about one: 345 GB/s on 8 GPUs, against 337 with pieces of all in turn.
extern "C" __global__ void scatter(const __grid_constant__ ScatterArgument a) {
    if (threadIdx.x != 0) return;
    const u64 rows = (a.most + kPiece - 1) / kPiece;
    const auto locate = [&](u64 i, int& stretch, u64& offset) {
        const u64 item = blockIdx.x + i * gridDim.x;
        stretch = (int)(item / rows);
        offset = item % rows * kPiece;
        const u64 all = a.nbytes[stretch];
        return offset >= all ? 0u : (u32)(all - offset < kPiece ? all - offset : kPiece);
    };
    push(
        share(rows * kRanks),
        [&](u64 i, const Pipeline& pipe) {
            int stretch;
            u64 offset;
            const u32 nbytes = locate(i, stretch, offset);
            pipe.load(i, a.from[stretch] + offset, nbytes);
        },
        [&](u64 i, const Pipeline& pipe) {
            int stretch;
            u64 offset;
            const u32 nbytes = locate(i, stretch, offset);
            if (nbytes) pipe.store(i, a.to[stretch] + offset, nbytes);
        });
}

struct SpreadArgument {
    const char* from;
    u64 nbytes;
    u64 count;
    char* to[kRanks];
};

// One stretch to several places: all_gather and broadcast. It is read once.
extern "C" __global__ void spread(const __grid_constant__ SpreadArgument a) {
    if (threadIdx.x != 0) return;
    const auto size = [&](u64 i) {
        const u64 offset = (blockIdx.x + i * gridDim.x) * kPiece;
        return (u32)(a.nbytes - offset < kPiece ? a.nbytes - offset : kPiece);
    };
    push(
        share((a.nbytes + kPiece - 1) / kPiece),
        [&](u64 i, const Pipeline& pipe) {
            pipe.load(i, a.from + (blockIdx.x + i * gridDim.x) * kPiece, size(i));
        },
        [&](u64 i, const Pipeline& pipe) {
            for (u64 k = 0; k < a.count; ++k) {  // blocks start at different peers
                const int target = (int)((k + blockIdx.x) % a.count);
                pipe.store(i, a.to[target] + (blockIdx.x + i * gridDim.x) * kPiece, size(i));
            }
        });
}
