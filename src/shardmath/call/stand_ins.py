"""Copies of operands that lie elsewhere in each call: with them, a call that is known is repeated.

What is known of a call holds for the places of its arrays. A program that trains makes new tensors
in each step, wherever its allocator has room, and would make each call as if for the first time. So
operands are copied to arrays of the context's own, the stand-ins, once others that look alike have
lain in a few places. When operands have often been at the same place, the call is made with them,
and is known there from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardmath.arrays import ArraySpec, Library, library_named, library_of
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

CopyAgain = Callable[[_Places], tuple[Any, ...] | None]
"""Copies operands that lie there to the same stand-ins as before, and returns these."""


class StandIns:
    """The stand-ins for operands of one driver's calls."""

    def __init__(self, context: Context, performer: Performer) -> None:
        self._heap, self._performer = context.heap, performer
        self._device = "cpu" if context.team is None else context.team.device.name
        # How often operands were copied, by their specs and then by their places.
        self._copied: LRUCache[_Specs, LRUCache[_Places, int]] = LRUCache(_KEPT)
        self._arrays: LRUCache[tuple[int, ArraySpec], tuple[Any, int]]  # and where they lie
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
        if self._is_to_be_made(specs, places):
            return None
        made = [look and self._made(n, look[0]) for n, look in enumerate(looks)]
        targets = tuple([stand_in and stand_in[1] for stand_in in made])
        self._copy(specs, targets, places)
        operands = tuple([stand_in and stand_in[0] for stand_in in made])
        return arguments._replace(operands=operands), partial(self._again, specs, targets)

    def _again(self, specs: _Specs, targets: _Places, places: _Places) -> tuple[Any, ...] | None:
        """The stand-ins that lie at the targets, to which operands at these places have been
        copied; None where those lie on the heap, or come often, or the stand-ins are no more.
        """
        stand_ins = [spec and self._arrays.find((n, spec)) for n, spec in enumerate(specs)]
        if tuple([stand_in and stand_in[1] for stand_in in stand_ins]) != targets:
            return None
        if any(place is not None and self._heap.find(place) is not None for place in places):
            return None
        if self._is_to_be_made(specs, places):
            return None
        self._copy(specs, targets, places)
        return tuple([stand_in and stand_in[0] for stand_in in stand_ins])

    def _is_plain(self, spec: ArraySpec, address: int) -> bool:
        """Whether an array lies without gaps where this rank computes, in ordinary memory."""
        packed = spec.order != "strided" and spec.size > 0
        return packed and spec.device == self._device and self._heap.find(address) is None

    def _is_to_be_made(self, specs: _Specs, places: _Places) -> bool:
        """Whether the call is to be made with operands at these places; notes it where not."""
        copied = self._copied.made(specs, partial(LRUCache, _PLACES))
        times = copied.find(places)
        if times is None:
            times = _OFTEN if len(copied) < _FIRST else 0
        copied.keep(places, min(times + 1, _OFTEN))
        return times == _OFTEN

    def _made(self, number: int, spec: ArraySpec) -> tuple[Any, int]:
        """The stand-in for operands of that number that look so, and where it lies."""
        return self._arrays.made((number, spec), partial(_made, spec))

    def _copy(self, specs: _Specs, targets: _Places, places: _Places) -> None:
        for spec, target, place in zip(specs, targets, places, strict=True):
            if spec is not None and target is not None and place is not None:
                self._performer.copy(target, place, spec.nbytes)


def _made(spec: ArraySpec) -> tuple[Any, int]:
    """An array that looks so, and where it lies."""
    library: Library = library_named(spec.library)
    array = library.empty(spec.shape, spec.dtype, "F" if spec.order == "F" else "C", spec.device)
    return array, library.pointer(array)
