// Any part of any rank's memory to any other rank: all_gather, all_to_all and broadcast, from and to memory of any
// kind and alignment. The bits arrive as they are.
//
// No host knows what the peers send. Each rank sends all others its row: how much goes to each rank, what it expects
// of each if it knows that, and how much its result takes. It writes nothing of a result before all ranks' rows are
// here and fit. All ranks see the same rows: so where they do not fit, all report it, and none writes anything.
//
//     to each rank  |  few bytes: packets that say of which launch they are, sent with the row.
//                   |  More, once all rows have come: straight into the result, where that is on the receiver's heap
//                   |  and the sender reaches it; each block of the sender counts itself at the receiver at its end.
//                   |  Else chunks through slots at the receiver. Chunk c goes by lane c % kLanes, of which one block
//                   |  sends at one end and another receives at the other.
//
// Which of these it is, both see by the rows of both: a row says how many bytes its rank sends as packets, where its
// result lies, and which segments of the others' heaps it reaches.
//
// A rank that has guessed what all ranks send to all sends a number for that, too. A kernel for few bytes writes what has
// come without looking at rows, where all ranks have sent the same number in the same call: then all parts fit.
//
// Compiled with MAIL_BYTES, POST_BYTES and SEGMENTS, see kMail, Post and Heaps.
//
// Reuse. There are two places for rows, mail and counts of blocks, used in turn, as for the words of launches in
// cells.cuh; the receiver sets the counts back before its launch ends. A slot is
// free once its receiver has said that it has taken chunk k - kSlots of this lane; the slots of earlier launches
// are, when the sender has all ranks' rows of this one. Launches are counted in the words of block 0: in its own order
// with the launches of other kernels on these cells.
#include "cells.cuh"

using namespace shardmath;

constexpr u64 kMail = MAIL_BYTES;     // the most bytes to a rank that are sent as packets; a multiple of 8
constexpr u32 kLanes = 64;            // of chunks; a launch that may have any has two blocks for each
constexpr u32 kSlots = 4;             // of a lane, for each rank
constexpr u64 kInbox = 16 << 20;      // bytes of all slots of a rank
constexpr u64 kUnknown = ~0ull;       // a number that a rank does not know
constexpr u64 kSpread = 0x9e3779b97f4a7c15;  // odd: other guesses of one call are other words
constexpr u32 kPatience = 1 << 12;    // polls for guesses, before rows are waited for
constexpr u32 kSegments = SEGMENTS;   // of a rank's heap that others may reach; no more than a block has threads
// A row: counts to each rank and from each, and of the result; then how the rank sends, where its result lies, and of
// each rank's heap the segments that it reaches, a bit for each.
constexpr u32 kCounts = 2 * kRanks + 1, kHow = kCounts, kPlace = kCounts + 1, kReach = kCounts + 2;
constexpr u32 kRow = kReach + kRanks;  // packets
constexpr u32 kPlaceBits = 48;         // of an offset in a segment, whose number is above
constexpr u64 kSlotBytes = kInbox / (kLanes * kRanks * kSlots) & ~2047ull;
static_assert(kRanks <= 32, "the rows of all ranks fit in a block's shared memory");

struct Arrival {
    u64 sent[kRanks], taken[kRanks];  // chunks of this launch, by the rank that writes here
};

// One rank's memory for this kernel. Packets carry the number of their launch.
struct Post {
    Packet guess[2][kRanks];
    Packet row[2][kRanks][kRow];
    u64 written[2][kRanks];  // blocks of a rank that have written all they write straight, less one: all ones at first
    Packet mail[2][kRanks][kMail / 8];
    Arrival lane[kLanes];
    Packet slot[kLanes][kRanks][kSlots][kSlotBytes / sizeof(Packet)];
    u64 passed;  // blocks of this rank's launch that have read its number
};
static_assert(sizeof(Post) == POST_BYTES, "as the host has it");

// Where this rank's kernels find the segments of heaps, by their owner's numbers; 0 for what is not there, or is out of
// reach. The host adds to it while kernels run: so what a launch goes by is what it has put in its row.
struct Heaps {
    ulonglong2 own[kSegments];  // start, and bytes
    u64 reached[kRanks];        // a bit for each segment that is in `peer`
    u64 peer[kRanks][kSegments];
};

