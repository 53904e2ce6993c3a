"""What ranks compare of an array: plain data in their descriptions, and how it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardmath.arrays import ArraySpec
from shardmath.context.agreement import require_equal
from shardmath.errors import CollectiveMismatch

# Fields, by their names in messages.
_COMPARED = {"library": "library", "memory space": "space", "dtype": "dtype"}


class ArrayFacts(NamedTuple):
    """One rank's array. Peers send it as a plain tuple."""

    library: str
    space: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    order: str

    @classmethod
    def of(cls, spec: ArraySpec) -> ArrayFacts:
        """The facts of an array with this spec."""
        return cls(spec.library, spec.space, spec.dtype, spec.itemsize, spec.shape, spec.order)

    def misfit(self, name: str, result: ArrayFacts) -> str:
        """How this array, given as `name`, differs from the result it is for; "" if it fits."""
        for what, field in {**_COMPARED, "shape": "shape"}.items():
            given, expected = getattr(self, field), getattr(result, field)
            if given != expected:
                return f"{name} has {what} {given}, the result has {expected}"
        return ""


def agreed_facts(name: str, sent: Sequence[Any]) -> list[ArrayFacts]:
    """All ranks' facts of an array. Raises CollectiveMismatch where ranks have other libraries,
    memory, types or numbers of axes.
    """
    of_ranks = [ArrayFacts(*facts) for facts in sent]
    for what, field in {**_COMPARED, "itemsize": "itemsize"}.items():
        require_equal(f"the {what} of {name}", [getattr(facts, field) for facts in of_ranks])
    require_equal(f"the ndim of {name}", [len(facts.shape) for facts in of_ranks])
    return of_ranks


def require_fits(rank: int, out: Any, result: ArrayFacts) -> None:
    """Raise CollectiveMismatch unless `out`, as `rank` has sent its facts, can hold the result."""
    wrong = ArrayFacts(*out).misfit("out", result)
    if wrong:
        raise CollectiveMismatch(f"rank {rank}: {wrong}")
