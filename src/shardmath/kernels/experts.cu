// Rows to the experts of all ranks, and back: all_to_all whose counts lie on the GPU, where no host reads them. So
// it can be captured in a CUDA graph, and replayed with other counts.
//
// A rank has kRanks * experts chunks of rows to send, one for each expert of each rank. They lie rank-major and come
// expert-major; or, where they are `combines`d, the other way round:
//
//     rank-major    (rank, expert) is chunk rank * experts + expert
//     expert-major  (rank, expert) is chunk expert * kRanks + rank
//
// Three launches, one after the other:
//
//     tell_counts     one block: this rank's counts to every rank, and a barrier. Then, from all ranks' counts, where
//                     each of this rank's chunks goes, and what comes to this rank. All ranks see the same counts:
//                     so where they do not fit, all see it, and none sends.
//     send_rows       tiles of this rank's chunks, straight into the peers' memory. Blocks begin with different peers,
//                     so that all links are busy, and take the tiles of the next when those of one are gone.
//     finish_sending  one block: a barrier, after which all rows are there. Then what did not fit is reported.
//
// Reuse. A peer writes this rank's table in `tell_counts`, after its last `finish_sending`, which waited for this
// rank's: behind all that has read the table, and behind what used the result before.
#include "symm.cuh"

using namespace shardmath;

typedef long long i64;

constexpr u64 kTile = 32 << 10;  // bytes that a block copies at once

// What a rank says beside its counts.
struct Head {
    u64 tag;   // which exchange this is: other ones have other chunks, or wider rows
    u64 rows;  // of the input
    u64 room;  // rows of the result
    u64 bad;   // a count, or where a chunk begins, is out of the input: one more than its number
};
constexpr u64 kHead = sizeof(Head) / 8;

struct Chunk {
    u64 from, to, nbytes;  // in the input, and in the result of its rank
    u64 tile;              // the number of its first one, among those for this rank
};

// What `tell_counts` has found out for the launches behind it. `base` and `chunk` follow it.
struct Plan {
    u64 operation, place, expected, seen;  // why nothing is sent; an operation of 0: it is
    u64 tiles[kRanks], taken[kRanks];      // for each rank: all, and those that blocks have taken
    u64 sum[kRanks];                       // rows for each rank
    u64 total[kRanks];                     // behind the last row that comes to each rank
};

struct ExpertsArgument {
    Team team;
    u32 channel, combines;
    u64 tag, width, rows, room;
    u64 experts, align, pitch;  // pitch: words from a rank's row of a table to the next
    const i64* counts;
    const i64* starts;  // of the chunks in the input, in rows; null: one after the other
    i64* told;          // counts of what comes, and behind them where it begins
    const char* input;
    char* output[kRanks];
    u64* table[kRanks];  // every rank's
    Plan* plan;
};

struct Exchange {
    const ExpertsArgument& a;

    __device__ int rank() const { return a.team.rank; }
    __device__ u64 chunks() const { return kRanks * a.experts; }
    __device__ Head& head(int of, int from) const { return *(Head*)(a.table[of] + from * a.pitch); }
    __device__ u64& entry(int of, int from, u64 chunk) const {
        return a.table[of][from * a.pitch + kHead + chunk];
    }

    // Where its sender has the chunk for or from an expert of a rank.
    __device__ u64 sent(u64 peer, u64 expert) const {
        return a.combines ? expert * kRanks + peer : peer * a.experts + expert;
    }

    // What comes to a rank, in order: `majors` groups of `minors` chunks; a group is padded.
    __device__ u64 majors() const { return a.combines ? kRanks : a.experts; }
    __device__ u64 minors() const { return a.combines ? a.experts : kRanks; }
    __device__ u64 coming(int to, u64 major, u64 minor) const {
        const u64 src = a.combines ? major : minor, expert = a.combines ? minor : major;
        return entry(rank(), src, sent(to, expert));
    }
    __device__ u64* base() const { return (u64*)(a.plan + 1); }  // where a group begins: [rank][major]
    __device__ Chunk* chunk() const { return (Chunk*)(base() + kRanks * majors()); }  // [rank][expert]

    // -- tell ------------------------------------------------------------------------------------------

    __device__ bool within(u64 chunk) const {
        const i64 count = a.counts[chunk], start = a.starts ? a.starts[chunk] : 0;
        if (count < 0) return false;
        return count == 0 || (start >= 0 && (u64)count <= a.rows && (u64)start <= a.rows - (u64)count);
    }

    __device__ void send_counts(u64& bad) const {
        const u64 me = thread_number(), all = thread_count();
        if (me == 0) bad = 0;
        __syncthreads();
        for (u64 i = me; i < chunks(); i += all) {
            if (!within(i)) atomicMax(&bad, i + 1);
            for (int peer = 0; peer < kRanks; ++peer) entry(peer, rank(), i) = (u64)a.counts[i];
        }
        if (!a.starts && me < kRanks) {
            u64 sum = 0;
            for (u64 e = 0; e < a.experts; ++e) sum += (u64)a.counts[sent(me, e)];
            a.plan->sum[me] = sum;
        }
        __syncthreads();
        if (!a.starts && me == 0) {
            u64 sum = 0;
            for (int peer = 0; peer < kRanks; ++peer) sum += a.plan->sum[peer];
            if (sum > a.rows && !bad) bad = chunks();
        }
        __syncthreads();
        if (me < kRanks) head(me, rank()) = {a.tag, a.rows, a.room, bad};
    }

    __device__ void refuse(u64 operation, u64 place, u64 expected, u64 seen) const {
        a.plan->expected = expected, a.plan->seen = seen, a.plan->place = place;
        a.plan->operation = operation;
    }

