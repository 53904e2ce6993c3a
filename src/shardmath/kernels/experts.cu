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
//     finish_sending  one block: a barrier, after which all rows are there. Then what did not fit is reported; these
//                     ranks' later exchanges and collectives do nothing, as their hosts raise errors at other calls.
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

// What `tell_counts` has found out for the launches behind it. `chunk` follows it, [rank][expert], and then room for
// what does not fit in shared memory.
struct Plan {
    u64 operation, place, expected, seen;  // why nothing is sent; an operation of 0: it is
    u64 tiles[kRanks], taken[kRanks];      // for each rank: all, and those that blocks have taken
};

// What the threads of `tell_counts` share. Prefix sums run over it, one step after the other.
constexpr u64 kFew = 2048;
struct Shared {
    u64 word;
    u64 sum[kRanks];  // rows for each rank
    u64 end[kRanks];  // behind the last row that comes to each rank
    u64 why[kRanks], expected[kRanks], seen[kRanks];  // what is wrong with each rank, an Operation
    u64 group[kFew], tile[kFew];
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
    __device__ Chunk* chunk() const { return (Chunk*)(a.plan + 1); }

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
};

struct Telling : Exchange {
    Shared& shared;
    u64* group;  // where the groups of chunks that come to a rank begin, [rank][major]
    u64* tile;   // the number of the first tile of a chunk, among those for its rank, [rank][expert]

    __device__ Telling(const ExpertsArgument& a, Shared& shared) : Exchange{a}, shared(shared) {
        u64* const room = (u64*)(chunk() + chunks());
        group = kRanks * majors() <= kFew ? shared.group : room;
        tile = chunks() <= kFew ? shared.tile : room + kRanks * majors();
    }

    __device__ bool within(u64 chunk) const {
        const i64 count = a.counts[chunk], start = a.starts ? a.starts[chunk] : 0;
        if (count < 0) return false;
        return count == 0 || (start >= 0 && (u64)count <= a.rows && (u64)start <= a.rows - (u64)count);
    }

    __device__ void send_counts() const {
        const u64 me = thread_number(), all = thread_count();
        u64& bad = shared.word;
        if (me == 0) bad = 0;
        __syncthreads();
        for (u64 i = me; i < chunks(); i += all) {
            if (!within(i)) atomicMax(&bad, i + 1);
            for (int peer = 0; peer < kRanks; ++peer) entry(peer, rank(), i) = (u64)a.counts[i];
        }
        for (u64 peer = me; peer < kRanks; peer += all) {
            u64 sum = 0;
            for (u64 e = 0; e < a.experts; ++e) sum += (u64)a.counts[sent(peer, e)];
            shared.sum[peer] = sum;
        }
        __syncthreads();
        if (me == 0 && !a.starts && !bad) {  // chunks that lie one after the other
            u64 sum = 0;
            for (int peer = 0; peer < kRanks; ++peer) sum += shared.sum[peer];
            if (sum > a.rows) bad = chunks();
        }
        __syncthreads();
        for (u64 peer = me; peer < kRanks; peer += all) head(peer, rank()) = {a.tag, a.rows, a.room, bad};
    }

