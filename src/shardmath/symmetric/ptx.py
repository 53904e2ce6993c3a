"""The words of `kernels/symm.cuh` in PTX, as Triton's inline assembly takes them.

Labels and registers are local to the braces, so that each can stand in a program many times.
"""

from __future__ import annotations

__all__ = [
    "ALL_THREADS",
    "LOAD_PACKET",
    "POLL",
    "STORE_PACKET",
    "STORE_RELAXED",
    "STORE_RELEASE",
]

# If $3, then in the first $4 threads: the word at $1 becomes $2. $0 means nothing.
_STORE = """{
    .reg .pred p, q;
    .reg .u32 t;
    mov.u32 t, %tid.x;
    setp.ne.s32 p, $3, 0;
    setp.lt.and.u32 q, t, $4, p;
    @q st.ORDER.sys.global.u64 [$1], $2;
    mov.u32 $0, 0;
}"""
STORE_RELEASE = _STORE.replace("ORDER", "release")
STORE_RELAXED = _STORE.replace("ORDER", "relaxed")
# In the first thread: the 16 bytes at $1 become $2 and $3, in one store. $0 means nothing.
STORE_PACKET = """{
    .reg .pred q;
    .reg .u32 t;
    .reg .b128 whole;
    mov.u32 t, %tid.x;
    setp.eq.u32 q, t, 0;
    mov.b128 whole, {$2, $3};
    @q st.relaxed.sys.global.b128 [$1], whole;
    mov.u32 $0, 0;
}"""
# The 16 bytes at $2, in one load.
LOAD_PACKET = """{
    .reg .b128 whole;
    ld.relaxed.sys.global.b128 whole, [$2];
    mov.b128 {$0, $1}, whole;
}"""
# If $5, what is seen at $1 when it is at least $2, or when $3 nanoseconds have passed, or when the
# word at $4 says that another wait has expired, or the word $7 bytes behind the address at $6, if
# there is one, that nobody writes at $1 any more; else $2. The clock costs more than a poll, and is
# read now and then; what $6 leads to is in the host's memory, and is read more rarely.
POLL = """{
    .reg .pred p;
    .reg .u64 now, end, failed, gone;
    .reg .u32 polls, some;
    mov.u64 $0, $2;
    setp.eq.s32 p, $5, 0;
    @p bra finished;
    mov.u64 end, 0;
    mov.u32 polls, 0;
poll:
    ld.acquire.sys.global.u64 $0, [$1];
    setp.ge.u64 p, $0, $2;
    @p bra finished;
    add.u32 polls, polls, 1;
    and.b32 some, polls, 255;
    setp.ne.u32 p, some, 0;
    @p bra poll;
    mov.u64 now, %globaltimer;
    setp.eq.u64 p, end, 0;
    @p add.u64 end, now, $3;
    setp.gt.u64 p, now, end;
    @p bra finished;
    ld.relaxed.sys.global.u64 failed, [$4];
    setp.ne.u64 p, failed, 0;
    @p bra finished;
    and.b32 some, polls, 4095;
    setp.ne.u32 p, some, 0;
    @p bra poll;
    ld.relaxed.sys.global.u64 gone, [$6];
    setp.eq.u64 p, gone, 0;
    @p bra poll;
    add.u64 gone, gone, $7;
    ld.acquire.sys.global.u64 gone, [gone];
    setp.eq.u64 p, gone, 0;
    @p bra poll;
    ld.acquire.sys.global.u64 $0, [$1];
finished:
}"""
# Whether $1 is set in all threads of the program.
ALL_THREADS = """{
    .reg .pred p, q;
    setp.ne.s32 p, $1, 0;
    barrier.red.and.pred q, 0, p;
    selp.s32 $0, 1, 0, q;
}"""