    // Where the groups that come to each rank begin, and all of them end.
    __device__ void place_groups() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 i = me; i < kRanks * majors(); i += all) {
            u64 sum = 0;
            for (u64 k = 0; k < minors(); ++k) sum += coming(i / majors(), i % majors(), k);
            base()[i] = sum;
        }
        __syncthreads();
        for (u64 to = me; to < kRanks; to += all) {
            u64 start = 0, end = 0;
            for (u64 major = 0; major < majors(); ++major) {
                u64& group = base()[to * majors() + major];
                const u64 sum = group;
                group = start;
                if (sum) end = start + sum;
                const u64 steps = a.align ? (sum + a.align - 1) / a.align : sum;
                start += a.align ? (steps ? steps : 1) * a.align : sum;
            }
            a.plan->total[to] = end;
        }
        __syncthreads();
    }

    // Whether all ranks make this exchange, and what each sends and takes is there. By one thread.
    __device__ bool fits() const {
        for (int r = 0; r < kRanks; ++r) {
            const Head& told = head(rank(), r);
            if (told.tag != head(rank(), 0).tag) return refuse(kOtherRows, r, head(rank(), 0).tag, told.tag), false;
        }
        for (int r = 0; r < kRanks; ++r) {
            const Head& told = head(rank(), r);
            if (told.bad) return refuse(kBadRows, r, told.rows, told.bad - 1), false;
        }
        for (int r = 0; r < kRanks; ++r) {
            const u64 room = head(rank(), r).room;
            if (a.plan->total[r] > room) return refuse(kNoRoom, r, room, a.plan->total[r]), false;
        }
        return refuse(0, 0, 0, 0), true;
    }

    __device__ u64 offset(int to, u64 major, u64 minor) const {
        u64 start = base()[to * majors() + major];
        for (u64 k = 0; k < minor; ++k) start += coming(to, major, k);
        return start;
    }

    __device__ void place_chunks() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 i = me; i < chunks(); i += all) {
            const u64 to = i / a.experts, expert = i % a.experts, number = sent(to, expert);
            const u64 major = a.combines ? rank() : expert, minor = a.combines ? expert : rank();
            u64 from = 0;
            if (a.starts) {
                from = (u64)a.starts[number];
            } else {
                for (u64 r = 0; r < to; ++r) from += a.plan->sum[r];
                for (u64 e = 0; e < expert; ++e) from += (u64)a.counts[sent(to, e)];
            }
            const u64 nbytes = (u64)a.counts[number] * a.width;
            chunk()[i] = {from * a.width, offset(to, major, minor) * a.width, nbytes, 0};
            const u64 coming_major = i / minors(), coming_minor = i % minors();
            a.told[i] = (i64)coming(rank(), coming_major, coming_minor);
            a.told[chunks() + i] = (i64)offset(rank(), coming_major, coming_minor);
        }
        __syncthreads();
        for (u64 to = me; to < kRanks; to += all) {
            u64 tiles = 0;
            for (u64 e = 0; e < a.experts; ++e) {
                Chunk& each = chunk()[to * a.experts + e];
                each.tile = tiles;
                tiles += (each.nbytes + kTile - 1) / kTile;
            }
            a.plan->tiles[to] = tiles;
            a.plan->taken[to] = 0;
        }
    }

    // -- send ------------------------------------------------------------------------------------------

    // The chunk for a rank to which a tile belongs: the last that begins with it or before, which is not empty.
    __device__ const Chunk& chunk_of(int to, u64 tile) const {
        const Chunk* const first = chunk() + to * a.experts;
        u64 low = 0, high = a.experts;
        while (high - low > 1) {
            const u64 middle = (low + high) / 2;
            if (first[middle].tile <= tile)
                low = middle;
            else
                high = middle;
        }
        return first[low];
    }

    __device__ void send_tiles(int to, u64& claimed) const {
        for (;;) {
            if (thread_number() == 0) claimed = atomicAdd(&a.plan->taken[to], 1ull);
            __syncthreads();
            const u64 tile = claimed;
            __syncthreads();  // all have read it before the next is claimed
            if (tile >= a.plan->tiles[to]) return;
            const Chunk& part = chunk_of(to, tile);
            const u64 at = (tile - part.tile) * kTile, left = part.nbytes - at;
            put(a.output[to] + part.to + at, a.input + part.from + at, left < kTile ? left : kTile);
        }
    }
};

extern "C" __global__ void __launch_bounds__(1024) tell_counts(const __grid_constant__ ExpertsArgument a) {
    __shared__ u64 word;
    const Exchange exchange{a};
    exchange.send_counts(word);
    if (!barrier(a.team, a.channel, kCollective)) {
        if (thread_number() == 0) exchange.refuse(kCollective, 0, 0, 0);
        return;
    }
    exchange.place_groups();
    if (thread_number() == 0) word = exchange.fits();
    __syncthreads();
    if (word) exchange.place_chunks();
}

extern "C" __global__ void __launch_bounds__(256) send_rows(const __grid_constant__ ExpertsArgument a) {
    __shared__ u64 claimed;
    if (a.plan->operation) return;
    for (int i = 0; i < kRanks; ++i)
        Exchange{a}.send_tiles((a.team.rank + 1 + blockIdx.x + i) % kRanks, claimed);
}

extern "C" __global__ void __launch_bounds__(1024) finish_sending(const __grid_constant__ ExpertsArgument a) {
    const bool met = barrier(a.team, a.channel, kCollective);
    const Plan& plan = *a.plan;
    if (!met || thread_number() != 0 || plan.operation == 0 || plan.operation == kCollective) return;
    note(a.team, a.team.rank, (u32)plan.operation, (u32)plan.place, plan.expected, plan.seen);
    report(a.team);
}
