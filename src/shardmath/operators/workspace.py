"""Heap memory that operations of one context pass data through, kept from one to the next.

Operations of a context follow one another, and each ends with a barrier of its own: whoever takes
a buffer of the workspace may write into it, since no peer reads it any more.
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


def give_back(context: Context) -> None:
    """Give back the memory that a context, of cores or GPUs, keeps for operations. Local."""
    if context.team is None:
        Workspace.of(context).release()
        return
    from shardmath.operators.lanes import Lane

    Lane.release(context)
