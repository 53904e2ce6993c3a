"""Copies of operands that lie elsewhere in each call: with them, a call that is known is repeated.

What is known of a call holds for the places of its arrays. A program that trains makes new tensors
in each step, wherever its allocator has room, and would make each call as if for the first time. So
operands are copied to arrays of the context's own, the stand-ins, once others that look alike have
lain in a few places. When operands have often been at the same place, the call is made with them,
and is known there from then on.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from shardmath.arrays import ArraySpec, Library, library_named, library_of
from shardmath.arrays.spec import Packed
from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.program.performing import Arguments, Performer

_KEPT = 64  # looks of all operands of a call
_ARRAYS = 32  # which layers of a model share: each takes memory for as long as the context
_PLACES = 1024  # of operands that look alike
_FIRST = 4  # of them, in which operands are not copied
_OFTEN = 128  # copies from one place: they take less time than to find out all about a call there

_Specs = tuple[ArraySpec | None, ...]  # of operands, None for those left out
_Places = tuple[int | None, ...]  # where they lie

CopyAgain = tuple[Any, ...]
"""What direct.c needs to copy operands that lie elsewhere to the same stand-ins."""


class _StandIn:
    """An array of the context's own, where it lies, and its size."""

    __slots__ = ("__weakref__", "address", "array", "nbytes")

    def __init__(self, spec: ArraySpec) -> None:
        library: Library = library_named(spec.library)
        order: Packed = "F" if spec.order == "F" else "C"
        self.array = library.empty(spec.shape, spec.dtype, order, spec.device)
        self.address, self.nbytes = library.pointer(self.array), spec.nbytes


class StandIns:
    """The stand-ins for operands of one driver's calls."""

    def __init__(self, context: Context, performer: Performer) -> None:
        self._heap, self._performer = context.heap, performer
        self._device = "cpu" if context.team is None else context.team.device.name
        # How often operands were copied, by their specs and then by their places.
        self._copied: LRUCache[_Specs, dict[_Places, int]] = LRUCache(_KEPT)
        self._arrays: LRUCache[tuple[int, ArraySpec], _StandIn]
        self._arrays = context.cache("stand-ins", partial(LRUCache, _ARRAYS))

    def arguments(self, arguments: Arguments) -> tuple[Arguments, CopyAgain] | None:
        """The arguments with stand-ins, to which the operands have been copied, and what copies
        others that look alike; None for a call to be made with its own operands. Local.

        Operands that peers read in place, or that the call may overwrite, have no stand-ins.
        """
        given = [x for x in arguments.results if x is not None]
        if given or getattr(arguments.options, "inplace", False):
            return None
        try:
            looks = [None if x is None else library_of(x).identity(x) for x in arguments.operands]
        except (TypeError, ValueError, RuntimeError):  # no arrays, or none with memory
            return None
        given = [x for x in arguments.operands if x is not None]
        found = [look for look in looks if look is not None and self._is_plain(*look)]
        nbytes = sum([spec.nbytes for spec, _ in found])
        if len(found) < len(given) or not found:
            return None
        if nbytes > self._performer.most_copied(found[0][0]):
            return None
        specs = tuple([look and look[0] for look in looks])
        places = tuple([look and look[1] for look in looks])
        copied = self._copied.made(specs, dict)
        if _is_often(copied, places):
            return None
        stand_ins = [
            None if spec is None else self._arrays.made((number, spec), partial(_StandIn, spec))
            for number, spec in enumerate(specs)
        ]
        for stand_in, place in zip(stand_ins, places, strict=True):
            if stand_in is not None and place is not None:
                self._performer.copy(stand_in.address, place, stand_in.nbytes)
        operands = tuple([None if one is None else one.array for one in stand_ins])
        to = tuple([None if x is None else (ref(x), x.address, x.nbytes) for x in stand_ins])
        again = to, copied, _FIRST, _OFTEN, _PLACES, self._performer.copier
        return arguments._replace(operands=operands), again

    def _is_plain(self, spec: ArraySpec, address: int) -> bool:
        """Whether an array lies without gaps where this rank computes, in ordinary memory."""
        packed = spec.order != "strided" and spec.size > 0
        return packed and spec.device == self._device and self._heap.find(address) is None


def _is_often(copied: dict[_Places, int], places: _Places) -> bool:
    """Whether a call is to be made with operands at these places; notes it where not."""
    times = copied.get(places)
    if times is None:
        times = _OFTEN if len(copied) < _FIRST else 0
        if len(copied) == _PLACES:
            copied.clear()
    copied[places] = min(times + 1, _OFTEN)
    return times == _OFTEN
