"""Fingerprints of arrays, by which repeated calls are recognised.

A program makes the same few calls again and again. Arrays of the same library, type, shape, strides
and device, at the same address and in a heap block of the same extent, have the same fingerprint:
what a call has found out about such arrays still holds. No element is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from shardmath.arrays import libraries, library_of
from shardmath.arrays.spec import ArraySpec
from shardmath.base.compiled import extension
from shardmath.base.lru_cache import LRUCache
from shardmath.base.untraced import is_loaded, may_have_tangents
from shardmath.context.context import Context
from shardmath.symmetric.heap import Block, Heap

V = TypeVar("V")

_NAME = "shardmath.handles._fingerprint"  # of the module that fingerprint.c makes

_FORWARD = "torch.autograd.forward_ad"  # until it is in sys.modules, no tensor has a tangent

Looks = Callable[..., tuple[Any, ...] | None]  # of tuples of arrays: one look for each


class Recognised(LRUCache[Hashable, Any], Generic[V]):
    """A cache of calls, by their words and by the fingerprints of their arrays.

    Which blocks of the heap the arrays lie in is looked up again only where the heap has changed.
    """

    def __init__(self, context: Context, most: int) -> None:
        super().__init__(most)
        self._context = context
        self._heap = context.heap
        self.looks = _looks()

    def key(self, words: Hashable, *arrays: tuple[Any, ...]) -> Hashable | None:
        """The key of a call; None where the call has to check its arrays. Local."""
        try:
            tangents = is_loaded(_FORWARD) and may_have_tangents()
            seen = (_look_at_all if tangents else self.looks)(*arrays)
        except (TypeError, ValueError, RuntimeError):  # no arrays, or none with memory
            return None
        return None if seen is None else (seen, words)

    def find(self, key: Hashable) -> V | None:
        """The value of `key`; None also where an array was freed or lies in another block."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        value: V
        blocks, value = entry[0]
        if blocks.version != self._heap.version and not blocks.holds(self._heap):
            return None
        entry[1] = self._uses = self._uses + 1
        return value

    def keep_for(self, key: Hashable, arrays: tuple[Any, ...], value: V) -> InBlocks | None:
        """Keep a value for arrays like these, and return the object that says whether it holds.

        None where the call has to check its arrays, or they are not where this rank computes.
        """
        context, version = self._context, self._heap.version
        device = "cpu" if context.team is None else context.team.device.name
        try:
            looks = [_look(x) for x in arrays if x is not None]
        except (ValueError, RuntimeError):
            return None
        blocks: list[tuple[int, Block | None]] = []
        for look in looks:
            block = None if look is None else self._heap.find(look[1])
            if look is None or look[0].device != device or (block is not None and block.freed):
                return None
            blocks.append((look[1], block))
        in_blocks = InBlocks(version, blocks, same=context.team is not None)
        self.keep(key, (in_blocks, value))
        return in_blocks


class InBlocks:
    """The blocks in which the arrays of a call lay when the heap had this `version`.

    Other blocks of the same extent serve as well, unless they must be the `same`: where kernels of
    late ranks may write to memory that a call has announced, which the heap knows by its blocks.
    """

    __slots__ = ("_blocks", "_same", "version")

    def __init__(
        self, version: int, blocks: list[tuple[int, Block | None]], *, same: bool = False
    ) -> None:
        self.version = version
        self._blocks, self._same = blocks, same

    def holds(self, heap: Heap) -> bool:
        """Whether the arrays still lie in such blocks, and this rank has freed none of them."""
        version = heap.version
        for address, known in self._blocks:
            block = heap.find(address)
            if block is not known and (self._same or _extent(block) != _extent(known)):
                return False
            if block is not None and block.freed:
                return False
        self.version = version
        return True


def _extent(block: Block | None) -> tuple[int, int] | None:
    return None if block is None else (block.address, block.nbytes)


def _looks() -> Looks:
    """The function that looks at arrays: fingerprint.c's where that was built."""
    built = extension(_NAME)
    if built is None:
        return _look_at_all
    known: set[str] = set()  # libraries whose arrays it can read

    def learn() -> None:
        found = {n: x.attributes() for n, x in libraries().items() if n not in known}
        read = {name: attributes for name, attributes in found.items() if attributes is not None}
        known.update(read)
        built.know(np.ndarray, *read.values())

    def other(x: Any) -> Hashable | None:
        learn()  # a library may have been imported since
        return _look(x)

    learn()
    return partial(built.looks, other)


def _look_at_all(*arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    looks: list[Hashable] = []
    for x in chain(*arrays):
        look = None if x is None else _look(x)
        if x is not None and look is None:
            return None
        looks.append(look)
    return tuple(looks)


def _look(x: Any) -> tuple[ArraySpec, int, bool] | None:
    """The spec of an array, its address, and whether it is writable.

    None where a call has to check it: it is lazy, or may be under a gradient. Raises ValueError or
    RuntimeError for anything that is no array, or has no memory.
    """
    library = library_of(x)
    identity = library.identity(x)
    if identity is None:
        return None
    spec, address = identity
    return spec, address if spec.size else library.anchor(x), library.is_writable(x)