struct ExchangeArgument {
    Cells cells;
    char* input;
    char* output;
    u64 width;              // bytes of what is counted
    u64 start[kRanks];      // where the part for each rank starts in the input, in bytes
    u64 row[kCounts];       // counts: to each rank; from each rank, or kUnknown; of the result, or kUnknown
    u64 guess;              // a number for what all ranks send to all, or kUnknown
    Post* post[kRanks];     // every rank's, by rank
    const Heaps* heaps;
    u64 packed;             // the most bytes to a rank that this one sends as packets: kMail at most
};

// -- bytes of any alignment ----------------------------------------------------------------------------

// Runs F of the widest type, of up to 16 bytes, at whose alignment the address is.
template <template <class> class F, class... Arguments>
__device__ inline auto by_unit(u64 address, const Arguments&... arguments) {
    if (!(address & 15)) return F<ulonglong2>::run(arguments...);
    if (!(address & 7)) return F<u64>::run(arguments...);
    if (!(address & 3)) return F<u32>::run(arguments...);
    if (!(address & 1)) return F<unsigned short>::run(arguments...);
    return F<unsigned char>::run(arguments...);
}

// A word in pieces of `Unit`, or whole where that is as wide.
template <class Unit, class Word>
__device__ inline Word read_word(const char* from) {
    if constexpr (sizeof(Unit) >= sizeof(Word)) {
        return *(const Word*)from;
    } else {
        Word word;
#pragma unroll
        for (u32 i = 0; i < sizeof(Word) / sizeof(Unit); ++i) ((Unit*)&word)[i] = ((const Unit*)from)[i];
        return word;
    }
}
template <class Unit, class Word>
__device__ inline void write_word(char* to, Word word) {
    if constexpr (sizeof(Unit) >= sizeof(Word)) {
        *(Word*)to = word;
    } else {
#pragma unroll
        for (u32 i = 0; i < sizeof(Word) / sizeof(Unit); ++i) ((Unit*)to)[i] = ((const Unit*)&word)[i];
    }
}

// As load_eight and store_eight, which are long where they are slow.
__device__ __noinline__ u64 read_slowly(const char* memory, u64 i, u64 nbytes) {
    return load_eight(memory, i, nbytes);
}
__device__ inline u64 read_eight(const char* memory, u64 i, u64 nbytes) {
    if (((u64)memory & 7) || 8 * i + 8 > nbytes) return read_slowly(memory, i, nbytes);
    return ((const u64*)memory)[i];
}
__device__ __noinline__ void write_slowly(char* memory, u64 i, u64 nbytes, u64 data) {
    store_eight(memory, i, nbytes, data);
}
__device__ inline void write_eight(char* memory, u64 i, u64 nbytes, u64 data) {
    if (((u64)memory & 7) || 8 * i + 8 > nbytes) return write_slowly(memory, i, nbytes, data);
    ((u64*)memory)[i] = data;
}

// Copy `nbytes`, by threads `me` of `all`: addresses are multiples of the units' sizes.
template <class From, class To>
__device__ __noinline__ void copy_words(char* to, const char* from, u64 nbytes, u64 me, u64 all) {
    typedef ulonglong2 Word;
    constexpr int kAtOnce = 4;
    const u64 words = nbytes / 16;
    u64 i = me;
    for (; i + (kAtOnce - 1) * all < words; i += kAtOnce * all) {
        Word held[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) held[k] = read_word<From, Word>(from + 16 * (i + k * all));
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) write_word<To, Word>(to + 16 * (i + k * all), held[k]);
    }
#pragma unroll 1
    for (; i < words; i += all) write_word<To, Word>(to + 16 * i, read_word<From, Word>(from + 16 * i));
    for (u64 k = 16 * words + me; k < nbytes; k += all) to[k] = from[k];
}

template <class Unit>
struct CopyAsAligned {
    static __device__ void run(char* to, const char* from, u64 nbytes, u64 me, u64 all) {
        copy_words<Unit, Unit>(to, from, nbytes, me, all);
    }
};
template <class Unit>
struct CopyToSlot {
    static __device__ void run(char* slot, const char* from, u64 nbytes, u64 me, u64 all) {
        copy_words<Unit, ulonglong2>(slot, from, nbytes, me, all);
    }
};
template <class Unit>
struct CopyFromSlot {
    static __device__ void run(char* to, const char* slot, u64 nbytes, u64 me, u64 all) {
        copy_words<ulonglong2, Unit>(to, slot, nbytes, me, all);
    }
};

