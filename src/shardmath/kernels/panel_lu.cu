// LU with partial pivoting of up to 32 columns of a panel in two launches. Compiled with ELEMENT, float or double, and
// THREADS, the size of a block of `factorise_columns`.
//
// `factorise_columns` computes the factors. Each thread keeps one row in registers from the first column to the last.
// For each column every block publishes its candidate for the pivot, with its whole row; all blocks read the candidates
// of all others, choose the same one, and eliminate:
//
//     block 0   rows   0 .. 383   candidate ─┐             ┌─  l = x / u,  row -= l u
//     block 1   rows 384 .. 767   candidate ─┼─  the pivot ┼─  l = x / u,  row -= l u
//     block 2   ...                         ─┘             └─  ...
//
// Rows do not move until the end: each thread knows the place of its row, and an exchange changes two places.
//
// `bring_up` does the same exchanges in all other columns of the panel, a warp for each, and divides those to the right
// by the unit lower triangle.
//
// Blocks communicate by packets of 16 bytes, each stored and loaded whole with its tag, so that no fence is needed. Tags
// are the numbers of the panel's columns, from 1; the host clears all packets before each panel. Two places are used in
// turn: a block publishes for column j + 2 after it has read all candidates of column j + 1, and every block publishes
// those after it has read what it needs of column j.
//
// Blocks wait for each other, so all must become resident. They do: the host launches no more blocks than there are
// multiprocessors, and `__launch_bounds__` makes one fit on each. Other kernels on this GPU at that time, such as the
// end of a product, end without waiting for this one, or at a deadline where they wait for peers. No two of these
// kernels of one factorisation run at once, even where ranks share a GPU: only one rank has the next panel.
// It includes nothing.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kThreads = THREADS, kWarps = kThreads / 32;
constexpr int kWidth = 32;         // columns at most, as many as a warp has threads
constexpr int kSlot = 1 + kWidth;  // packets of a candidate: its size and place, then its row
constexpr int kHeard = 4;          // candidates that a thread reads: there are 128 blocks at most
constexpr u32 kNobody = ~0u;       // the place of no row
constexpr u32 kAll = ~0u;          // threads of a warp

struct alignas(16) Packet {
    u64 low, high;
};

// -- words ---------------------------------------------------------------------------------------

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

// -- candidates ----------------------------------------------------------------------------------

union Word {
    u64 bits;
    ELEMENT element;
};

// A row that may become the pivot: the bits of its absolute value, which order as values do, and its place.
struct Candidate {
    u64 size;
    u32 place;
};

// The greater one; of equal ones, that which comes first, as in LAPACK.
__device__ inline bool is_better(Candidate x, Candidate y) {
    return x.size > y.size || (x.size == y.size && x.place < y.place);
}

__device__ inline Candidate best_of_warp(Candidate x) {
    const u32 high = __reduce_max_sync(kAll, (u32)(x.size >> 32));
    const u32 low = __reduce_max_sync(kAll, (u32)(x.size >> 32) == high ? (u32)x.size : 0u);
    const u64 size = (u64)high << 32 | low;
    return {size, __reduce_min_sync(kAll, x.size == size ? x.place : kNobody)};
}

// -- kernels -------------------------------------------------------------------------------------

struct PanelArgument {
    i64 leading;         // elements between columns
    ELEMENT* data;       // of the panel's first column, in the first row that is factorised
    int* pivots;         // get the rows of the matrix that each row is exchanged with
    u32* moves;          // [2][kWidth]: which row comes to place i, and to which place row i goes
    Packet* packets;     // [2][blocks][kSlot]
    u32 rows, width;     // of the columns that are factorised
    u32 before;          // columns of the panel before these
    int first;           // the row of the matrix that row 0 is
};

struct Shared {
    Candidate of_warps[kWarps];
    ELEMENT row[kWidth];  // of the pivot
    u32 pivot;            // its place
};

