"""The verbs of `symm.cuh` for Triton: peer, put, get, signal, wait, barrier.

    from shardmath import symm_triton as symm

    @triton.jit
    def kernel(memory, ...):          # memory: handle.device_argument()
        symm.barrier(memory, tl.program_id(0))

The words are those of the header, so a program may meet a kernel of CUDA C++, or a barrier of the
handle, on the same channel. Every verb is one of a whole program; a channel is used by one program
at a time. What a verb waits for is bounded: one that expires returns false, and so do those after
it, until the host has raised its error (`handle.check()`).

Importing this module imports Triton.
"""

# The words that one thread writes are read by all threads of the program: each verb begins with a
# barrier of the program, so that none reads what its thread has yet to write.
from __future__ import annotations

from shardmath.errors import BackendUnavailable
from shardmath.symmetric import structs

try:
    import triton
    import triton.language as tl
except ImportError:
    raise BackendUnavailable("these verbs are for Triton: pip install triton") from None

__all__ = [
    "barrier",
    "get",
    "peer",
    "put",
    "put_signal",
    "put_value",
    "rank",
    "signal",
    "size",
    "wait",
    "wait_signal",
    "wait_value",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_PAD_BYTES = tl.constexpr(structs.PAD_BYTES)
_FAILED = tl.constexpr(structs.FAILED)
_CHANNEL_BYTES = tl.constexpr(structs.CHANNEL_BYTES)
_SIGNAL = tl.constexpr(structs.SIGNAL)
_BARRIER = tl.constexpr(structs.BARRIER)
_ROUND = tl.constexpr(structs.ROUND)
_SENT = tl.constexpr(structs.SENT)
_TAKEN = tl.constexpr(structs.TAKEN)
_CHANNELS = tl.constexpr(structs.TEAM_CHANNELS // 4)
_TIMEOUT = tl.constexpr(structs.TEAM_TIMEOUT // 8)
_STATUS = tl.constexpr(structs.TEAM_STATUS // 8)
_PADS = tl.constexpr(structs.TEAM_PADS // 8)
_BUFFERS = tl.constexpr(structs.TEAM_BUFFERS // 8)
_LATE = tl.constexpr(structs.LATE)
_LATE_BYTES = tl.constexpr(structs.LATE_BYTES)
_OF_BARRIER = tl.constexpr(structs.OF_BARRIER)
_OF_SIGNAL = tl.constexpr(structs.OF_SIGNAL)
_OF_USER = tl.constexpr(structs.OF_USER)
_NO_CHANNEL = tl.constexpr(structs.NO_CHANNEL)
_NO_PEER = tl.constexpr(structs.NO_PEER)
_WARP = tl.constexpr(32)

# The words of symm.cuh in PTX, as inline assembly takes them. Labels and registers are local to the
# braces, so that each can stand in a program many times.
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
_RELEASE = tl.constexpr(_STORE.replace("ORDER", "release"))
_RELAXED = tl.constexpr(_STORE.replace("ORDER", "relaxed"))
# In the first thread: the 16 bytes at $1 become $2 and $3, in one store. $0 means nothing.
_STORE_PACKET = tl.constexpr("""{
    .reg .pred q;
    .reg .u32 t;
    .reg .b128 whole;
    mov.u32 t, %tid.x;
    setp.eq.u32 q, t, 0;
    mov.b128 whole, {$2, $3};
    @q st.relaxed.sys.global.b128 [$1], whole;
    mov.u32 $0, 0;
}""")
# The 16 bytes at $2, in one load.
_LOAD_PACKET = tl.constexpr("""{
    .reg .b128 whole;
    ld.relaxed.sys.global.b128 whole, [$2];
    mov.b128 {$0, $1}, whole;
}""")
# If $5, what is seen at $1 when it is at least $2, or when $3 nanoseconds have passed, or when the
# word at $4 says that another wait has expired, or the word $7 bytes behind the address at $6, if
# there is one, that nobody writes at $1 any more; else $2. The clock costs more than a poll, and is
# read now and then; what $6 leads to is in the host's memory, and is read more rarely.
_POLL = tl.constexpr("""{
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
}""")
# Whether $1 is set in all threads of the program.
_ALL_THREADS = tl.constexpr("""{
    .reg .pred p, q;
    setp.ne.s32 p, $1, 0;
    barrier.red.and.pred q, 0, p;
    selp.s32 $0, 1, 0, q;
}""")


# -- who and where ---------------------------------------------------------------------------------


@triton.jit
def rank(memory):
    """The number of this rank."""
    return tl.load(memory.to(tl.pointer_type(tl.int32), bitcast=True))


@triton.jit
def size(memory):
    """The number of ranks."""
    return tl.load(memory.to(tl.pointer_type(tl.int32), bitcast=True) + 1)


@triton.jit
def peer(memory, number, dtype: tl.constexpr):
    """Where rank `number`'s array lies for this GPU; null where there is no such rank."""
    known = _known(memory, number)
    address = tl.load(memory + _BUFFERS + size(memory) + number, mask=known, other=0)
    return address.to(tl.pointer_type(dtype))


# -- memory ----------------------------------------------------------------------------------------


@triton.jit
def put(peer_memory, own_memory, count, BLOCK: tl.constexpr):
    """Write `count` elements into a peer's memory, BLOCK at a time."""
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(peer_memory + at, tl.load(own_memory + at, mask=at < count), mask=at < count)


@triton.jit
def get(own_memory, peer_memory, count, BLOCK: tl.constexpr):
    """Read `count` elements of a peer's memory, BLOCK at a time."""
    put(own_memory, peer_memory, count, BLOCK)


# -- signals ---------------------------------------------------------------------------------------


@triton.jit
def signal(word, value):
    """Raise an int64 word in a peer's memory: what this program wrote before comes first."""
    tl.debug_barrier()
    _store(_RELEASE, word.to(tl.int64), _int64(value), True, 1)


@triton.jit
def wait(memory, word, target, src):
    """Wait until an int64 word, which rank `src` writes, is at least `target`; whether it was."""
    return _wait_for(memory, word.to(tl.int64), _int64(target), src, _OF_USER, 0)


@triton.jit
def put_signal(memory, dst, channel):
    """Send one more signal to `dst`: what this program has written before comes first.

    Never waits for the peer. False where there is no such rank or channel.
    """
    known = _known_channel(memory, channel) and _known(memory, dst)
    tl.debug_barrier()
    if known:
        n = size(memory)
        sent = _channel(memory, rank(memory), channel) + n * _SENT + 8 * dst
        count = _load(sent) + 1
        inbox = _channel(memory, dst, channel) + n * _SIGNAL + 16 * rank(memory)
        _store(_RELEASE, inbox, count, True, 1)
        _store(_RELAXED, sent, count, True, 1)
    return known


@triton.jit
def wait_signal(memory, src, channel):
    """Wait for one more signal of `src`; what it wrote before is then seen. Whether it came."""
    known = _known_channel(memory, channel) and _known(memory, src)
    arrived = known
    tl.debug_barrier()
    if known:
        n = size(memory)
        own = _channel(memory, rank(memory), channel)
        taken = own + n * _TAKEN + 8 * src
        count = _load(taken) + 1
        inbox = own + n * _SIGNAL + 16 * src
        arrived = _wait_for(memory, inbox, count, src, _OF_SIGNAL, channel)
        _store(_RELAXED, taken, count, arrived, 1)
    return arrived


@triton.jit
def put_value(memory, dst, channel, value):
    """Send one more signal with eight bytes, in one store: nothing else is ordered before it.

    The peer sees the value of the last signal only: send the next when it has taken this one.
    """
    known = _known_channel(memory, channel) and _known(memory, dst)
    tl.debug_barrier()
    if known:
        n = size(memory)
        sent = _channel(memory, rank(memory), channel) + n * _SENT + 8 * dst
        count = _load(sent) + 1
        inbox = _channel(memory, dst, channel) + n * _SIGNAL + 16 * rank(memory)
        _store_packet(inbox, count, _int64(value))
        _store(_RELAXED, sent, count, True, 1)
    return known


@triton.jit
def wait_value(memory, src, channel):
    """Wait for one more signal of `src`: whether it came, and its value."""
    arrived = wait_signal(memory, src, channel)
    value = tl.full([], 0, tl.int64)
    if arrived:
        inbox = _channel(memory, rank(memory), channel) + size(memory) * _SIGNAL + 16 * src
        _, value = _load_packet(inbox)
    return arrived, value


@triton.jit
def barrier(memory, channel):
    """Wait until every rank's program has called it with the same channel; whether all have.

    Before reading what peers wrote, after writing what they will read. After one that expired, the
    next call waits for the same round again.
    """
    known = _known_channel(memory, channel)
    arrived = known
    tl.debug_barrier()
    if known:
        n = size(memory)
        me = rank(memory)
        own = _channel(memory, me, channel)
        round = _load(own + n * _ROUND) + 1  # all copies are equal
        for start in range(0, n, _WARP):
            peers = start + tl.arange(0, _WARP)
            other = (peers < n) & (peers != me)
            pads = tl.load(memory + _PADS + peers, mask=other, other=0)
            offset = _PAD_BYTES + channel * (n * _CHANNEL_BYTES) + n * _BARRIER + 8 * me
            _store(_RELEASE, pads + offset, round + 0 * pads, other, _WARP)
        for start in range(0, n, _WARP):
            peers = start + tl.arange(0, _WARP)
            other = (peers < n) & (peers != me)
            inbox = own + n * _BARRIER + 8 * peers.to(tl.int64)
            seen = _poll(memory, inbox, round + 0 * inbox, peers, other)
            late = other & (seen < round)
            if tl.max(late.to(tl.int32), 0) > 0:
                _expire(memory, peers, _OF_BARRIER, channel, round + 0 * inbox, seen, late, _WARP)
                arrived = False
        arrived = _all_threads(arrived)
        for start in range(0, n, _WARP):
            peers = start + tl.arange(0, _WARP)
            words = own + n * _ROUND + 8 * peers.to(tl.int64)
            _store(_RELAXED, words, round + 0 * words, (peers < n) & arrived, _WARP)
    return arrived


# -- what they are made of -------------------------------------------------------------------------


@triton.jit
def _channel(memory, owner, channel):
    """The address of a channel in the pad of rank `owner`."""
    pad = tl.load(memory + _PADS + owner)
    return pad + _PAD_BYTES + channel * (size(memory) * _CHANNEL_BYTES).to(tl.int64)


@triton.jit
def _known_channel(memory, channel):
    channels = tl.load(memory.to(tl.pointer_type(tl.int32), bitcast=True) + _CHANNELS)
    known = (channel >= 0) & (channel < channels)
    if not known:
        _refuse(memory, _NO_CHANNEL, channels, channel)
    return known


@triton.jit
def _known(memory, number):
    known = (number >= 0) & (number < size(memory))
    if not known:
        _refuse(memory, _NO_PEER, size(memory), number)
    return known


@triton.jit
def _refuse(memory, reason: tl.constexpr, limit, given):
    expected = _int64(limit)
    seen = _int64(given)
    _expire(memory, rank(memory), reason, 0, expected, seen & 0xFFFFFFFF, True, 1)


@triton.jit
def _wait_for(memory, word, target, src, operation: tl.constexpr, channel):
    seen = _poll(memory, word, target, src, True)
    arrived = seen >= target
    if not arrived:
        _expire(memory, src, operation, channel, target, seen, True, 1)
    return _all_threads(arrived)


@triton.jit
def _expire(
    memory,
    src,
    operation: tl.constexpr,
    place,
    expected,
    seen,
    where,
    threads: tl.constexpr,
):
    """Note that the waits for `src`, where they were late, have come to their end."""
    status = tl.load(memory + _STATUS)
    late = status + _LATE + _LATE_BYTES * src
    first = where & (_load(late) == 0)
    _store(_RELAXED, late + 8, expected, first, threads)
    _store(_RELAXED, late + 16, seen, first, threads)
    note = operation + (_int64(place) << 32)
    _store(_RELAXED, late, note + 0 * late, first, threads)
    own = tl.load(memory + _PADS + rank(memory))
    one = _int64(1)
    _store(_RELAXED, own + _FAILED, one, True, 1)
    _store(_RELEASE, status, one, True, 1)


@triton.jit
def _load(word):
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.u64 $0, [$1];", "=l,l", [word], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _load_packet(packet):
    """Both words in one load."""
    return tl.inline_asm_elementwise(
        _LOAD_PACKET,
        "=l,=l,l",
        [packet],
        dtype=(tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store(order: tl.constexpr, word, value, where, threads: tl.constexpr):
    """By the first `threads` threads of the program alone."""
    tl.inline_asm_elementwise(
        order,
        "=r,l,l,r,r",
        [word, value, _flag(where), threads],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store_packet(packet, low, high):
    """Both words in one store, by the first thread."""
    tl.inline_asm_elementwise(
        _STORE_PACKET, "=r,l,l,l", [packet, low, high], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _poll(memory, word, target, src, where):
    """The value at `word`, which `src` writes: at least `target`, or less when the wait has
    expired.
    """
    own = tl.load(memory + _PADS + rank(memory))
    limit = tl.load(memory + _TIMEOUT)
    gone = tl.load(memory + _STATUS) + _LATE + _LATE_BYTES * size(memory)
    return tl.inline_asm_elementwise(
        _POLL,
        "=&l,l,l,l,l,r,l,l",
        [word, target, limit, own + _FAILED, _flag(where), gone, _int64(8 * src)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _all_threads(yes):
    """Whether all threads of the program say so; a barrier of the program."""
    found = tl.inline_asm_elementwise(
        _ALL_THREADS, "=r,r", [_flag(yes)], dtype=tl.int32, is_pure=False, pack=1
    )
    return found != 0


@triton.jit
def _int64(number):
    return tl.full([], 0, tl.int64) + number


@triton.jit
def _flag(yes):
    return (tl.full([], 0, tl.int32) + yes).to(tl.int32)
