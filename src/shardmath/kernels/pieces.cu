// Large reductions over the ranks, all_reduce and reduce_scatter, by one launch in pieces.
//
//     rank 0   its part of slice 1, piece by piece  ---->  inbox of rank 1
//     rank 1   combines what all ranks have sent of a piece  ---->  the results of all ranks
//
// Block b of every rank works with block b of the others only, on every gridDim-th piece of all slices. In each
// block one warp sends to the inboxes of the ranks that combine; eight warps combine this rank's slice, and push
// it; and one tells the peers how far the sender is. All copies are bulk copies, which one thread drives.
//
// One peer gets all of its slice after the other, in another order on each rank, so that at any time every rank
// hears from about one. So the first pieces are complete when most has been sent, and results follow parts on the
// links without a pause, and hardly at the same time: both at once, by a window of pieces, is slower.
//
// Words count pieces, and never return. `ready`: a peer's piece is in this rank's inbox. `done`: a peer has combined
// all, and its results are here. A call waits for that at its end, so the next one finds all inboxes free. The
// first word of a call from a peer also says that its result may be written, and nothing is written before. So
// there is no barrier.
//
// Compiled with ELEMENT, OPERATION and WHOLE as reduce.cu, and with PIECE (bytes), STAGES (pieces in shared
// memory on their way out), AHEAD (of them loaded early) and TILES (combined pieces on their way out).
#include "hopper.cuh"
#include "packets.cuh"

using namespace shardmath;

typedef shardmath::ELEMENT Element;
typedef shardmath::OPERATION Op;
typedef Stretch<16, Element, WHOLE> Elements;

constexpr u32 kPiece = PIECE;
constexpr int kStages = STAGES, kAhead = AHEAD, kUnderWay = kStages - kAhead, kTiles = TILES;
constexpr int kFolders = 256, kSender = kFolders, kHerald = kSender + 32, kThreads = kHerald + 32;
constexpr int kTogether = kRanks <= 4 ? 2 : 1;     // packets of each rank that a thread has under way
constexpr int kPeers = kRanks - 1;

struct __align__(128) Words {
    u64 base;  // pieces of earlier calls: this rank's own
    u64 ready[kRanks], done[kRanks];
};

// Ranks in the order of rank + 1, ..., this rank; what is by rank says so.
struct PiecesArgument {
    Team team;
    Words* words[kRanks];  // by block
    char* inbox[kRanks];   // by rank that sends, `most` bytes rounded up to 16 each
    char* result[kRanks];  // of this rank's slice
    u64 results;           // how many ranks get it, from the last of them on: all of them, or this rank alone
    u64 most;              // bytes of the longest slice
    char* slice[kRanks];   // by rank: what this rank has of it
    u64 nbytes[kRanks];    // by rank
};

extern __shared__ __align__(128) char memory[];
__shared__ u64 bars[kStages];
__shared__ u64 arrived;  // items that the peers have
__shared__ bool lost;    // a wait has expired

// Where this block is in a call.
struct Place {
    u64 base, count, pitch;

    __device__ Place(const PiecesArgument& a, const Words* own) {
        const u64 rows = (a.most + kPiece - 1) / kPiece;
        base = own->base;
        pitch = (a.most + 15) / 16 * 16;
        count = rows > blockIdx.x ? (rows - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    }
    // The first byte of this block's piece `number` in each slice.
    __device__ u64 start(u64 number) const { return (blockIdx.x + number * gridDim.x) * kPiece; }
    // And where that of rank `from` lies in an inbox.
    __device__ u64 slot(u64 number, int from) const { return from * pitch + start(number); }
};

__device__ inline u32 piece_bytes(const PiecesArgument& a, int rank, u64 start) {
    const u64 all = a.nbytes[rank];
    return start >= all ? 0u : (u32)(all - start < kPiece ? all - start : kPiece);
}

__device__ inline bool is_lost() { return *(volatile bool*)&lost; }

// What this thread did before a word is raised is done for the one that reads it.
__device__ inline void raise(u64* word, u64 value) {
    asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"(shared_address(word)), "l"(value) : "memory");
}
__device__ inline u64 raised(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.cta.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(word)) : "memory");
    return value;
}

