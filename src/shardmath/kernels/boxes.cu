// Strided boxes copied between memories that this GPU can reach, its own and its peers': all boxes of a
// step in one launch. Boxes are cut into tiles; the host has written down in which order blocks take them,
// so that all links are busy from the first tile to the last. The tables are those of
// redistribution/boxes.py.
//
// Bits are copied, never values. How wide an access is, the addresses decide when the kernel runs: 16
// bytes where everything is a multiple of 16, and half as much as often as needed where it is not. Compiled with
// UNALIGNED=1, rows that begin anywhere are written 16 bytes at a time all the same, each put together from 5
// words; without them the kernel has registers enough for 1 % more.
// It includes nothing.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 kThreads = 256;
constexpr int kBlocksEach = 3;  // on a multiprocessor
constexpr int kDims = 8;
constexpr int kBases = 128;
constexpr u32 kSharedBytes = 24 << 10;  // bytes of shared memory for a tile that is transposed
constexpr int kFlight = 4;       // accesses that a thread has in flight
constexpr u32 kLong = 64;        // bytes of a row that is put together, at least

struct Tile {
    u32 box, number;
};

struct Dim {  // of the rows of a box; divisions are by multiplication
    i64 from, to;  // strides
    u32 extent, magic, shift, padding;
};

struct Box {
    i64 from, to;      // offsets from the bases
    i64 from_along, to_along;    // transposed: strides of the target's densest axis
    i64 from_across, to_across;  // and of the source's
    u32 source, target;          // numbers of the bases
    u32 unit;                    // bytes that are contiguous on both sides
    u32 transposed;
    u32 count, ndim;         // of the rows, or of what is left beside the two axes
    u32 rows;                // of them, in a tile
    u32 piece, pieces;       // a row is cut into so many pieces of so many bytes
    u32 along, across;       // extents
    u32 tile_along, tile_across;
    u32 tiles_along, tiles_across;
    u32 from_strides, to_strides;  // all or-ed: what they are multiples of
    u32 padding[3];
    Dim dims[kDims];
};

struct Argument {
    const Tile* tiles;
    const Box* boxes;
    u64 count;
    char* bases[kBases];
};

struct alignas(16) Wide {
    u32 words[4];
};

__shared__ Box box;  // of this block's tile
__shared__ Wide shared_memory[kSharedBytes / 16];

// Division of numbers below 2^21.
struct Divider {
    u32 by;
    float inverse;

    __device__ explicit Divider(u32 divisor) : by(divisor), inverse(1.0f / (float)divisor) {}
    __device__ u32 operator()(u32 number, u32& rest) const {
        const u32 quotient = (u32)(((float)number + 0.5f) * inverse);
        rest = number - quotient * by;
        return quotient;
    }
};

// Add where row `index` lies.
__device__ inline void locate(u32 index, i64& from, i64& to) {
#pragma unroll 1
    for (int d = (int)box.ndim - 1; d > 0; --d) {
        const Dim& dim = box.dims[d];
        const u32 quotient = dim.extent == 1 ? index : __umulhi(index, dim.magic) >> dim.shift;
        const i64 at = index - quotient * dim.extent;
        from += at * dim.from;
        to += at * dim.to;
        index = quotient;
    }
    if (box.ndim) {
        from += (i64)index * box.dims[0].from;
        to += (i64)index * box.dims[0].to;
    }
}

// Items dealt out to the threads: `load(i, hold)` for some, then `store(i, hold)` for the same ones.
template <class Hold, int kMany = kFlight, class Load, class Store>
__device__ inline void deal(u32 items, Load load, Store store) {
    for (u32 first = threadIdx.x; first < items; first += kThreads * kMany) {
        Hold held[kMany];
#pragma unroll
        for (int k = 0; k < kMany; ++k) {
            if (first + k * kThreads < items) load(first + k * kThreads, held[k]);
            asm volatile("" ::: "memory");  // fields of the box are read again, rather than kept in registers
        }
#pragma unroll
        for (int k = 0; k < kMany; ++k)
            if (first + k * kThreads < items) store(first + k * kThreads, held[k]);
    }
}

template <class Word>
struct Placed {
    Word word;
    char* to;
};

template <class Word>
__device__ inline void copy_rows(u32 number, const char* source, char* target) {
    const u32 group = number / box.pieces, start = (number - group * box.pieces) * box.piece;
    const u32 nbytes = box.unit - start < box.piece ? box.unit - start : box.piece;
    const u32 row = group * box.rows;
    const u32 rows = box.count - row < box.rows ? box.count - row : box.rows;
    const u32 columns = nbytes / (u32)sizeof(Word);
    const Divider by_columns(columns);
    deal<Placed<Word>>(
        rows * columns,
        [&](u32 i, Placed<Word>& held) {
            u32 column;
            i64 from = start, to = start;
            locate(row + by_columns(i, column), from, to);
            held.word = *(const Word*)(source + from + column * (u32)sizeof(Word));
            held.to = target + to + column * (u32)sizeof(Word);
        },
        [&](u32, const Placed<Word>& held) { *(Word*)held.to = held.word; });
}

