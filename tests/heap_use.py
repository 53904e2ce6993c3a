"""How much of the heap is in use, whatever other tests have left behind."""

from __future__ import annotations

import gc

__all__ = ["settled_use"]


def settled_use(context):
    """Bytes of the heap in use, once what all ranks have dropped is back. Collective.

    A group that another test has dropped is garbage in a cycle with its parent, and the memory that
    its ranks shared comes back when the last of them has collected it: at any time, if not now.
    """
    gc.collect()
    for _ in range(2):  # the first sets the fences of GPUs, the second carries the marks
        _finish(context)
        context.barrier()
    assert context.heap.used >= 0  # which sets fences for what no peer knows
    _finish(context)
    return context.heap.used


def _finish(context):
    if context.team is not None:
        context.team.device.synchronize()