// -- one launch ----------------------------------------------------------------------------------------

// What a block knows of the exchange, once all rows have come.
struct Table {
    u64 row[kRanks][kRow];
    u64 place[kRanks];  // where in the output the part of each rank starts, in bytes
    char* there[kRanks];  // where this rank's part lies in the result of each that it writes to; null for others
    u64 own[kSegments];  // where the result lies in each segment of this rank's heap, or kUnknown; of the first block
    u64 counted[2];     // the chunks that a peer has counted, as was seen last: in turn, since who reads may be late
};

struct Exchange {
    const ExchangeArgument& a;
    const Launch& launch;
    Table& table;
    mutable u32 waits = 0;  // for counts, the same for all threads of a block

    __device__ int rank() const { return a.cells.team.rank; }
    __device__ Post& own() const { return *a.post[rank()]; }
    __device__ u64 to(int peer) const { return a.row[peer] * a.width; }
    __device__ u64 from(int peer) const { return table.row[peer][rank()] * a.width; }

    // Of a wait that has expired: whom it was for.
    __device__ void give_up(int peer, u64 expected, u64 seen) const {
        store_relaxed(&a.cells.team.own().broken, 1);
        expire(a.cells.team, peer, kCollective, blockIdx.x, expected, seen);
    }

    __device__ Packet guessed() const { return {(a.cells.tag << 16) + a.guess * kSpread, launch.number}; }

    __device__ void send_guess() const {
        if (threadIdx.x < kRanks) store_packet(&a.post[threadIdx.x]->guess[launch.number & 1][rank()], guessed());
    }

    __device__ void send_row() const {
        const auto send = [&](int peer, u32 i, u64 word) {
            store_packet(&a.post[peer]->row[launch.number & 1][rank()][i], {word, launch.number});
        };
        constexpr u32 kRest = kRow - kCounts;
        for (u32 i = threadIdx.x; i < kRanks * kCounts; i += blockDim.x) send(i / kCounts, i % kCounts, a.row[i % kCounts]);
        // By other warps: these words have to be looked up.
        for (u32 i = blockDim.x - 1 - threadIdx.x; i < kRanks * kRest; i += blockDim.x)
            send(i / kRest, kCounts + i % kRest, told(kCounts + i % kRest));
    }

    // Whether places are looked up: not where this rank sends and gets packets alone, for which it awaits no more of
    // rows than counts.
    __device__ static bool looks_up() { return gridDim.x >= 2 * kLanes; }

    // What a row says behind its counts.
    __device__ u64 told(u32 i) const {
        if (i == kHow) return a.packed << 16 | gridDim.x;
        if (!looks_up()) return i == kPlace ? kUnknown : 0;
        if (i != kPlace) return load_relaxed(&a.heaps->reached[i - kReach]);
        u64 place = kUnknown;
        for (u32 segment = 0; segment < kSegments; ++segment)
            if (table.own[segment] != kUnknown) place = (u64)segment << kPlaceBits | table.own[segment];
        return place;
    }

    __device__ void send_mail(u64 me, u64 all) const {
#pragma unroll 1
        for (int i = 1; i < kRanks; ++i) {
            const int peer = (rank() + i) % kRanks;
            const u64 nbytes = to(peer);
            const char* const start = a.input + a.start[peer];
            Packet* const mail = a.post[peer]->mail[launch.number & 1][rank()];
            for (u64 at = me; at < mail_packets(nbytes, a.packed); at += all)
                store_packet(mail + at, {load_eight(start, at, nbytes), launch.number});
        }
    }

    __device__ static u64 mail_packets(u64 nbytes, u64 packed) { return nbytes > packed ? 0 : packets_for(nbytes); }

