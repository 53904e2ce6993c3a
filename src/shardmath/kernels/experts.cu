// Rows to the experts of all ranks, and back: all_to_all whose counts lie on the GPU, where no host reads them. So
// it can be captured in a CUDA graph, and replayed with other counts.
//
// A rank has kRanks * experts chunks of rows to send, one for each expert of each rank. They lie rank-major and come
// expert-major; or, where they are `combines`d, the other way round:
//
//     rank-major    (rank, expert) is chunk rank * experts + expert
//     expert-major  (rank, expert) is chunk expert * kRanks + rank
//
// One launch. Its blocks share the work by when they begin and end, wherever they run:
//
//     the first  tells every rank this rank's counts, as packets that carry the number of the launch, and waits for those
//                of all ranks. Then it plans where each of this rank's chunks goes, and what comes to this rank. All
//                ranks see the same counts: so where they do not fit, all see it, and none sends.
//     all        wait for the plan. Then they copy tiles of this rank's chunks straight into the peers' memory. Blocks
//                begin with different peers, so that all links are busy, and take the tiles of the next when those of
//                one are gone.
//     the last   crosses a barrier when all others have ended: then all rows are there. It reports what did not fit;
//                these ranks' later exchanges and collectives do nothing, as their hosts raise errors at other calls.
//
// Blocks wait for the first one only, which runs already. So they need not all be on the GPU at once.
//
// Reuse. A peer writes this rank's table after the barrier of its last exchange, in which this rank's last block took
// part: behind all that has read the table. It writes into the result once it has this rank's packets, which come from a
// kernel behind all that used the result before.
#include "symm.cuh"

using namespace shardmath;

typedef long long i64;

constexpr u64 kTile = 32 << 10;  // bytes that a block copies at once

// What a rank says before its counts, each word in a packet.
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

// What the first block has found out for the others. Between launches `state` and `ended` have all bits set, and so has
// the lower half of `begun`, as all the memory has at first. `chunk` follows it, [rank][expert], and then room for what
// does not fit in shared memory.
struct Plan {
    u64 state;                         // kUnknown: not known yet; 0: send; else an Operation, why nothing is sent
    u64 begun;                         // blocks that have begun, less one; the upper half counts launches
    u64 ended;                         // blocks that have ended, less one
    u64 place, expected, seen;         // of the Operation
    u64 tiles[kRanks], taken[kRanks];  // for each rank: all, and those that blocks have taken
};
constexpr u64 kUnknown = ~0ull;

// What the threads of a block share: the first one's sums by rank, and sizes; then the chunk that a tile belongs to.
constexpr u64 kFew = 1024;
struct Shared {
    u64 word;              // which one thread has found for all
    u64 number;            // of the chunk
    Chunk chunk;
    u64 sum[kRanks];       // rows for each rank
    u64 end[kRanks];       // behind the last row that comes to each rank
    u64 why[kRanks], expected[kRanks], seen[kRanks];  // what is wrong with each rank, an Operation
    u64 told[kFew], extent[kFew], group[kFew], tiles[kFew];
};

struct ExpertsArgument {
    Team team;
    u32 channel, combines;
    u64 tag, width, rows, room;
    u64 experts, align, pitch;  // pitch: packets from a rank's row of a table to the next
    const i64* counts;
    const i64* starts;  // of the chunks in the input, in rows; null: one after the other
    i64* told;          // counts of what comes, and behind them where it begins
    const char* input;
    char* output[kRanks];
    Packet* table[kRanks];  // every rank's
    Plan* plan;
};

struct Exchange {
    const ExpertsArgument& a;

    __device__ int rank() const { return a.team.rank; }
    __device__ u64 chunks() const { return kRanks * a.experts; }
    __device__ Chunk* chunk() const { return (Chunk*)(a.plan + 1); }

    // Where its sender has the chunk for or from an expert of a rank.
    __device__ u64 sent(u64 peer, u64 expert) const {
        return a.combines ? expert * kRanks + peer : peer * a.experts + expert;
    }

