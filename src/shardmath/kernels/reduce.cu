// Reductions over the ranks on cells: all_reduce in one shot and in two, and reduce_scatter.
//
// Compiled with ELEMENT (a type of elements.cuh), OPERATION (sum, product, min, max, mean) and ALIGNED: 1 where
// operands are multiples of 16 in address and size, 0 where they may lie anywhere. The ranks'
// elements are combined in the order of the ranks, wherever that happens: the result has the same bits on
// all ranks, and every time. Operands are ordinary memory of any alignment of their elements.
#include "cells.cuh"

using namespace shardmath;

typedef shardmath::ELEMENT Element;
typedef shardmath::OPERATION Op;
typedef PacketFormat<IsFloat<Element>::value> Format;
constexpr int kBytes = Format::kBytes;
static_assert(kBytes % sizeof(Element) == 0 || sizeof(Element) == 16, "a packet holds whole elements");

// Packets combined in the order of the ranks, in the wide type: the first `kElements` elements of each.
template <int kElements>
struct Combined {
    typename Wide<Element>::type value[kElements];

    __device__ void add(Packet packet, bool first) {
        const Element* elements = (const Element*)&packet;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const auto x = Wide<Element>::widen(elements[i]);
            value[i] = first ? x : Op::combine(value[i], x);
        }
    }
    __device__ Packet narrowed() const {
        Packet packet = {0, 0};
        Element* elements = (Element*)&packet;
#pragma unroll
        for (int i = 0; i < kElements; ++i) elements[i] = Wide<Element>::narrow(Finish<Op>::apply(value[i], kRanks));
        return packet;
    }
};

template <int kElements = kBytes / sizeof(Element)>
__device__ inline Packet combined(const Packet (&packets)[kRanks]) {
    Combined<kElements> all;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) all.add(packets[rank], rank == 0);
    return all.narrowed();
}

typedef Span<kBytes, Element, ALIGNED> Elements;

__device__ inline Packet encoded(Packet packet, const Step& step) { return Format::encode(packet, step.number); }

struct AllReduceArgument {
    Cells cells;
    char* input;
    char* output;  // may be the input
    u64 nbytes;
};

// Every rank sends all it has to all others, and combines all: for small arrays.
extern "C" __global__ void __launch_bounds__(kThreads, 2) one_shot(const __grid_constant__ AllReduceArgument a) {
    const Elements input = {a.input, a.nbytes}, output = {a.output, a.nbytes};
    const auto read = [&](u32 at, Packet (&out)[kRanks]) {
        const Packet own = input.read(at);
#pragma unroll
        for (int i = 0; i < kRanks; ++i) out[i] = own;
    };
    run_steps<Format>(a.cells, input.packets(), read,
                      [&](u32 at, const Packet (&have)[kRanks]) { output.write(at, combined(have)); });
}

// Every rank combines one slice of the array, and sends the result to all others. What it has of the next
// step follows at once, so that the links are busy while it waits for this one's results.
extern "C" __global__ void __launch_bounds__(kThreads, 2) two_shot(const __grid_constant__ AllReduceArgument a) {
    const Elements input = {a.input, a.nbytes}, output = {a.output, a.nbytes};
    const u32 slice = (input.packets() + kRanks - 1) / kRanks, stride = gridDim.x * blockDim.x;
    const auto contribute = [&](u32 at, const Step& step) {
        Packet out[kRanks];
#pragma unroll
        for (int i = 0; i < kRanks; ++i) out[i] = encoded(input.read(rank_at(a.cells, i) * slice + at), step);
        send(a.cells, step, 0, [&](int i) { return out[i]; });
    };
    const u32 row0 = blockIdx.x * blockDim.x;
    Step step(a.cells);
    Launch launch(a.cells);
    if (row0 + threadIdx.x < slice) contribute(row0 + threadIdx.x, step);
    for (u32 row = row0; row < slice; row += stride, step = step.next()) {
        const u32 at = row + threadIdx.x;
        if (at >= slice) continue;
        Packet have[kRanks];
        if (!receive<Format>(a.cells, launch, step, 0, have)) break;
        const Packet result = encoded(combined(have), step);
        send(a.cells, step, 1, [&](int) { return result; });
        if (at + stride < slice) contribute(at + stride, step.next());
        if (!receive<Format>(a.cells, launch, step, 1, have)) break;
#pragma unroll
        for (int from = 0; from < kRanks; ++from) output.write(from * slice + at, have[from]);
        if (at + stride < slice) fence_cells();
    }
    finish(a.cells, launch, step);
}

struct ReduceScatterArgument {
    Cells cells;
    char* input;
    char* output;
    u64 most;            // bytes of the largest part
    u64 start[kRanks];   // of each rank's part in the input, in bytes
    u64 nbytes[kRanks];  // of each rank's part
};

// Every rank combines its own part. Parts may differ in size; shorter ones take part to the end.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    reduce_scatter(const __grid_constant__ ReduceScatterArgument a) {
    const auto read = [&](u32 at, Packet (&out)[kRanks]) {
#pragma unroll
        for (int i = 0; i < kRanks; ++i) {
            const u32 peer = rank_at(a.cells, i);
            out[i] = Elements{a.input + a.start[peer], a.nbytes[peer]}.read(at);
        }
    };
    const Elements own = {a.output, a.nbytes[a.cells.team.rank]};
    run_steps<Format>(a.cells, Elements{a.input, a.most}.packets(), read,
                      [&](u32 at, const Packet (&have)[kRanks]) { own.write(at, combined(have)); });
}

struct ReduceAndPushArgument {
    char* from[kRanks];  // what each rank has of this rank's slice, in this rank's memory
    char* to[kRanks];    // the slice in the ranks' results; may be where it was read
    u64 count;           // how many of them are written to
    u64 nbytes;
};

constexpr int kReduceAndPushThreads = 256;

// Combine what has come from every rank, and push it into the results. No peer is waited for.
extern "C" __global__ void __launch_bounds__(kReduceAndPushThreads)
    reduce_and_push(const __grid_constant__ ReduceAndPushArgument a) {
    typedef Span<sizeof(Packet), Element, ALIGNED> Slice;
    const u32 packets = Slice{a.to[0], a.nbytes}.packets(), stride = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < packets; at += stride) {
        Packet have[kRanks];
#pragma unroll
        for (int from = 0; from < kRanks; ++from) have[from] = Slice{a.from[from], a.nbytes}.read(at);
        const Packet result = combined<sizeof(Packet) / sizeof(Element)>(have);
        for (u64 i = 0; i < a.count; ++i) Slice{a.to[i], a.nbytes}.write(at, result);
    }
}