template <int kOthers>
__device__ inline void stores_are_done_but() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kOthers) : "memory");
}

__device__ inline void push(char* to, u32 from, u32 nbytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(nbytes)
                 : "memory");
}

// -- the warp that sends ---------------------------------------------------------------------------------

// Item i is piece i % count for peer i / count.
struct Sender {
    const PiecesArgument& a;
    const Place& place;

    __device__ u64 number(u64 i) const { return (u32)i % (u32)place.count; }
    __device__ int peer(u64 i) const {
        const int rank = a.team.rank + 1 + (int)((u32)i / (u32)place.count);
        return rank < kRanks ? rank : rank - kRanks;
    }
    __device__ u32 stage(u64 i) const { return shared_address(memory) + (u32)(i % kStages) * kPiece; }
    __device__ u32 bar(u64 i) const { return shared_address(bars) + 8 * (u32)(i % kStages); }
    __device__ u32 nbytes(u64 i) const { return piece_bytes(a, peer(i), place.start(number(i))); }

#if WHOLE
    __device__ void load(u64 i) const {
        const u32 count = nbytes(i);
        bar_expect(bar(i), count);
        if (count) load_bulk(stage(i), a.slice[peer(i)] + place.start(number(i)), count, bar(i));
    }
    __device__ void await(u64 i) const { bar_wait(bar(i), (u32)(i / kStages) & 1); }
#else
    // By the whole warp, since a bulk copy needs whole packets; there is nothing left to wait for.
    __device__ void load(u64 i) const {
        constexpr u32 kUnder = 8;
        const Elements from = {a.slice[peer(i)], a.nbytes[peer(i)]};
        const u32 first = (u32)(place.start(number(i)) / 16), packets = (nbytes(i) + 15) / 16;
        Packet* const to = (Packet*)(memory + i % kStages * kPiece);
        for (u32 k = threadIdx.x % 32; k < packets; k += 32 * kUnder) {
            Packet have[kUnder];
#pragma unroll
            for (u32 j = 0; j < kUnder; ++j) have[j] = from.read(first + k + 32 * j);
#pragma unroll
            for (u32 j = 0; j < kUnder; ++j)
                if (k + 32 * j < packets) to[k + 32 * j] = have[j];
        }
        fence_async_shared();
        __syncwarp();
    }
    __device__ void await(u64) const {}
#endif

    __device__ void store(u64 i) const {
        const u32 count = (nbytes(i) + 15) / 16 * 16;
        if (count) push(a.inbox[(u32)i / (u32)place.count] + place.slot(number(i), a.team.rank), stage(i), count);
        stores_commit();
    }
    __device__ void run() const {
        const bool leads = threadIdx.x == kSender;
        const u64 items = place.count * kPeers;
        if (WHOLE && !leads) return;
        for (u64 i = 0; i < items && i < kAhead; ++i) load(i);
        for (u64 i = 0; i < items; ++i) {
            if (leads) {
                await(i);
                store(i);
                stores_are_done_but<kUnderWay>();
                if (i + 1 > kUnderWay) raise(&arrived, i + 1 - kUnderWay);
            }
            if (!WHOLE) __syncwarp();
            if (i + kAhead < items) load(i + kAhead);
        }
        if (leads) {
            stores_are_done();
            raise(&arrived, items);
        }
    }
};

// -- the warps that combine --------------------------------------------------------------------------------

__device__ inline void folders_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kFolders) : "memory"); }

struct Folder {
    const PiecesArgument& a;
    const Place& place;
    Words* own;

