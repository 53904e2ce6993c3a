/* An instruction for a core that spins on a word which another core writes. */
#ifndef SHARDMATH_PAUSE_H
#define SHARDMATH_PAUSE_H

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