struct Together {  // what goes to the 16 bytes at `to`: bytes `begin` to `end` of them
    Wide value;
    char* to;
    int begin, end;
};

// In as few stores as there can be: each is a packet on the link.
__device__ inline void store_part(const Together& held) {
    const u32* words = held.value.words;
    int at = held.begin;
    const auto word = [&] { return at < 8 ? at < 4 ? words[0] : words[1] : at < 12 ? words[2] : words[3]; };
    const auto narrow = [&](int size) {
        if (size == 4)
            *(u32*)(held.to + at) = word();
        else if (size == 2)
            *(unsigned short*)(held.to + at) = (unsigned short)(word() >> 8 * (at & 3));
        else
            held.to[at] = (char)(word() >> 8 * (at & 3));
        at += size;
    };
#pragma unroll
    for (int size = 1; size < 8; size *= 2)
        if (at & size && at + size <= held.end) narrow(size);
    if (at + 8 <= held.end) {
        *(u64*)(held.to + at) = at ? words[2] | (u64)words[3] << 32 : words[0] | (u64)words[1] << 32;
        at += 8;
    }
#pragma unroll
    for (int size = 4; size; size /= 2)
        if (at + size <= held.end) narrow(size);
}

// Rows that begin anywhere. All of a word of the source is read where some of its bytes are wanted.
__device__ inline void put_rows_together(u32 number, const char* source, char* target) {
    const u32 group = number / box.pieces, start = (number - group * box.pieces) * box.piece;
    const u32 nbytes = box.unit - start < box.piece ? box.unit - start : box.piece;
    const u32 row = group * box.rows;
    const u32 rows = box.count - row < box.rows ? box.count - row : box.rows;
    const u32 columns = nbytes / 16 + 2;  // of 16 bytes of the target, for rows wherever they begin
    const Divider by_columns(columns);
    deal<Together, kFlight / 2>(
        rows * columns,
        [&](u32 i, Together& held) {
            u32 column;
            i64 from = start, to = start;
            locate(row + by_columns(i, column), from, to);
            const int before = (int)(u32)((u64)(target + to) & 15);  // bytes between a multiple of 16 and the row
            const int ahead = before - (int)(column * 16);          // where the row begins, seen from `held.to`
            held.to = target + to - ahead;
            held.begin = max(ahead, 0);
            held.end = min(ahead + (int)nbytes, 16);
            const char* at = source + from - ahead;
            const int shift = (int)((u64)at & 3);
            const u32* words = (const u32*)(at - shift);
            u32 read[5];
#pragma unroll
            for (int k = 0; k < 5; ++k)
                read[k] = 4 * k - shift < held.end && 4 * k - shift + 4 > held.begin ? words[k] : 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) held.value.words[k] = __funnelshift_r(read[k], read[k + 1], 8 * shift);
        },
        [&](u32, const Together& held) {
            if (held.begin == 0 && held.end == 16)
                *(Wide*)held.to = held.value;
            else
                store_part(held);
        });
}

// A tile of two axes, and of several of what lies beside them, through shared memory: rows of the source
// come in, rows of the target go out. Both sides are accessed 16 bytes at a time where they are dense.
template <class Word>
struct Transposition {
    u32 first, many;            // of what lies beside
    u32 along, across, words;   // of this tile; words of a unit
    u32 pitch;                  // words from one row to the next in shared memory
    static constexpr u32 kWord = sizeof(Word), kGroup = 16 / kWord;

    __device__ Transposition(u32 number, const char*& source, char*& target) {
        const u32 rest = number / box.tiles_along, beside = rest / box.tiles_across;
        const u32 start = (number - rest * box.tiles_along) * box.tile_along;
        const u32 offset = (rest - beside * box.tiles_across) * box.tile_across;
        first = beside * box.rows;
        many = min(box.rows, box.count - first);
        along = min(box.tile_along, box.along - start);
        across = min(box.tile_across, box.across - offset);
        words = box.unit / kWord;
        const u32 least = kWord < 4 ? 4 / kWord : 1;  // banks have 4 bytes: an odd number of them
        pitch = ((across * words + least - 1) / least | 1) * least;
        source += start * box.from_along + offset * box.from_across;
        target += start * box.to_along + offset * box.to_across;
    }

    __device__ Word* shared() const { return (Word*)shared_memory; }

    __device__ bool wide(const void* at, u32 strides, i64 dense, u32 extent) const {
        return kWord < 16 && words == 1 && dense == kWord && (((u32)(u64)at | strides) & 15) == 0 &&
               extent % kGroup == 0;
    }