    // How a part travels, as both of its ranks see it once all rows have come.
    __device__ u64 packed(int src) const { return looks_up() ? table.row[src][kHow] >> 16 : kMail; }
    __device__ bool reaches(int src, int dst) const {
        const u64 place = table.row[dst][kPlace];
        return place != kUnknown && table.row[src][kReach + dst] >> (place >> kPlaceBits) & 1;
    }
    __device__ bool is_written(int src, int dst) const {
        return src != dst && table.row[src][dst] * a.width > packed(src) && reaches(src, dst);
    }
    __device__ u64 through_slots(int src, int dst) const {
        const u64 nbytes = table.row[src][dst] * a.width;
        return src != dst && nbytes > packed(src) && !reaches(src, dst) ? nbytes : 0;
    }

    // Wait for all ranks' words and rows, of which so many packets matter. By all threads; the same for all.
    template <u32 kPackets>
    __device__ bool receive_rows() const {
        const Team& team = a.cells.team;
        bool come = true;
        if (threadIdx.x == blockDim.x - 1) come = receive_words();  // of another warp than who waits for rows
        for (u32 i = threadIdx.x; come && i < kRanks * kPackets; i += blockDim.x) {
            const int peer = i / kPackets;
            const Packet* const packet = &own().row[launch.number & 1][peer][i % kPackets];
            Deadline deadline;
            for (bool last = false;; last = deadline.passed(team, peer)) {
                const Packet seen = load_packet(packet);
                table.row[peer][i % kPackets] = seen.low;
                if (seen.high == launch.number) break;
                if (last) {
                    // Of another call there are none; who waits for words says so, or whose has not come.
                    if (word_of(peer) == launch.word) give_up(peer, launch.number, seen.high);
                    come = false;
                    break;
                }
            }
        }
        return __syncthreads_and(come);
    }

    __device__ u64 word_of(int peer) const {
        return load_relaxed(launch.words(a.cells) + peer);
    }

    // Wait for all ranks' words, which say that they make the same call. By one thread.
    __device__ bool receive_words() const {
        const Team& team = a.cells.team;
        Launch own = launch;
        const auto any_gone = [&] {
            bool found = false;
            for (int peer = 0; peer < kRanks && !found; ++peer) found = gone(team, peer) && !own.come(word_of(peer));
            return found;
        };
        Deadline deadline;
        for (bool last = false; !own.all_come(a.cells); last = deadline.passed(team, any_gone)) {
            if (!last) continue;
            for (int peer = 0; peer < kRanks; ++peer)
                if (!own.come(word_of(peer))) give_up(peer, own.number, own.number - 1);
            return false;
        }
        if (!own.equal) refuse(a.cells, own.words(a.cells), own.word);
        return own.equal;
    }

    // Whether what all ranks send is what each of them takes. By all threads; the same for all.
    __device__ bool fits() const {
        bool good = true;
        for (int peer = threadIdx.x; peer < kRanks; peer += blockDim.x) {
            u64 total = 0, before = 0, ours = 0;
            const u64* const takes = table.row[peer];
            for (int src = 0; src < kRanks; ++src) {
                const u64 sent = table.row[src][peer], expected = takes[kRanks + src];
                total += sent;
                before += src < peer ? table.row[src][rank()] : 0;
                ours += src < rank() ? sent : 0;
                good &= expected == kUnknown || expected == sent;
            }
            good &= takes[2 * kRanks] == kUnknown || takes[2 * kRanks] == total;
            table.place[peer] = before * a.width;
            if (looks_up()) table.there[peer] = is_written(rank(), peer) ? result_of(peer) + ours * a.width : nullptr;
        }
        good = __syncthreads_and(good);
        if (!good && threadIdx.x == 0) {
            store_relaxed(&a.cells.team.own().broken, 1);
            note(a.cells.team, rank(), kMisfit, 0, a.cells.tag, launch.number);
            report(a.cells.team);
        }
        return good;
    }

    __device__ char* result_of(int peer) const {
        const u64 place = table.row[peer][kPlace];
        return (char*)a.heaps->peer[peer][place >> kPlaceBits] + (place & ((1ull << kPlaceBits) - 1));
    }

