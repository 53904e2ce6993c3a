__device__ inline u64 load_acquire(const u64* word) {
    sched_yield();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
__device__ inline u64 load_relaxed(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
__device__ inline void store_release(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
__device__ inline void store_relaxed(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
__device__ inline void add_for_all(u64* word, u64 value) { __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
__device__ inline void fence() { __threadfence(); }
__device__ inline void await_earlier() {}
__device__ inline Packet load_packet(const Packet* packet) {
    sched_yield();  // which also makes the compiler load anew
    Packet p;
    _mm_store_si128((__m128i*)&p, _mm_load_si128((const __m128i*)packet));
    return p;
}
__device__ inline void store_packet(Packet* packet, Packet p) {
    _mm_store_si128((__m128i*)packet, _mm_load_si128((const __m128i*)&p));
}
__device__ inline u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000 + now.tv_nsec;
}
