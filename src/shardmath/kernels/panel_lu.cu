// The LU factors of a panel, a few columns at a time. Compiled with ELEMENT, the type of a matrix, THREADS of a block,
// and ROWS, how many rows of the matrix a thread has.
//
// `factorise_columns`: kWidth columns by one launch. A thread has its rows in registers, from the first column to the
// last. For each column every block says which of its rows would be the pivot, with all elements of it; all blocks hear
// that of all others, take the same one, and subtract its multiples from their rows:
//
//     block 0   rows   0 .. 383   its greatest  ─┐             ┌─  l = x / u,  row - l u
//     block 1   rows 384 .. 767   its greatest  ─┼─  the pivot ┼─  l = x / u,  row - l u
//     block 2   ...                             ─┘             └─  ...
//
// Rows do not move: a thread knows the place of each of its own, and two threads exchange theirs.
//
// What blocks say travels in packets of 16 bytes, each with its tag: nobody needs a fence. Tags count the columns of a
// panel from 1 on, and whoever launches this clears the packets before. They lie in two places in turn: a block says
// something of column j + 2 when it has heard all of column j + 1, which each says after it has read all of column j.
//
// All blocks wait for each other, so the grid is no larger than the multiprocessors are many. A block that finds no
// room yet comes when kernels that run beside this one end, none of which waits for it.
//
// `bring_up`: what follows for the other columns of the panel: rows are exchanged in all of them, and those to the
// right are divided by the triangle.
#include "numbers.cuh"
#include "permutation.cuh"

#ifndef ELEMENT
#define ELEMENT float64
#define THREADS 384
#define ROWS 1
#endif

using namespace shardmath;

constexpr int kThreads = THREADS, kRows = ROWS, kWarps = kThreads / 32;
constexpr int kWords = 32 / kRows;                            // of 8 bytes, of a row
constexpr int kWidth = kWords * 8 / (int)sizeof(ELEMENT);     // columns
constexpr int kSlot = 1 + kWords;                             // packets that a block has for each of two columns
constexpr int kEach = sizeof(ELEMENT) < 8 ? 2 : 1;            // elements in a word
constexpr int kParts = sizeof(ELEMENT) > 8 ? 2 : 1;           // words of an element
constexpr uint64 kNobody = ~0ull;

// -- words ---------------------------------------------------------------------------------------
struct Packet {
    uint64 low, high;
};
__device__ inline Packet load_packet(const Packet* packet) {
    Packet p;
    asm volatile(
        "{\n\t.reg .b128 whole;\n\tld.relaxed.gpu.global.b128 whole, [%2];\n\tmov.b128 {%0, %1}, whole;\n\t}"
        : "=l"(p.low), "=l"(p.high)
        : "l"(packet)
        : "memory");
    return p;
}
__device__ inline void store_packet(Packet* packet, Packet p) {
    asm volatile(
        "{\n\t.reg .b128 whole;\n\tmov.b128 whole, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], whole;\n\t}" ::"l"(packet),
        "l"(p.low), "l"(p.high)
        : "memory");
}
__device__ inline uint64 bits_of(float64 x) { return (uint64)__double_as_longlong(x); }
__device__ inline uint32 bits_of(float32 x) { return __float_as_uint(x); }
// -- rows ----------------------------------------------------------------------------------------

// Word `at` of a row.
__device__ inline uint64 word_of(const float64* row, int at) { return bits_of(row[at]); }
__device__ inline uint64 word_of(const float32* row, int at) {
    return (uint64)bits_of(row[2 * at + 1]) << 32 | bits_of(row[2 * at]);
}
__device__ inline uint64 word_of(const complex64* row, int at) {
    return (uint64)bits_of(row[at].imag) << 32 | bits_of(row[at].real);
}
__device__ inline uint64 word_of(const complex128* row, int at) {
    return bits_of(at % 2 ? row[at / 2].imag : row[at / 2].real);
}

// -- the pivot -----------------------------------------------------------------------------------

// A row that would be the pivot: the bits of its size, which order as sizes do; its place, and behind that its block.
struct Candidate {
    uint64 size, place;

    __device__ int row() const { return (int)(place >> 32); }
};
// The greater of two, and of equals that which comes first.
__device__ inline Candidate greater(Candidate x, Candidate y) {
    return x.size > y.size || (x.size == y.size && x.place < y.place) ? x : y;
}
__device__ inline Candidate greatest_of_warp(Candidate x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x = greater(x, {__shfl_xor_sync(~0u, x.size, lanes), __shfl_xor_sync(~0u, x.place, lanes)});
    return x;
}

__device__ inline Packet awaited(const Packet* packet, uint32 tag) {
    Packet p = load_packet(packet);
    while ((uint32)(p.high >> 32) != tag) p = load_packet(packet);
    return p;
}

struct ColumnsArgument {
    i64 rows, leading;  // of the columns, from their diagonal on; elements between columns
    ELEMENT* data;
    int32* pivots;      // get the rows of the matrix that each is exchanged with
    Packet* packets;    // [2][blocks][kSlot]
    int32 first;        // the row of the matrix that row 0 is
    int32 width, before;  // columns, and those of the panel before them
};

struct SharedWords {
    Candidate of_warps[kWarps], of_blocks[kWarps];
    alignas(16) uint64 row[kWords];
};

