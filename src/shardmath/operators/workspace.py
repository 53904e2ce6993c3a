"""Heap memory that operations of one context pass data through, kept from one to the next.

Operations of a context follow one another, and each ends with a barrier of its own: whoever takes
a buffer of the workspace may write into it, since no peer reads it any more. For what is
`kept_for_readers` the exchange of the next operation is that barrier.
"""

from __future__ import annotations

from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer

KEPT_STAGING = 64 << 20  # bytes that redistributions without an object leave to the next


class Workspace:
    """Heap buffers by name, grown when needed, kept until released."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._buffers: dict[str, Buffer] = {}
        self.version = 0  # rises before buffers come or go

    @classmethod
    def of(cls, context: Context) -> Workspace:
        """The one of a context."""
        return context.cache("workspace", lambda: cls(context))

    def buffer(self, name: str, nbytes: int) -> Buffer:
        """At least `nbytes` of memory under that name. Local. Raises HeapExhausted."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.block.nbytes < nbytes:
            self.version += 1
            self._buffers.pop(name, None)  # its memory first, then more
            del buffer
            buffer = self._buffers[name] = self._context.heap.allocate(nbytes)
        return buffer

    def release(self) -> None:
        """Give all buffers back."""
        self.version += 1
        self._buffers.clear()


def kept_for_readers(context: Context, name: str, nbytes: int) -> Buffer:
    """The memory of that name and so many bytes, which stays while the context does. Local.

    No operation waits at its end for the peers that read it: what they may still be reading is
    written only when the ranks have met in another exchange. Raises HeapExhausted.
    """
    buffers: dict[tuple[str, int], Buffer] = context.cache("kept for readers", dict)
    buffer = buffers.get((name, nbytes))
    if buffer is None:
        buffer = buffers[name, nbytes] = context.allocate_shared(nbytes)
        context.keep_for_readers(buffer)
    return buffer


def give_back(context: Context) -> None:
    """Give back the memory that a context, of cores or GPUs, keeps for operations. Local."""
    if context.team is None:
        Workspace.of(context).release()
        return
    from shardmath.operators.lanes import Lane

    Lane.release(context)
