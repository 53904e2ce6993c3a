"""Calls that come again with the same arrays: agreed on by a number, and launched as one graph.

Every execution has a number, the same on all ranks. A rank whose call is as it was before, with its
arrays and its workspace where they were, says the number of that execution. Where all ranks say the
same, what they told each other then still holds, and they need not meet once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmath.arrays import library_of
from shardmath.context import DistributedContext
from shardmath.cuda import stream as streams
from shardmath.cuda.graph import Graph
from shardmath.operators.fft import ways
from shardmath.operators.fft.ways import Way
from shardmath.operators.workspace import Workspace
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import stream_of
from shardmath.symmetric.heap import Block

if TYPE_CHECKING:
    from shardmath.operators.fft.call import Call

__all__ = ["Key", "Known", "Memory", "key_of"]

_KEPT = 16

Key = tuple[Any, ...]  # a call, its arrays' addresses and strides, its stream


@dataclass(frozen=True)
class Known:
    """An execution that can be launched again, with the `blocks` of the workspace by name.

    `said` is what this rank said of it to its peers.
    """

    number: int
    said: bytes
    way: Way
    graph: Graph
    blocks: Mapping[str, Block]


class Memory:
    """The latest executions of one context. Get it with `Memory.of`."""

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._count = 0
        self._known: OrderedDict[Key, Known] = OrderedDict()

    @classmethod
    def of(cls, context: DistributedContext) -> Memory:
        """The one of a context."""
        memory: Memory = context.cache("fft memory", lambda: cls(context))
        return memory

    def next(self) -> int:
        """The number of one more execution. To be called where all ranks call it."""
        self._count += 1
        return self._count

    def find(self, key: Key | None) -> Known | None:
        """What can be launched again for this call, if anything."""
        known = None if key is None else self._known.get(key)
        if known is None:
            return None
        workspace = Workspace.of(self._context)
        if any(workspace.held(name) is not block for name, block in known.blocks.items()):
            return None
        return known

    def keep(self, key: Key | None, known: Known) -> None:
        """Remember an execution for its call."""
        if key is None:
            return
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)


def key_of(context: DistributedContext, call: Call) -> Key | None:
    """What makes two calls on this rank the same; None for one that cannot come again.

    Arrays in host memory are carried to another place each time, new results lie elsewhere, and
    what is captured is not launched now. Raises UseAfterFree.
    """
    operand, out = call.operand, call.operand if call.read_options.inplace else call.out
    spec = call.spec
    if not ways.GRAPHS or out is None or spec.device == "cpu":
        return None
    if hasattr(operand, "is_conj") and (operand.is_conj() or operand.is_neg()):
        return None
    library, given = library_of(operand), spec if out is operand else call.out_spec
    assert given is not None, "the spec of out"
    stream = stream_of(context, spec, call.stream)
    if streams.capturing(stream):
        return None
    addresses = library.pointer(operand), library_of(out).pointer(out)
    for array, address in zip((operand, out), addresses, strict=True):
        block = context.heap.find(address)
        if block is not None and block.freed:
            block_of(context, array)  # raises
    return call.description, addresses, spec.strides, given.strides, stream