extern "C" __global__ void __launch_bounds__(kThreads) factorise_columns(const __grid_constant__ ColumnsArgument a) {
    __shared__ SharedWords shared;
    const int t = threadIdx.x, blocks = gridDim.x, block = blockIdx.x;
    ELEMENT x[kRows][kWidth];
    int place[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const i64 i = ((i64)block * kRows + r) * kThreads + t;
        place[r] = i < a.rows ? (int)i : -1;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) x[r][c] = i < a.rows && c < a.width ? a.data[i + c * a.leading] : ELEMENT{};
    }
    // In the turn of column j it is x[.][0]: a row turns by one each time, and what has been computed comes in behind.
#pragma unroll 1
    for (int j = 0; j < a.width; ++j) {
        const uint32 tag = a.before + j + 1;
        Packet* const packets = a.packets + (i64)(tag & 1) * blocks * kSlot;

        Candidate best = {0, kNobody};
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (place[r] >= j) best = greater(best, {bits_of(size_of(x[r][0])), (uint64)place[r] << 32 | block});
        best = greatest_of_warp(best);
        if (t % 32 == 0) shared.of_warps[t / 32] = best;
        __syncthreads();
        best = shared.of_warps[0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) best = greater(best, shared.of_warps[w]);

        Packet* const own = packets + block * kSlot;
        if (best.place == kNobody) {
            if (t == 0) store_packet(own, {0, (uint64)tag << 32 | 0xffffffffu});
        } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                if (place[r] == best.row()) {
                    store_packet(own, {best.size, (uint64)tag << 32 | (uint32)place[r]});
#pragma unroll
                    for (int w = 0; w < kWords; ++w) store_packet(own + 1 + w, {word_of(x[r], w), (uint64)tag << 32});
                }
        }
        __syncwarp();  // who has told nothing does not wait yet

        if (t / 32 * 32 < blocks) {
            Candidate heard = {0, kNobody};
            if (t < blocks) {
                const Packet p = awaited(packets + t * kSlot, tag);
                if ((uint32)p.high != 0xffffffffu) heard = {p.low, p.high << 32 | t};
            }
            heard = greatest_of_warp(heard);
            if (t % 32 == 0) shared.of_blocks[t / 32] = heard;
        }
        __syncthreads();
        Candidate pivot = shared.of_blocks[0];
        for (int w = 1; w * 32 < blocks; ++w) pivot = greater(pivot, shared.of_blocks[w]);
        if (t < kWords) {
            const Packet p = awaited(packets + (uint32)pivot.place * kSlot + 1 + t, tag);
            // Behind the columns that are left there are those of L, from which nothing is subtracted.
            shared.row[t] = t * kEach / kParts < kWidth - j ? p.low : 0;
            if (kEach == 2 && t * 2 + 1 == kWidth - j) shared.row[t] = (uint32)p.low;
        }
        __syncthreads();

        const ELEMENT* const u = (const ELEMENT*)shared.row;
        const ELEMENT head = u[0];
        const bool divides = !is_zero(head);
        if (block == 0 && t == 0) a.pivots[j] = a.first + pivot.row();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (place[r] == pivot.row())
                place[r] = j;
            else if (place[r] == j)
                place[r] = pivot.row();
            ELEMENT last = x[r][0];
            if (place[r] > j) {
                if (divides) last = quotient(last, head);
#pragma unroll
                for (int c = 1; c < kWidth; ++c) x[r][c - 1] = minus_product(x[r][c], last, u[c]);
            } else {
#pragma unroll
                for (int c = 1; c < kWidth; ++c) x[r][c - 1] = x[r][c];
            }
            x[r][kWidth - 1] = last;
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
            const int column = (c + a.width) % kWidth;
            if (place[r] >= 0 && column < a.width) a.data[place[r] + column * a.leading] = x[r][c];
        }
}

// -- the other columns ---------------------------------------------------------------------------

struct BringArgument {
    i64 leading;
    ELEMENT* data;        // of the panel's first column, in the first row of the columns that were factorised
    const int32* pivots;  // of these
    int32 first;          // the row of the matrix that row 0 is
    int32 before, width;  // columns before these, and these
};

struct BringWords {
    Permutation<kWidth> exchanges;
    ELEMENT x[kWidth];
};

// A block for each other column, of kWidth threads.
extern "C" __global__ void __launch_bounds__(kWidth) bring_up(const __grid_constant__ BringArgument a) {
    __shared__ BringWords shared;
    const int t = threadIdx.x;
    const bool is_right = (int)blockIdx.x >= a.before;
    ELEMENT* const column = a.data + (blockIdx.x + (is_right ? a.width : 0)) * a.leading;
    ELEMENT l[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
        l[k] = is_right && k < t && t < a.width ? a.data[t + (a.before + k) * a.leading] : ELEMENT{};
    shared.exchanges.find(a.pivots, a.first, 0, a.width, false);
    shared.exchanges.apply(column);
    if (!is_right) return;
    __syncthreads();
    ELEMENT own = t < a.width ? column[t] : ELEMENT{};
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
        if (t == k) shared.x[k] = own;
        __syncthreads();
        if (k < t) own = minus_product(own, l[k], shared.x[k]);
    }
    if (t < a.width) column[t] = own;
}
