"""Fingerprints of arrays, by which repeated calls are recognised.

A program makes the same few calls for ever. Arrays of the same library, type, shape, strides and
device, at the same address and in a heap block of the same extent, have the same fingerprint:
whatever a call found out about such arrays still holds. No element is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from shardmath.arrays import Library, library_of
from shardmath.arrays.spec import ArraySpec
from shardmath.base.compiled import extension
from shardmath.base.lru_cache import LRUCache
from shardmath.base.untraced import is_loaded, may_have_tangents
from shardmath.context.context import Context
from shardmath.symmetric.heap import Block, Heap

V = TypeVar("V")

_NAME = "shardmath.handles._fingerprint"  # of the module that fingerprint.c makes

_FORWARD = "torch.autograd.forward_ad"  # until it is in sys.modules, no tensor has a tangent

Looks = Callable[..., tuple[Any, ...] | None]  # of tuples of arrays
Inspected = tuple[Library, ArraySpec, int, Block | None]  # and the address, and the block there


def inspect(context: Context, x: Any) -> Inspected | None:
    """The facts by which a repeated call recognises an array. Local.

    None where the call has to check its arguments: for what is no array, is lazy, was freed, or may
    be under a gradient.
    """
    try:
        library = library_of(x)
        identity = library.identity(x)
    except (ValueError, RuntimeError):
        return None
    if identity is None:
        return None
    spec, address = identity
    block = context.heap.find(address if spec.size else library.anchor(x))
    return None if block is not None and block.freed else (library, spec, address, block)


class Recognised(LRUCache[Hashable, Any], Generic[V]):
    """A cache of calls, by their words, and by how their arrays look and where they lie.

    What a key says of arrays is how they look and where they lie. Which blocks of the heap are
    there is asked anew only where the heap has changed since.
    """

    def __init__(self, context: Context, most: int) -> None:
        super().__init__(most)
        self._context = context
        self._heap = context.heap
        self.looks = _looks()

    def key(self, words: Hashable, *arrays: tuple[Any, ...]) -> Hashable | None:
        """The key of such a call; None for arrays that take a closer look. Local."""
        try:
            tangents = is_loaded(_FORWARD) and may_have_tangents()
            seen = (_look_at_all if tangents else self.looks)(*arrays)
        except (TypeError, ValueError, RuntimeError):  # no arrays, or such as have no memory
            return None
        return None if seen is None else (seen, words)

    def find(self, key: Hashable) -> V | None:
        """The value of that key, or None, also where an array was freed, or lies otherwise."""
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
        """Keep a value for arrays like these, and return what says whether it holds.

        None for arrays that lie elsewhere than where this rank computes.
        """
        context, version = self._context, self._heap.version
        device = "cpu" if context.team is None else context.team.device.name
        blocks: list[tuple[int, Block | None]] = []
        for x in arrays:
            if x is None:
                continue
            inspected = inspect(context, x)
            if inspected is None or inspected[1].device != device:
                return None
            library, spec, address, block = inspected
            blocks.append((address if spec.size else library.anchor(x), block))
        in_blocks = InBlocks(version, blocks, same=context.team is not None)
        self.keep(key, (in_blocks, value))
        return in_blocks


class InBlocks:
    """The blocks in which the arrays of a call lay when the heap had that `version`.

    Others in their places are as good; but they must be the `same` where kernels of late ranks may
    write to what a call has told them of, which the heap knows by its blocks.
    """

    __slots__ = ("_blocks", "_same", "version")

    def __init__(
        self, version: int, blocks: list[tuple[int, Block | None]], *, same: bool = False
    ) -> None:
        self.version = version
        self._blocks, self._same = blocks, same

    def holds(self, heap: Heap) -> bool:
        """Whether they still do, as far as this rank has not freed them."""
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
    """The function that looks at arrays: compiled where that was built."""
    built = extension(_NAME)
    if built is None:
        return _look_at_all
    built.know(np.ndarray)

    def learn() -> None:
        torch = sys.modules.get("torch")
        if torch is not None:
            built.know(torch.Tensor, torch.is_grad_enabled)

    def other(x: Any) -> Hashable | None:
        learn()  # it may have been imported since
        return _look(x)

    learn()
    return partial(built.looks, other)


def _look_at_all(*arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    looks: list[Hashable] = []
    for x in (x for group in arrays for x in group):
        look = None if x is None else _look(x)
        if x is not None and look is None:
            return None
        looks.append(look)
    return tuple(looks)


def _look(x: Any) -> Hashable | None:
    library = library_of(x)
    identity = library.identity(x)
    if identity is None:
        return None
    spec, address = identity
    return spec, address if spec.size else library.anchor(x), library.is_writable(x)
