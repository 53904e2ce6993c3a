// Operands as packets of 8 or 16 bytes, whatever their alignment, and packets of all ranks combined into one.
#pragma once

#include "elements.cuh"
#include "symm.cuh"

namespace shardmath {

// Bytes in packets of kBytes. With kWhole, address and size are multiples of kBytes; else `Unit` divides them.
template <int kBytes, class Unit, bool kWhole>
struct Stretch {
    char* start;
    u64 nbytes;

    __device__ u32 packets() const { return (u32)((nbytes + kBytes - 1) / kBytes); }

    // The packet at `at`, all of which is inside and at its alignment.
    __device__ Packet whole(u32 at) const {
        const char* address = start + (u64)at * kBytes;
        if (kBytes == 8) return {*(const u64*)address, 0};
        const ulonglong2 words = *(const ulonglong2*)address;
        return {words.x, words.y};
    }

    // The packet at `at`; zeros from the end on.
    __device__ Packet read(u32 at) const {
        Packet p = {0, 0};
        const char* address = start + (u64)at * kBytes;
        if (at >= packets()) return p;
        if (kWhole || is_whole(at)) return whole(at);
        Unit* units = (Unit*)&p;
#pragma unroll
        for (int i = 0; i < kBytes / (int)sizeof(Unit); ++i)
            if ((u64)at * kBytes + i * sizeof(Unit) < nbytes) units[i] = ((const Unit*)address)[i];
        return p;
    }

    // Put a packet there; what lies beyond the end is dropped.
    __device__ void write(u32 at, Packet p) const {
        char* address = start + (u64)at * kBytes;
        if (at >= packets()) return;
        if (kWhole || is_whole(at)) {
            if (kBytes == 8)
                *(u64*)address = p.low;
            else
                *(ulonglong2*)address = make_ulonglong2(p.low, p.high);
            return;
        }
        const Unit* units = (const Unit*)&p;
#pragma unroll
        for (int i = 0; i < kBytes / (int)sizeof(Unit); ++i)
            if ((u64)at * kBytes + i * sizeof(Unit) < nbytes) ((Unit*)address)[i] = units[i];
    }

    __device__ bool is_whole(u32 at) const {
        return ((u64)start & (kBytes - 1)) == 0 && ((u64)at + 1) * kBytes <= nbytes;
    }
};

// The elements in the first kBytes of packets of all ranks, combined in the order of the ranks in the wide type:
// the same bits wherever that happens.
template <int kBytes, class Element, class Op>
__device__ inline Packet combined(const Packet (&packets)[kRanks]) {
    constexpr int kElements = kBytes / sizeof(Element);
    Packet result = {0, 0};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
        auto all = Wide<Element>::widen(((const Element*)&packets[0])[i]);
#pragma unroll
        for (int rank = 1; rank < kRanks; ++rank)
            all = Op::combine(all, Wide<Element>::widen(((const Element*)&packets[rank])[i]));
        ((Element*)&result)[i] = Wide<Element>::narrow(Finish<Op>::apply(all, kRanks));
    }
    return result;
}

}  // namespace shardmath