extern "C" __global__ void __launch_bounds__(kThreads) factorise_columns(const __grid_constant__ PanelArgument a) {
    __shared__ Shared shared;
    const u32 t = threadIdx.x, lane = t % 32, blocks = gridDim.x, row = blockIdx.x * kThreads + t;
    ELEMENT* const data = a.data + a.before * a.leading;
    u32 place = row < a.rows ? row : kNobody;
    ELEMENT x[kWidth];
#pragma unroll
    for (u32 c = 0; c < kWidth; ++c) x[c] = row < a.rows && c < a.width ? data[row + c * a.leading] : ELEMENT(0);

    // At column j, x[0] is its element: the row is rotated by one each time, and elements of L enter at the end.
#pragma unroll 1
    for (u32 j = 0; j < a.width; ++j) {
        const u32 tag = a.before + j + 1;
        Packet* const packets = a.packets + (tag & 1) * blocks * kSlot;

        // This block's candidate: only its thread stores. NaN counts as 0.
        Candidate best = {0, kNobody};
        if (place != kNobody && place >= j) {
            Word size = {0};
            size.element = x[0] < 0 ? -x[0] : x[0] == x[0] ? x[0] : ELEMENT(0);
            best = {size.element == 0 ? 0 : size.bits, place};
        }
        best = best_of_warp(best);
        if (lane == 0) shared.of_warps[t / 32] = best;
        __syncthreads();
        best = best_of_warp(lane < kWarps ? shared.of_warps[lane] : Candidate{0, kNobody});
        if (best.place == kNobody ? t == 0 : place == best.place) {
            Packet* const own = packets + blockIdx.x * kSlot;
            store_packet(own, {best.size, (u64)tag << 32 | best.place});
#pragma unroll
            for (int c = 0; c < kWidth; ++c) {
                Word word = {0};
                word.element = x[c];
                store_packet(own + 1 + c, {word.bits, (u64)tag << 32});
            }
        }

        // The first warp finds the best of all blocks, and fetches its row.
        if (t < 32) {
            __syncwarp();  // the thread that stores must not have to wait for the others to hear it
            // The last block stands in for those beyond it, so that all loads are under way at once.
            const auto block_at = [=](u32 h) { return h * 32 + lane < blocks ? h * 32 + lane : blocks - 1; };
            Candidate own;
            u32 from;
            for (bool waits = true; waits;) {
                Packet heard[kHeard];
#pragma unroll
                for (u32 h = 0; h < kHeard; ++h) heard[h] = load_packet(packets + block_at(h) * kSlot);
                waits = false, own = {0, kNobody}, from = 0;
#pragma unroll
                for (u32 h = 0; h < kHeard; ++h) {
                    const Candidate of_block = {heard[h].low, (u32)heard[h].high};
                    waits = waits || (u32)(heard[h].high >> 32) != tag;
                    if (is_better(of_block, own)) own = of_block, from = block_at(h);
                }
            }
            const Candidate pivot = best_of_warp(own);
            from = __reduce_max_sync(kAll, own.place == pivot.place ? from : 0u);
            Packet p;
            do p = load_packet(packets + from * kSlot + 1 + lane);
            while ((u32)(p.high >> 32) != tag);
            Word word;
            word.bits = p.low;
            shared.row[lane] = lane < kWidth - j ? word.element : ELEMENT(0);  // behind that the row has elements of L
            if (lane == 0) shared.pivot = pivot.place;
            if (t == 0 && blockIdx.x == 0) a.pivots[j] = a.first + (int)pivot.place;
        }
        __syncthreads();

        const u32 pivot = shared.pivot;
        if (place == pivot)
            place = j;
        else if (place == j)
            place = pivot;
        ELEMENT l = x[0];
        if (place != kNobody && place > j) {
            if (shared.row[0] != 0) l /= shared.row[0];
#pragma unroll
            for (int c = 1; c < kWidth; ++c) x[c - 1] = x[c] - l * shared.row[c];
        } else {
#pragma unroll
            for (int c = 1; c < kWidth; ++c) x[c - 1] = x[c];
        }
        x[kWidth - 1] = l;
    }

    if (place == kNobody) return;
#pragma unroll
    for (u32 c = 0; c < kWidth; ++c) {
        const u32 column = (c + a.width) % kWidth;
        if (column < a.width) data[place + column * a.leading] = x[c];
    }
    if (place < a.width) a.moves[place] = row;
    if (row < a.width) a.moves[kWidth + row] = place;
}

extern "C" __global__ void __launch_bounds__(kWidth) bring_up(const __grid_constant__ PanelArgument a) {
    const u32 t = threadIdx.x;
    const bool is_right = blockIdx.x >= a.before, has_row = t < a.width;
    ELEMENT* const column = a.data + (blockIdx.x + (is_right ? a.width : 0)) * a.leading;
    const u32 target = has_row ? a.moves[kWidth + t] : 0;
    const ELEMENT leaves = has_row ? column[t] : ELEMENT(0);
    ELEMENT x = has_row ? column[a.moves[t]] : ELEMENT(0), l[kWidth];
#pragma unroll
    for (u32 k = 0; k < kWidth; ++k)
        l[k] = is_right && k < t && has_row ? a.data[t + (a.before + k) * a.leading] : ELEMENT(0);
    __syncwarp();  // all have read before one writes
    if (target >= a.width) column[target] = leaves;
#pragma unroll
    for (u32 k = 0; k < kWidth; ++k) x -= l[k] * __shfl_sync(kAll, x, k);
    if (has_row) column[t] = x;
}
