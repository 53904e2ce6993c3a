// How a rank reads the sums of all owners into its own result.
//
// The sums are cut into the chunks in which their owners make them. A rank's words `ready` say which are there.
#pragma once

#include "hopper.cuh"
#include "slots.cuh"

namespace shardmath {

struct Part {  // of one owner's sums, in one chunk
    u32 owner;
    u32 row, rows;       // from the owner's first
    u32 column, columns; // bytes
    u32 unused[3];
};

struct GatherArgument {
    const u64* ready;     // [owner][chunk]: launches whose sum is there
    const Part* parts;    // [chunk][kRanks], the next rank's first and this one's last
    u32 chunks;
    u32 early;            // chunks that are read while the product goes on
    u64 from_pitch, to_pitch;
    const char* sums[kRanks];
    char* rows[kRanks];   // where each owner's begin in the result
};

__device__ inline bool ready(const Team& team, const GatherArgument& a, u32 owner, u32 chunk, u64 launch) {
    return wait(team, a.ready + owner * a.chunks + chunk, launch + 1, owner, kProduct, chunk);
}

// Pieces of rows that pass through the shared memory of a block: the bulk copies of one thread.
struct Pull {
    static constexpr u32 kPiece = 8 << 10, kStages = 8, kAhead = 6;
    const GatherArgument& a;
    u32 stages, bars;          // shared addresses
    u32 block, blocks;
    u32 loaded = 0, stored = 0;

    __device__ Pull(const GatherArgument& argument, u32 stages, u32 bars, u32 block, u32 blocks)
        : a(argument), stages(stages), bars(bars), block(block), blocks(blocks) {
        for (u32 i = 0; i < kStages; ++i) bar_init(bars + 8 * i, 1);
        bars_visible();
    }

    struct Piece {
        const char* from;
        char* to;
        u32 nbytes;
    };
    // Piece `number` of a chunk: owners in turn, so that all links are busy. No bytes where there is none.
    __device__ Piece piece(const Part* parts, u32 number) const {
        const Part& part = parts[number % kRanks];
        const u32 across = (part.columns + kPiece - 1) / kPiece, at = number / kRanks;
        if (across == 0 || at >= part.rows * across) return {nullptr, nullptr, 0};
        const u64 row = part.row + at / across, column = at % across * kPiece;
        const u32 left = part.columns - column;
        return {a.sums[part.owner] + row * a.from_pitch + part.column + column,
                a.rows[part.owner] + row * a.to_pitch + part.column + column, left < kPiece ? left : kPiece};
    }
    __device__ u32 count(const Part* parts) const {
        u32 most = 0;
        for (u32 i = 0; i < kRanks; ++i) {
            const u32 pieces = parts[i].rows * ((parts[i].columns + kPiece - 1) / kPiece);
            most = pieces > most ? pieces : most;
        }
        return most * kRanks;
    }
    __device__ void load(const Piece& piece) {
        if (piece.nbytes) {
            const u32 stage = loaded++ % kStages, bar = bars + 8 * stage;
            bar_expect(bar, piece.nbytes);
            load_bulk(stages + stage * kPiece, piece.from, piece.nbytes, bar);
        }
    }
    __device__ void store(const Piece& piece) {
        if (piece.nbytes) {
            const u32 stage = stored % kStages;
            bar_wait(bars + 8 * stage, stored / kStages & 1);
            store_bulk(piece.to, stages + stage * kPiece, piece.nbytes);
            stores_have_read_but<kStages - kAhead>();
            ++stored;
        }
    }
    // This block's pieces of a chunk, whose sums are all ready.
    __device__ void run(u32 chunk) {
        const Part* parts = a.parts + chunk * kRanks;
        const u32 end = count(parts);
        u32 next = block;
        for (u32 i = 0; i < kAhead && next < end; ++i, next += blocks) load(piece(parts, next));
        for (u32 number = block; number < end; number += blocks, next += blocks) {
            store(piece(parts, number));
            if (next < end) load(piece(parts, next));
        }
    }
};

// The early chunks, as they become ready, by one thread of each of some blocks.
__device__ inline void gather_early(const Team& team, const GatherArgument& a, u64 launch, u32 stages, u32 bars,
                                    u32 block, u32 blocks) {
    Pull pull(a, stages, bars, block, blocks);
    for (u32 chunk = 0; chunk < a.early; ++chunk) {
        for (u32 i = 1; i <= kRanks; ++i)
            if (!ready(team, a, (team.rank + i) % kRanks, chunk, launch)) return stores_are_done();
        fence_async();
        pull.run(chunk);
    }
    stores_are_done();
}

}  // namespace shardmath
