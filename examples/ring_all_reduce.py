"""Your own kernel that communicates between GPUs: a ring all-reduce in CUDA C++.

The kernel is in ring_all_reduce.cu.

python -m shardmath run -n 4 examples/ring_all_reduce.py

              chunk 0   1   2   3              every rank sends to the one on its right
rank 0 -----> rank 1 -----> rank 2 -----> rank 3 -----> rank 0

first round:  each rank adds the chunk that arrives to its own and sends the sum on: after 3 steps
              every rank has one complete chunk
second round: the complete chunks go around, straight to their places
"""

from __future__ import annotations

import os
from pathlib import Path

import shardmath
from shardmath import symmetric_memory
from shardmath.collectives import all_reduce
from shardmath.errors import BackendUnavailable

SOURCE = Path(__file__).with_suffix(".cu").read_text()
BLOCKS, THREADS = 64, 512


def main() -> None:
    """Check the ring against the collectives, and time both."""
    device = int(os.environ.get("SHARDMATH_RANK", "0"))
    try:
        context = shardmath.initialize(device)
    except BackendUnavailable as reason:
        print(f"this example needs a GPU for each rank: {reason}")
        return
    import torch

    torch.cuda.set_device(device)
    if context.rank == 0:
        print(f"{context.size} rank(s), float32\n{'elements':>10}  {'ring':>22}  all_reduce")
    for count in (1, 1_000, 65_536, 1_000_003, 16_777_216):
        room = -(-count // 4) * 4  # a multiple of 16 bytes, as the elements' start
        both = symmetric_memory.empty(2 * room, dtype=torch.float32, device="cuda")
        handle = symmetric_memory.rendezvous(both)
        ring = handle.kernel(SOURCE, "ring")
        x = both[:count]

        x.copy_(torch.arange(count, device="cuda") % 1000 + context.rank)
        expected = all_reduce(x)
        ring(BLOCKS, THREADS, handle, count, room)
        handle.synchronize()
        assert torch.equal(x, expected), "the ring's sum differs"

        x.zero_()
        ours = microseconds(lambda: ring(BLOCKS, THREADS, handle, count, room))  # noqa: B023
        theirs = microseconds(lambda: all_reduce(x, out=x))  # noqa: B023
        handle.synchronize()
        handle.barrier()  # nobody frees what a neighbour still writes
        if context.rank == 0:
            sent = 2 * (context.size - 1) / context.size * 4 * count / 1e3  # thousands of bytes
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