    // Several packets of each thread are looked at together: the next of all peers, or the next few of the only one.
    __device__ bool receive_mail(u64 me, u64 all) const {
        constexpr int kAhead = kRanks == 2 ? 4 : 1, kPeers = kRanks < 8 ? kRanks - 1 : 7, kMany = kAhead * kPeers;
        const Packet(&mails)[kRanks][kMail / 8] = own().mail[launch.number & 1];
        bool come = true;
#pragma unroll 1
        for (int first = 1; first < kRanks; first += kPeers) {
            const auto peer_of = [&](int j) { return (rank() + 2 * kRanks - first - j / kAhead) % kRanks; };
            const auto packets = [&](int j) {
                const int peer = peer_of(j);
                return first + j / kAhead < kRanks ? mail_packets(from(peer), packed(peer)) : 0;
            };
            u64 most = 0;
            for (int j = 0; j < kMany; j += kAhead) most = packets(j) > most ? packets(j) : most;
            for (u64 at = me; come && at < most; at += kAhead * all) {
                u32 left = 0;
#pragma unroll
                for (int j = 0; j < kMany; ++j) left |= (u32)(at + j % kAhead * all < packets(j)) << j;
                const auto any_gone = [&] { return gone(a.cells.team, peer_of(__ffs(left) - 1)); };
                Deadline deadline;
                for (bool last = false; left; last = deadline.passed(a.cells.team, any_gone)) {
                    Packet seen[kMany + !kMany];
#pragma unroll
                    for (int j = 0; j < kMany; ++j)
                        if (left >> j & 1) seen[j] = load_packet(&mails[peer_of(j)][at + j % kAhead * all]);
#pragma unroll
                    for (int j = 0; j < kMany; ++j) {
                        if (!(left >> j & 1) || seen[j].high != launch.number) continue;
                        const int peer = peer_of(j);
                        write_eight(a.output + table.place[peer], at + j % kAhead * all, from(peer), seen[j].low);
                        left &= ~(1u << j);
                    }
                    if (!last || !left) continue;
                    give_up(peer_of(__ffs(left) - 1), launch.number, launch.number - 1);
                    come = false;
                    break;
                }
            }
        }
        return __syncthreads_and(come);
    }

    // -- in chunks -------------------------------------------------------------------------------------

    // The bytes of each chunk of a part: enough for every lane to have two, if it is short.
    __device__ static u64 chunk_bytes(u64 nbytes) {
        const u64 each = (nbytes / (2 * kLanes) + 2047) & ~2047ull;
        return each < 2048 ? 2048 : each < kSlotBytes ? each : kSlotBytes;
    }
    __device__ static u64 chunks(u64 nbytes) { return (nbytes + chunk_bytes(nbytes) - 1) / chunk_bytes(nbytes); }

    // Wait until a peer has counted `target` chunks of this launch, and say how many it has; 0 when they do not come.
    // By all threads; the same for all.
    __device__ u64 await_count(const u64* word, u64 target, int peer) const {
        u64& counted = table.counted[++waits & 1];
        bool come = true;
        if (threadIdx.x == 0) {
            Deadline deadline;
            for (bool last = false;; last = deadline.passed(a.cells.team, peer)) {
                const u64 seen = load_acquire(word);
                counted = seen & 0xffffff;
                if (seen >> 24 == (launch.number & 0xffffffffffull) && counted >= target) break;
                if (last) {
                    give_up(peer, target, counted);
                    come = false;
                    break;
                }
            }
        }
        return __syncthreads_and(come) ? counted : 0;
    }

    __device__ u64 count_of(u64 chunks) const { return launch.number << 24 | chunks; }

    // Those who have copied a chunk go on while one thread for each peer waits until it is there, and says so.
    __device__ bool send_chunks(u32 lane) const {
        const auto left = [&](int peer, u64 chunk) { return chunk < chunks(through_slots(rank(), peer)); };
        u64 room[kRanks];  // chunks that a peer is known to have room for
        for (int i = 0; i < kRanks; ++i) room[i] = kSlots;
        bool more = true;
        for (u64 k = 0, chunk = lane; more; ++k, chunk += kLanes) {
            more = false;
#pragma unroll 1
            for (int i = 1; i < kRanks; ++i) {
                const int peer = (rank() + i) % kRanks;
                if (!left(peer, chunk)) continue;
                more = true;
                if (k >= room[i]) {
                    const u64 taken = await_count(&own().lane[lane].taken[peer], k - kSlots + 1, peer);
                    if (!taken) return false;
                    room[i] = taken + kSlots;
                }
                const u64 nbytes = to(peer), each = chunk_bytes(nbytes), at = chunk * each;
                const char* const start = a.input + a.start[peer] + at;
                char* const slot = (char*)a.post[peer]->slot[lane][rank()][k % kSlots];
                const u64 some = nbytes - at < each ? nbytes - at : each;
                by_unit<CopyToSlot>((u64)start, slot, start, some, threadIdx.x, blockDim.x);
            }
            __syncthreads();
            const int peer = blockDim.x - 1 - threadIdx.x;
            if (peer < kRanks && left(peer, chunk)) store_release(&a.post[peer]->lane[lane].sent[rank()], count_of(k + 1));
        }
        return true;
    }