    // What comes to a rank, in order: `majors` groups of `minors` chunks; a group is padded.
    __device__ u64 majors() const { return a.combines ? kRanks : a.experts; }
    __device__ u64 minors() const { return a.combines ? a.experts : kRanks; }
};

struct Planning : Exchange {
    Shared& shared;
    u64* told;    // what all ranks say, [rank]: the words of its Head, and its counts
    u64* extent;  // rows from the beginning of a group of chunks that come to a rank to the next, [rank][major]
    u64* group;   // where the group begins
    u64* tiles;   // of a chunk of this rank, [rank][expert]

    __device__ Planning(const ExpertsArgument& a, Shared& shared) : Exchange{a}, shared(shared) {
        u64* const room = (u64*)(chunk() + chunks());
        const u64 groups = kRanks * majors();
        extent = groups <= kFew ? shared.extent : room;
        group = groups <= kFew ? shared.group : room + groups;
        tiles = chunks() <= kFew ? shared.tiles : room + 2 * groups;
        told = kRanks * words() <= kFew ? shared.told : room + 2 * groups + chunks();
    }

    __device__ u64 words() const { return kHead + chunks(); }
    __device__ const Head& head(int of) const { return *(const Head*)(told + of * words()); }

    // The rows of a chunk that comes to a rank.
    __device__ u64 coming(int to, u64 major, u64 minor) const {
        const u64 src = a.combines ? major : minor, expert = a.combines ? minor : major;
        return told[src * words() + kHead + sent(to, expert)];
    }

    __device__ bool within(u64 chunk) const {
        const i64 count = a.counts[chunk], start = a.starts ? a.starts[chunk] : 0;
        if (count < 0) return false;
        return count == 0 || (start >= 0 && (u64)count <= a.rows && (u64)start <= a.rows - (u64)count);
    }

    __device__ void tell(int peer, u64 word, u64 value, u64 number) const {
        store_packet(a.table[peer] + rank() * a.pitch + word, {value, number});
    }

