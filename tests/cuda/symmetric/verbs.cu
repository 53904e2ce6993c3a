// Kernels of test_device_verbs.py: what a user could write.
#include "symm.cuh"
using namespace shardmath;

// A rank's array: what it has, and places for what comes by put, by get, and in packets.
struct Places {
    char *source, *landing, *got, *taken;
    Packet* room;

    __device__ Places(char* array, long long nbytes, long long shift) {
        const long long part = (nbytes + shift + 16 + 15) / 16 * 16;
        source = array + shift;
        landing = source + part;
        got = landing + part;
        taken = got + part;
        room = (Packet*)(array + 4 * part);
    }
};

// Every rank sends to the one on its right, and reads what the one on its left has.
extern "C" __global__ void __launch_bounds__(1024)
    verbs(const __grid_constant__ SymmetricMemory m, long long nbytes, long long shift, long long number, u64* out) {
    const int right = (m.rank + 1) % m.size, left = (m.rank + m.size - 1) % m.size;
    const Places mine(m.peer<char>(m.rank), nbytes, shift), theirs(m.peer<char>(right), nbytes, shift);
    const Places other(m.peer<char>(left), nbytes, shift);
    bool fine = put_signal(m, right, 0, theirs.landing, mine.source, nbytes);
    fine &= wait_signal(m, left, 0);
    get(mine.got, other.source, nbytes);
    u64 value = 0;
    for (int i = 0; i < 3; ++i) {  // the answer says that the value was taken
        fine &= put_value(m, right, 1, 1000 * i + m.rank);
        fine &= wait_value(m, left, 1, value);
        fine &= put_signal(m, left, 2) && wait_signal(m, right, 2);
    }
    put_packets(theirs.room, mine.source, nbytes, number);
    fine &= wait_packets(m, left, mine.taken, mine.room, nbytes, number);
    for (int i = 0; i < 20; ++i) fine &= barrier(m, 3 + i % 2);
    if (thread_number() == 0) {
        out[0] = value;
        out[1] = fine;
        out[2] = m.nbytes[left];
    }
}

// The same by its address.
extern "C" __global__ void meet(const SymmetricMemory* m, u64* out) {
    const int right = (m->rank + 1) % m->size, left = (m->rank + m->size - 1) % m->size;
    *m->peer<u64>(right) = 100 + m->rank;
    put_signal(*m, right, 5);
    const bool fine = wait_signal(*m, left, 5);
    if (threadIdx.x == 0) out[0] = fine ? *m->peer<u64>(m->rank) : 0;
    barrier(*m, 6);
}
extern "C" __global__ void meet_by_value(const __grid_constant__ SymmetricMemory m, u64* out) {
    const int right = (m.rank + 1) % m.size, left = (m.rank + m.size - 1) % m.size;
    if (threadIdx.x == 0) *m.peer<u64>(right) = 100 + m.rank;
    put_signal(m, right, 5);
    const bool fine = wait_signal(m, left, 5);
    if (threadIdx.x == 0) out[0] = fine ? *m.peer<u64>(m.rank) : 0;
    barrier(m, 6);
}

// Waits of each kind, for one rank.
extern "C" __global__ void wait_for(const __grid_constant__ SymmetricMemory m, long long kind, long long src,
                                    u64* out) {
    bool came = true;
    u64 value;
    char* own = m.peer<char>(m.rank);
    if (kind == 0) came = barrier(m, 9);
    if (kind == 1) came = wait_signal(m, src, 9);
    if (kind == 2) came = wait_value(m, src, 10, value);
    if (kind == 3) came = wait_packets(m, src, own, (const Packet*)(own + 64), 16, 1);
    if (kind == 4) came = __syncthreads_and(wait(m, (const u64*)(own + 128), 1, src));
    if (thread_number() == 0) out[0] = came;
}
// What they wait for.
extern "C" __global__ void give(const __grid_constant__ SymmetricMemory m, long long kind, long long dst) {
    char* theirs = m.peer<char>(dst);
    if (kind == 0) barrier(m, 9);
    if (kind == 1) put_signal(m, dst, 9);
    if (kind == 2) put_value(m, dst, 10, 1);
    if (kind == 3) put_packets((Packet*)(theirs + 64), m.peer<char>(m.rank), 16, 1);
    if (kind == 4 && thread_number() == 0) signal((u64*)(theirs + 128), 1);
}

// Calls that are refused.
extern "C" __global__ void misuse(const SymmetricMemory* m, long long kind, u64* out) {
    bool fine = false;
    u64 value;
    if (kind == 0) fine = barrier(*m, m->channels);
    if (kind == 1) fine = put_signal(*m, m->size, 0);
    if (kind == 2) fine = wait_signal(*m, -1, 0);
    if (kind == 3) fine = m->peer<char>(m->size + 3) != nullptr;
    if (kind == 4) fine = put_value(*m, 0, 1u << 31, 1);
    if (kind == 5) fine = wait_value(*m, m->size, 0, value);
    if (kind == 6) fine = wait_packets(*m, -2, nullptr, nullptr, 8, 1);
    if (kind == 7) fine = barrier(*m, 0);  // compiled for another number of ranks
    if (thread_number() == 0) out[0] = fine;
}
