"""Your own kernel that communicates between GPUs: a one-shot all-reduce in Triton.

python -m shardmath run -n 4 examples/one_shot_all_reduce.py

rank 0   x0 --+------+------+     every rank reads everybody's array where it lies,
rank 1   x1 --+------+------+     and adds them up in the order of the ranks
rank 2   x2 --+------+------+
             sum    sum    sum
"""

from __future__ import annotations

import os

import shardmath
from shardmath import symmetric_memory
from shardmath.collectives import all_reduce
from shardmath.errors import BackendUnavailable

try:
    import triton
    import triton.language as tl

    from shardmath import symm_triton as symm
except ImportError as reason:
    print(f"this example needs Triton and a GPU for each rank: {reason}")
    raise SystemExit(0) from None

PROGRAMS = 128  # at most the number of multiprocessors: they wait for peers, so all must run


@triton.jit
def one_shot(memory, target, count, BLOCK: tl.constexpr):
    """Add up all ranks' arrays in symmetric memory; every program has a channel of its own."""
    program = tl.program_id(0)
    arrived = symm.barrier(memory, program)  # before reading what peers wrote
    for start in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < count) & arrived  # the host will say who was late
        total = tl.zeros([BLOCK], tl.float32)
        for rank in range(symm.size(memory)):
            source = tl.multiple_of(symm.peer(memory, rank, tl.bfloat16), 16)
            total += tl.load(source + at, mask=inside, other=0).to(tl.float32)
        tl.store(target + at, total.to(tl.bfloat16), mask=inside)
    symm.barrier(memory, program)  # before reusing what peers may still read


def main() -> None:
    """Check the kernel against the collectives, and time both."""
    device = int(os.environ.get("SHARDMATH_RANK", "0"))
    try:
        context = shardmath.initialize(device)
    except BackendUnavailable as reason:
        print(f"this example needs a GPU for each rank: {reason}")
        return
    import torch

    torch.cuda.set_device(device)
    if context.rank == 0:
        print(f"{context.size} rank(s), bfloat16\n{'elements':>10}  {'one shot':>22}  all_reduce")
    for count in (1, 1_000, 65_536, 1_000_003):
        x = symmetric_memory.empty(count, dtype=torch.bfloat16, device="cuda")
        handle = symmetric_memory.rendezvous(x)
        memory = handle.device_argument()
        total = torch.empty_like(x)
        programs = min(PROGRAMS, triton.cdiv(count, 1024))

        x.copy_(torch.arange(count, device="cuda") % 50 + context.rank)
        one_shot[programs,](memory, total, count, BLOCK=1024)
        handle.synchronize()
        assert torch.equal(total, all_reduce(x)), "the kernel's sum differs"

        ours = microseconds(lambda: one_shot[programs,](memory, total, count, BLOCK=1024))  # noqa: B023
        theirs = microseconds(lambda: all_reduce(x, out=total))  # noqa: B023
        handle.synchronize()
        handle.barrier()  # nobody frees what a neighbour still reads
        if context.rank == 0:
            sent = 2 * (context.size - 1) / context.size * 2 * count / 1e3  # thousands of bytes
            rates = [f"{us:8.1f} us {sent / us:5.1f} GB/s" for us in (ours, theirs)]
            print(f"{count:>10}  {rates[0]:>22}  {rates[1]}")
    shardmath.finalize()


def microseconds(call, repeats: int = 10) -> float:
    """Return the time of one call, of several in a row."""
    import torch

    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


if __name__ == "__main__":
    main()
