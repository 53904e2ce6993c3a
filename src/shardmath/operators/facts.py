"""What ranks compare of an array: plain data in their descriptions, and the checks of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardmath.arrays import ArraySpec
from shardmath.context.agreement import require_equal
from shardmath.errors import CollectiveMismatch

# By the names that messages have.
_COMPARED = {"library": "library", "memory space": "space", "dtype": "dtype"}


class ArrayFacts(NamedTuple):
    """One rank's array. What a peer has sent is a plain tuple of the same."""

    library: str
    space: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    order: str

    @classmethod
    def of(cls, spec: ArraySpec) -> ArrayFacts:
        """Those of a spec."""
        return cls(spec.library, spec.space, spec.dtype, spec.itemsize, spec.shape, spec.order)

    def misfit(self, name: str, result: ArrayFacts) -> str:
        """How the array given as `name` differs from the result that it is for; "" if it fits."""
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
    """Raise CollectiveMismatch where `out`, as a rank has sent it, is not what its result is."""
    wrong = ArrayFacts(*out).misfit("out", result)
    if wrong:
        raise CollectiveMismatch(f"rank {rank}: {wrong}")