    // Where the groups that come to each rank begin, and all of them end.
    __device__ void place_groups() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 i = me; i < kRanks * majors(); i += all) {
            u64 sum = 0;
            for (u64 k = 0; k < minors(); ++k) sum += coming(i / majors(), i % majors(), k);
            group[i] = sum;
        }
        __syncthreads();
        for (u64 to = me; to < kRanks; to += all) {
            u64 start = 0, end = 0;
            for (u64 major = 0; major < majors(); ++major) {
                u64& place = group[to * majors() + major];
                const u64 sum = place;
                place = start;
                if (sum) end = start + sum;
                const u64 steps = a.align ? (sum + a.align - 1) / a.align : sum;
                start += a.align ? (steps ? steps : 1) * a.align : sum;
            }
            shared.end[to] = end;
        }
        __syncthreads();
    }

    // What is wrong with a rank, as all ranks see it.
    __device__ void inspect(int of) const {
        const Head told = head(rank(), of);
        const u64 tag = head(rank(), 0).tag, end = shared.end[of];
        const bool other = told.tag != tag, bad = told.bad != 0, full = end > told.room;
        shared.why[of] = other ? kOtherRows : bad ? kBadRows : full ? kNoRoom : 0;
        shared.expected[of] = other ? tag : bad ? told.rows : told.room;
        shared.seen[of] = other ? told.tag : bad ? told.bad - 1 : end;
    }

    // Whether all ranks make this exchange, and what each sends and takes is there. The same for all threads. Where more
    // is wrong, another exchange counts before counts, these before room, and of ranks the first.
    __device__ bool fits() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 of = me; of < kRanks; of += all) inspect(of);
        __syncthreads();
        if (me == 0) {
            int first = 0;
            for (int r = 1; r < kRanks; ++r)
                if (shared.why[r] > shared.why[first]) first = r;
            refuse(shared.why[first], first, shared.expected[first], shared.seen[first]);
            shared.word = shared.why[first];
        }
        __syncthreads();
        return shared.word == 0;
    }

    __device__ void refuse(u64 operation, u64 place, u64 expected, u64 seen) const {
        Plan& plan = *a.plan;
        plan.place = place, plan.expected = expected, plan.seen = seen, plan.operation = operation;
    }

    __device__ u64 offset(int to, u64 major, u64 minor) const {
        u64 start = group[to * majors() + major];
        for (u64 k = 0; k < minor; ++k) start += coming(to, major, k);
        return start;
    }

    // Where one of this rank's chunks lies, in rows.
    __device__ u64 start_of(u64 to, u64 expert) const {
        if (a.starts) return (u64)a.starts[sent(to, expert)];
        u64 start = 0;
        for (u64 r = 0; r < to; ++r) start += shared.sum[r];
        for (u64 e = 0; e < expert; ++e) start += (u64)a.counts[sent(to, e)];
        return start;
    }

    __device__ void place_chunks() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 i = me; i < chunks(); i += all)
            tile[i] = ((u64)a.counts[sent(i / a.experts, i % a.experts)] * a.width + kTile - 1) / kTile;
        __syncthreads();
        for (u64 to = me; to < kRanks; to += all) {
            u64 tiles = 0;
            for (u64 e = 0; e < a.experts; ++e) {
                u64& first = tile[to * a.experts + e];
                const u64 count = first;
                first = tiles;
                tiles += count;
            }
            a.plan->tiles[to] = tiles;
            a.plan->taken[to] = 0;
        }
        __syncthreads();
        for (u64 i = me; i < chunks(); i += all) {
            const u64 to = i / a.experts, expert = i % a.experts;
            const u64 major = a.combines ? rank() : expert, minor = a.combines ? expert : rank();
            const u64 from = start_of(to, expert), nbytes = (u64)a.counts[sent(to, expert)] * a.width;
            chunk()[i] = {from * a.width, offset(to, major, minor) * a.width, nbytes, tile[i]};
            a.told[i] = (i64)coming(rank(), i / minors(), i % minors());
            a.told[chunks() + i] = (i64)offset(rank(), i / minors(), i % minors());
        }
    }
};

struct Sending : Exchange {
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
    __shared__ Shared shared;
    const Telling telling(a, shared);
    bool met = load_relaxed(&a.team.own().broken) == 0;
    if (met) {
        telling.send_counts();
        met = barrier(a.team, a.channel, kCollective);
    }
    if (!met) {
        if (thread_number() == 0) telling.refuse(kCollective, 0, 0, 0);
        return;
    }
    telling.place_groups();
    if (telling.fits()) telling.place_chunks();
}

extern "C" __global__ void __launch_bounds__(256) send_rows(const __grid_constant__ ExpertsArgument a) {
    __shared__ u64 claimed;
    if (a.plan->operation) return;
    for (int i = 0; i < kRanks; ++i)
        Sending{a}.send_tiles((a.team.rank + 1 + blockIdx.x + i) % kRanks, claimed);
}

extern "C" __global__ void __launch_bounds__(1024) finish_sending(const __grid_constant__ ExpertsArgument a) {
    const Plan& plan = *a.plan;
    if (plan.operation == kCollective || !barrier(a.team, a.channel, kCollective)) return;
    if (plan.operation == 0 || thread_number() != 0) return;
    store_relaxed(&a.team.own().broken, 1);
    note(a.team, a.team.rank, (u32)plan.operation, (u32)plan.place, plan.expected, plan.seen);
    report(a.team);
}