    __device__ void send_counts(u64 number) const {
        const u64 me = thread_number(), all = thread_count();
        u64& bad = shared.word;
        if (me == 0) bad = 0;
        __syncthreads();
        for (u64 i = me; i < chunks(); i += all) {
            if (!within(i)) atomicMax(&bad, i + 1);
            for (int peer = 0; peer < kRanks; ++peer) tell(peer, kHead + i, (u64)a.counts[i], number);
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
        for (u64 peer = me; peer < kRanks; peer += all) {  // in the order of Head
            tell(peer, 0, a.tag, number);
            tell(peer, 1, a.rows, number);
            tell(peer, 2, a.room, number);
            tell(peer, 3, bad, number);
        }
    }

    // Wait for what all ranks tell in this launch; false, and noted, where that takes too long.
    __device__ bool receive_counts(u64 number) const {
        bool come = true;
        for (u64 i = thread_number(); come && i < kRanks * words(); i += thread_count()) {
            const int src = i / words();
            const Packet* const place = a.table[rank()] + src * a.pitch + i % words();
            Packet seen = load_packet(place);
            Deadline deadline;
            for (bool last = false; seen.high != number && !last; seen = load_packet(place))
                last = deadline.passed(a.team, src);
            come = seen.high == number;
            told[i] = seen.low;
            if (!come) expire(a.team, src, kCollective, a.channel, number, seen.high);
        }
        return __syncthreads_and(come);
    }

    // The rows of a group that comes to a rank.
    __device__ u64 rows_of(int to, u64 major) const {
        u64 sum = 0;
        for (u64 k = 0; k < minors(); ++k) sum += coming(to, major, k);
        return sum;
    }

    // Where the groups that come to each rank begin, and all of them end. Each thread adds up what is before its own:
    // that takes no longer than one thread that adds up all.
    __device__ void place_groups() const {
        const u64 me = thread_number(), all = thread_count(), groups = kRanks * majors();
        for (u64 to = me; to < kRanks; to += all) shared.end[to] = 0;
        for (u64 i = me; i < groups; i += all) {
            const u64 rows = rows_of(i / majors(), i % majors());
            const u64 steps = a.align ? (rows + a.align - 1) / a.align : rows;
            extent[i] = a.align ? (steps ? steps : 1) * a.align : rows;
        }
        __syncthreads();
        for (u64 i = me; i < groups; i += all) {
            const u64 to = i / majors(), rows = rows_of(to, i % majors());
            u64 start = 0;
            for (u64 k = to * majors(); k < i; ++k) start += extent[k];
            group[i] = start;
            if (rows) atomicMax(&shared.end[to], start + rows);
        }
        __syncthreads();
    }

    // What is wrong with a rank, as all ranks see it.
    __device__ void inspect(int of) const {
        const Head& told = head(of);
        const u64 tag = head(0).tag, end = shared.end[of];
        const bool other = told.tag != tag, bad = told.bad != 0, full = end > told.room;
        shared.why[of] = other ? kOtherRows : bad ? kBadRows : full ? kNoRoom : 0;
        shared.expected[of] = other ? tag : bad ? told.rows : told.room;
        shared.seen[of] = other ? told.tag : bad ? told.bad - 1 : end;
    }

    // Why nothing can be sent, an Operation; 0 where all ranks make this exchange, and what each sends and takes is
    // there. The same for all threads. Where more is wrong, another exchange counts before counts, these before room,
    // and of ranks the first.
    __device__ u64 misfit() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 of = me; of < kRanks; of += all) inspect(of);
        __syncthreads();
        if (me == 0) {
            int first = 0;
            for (int r = 1; r < kRanks; ++r)
                if (shared.why[r] > shared.why[first]) first = r;
            a.plan->place = first, a.plan->expected = shared.expected[first], a.plan->seen = shared.seen[first];
            shared.word = shared.why[first];
        }
        __syncthreads();
        return shared.word;
    }

    __device__ u64 offset(int to, u64 major, u64 minor) const {
        u64 start = group[to * majors() + major];
        for (u64 k = 0; k < minor; ++k) start += coming(to, major, k);
        return start;
    }

    __device__ void place_chunks() const {
        const u64 me = thread_number(), all = thread_count();
        for (u64 i = me; i < chunks(); i += all)
            tiles[i] = ((u64)a.counts[sent(i / a.experts, i % a.experts)] * a.width + kTile - 1) / kTile;
        __syncthreads();
        for (u64 i = me; i < chunks(); i += all) {
            const u64 to = i / a.experts, expert = i % a.experts, number = sent(to, expert);
            u64 from = 0, tile = 0;
            for (u64 k = 0; k < expert; ++k) tile += tiles[to * a.experts + k];
            if (expert + 1 == a.experts) a.plan->tiles[to] = tile + tiles[i], a.plan->taken[to] = 0;
            if (a.starts) {
                from = (u64)a.starts[number];
            } else {
                for (u64 r = 0; r < to; ++r) from += shared.sum[r];
                for (u64 k = 0; k < expert; ++k) from += (u64)a.counts[sent(to, k)];
            }
            const u64 major = a.combines ? rank() : expert, minor = a.combines ? expert : rank();
            const u64 nbytes = (u64)a.counts[number] * a.width;
            chunk()[i] = {from * a.width, offset(to, major, minor) * a.width, nbytes, tile};
            a.told[i] = (i64)coming(rank(), i / minors(), i % minors());
            a.told[chunks() + i] = (i64)offset(rank(), i / minors(), i % minors());
        }
    }

    // Make the plan, with the peers' first blocks; other blocks of this rank see it when its state is known.
    __device__ void make(u64 number) const {
        u64 state = kCollective;  // a wait was in vain, in this launch or before
        if (load_relaxed(&a.team.own().broken) == 0) {
            send_counts(number);
            if (receive_counts(number)) {
                place_groups();
                state = misfit();
                if (state == 0) place_chunks();
            }
        }
        __syncthreads();
        if (thread_number() == 0) store_release(&a.plan->state, state);
    }
};