    __device__ void load(const char* source) const {
        if (wide(source, box.from_strides, box.from_across, across)) {
            const u32 columns = across / kGroup;
            const Divider by_columns(columns), by_along(along);
            deal<Wide>(
                many * along * columns,
                [&](u32 i, Wide& held) {
                    u32 column, row;
                    const u32 beside = by_along(by_columns(i, column), row);
                    const char* at = from_row(source, beside, row);
                    held = *(const Wide*)(at + column * 16);
                },
                [&](u32 i, const Wide& held) {
                    u32 column;
                    Word* to = shared() + by_columns(i, column) * pitch;
                    const Word* held_words = (const Word*)&held;
#pragma unroll
                    for (u32 k = 0; k < kGroup; ++k) to[column * kGroup + k] = held_words[k];
                });
        } else {
            const u32 columns = across * words;
            const Divider by_columns(columns), by_along(along), by_words(words);
            deal<Word>(
                many * along * columns,
                [&](u32 i, Word& held) {
                    u32 column, row, word;
                    const u32 beside = by_along(by_columns(i, column), row);
                    const char* at = from_row(source, beside, row);
                    const u32 unit = by_words(column, word);
                    held = *(const Word*)(at + unit * box.from_across + word * kWord);
                },
                [&](u32 i, const Word& held) {
                    u32 column;
                    const u32 row = by_columns(i, column);
                    shared()[row * pitch + column] = held;
                });
        }
    }

    __device__ void store(char* target) const {
        if (wide(target, box.to_strides, box.to_along, along)) {
            const u32 columns = along / kGroup;
            const Divider by_columns(columns), by_across(across);
            for (u32 i = threadIdx.x; i < many * across * columns; i += kThreads) {
                u32 column, row;
                const u32 beside = by_across(by_columns(i, column), row);
                const Word* from = shared() + (beside * along + column * kGroup) * pitch + row;
                Wide held;
#pragma unroll
                for (u32 k = 0; k < kGroup; ++k) ((Word*)&held)[k] = from[k * pitch];
                *(Wide*)(to_row(target, beside, row) + column * 16) = held;
            }
        } else {
            const u32 columns = along * words;
            const Divider by_columns(columns), by_across(across), by_words(words);
            for (u32 i = threadIdx.x; i < many * across * columns; i += kThreads) {
                u32 column, row, word;
                const u32 beside = by_across(by_columns(i, column), row);
                const u32 unit = by_words(column, word);
                const Word held = shared()[(beside * along + unit) * pitch + row * words + word];
                *(Word*)(to_row(target, beside, row) + unit * box.to_along + word * kWord) = held;
            }
        }
    }

    __device__ const char* from_row(const char* source, u32 beside, u32 row) const {
        i64 from = (i64)row * box.from_along, to = 0;
        locate(first + beside, from, to);
        return source + from;
    }
    __device__ char* to_row(char* target, u32 beside, u32 row) const {
        i64 from = 0, to = (i64)row * box.to_across;
        locate(first + beside, from, to);
        return target + to;
    }
};

template <class Word>
__device__ inline void copy_tile(u32 number, const char* source, char* target) {
    if (!box.transposed) {
        copy_rows<Word>(number, source, target);
        return;
    }
    const Transposition<Word> tile(number, source, target);
    tile.load(source);
    __syncthreads();
    tile.store(target);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksEach)
    copy_boxes(const __grid_constant__ Argument a) {
    for (u64 at = blockIdx.x; at < a.count; at += gridDim.x) {
        const Tile tile = a.tiles[at];
        __syncthreads();  // nobody is still in the last tile
        for (u32 k = threadIdx.x; k < sizeof(Box) / 16; k += kThreads)
            ((Wide*)&box)[k] = ((const Wide*)(a.boxes + tile.box))[k];
        __syncthreads();
        const char* source = a.bases[box.source] + box.from;
        char* target = a.bases[box.target] + box.to;
        u32 misfit = (u32)(u64)source | (u32)(u64)target | box.unit | box.from_strides | box.to_strides;
        if (box.transposed) misfit |= (u32)(box.from_across | box.to_along);
        if (!(misfit & 15))
            copy_tile<Wide>(tile.number, source, target);
        else if (UNALIGNED && !box.transposed && box.unit >= kLong)
            put_rows_together(tile.number, source, target);
        else if (!(misfit & 7))
            copy_tile<u64>(tile.number, source, target);
        else if (!(misfit & 3))
            copy_tile<u32>(tile.number, source, target);
        else if (!(misfit & 1))
            copy_tile<unsigned short>(tile.number, source, target);
        else
            copy_tile<unsigned char>(tile.number, source, target);
    }
}