    // This rank's own part comes in between, while the peers' chunks are under way.
    __device__ bool receive_chunks(u32 lane) const {
        bool more = true;
        for (u64 k = 0, chunk = lane; more; ++k, chunk += kLanes) {
            more = copy_own(chunk);
#pragma unroll 1
            for (int i = 1; i < kRanks; ++i) {
                const int peer = (rank() + kRanks - i) % kRanks;
                const u64 nbytes = through_slots(peer, rank()), each = chunk_bytes(nbytes), at = chunk * each;
                if (chunk >= chunks(nbytes)) continue;
                more = true;
                if (!await_count(&own().lane[lane].sent[peer], k + 1, peer)) return false;
                char* const start = a.output + table.place[peer] + at;
                const char* const slot = (const char*)own().slot[lane][peer][k % kSlots];
                const u64 some = nbytes - at < each ? nbytes - at : each;
                by_unit<CopyFromSlot>((u64)start, start, slot, some, threadIdx.x, blockDim.x);
                __syncthreads();
                // Nothing that was written needs to be seen with it: the slot has been read, or nothing was stored.
                if (threadIdx.x == 0) store_relaxed(&a.post[peer]->lane[lane].taken[rank()], count_of(k + 1));
            }
        }
        return true;
    }

    // One chunk of this rank's own part; false where there is none. All of it are chunks for a block of all.
    __device__ bool copy_own(u64 chunk) const {
        const u64 nbytes = to(rank()), each = chunk_bytes(nbytes), at = chunk * each;
        const char* const from_here = a.input + a.start[rank()];
        char* const to_here = a.output + table.place[rank()];
        if (at >= nbytes || from_here == to_here) return false;
        const u64 some = nbytes - at < each ? nbytes - at : each;
        by_unit<CopyAsAligned>((u64)from_here | (u64)to_here, to_here + at, from_here + at, some, threadIdx.x, blockDim.x);
        return true;
    }

    // -- straight into results ---------------------------------------------------------------------------

    // The part for `peer` that is written where it belongs, this rank's own among them; no bytes where it is not.
    struct Written {
        char* to;
        const char* from;
        u64 nbytes;

        __device__ bool is_aligned() const { return !(((u64)to | (u64)from) & 15); }
        __device__ u64 words() const { return is_aligned() ? nbytes / 16 : 0; }
    };
    __device__ Written written(int peer) const {
        const char* const from_here = a.input + a.start[peer];
        char* const to_there = peer == rank() ? a.output + table.place[peer] : table.there[peer];
        return {to_there, from_here, to_there == nullptr || to_there == from_here ? 0 : to(peer)};
    }

    // Write all of these parts at once, so that the link and this GPU's memory are busy together; with `own`, this
    // rank's too. Then say so to those who wait for them.
    __device__ void write_parts(u64 me, u64 all, bool own) const {
        constexpr int kAtOnce = 4;
        const int last = own ? kRanks : kRanks - 1;
        u64 most = 0;
        for (int i = 1; i <= last; ++i) {
            const u64 words = written((rank() + i) % kRanks).words();
            most = words > most ? words : most;
        }
        for (u64 first = me; first < most; first += kAtOnce * all) {
#pragma unroll 1
            for (int i = 1; i <= last; ++i) {
                const Written part = written((rank() + i) % kRanks);
                const u64 words = part.words();
                ulonglong2 held[kAtOnce];
#pragma unroll
                for (int k = 0; k < kAtOnce; ++k)
                    if (first + k * all < words) held[k] = ((const ulonglong2*)part.from)[first + k * all];
#pragma unroll
                for (int k = 0; k < kAtOnce; ++k)
                    if (first + k * all < words) ((ulonglong2*)part.to)[first + k * all] = held[k];
            }
        }
#pragma unroll 1
        for (int i = 1; i <= last; ++i) {
            const Written part = written((rank() + i) % kRanks);
            const u64 done = 16 * part.words();
            by_unit<CopyAsAligned>((u64)part.to | (u64)part.from, part.to + done, part.from + done, part.nbytes - done, me,
                                   all);
        }
        __syncthreads();
        const int peer = threadIdx.x;
        if (peer < kRanks && table.there[peer]) {
            fence();
            add_for_all(&a.post[peer]->written[launch.number & 1][rank()], 1);
        }
    }

