"""Heap memory through which operations of one context pass data, kept from one to the next.

Operations of a context follow one another, and each ends with a barrier. So an operation may write
into the buffers that it takes: no peer reads them any more. For memory that is `kept_for_readers`
the exchange of the next operation takes the place of that barrier.
"""

from __future__ import annotations

from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer

KEPT_STAGING = 64 << 20  # the most bytes that a redistribution leaves to the next one


class Workspace:
    """Heap buffers by name, grown when needed, kept until released."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._buffers: dict[str, Buffer] = {}
        self.version = 0  # rises before buffers come or go

    @classmethod
    def of(cls, context: Context) -> Workspace:
        """The workspace of a context."""
        return context.cache("workspace", lambda: cls(context))

    def buffer(self, name: str, nbytes: int) -> Buffer:
        """At least `nbytes` of memory under that name. Local. Raises HeapExhausted."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.block.nbytes < nbytes:
            self.version += 1
            self._buffers.pop(name, None)  # give its memory back before more is taken
            del buffer
            buffer = self._buffers[name] = self._context.heap.allocate(nbytes)
        return buffer

    def release(self) -> None:
        """Give all buffers back."""
        self.version += 1
        self._buffers.clear()


def kept_for_readers(context: Context, name: str, nbytes: int) -> Buffer:
    """The memory of that name and size, which stays as long as the context. Local.

    No operation waits at its end for peers that read it. It is written again only after the ranks
    have met in another exchange. Raises HeapExhausted.
    """
    buffers: dict[tuple[str, int], Buffer] = context.cache("kept for readers", dict)
    buffer = buffers.get((name, nbytes))
    if buffer is None:
        buffer = buffers[name, nbytes] = context.allocate_shared(nbytes)
        context.keep_for_readers(buffer)
    return buffer


def give_back(context: Context) -> None:
    """Give back the memory that a context keeps for operations, on cores or GPUs. Local."""
    if context.team is None:
        Workspace.of(context).release()
        return
    from shardmath.operators.lanes import Lane

    Lane.release(context)