struct Sending : Exchange {
    Shared& shared;

    __device__ Sending(const ExpertsArgument& a, Shared& shared) : Exchange{a}, shared(shared) {}

    // A number of one thread, for all.
    template <class Find>
    __device__ u64 for_all(Find find) const {
        if (thread_number() == 0) shared.word = find();
        __syncthreads();
        const u64 found = shared.word;
        __syncthreads();  // all have read it before the next is found
        return found;
    }

    // How many blocks have begun before this one, and 2^32 times the number of the launch, the same on all ranks.
    __device__ u64 begin() const {
        return for_all([&] { return atomicAdd(&a.plan->begun, 1ull) + 1; });
    }

    // Whether all other blocks have ended; what they wrote is then seen by this one, and by whom it tells.
    __device__ bool is_last() const {
        __syncthreads();  // all threads have written what they will
        const u64 before = for_all([&] {
            fence();
            const u64 number = atomicAdd(&a.plan->ended, 1ull) + 1;
            fence();
            return number;
        });
        return before + 1 == gridDim.x;
    }

    __device__ u64 await_plan() const {
        return for_all([&] {
            u64 state;
            do state = load_acquire(&a.plan->state);
            while (state == kUnknown);
            return state;
        });
    }

    // The chunk for a rank to which a tile belongs: the last that begins with it or before, which is not empty. Every
    // thread looks at one place, as far from the next as it takes to see all; then again between two of these.
    __device__ const Chunk& chunk_of(int to, u64 tile) const {
        const Chunk* const first = chunk() + to * a.experts;
        const u64 me = thread_number(), all = thread_count();
        for (u64 low = 0, high = a.experts;;) {
            const u64 step = (high - low + all - 1) / all, here = low + me * step, next = here + step;
            if (here < high && first[here].tile <= tile && (next >= high || first[next].tile > tile))
                shared.chunk = first[here], shared.number = here;
            __syncthreads();
            if (step == 1) return shared.chunk;
            low = shared.number, high = low + step < high ? low + step : high;
            __syncthreads();
        }
    }

    __device__ void send_tiles(int to) const {
        const u64 tiles = a.plan->tiles[to];
        for (;;) {
            const u64 tile = for_all([&] { return atomicAdd(&a.plan->taken[to], 1ull); });
            if (tile >= tiles) return;
            const Chunk& part = chunk_of(to, tile);
            const u64 at = (tile - part.tile) * kTile, left = part.nbytes - at;
            put(a.output[to] + part.to + at, a.input + part.from + at, left < kTile ? left : kTile);
        }
    }

    // Behind all rows of all ranks, or where nothing was sent; and make the plan ready for the next launch.
    __device__ void finish(u64 state, u64 number) const {
        const bool met = state != kCollective && barrier(a.team, a.channel, kCollective);
        if (thread_number() != 0) return;
        Plan& plan = *a.plan;
        if (met && state != 0) {
            store_relaxed(&a.team.own().broken, 1);
            note(a.team, a.team.rank, (u32)state, (u32)plan.place, plan.expected, plan.seen);
            report(a.team);
        }
        plan.state = plan.ended = kUnknown;
        plan.begun = number << 32 | 0xffffffff;
    }
};

extern "C" __global__ void __launch_bounds__(256, 4) exchange_rows(const __grid_constant__ ExpertsArgument a) {
    __shared__ Shared shared;
    const Sending sending(a, shared);
    const u64 begun = sending.begin(), number = begun >> 32;
    if ((u32)begun == 0) Planning(a, shared).make(number);
    const u64 state = sending.await_plan();
    for (int i = 0; i < kRanks && state == 0; ++i) sending.send_tiles((a.team.rank + 1 + blockIdx.x + i) % kRanks);
    if (sending.is_last()) sending.finish(state, number);
}