    // Wait until all that write into this rank's result have done so. By one block.
    __device__ void await_parts() const {
        const int peer = threadIdx.x;
        if (peer >= kRanks || !is_written(peer, rank())) return;
        u64* const count = &own().written[launch.number & 1][peer];
        const u64 blocks = table.row[peer][kHow] & 0xffff;
        Deadline deadline;
        for (bool last = false;; last = deadline.passed(a.cells.team, peer)) {
            const u64 seen = load_acquire(count) + 1;
            if (seen == blocks) return store_relaxed(count, ~0ull);
            if (last) return give_up(peer, blocks, seen);
        }
    }

    __device__ void run() const {
        const u64 me = (u64)blockIdx.x * blockDim.x + threadIdx.x, all = (u64)gridDim.x * blockDim.x;
        if (!__syncthreads_and(launch.usable)) return;  // another block may just have failed
        if (blockIdx.x == 0) {
            send_guess();
            send_row();
        }
        send_mail(me, all);
        if (!looks_up()) {
            if (receive_rows<kCounts>() && fits()) take_mail(me, all);
            return;
        }
        if (!receive_rows<kRow>() || !fits()) return;
        bool in_lanes = false, writes = false;
        for (int peer = 0; peer < kRanks; ++peer) {
            in_lanes |= through_slots(rank(), peer) || through_slots(peer, rank());
            writes |= table.there[peer] != nullptr;
        }
        if (writes) write_parts(me, all, !in_lanes);
        if (in_lanes && blockIdx.x < kLanes) {
            send_chunks(blockIdx.x);  // the rest is left to the others: peers wait for these
        } else if (in_lanes) {
            const u64 first = (u64)kLanes * blockDim.x;
            if (receive_mail(me - first, all - first)) receive_chunks(blockIdx.x - kLanes);
        } else {
            take_mail(me, all, writes);
        }
        if (blockIdx.x == 0) await_parts();
    }

    __device__ void take_mail(u64 me, u64 all, bool has_own = false) const {
        for (u64 chunk = blockIdx.x; !has_own && copy_own(chunk);) chunk += gridDim.x;
        receive_mail(me, all);
    }

    // -- few bytes: one packet of each thread for each rank ----------------------------------------------

    __device__ u64 guess_from(int peer) const {
        return a.row[kRanks + peer] == kUnknown ? a.row[peer] : a.row[kRanks + peer];
    }

    // What this thread sends, as it was read while the number of the launch was.
    struct Words {
        u64 word[kRanks];

        __device__ Words(const ExchangeArgument& a, u64 me) {
#pragma unroll
            for (int peer = 0; peer < kRanks; ++peer) {
                const u64 nbytes = a.row[peer] * a.width;
                word[peer] = 8 * me < nbytes ? read_eight(a.input + a.start[peer], me, nbytes) : 0;
            }
        }
    };

    __device__ void send_few(const Words& words, u64 me) const {
        const u32 place = launch.number & 1;
        if (blockIdx.x == 0) send_guess();
#pragma unroll
        for (int peer = 0; peer < kRanks; ++peer)
            if (peer != rank() && 8 * me < to(peer))
                store_packet(&a.post[peer]->mail[place][rank()][me], {words.word[peer], launch.number});
        if (blockIdx.x == 0) send_row();
    }