    // One piece: this rank's own is in its array, those of the peers are in its inbox.
    __device__ void combine(u64 number, const Elements& part, char* const tile, u32 nbytes) const {
        const u32 first = (u32)(place.start(number) / 16), packets = (nbytes + 15) / 16;
        const Packet* from[kRanks];
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
            from[rank] = (const Packet*)(WHOLE && rank == a.team.rank ? part.start + place.start(number)
                                                                      : a.inbox[kPeers] + place.slot(number, rank));
        for (u32 at = threadIdx.x; at < packets; at += kTogether * kFolders) {
            Packet have[kTogether][kRanks];
#pragma unroll
            for (int k = 0; k < kTogether; ++k)
#pragma unroll
                for (int rank = 0; rank < kRanks; ++rank)
                    if (at + k * kFolders < packets) have[k][rank] = from[rank][at + k * kFolders];
#pragma unroll
            for (int k = 0; k < kTogether; ++k) {
                const u32 i = at + k * kFolders;
                if (i >= packets) break;
#if WHOLE
                ((Packet*)tile)[i] = combined<16, Element, Op>(have[k]);
#else
#pragma unroll
                for (int rank = 0; rank < kRanks; ++rank)
                    if (rank == a.team.rank) have[k][rank] = part.read(first + i);
                const Packet sum = combined<16, Element, Op>(have[k]);
                for (u64 r = kRanks - a.results; r < kRanks; ++r)
                    Elements{a.result[r], a.nbytes[a.team.rank]}.write(first + i, sum);
#endif
            }
        }
    }
    __device__ bool await(const u64 (&words)[kRanks], u64 target) const {
        const int peer = threadIdx.x;
        return peer >= kRanks || peer == a.team.rank ||
               wait(a.team, &words[peer], target, peer, kCollective, blockIdx.x);
    }
    __device__ void run() const {
        const Elements part = {a.slice[a.team.rank], a.nbytes[a.team.rank]};
        u32 stage = 0;
        for (u64 number = 0; number < place.count; ++number) {
            char* const tile = memory + (kStages + stage) * kPiece;
            const u32 nbytes = piece_bytes(a, a.team.rank, place.start(number));
            if (!await(own->ready, place.base + number + 1)) lost = true;
            if (WHOLE && threadIdx.x == 0) stores_have_read_but<kTiles - 1>();  // what was in this tile
            folders_meet();
            if (is_lost()) break;
            combine(number, part, tile, nbytes);
            if (WHOLE) fence_async_shared();
            folders_meet();
            if (WHOLE && threadIdx.x == 0) {
                for (u64 r = kRanks - a.results; r < kRanks && nbytes; ++r)
                    push(a.result[r] + place.start(number), shared_address(tile), nbytes);
                stores_commit();
            }
            stage = stage + 1 == kTiles ? 0 : stage + 1;
        }
        if (WHOLE && threadIdx.x == 0) stores_are_done();
        folders_meet();
        if (!is_lost()) finish();
    }
    // All is combined, and the results are in place; wait until the peers' are.
    __device__ void finish() const {
        const u64 end = place.base + place.count;
        if (threadIdx.x < kPeers) {
            fence_async();
            fence();
            store_relaxed(&a.words[threadIdx.x][blockIdx.x].done[a.team.rank], end);
        }
        await(own->done, end);
    }
};

// -- the warp that tells the peers -------------------------------------------------------------------------

// A fence takes as long as a flight to the peers and back: neither of the others waits for it.
__device__ inline void tell(const PiecesArgument& a, const Place& place) {
    const int k = threadIdx.x - kHerald;
    if (k >= kPeers) return;
    Words* const theirs = a.words[k] + blockIdx.x;
    const u64 before = k * place.count;  // items of other peers
    for (u64 said = 0; said < place.count;) {
        const u64 all = raised(&arrived);
        const u64 now = all <= before ? 0 : all - before < place.count ? all - before : place.count;
        if (now == said) continue;
        fence_async();
        fence();
        store_relaxed(&theirs->ready[a.team.rank], place.base + now);
        said = now;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) pieces(const __grid_constant__ PiecesArgument a) {
    Words* const own = a.words[kPeers] + blockIdx.x;
    const Place place(a, own);
    if (threadIdx.x == 0) {
        arrived = 0;
        lost = false;
        for (int i = 0; i < kStages; ++i) bar_init(shared_address(bars) + 8 * i, 1);
        bars_visible();
    }
    __syncthreads();
    if (threadIdx.x >= kHerald)
        tell(a, place);
    else if (threadIdx.x >= kSender)
        Sender{a, place}.run();
    else
        Folder{a, place, own}.run();
    __syncthreads();
    if (threadIdx.x == 0) own->base = place.base + place.count;
}
