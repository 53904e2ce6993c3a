"""Write into a neighbour's array, and signal that: symmetric memory, put and signal.

python -m shardmath run -n 3 examples/symmetric_memory.py

rank 0          rank 1          rank 2
inbox  <---+    inbox  <---+    inbox <--- from rank 0
           |               |
      from rank 1     from rank 2            each writes to the rank before it
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath import symmetric_memory


def main() -> None:
    """Pass a message round the ring of ranks."""
    context = shardmath.initialize("cpu")
    rank, size = context.rank, context.size
    before, after = (rank - 1) % size, (rank + 1) % size

    # Allocation is local. Rendezvous is collective: from then on each rank reaches all inboxes.
    inbox = symmetric_memory.empty(4, dtype=np.int64)
    handle = symmetric_memory.rendezvous(inbox)

    # A peer's memory is an ordinary array here: writing to it is the message.
    theirs = handle.get_buffer(before, (4,), np.int64)
    theirs[:] = 10 * rank + np.arange(4)
    handle.put_signal(before)  # after writing what the peer will read
    handle.wait_signal(after)  # before reading what the peer wrote

    print(f"rank {rank} was sent {inbox} by rank {after}")
    assert np.array_equal(inbox, 10 * after + np.arange(4))

    handle.barrier()  # nobody leaves while a neighbour still writes
    shardmath.finalize()


if __name__ == "__main__":
    main()