    // Whether all ranks have guessed the same: then what they have sent is written. By all threads; the same for all.
    // Who waits long for a peer may as well wait for rows.
    __device__ bool receive_few(const Words& words, u64 me) const {
        const u32 place = launch.number & 1;
        const Post& post = own();
        const Packet wanted = guessed();
        Packet seen[kRanks];
        bool come = false, equal = a.guess != kUnknown;
        for (u32 polls = 0; !come && equal && polls < kPatience; ++polls) {
            come = true;
#pragma unroll
            for (int peer = 0; peer < kRanks; ++peer)
                if (peer != rank() && 8 * me < guess_from(peer) * a.width)
                    seen[peer] = load_packet(&post.mail[place][peer][me]);
#pragma unroll
            for (int peer = 0; peer < kRanks; ++peer) {
                const Packet guess = load_packet(&post.guess[place][peer]);
                come &= guess.high == wanted.high;
                equal &= guess.high != wanted.high || guess.low == wanted.low;
            }
        }
        if (!__syncthreads_and(come && equal)) return false;
        u64 start = 0;
#pragma unroll
        for (int peer = 0; peer < kRanks; ++peer) {
            const u64 nbytes = guess_from(peer) * a.width;
            if (8 * me < nbytes) {
                Deadline deadline;
                for (bool last = false; peer != rank() && seen[peer].high != launch.number;
                     last = deadline.passed(a.cells.team, peer)) {
                    seen[peer] = load_packet(&post.mail[place][peer][me]);
                    if (!last || seen[peer].high == launch.number) continue;
                    give_up(peer, launch.number, seen[peer].high);
                    return true;
                }
                const u64 word = peer == rank() ? words.word[peer] : seen[peer].low;
                write_eight(a.output + start, me, nbytes, word);
            }
            start += nbytes;
        }
        return true;
    }

    // The same where guesses do not do, once rows have come. Other blocks of this launch may have found that they do:
    // so each thread writes just what it would have written then, its word of this rank's own part too.
    __device__ void take_few(const Words& words, u64 me, u64 all) const {
#pragma unroll
        for (int peer = 0; peer < kRanks; ++peer)
            if (peer == rank() && 8 * me < to(peer))
                write_eight(a.output + table.place[peer], me, to(peer), words.word[peer]);
        receive_mail(me, all);
    }
};

// The last block to pass counts the launch, of which all have read the number then. By one thread of each: first the
// one, which says how many passed before, and at the end the other.
__device__ inline u64 pass(const ExchangeArgument& a) {
    return atomicAdd(&a.post[a.cells.team.rank]->passed, 1ull);
}
__device__ inline void count(const ExchangeArgument& a, const Launch& launch, u64 before) {
    if (before + 2 != gridDim.x) return;  // one less than the blocks: all ones at first
    a.post[a.cells.team.rank]->passed = ~0ull;
    a.cells.counts[1] = launch.number;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) exchange(const __grid_constant__ ExchangeArgument a) {
    __shared__ Table table;
    const u32 segment = threadIdx.x;
    const bool looks = segment < kSegments && blockIdx.x == 0 && Exchange::looks_up();
    const ulonglong2 own = looks ? a.heaps->own[segment] : make_ulonglong2(0, 0);  // on its way with the launch's number
    const Launch launch(a.cells, 0);
    if (looks) table.own[segment] = (u64)a.output - own.x < own.y ? (u64)a.output - own.x : kUnknown;
    Exchange{a, launch, table}.run();
    __syncthreads();
    if (threadIdx.x == 0) count(a, launch, pass(a));
}

// Of a rank that sends and expects few bytes, for which it has a thread for each packet. A kernel apart, since it takes
// little longer than it takes to run each of its instructions once.
extern "C" __global__ void __launch_bounds__(kThreads, 2) exchange_few(const __grid_constant__ ExchangeArgument a) {
    __shared__ Table table;
    const u64 me = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const Exchange::Words words(a, me);
    const Launch launch(a.cells, 0);
    const Exchange exchange{a, launch, table};
    if (launch.usable) exchange.send_few(words, me);
    const bool usable = __syncthreads_and(launch.usable);  // another block may just have failed
    const bool counts = threadIdx.x == blockDim.x - 1;
    const u64 before = counts ? pass(a) : 0;  // soon: the answer is there when it is asked for
    if (usable && !exchange.receive_few(words, me) && exchange.receive_rows<kCounts>() && exchange.fits())
        exchange.take_few(words, me, (u64)gridDim.x * blockDim.x);
    if (counts) count(a, launch, before);
}
