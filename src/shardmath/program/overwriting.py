"""Results that lie where operands are: which operands have to be copied before. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmath.handles.operand import Operand
from shardmath.program.steps import Convert, Move, Program, Step, Synchronise, Transform

__all__ = ["overwritten"]


def overwritten(arrays: Mapping[str, Operand], program: Program, rank: int) -> list[str]:
    """The operands that a result may overwrite before all that is read of them has been read.

    One that is read by the first step only, element by element of the result or before there is
    one, and by no peer, is none.
    """
    steps = [step for step in program.steps if not isinstance(step, Synchronise)]
    found = []
    for name, operand in arrays.items():
        if name in program.results:
            continue
        for result, array in program.results.items():
            target = arrays.get(result)
            taken = target is None and program.in_place.get(result) == name
            if not taken and (target is None or not operand.overlaps(target)):
                continue
            looks = array.local_shape(rank), array.dtype
            same = looks == (operand.shape, operand.dtype)
            if target is not None:
                same = _lie_alike(operand, target)
            if not _read_at_once(name, steps, result, in_place=same):
                found.append(name)
                break
    return found


def _lie_alike(one: Operand, other: Operand) -> bool:
    facts = ("address", "shape", "strides", "dtype")
    return all(getattr(one, fact) == getattr(other, fact) for fact in facts)


def _read_at_once(name: str, steps: Sequence[Step], result: str, *, in_place: bool) -> bool:
    """Whether only the first step reads an operand, and writes nothing that is still to be read."""
    first, *others = steps
    if not isinstance(first, Move | Transform | Convert) or name in _read_by(others):
        return False
    if not isinstance(first, Convert) and first.transfer.crosses:
        return False
    return first.target != result or in_place


def _read_by(steps: Sequence[Step]) -> set[str]:
    found: set[str] = set()
    for step in steps:
        for what in ("source", "left", "right"):
            found.add(getattr(step, what, ""))
    return found
