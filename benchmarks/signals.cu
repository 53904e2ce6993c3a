// The kernels of gpu_signals.py: round trips between two ranks, and barriers in a row, timed by the GPU.
#include "symm.cuh"
using namespace shardmath;

constexpr int kWarmUp = 20;

enum Way : int { kValue, kSignalAlone, kPutSignal, kPackets };

// One way takes half of a round trip. `out`: nanoseconds in all, and whether all signals arrived.
extern "C" __global__ void __launch_bounds__(1024)
    ping_pong(const __grid_constant__ SymmetricMemory m, long long way, long long turns, long long nbytes, u64* out) {
    const int peer = 1 - m.rank;
    const u64 room = (2 * nbytes + 15) / 16 * 16;  // data to send, received data, and packets
    char* mine = m.peer<char>(m.rank);
    char* theirs = m.peer<char>(peer);
    Packet* const packets = (Packet*)(mine + 2 * room);
    Packet* const to = (Packet*)(theirs + 2 * room);
    u64 start = 0, number = out[2];
    bool came = true;
    for (long long turn = -kWarmUp; turn < turns && came; ++turn) {
        if (turn == 0) start = nanoseconds();
        ++number;
        for (int half = 0; half < 2; ++half) {
            u64 value;
            if (half == m.rank) {
                if (way == kValue) put_value(m, peer, 0, number);
                if (way == kSignalAlone) put_signal(m, peer, 0);
                if (way == kPutSignal) put_signal(m, peer, 0, theirs + room, mine, nbytes);
                if (way == kPackets) put_packets(to, mine, nbytes, number);
            } else {
                if (way == kValue)
                    came = wait_value(m, peer, 0, value) && value == number;
                else if (way == kPackets)
                    came = wait_packets(m, peer, mine + room, packets, nbytes, number);
                else
                    came = wait_signal(m, peer, 0);
            }
        }
    }
    if (thread_number() == 0) {
        out[0] = nanoseconds() - start;
        out[1] = came;
        out[2] = number;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    barriers(const __grid_constant__ SymmetricMemory m, long long turns, u64* out) {
    u64 start = 0;
    bool came = true;
    for (long long turn = -kWarmUp; turn < turns && came; ++turn) {
        if (turn == 0) start = nanoseconds();
        came = barrier(m, 1);
    }
    if (thread_number() == 0) {
        out[0] = nanoseconds() - start;
        out[1] = came;
    }
}
