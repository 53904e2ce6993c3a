"""Results that lie where operands are: which operands have to be copied before. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmath.handles.operand import Operand
from shardmath.program.arithmetic import buffers_of
from shardmath.program.steps import Combine, Convert, Move, Program, Step, Synchronise, Transform


def overwritten(arrays: Mapping[str, Operand], program: Program, rank: int) -> list[str]:
    """The operands that a result may overwrite before all that is read of them has been read.

    One that is read by the first step only, element by element of the result or before there is
    one, and by no peer, is none.
    """
    steps = [step for step in program.steps if not isinstance(step, Synchronise)]
    names = []
    for name, operand in arrays.items():
        if name in program.results or not _is_read(name, steps, rank):
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
            if not _read_at_once(name, steps, result, rank, in_place=same):
                names.append(name)
                break
    return names


def _lie_alike(one: Operand, other: Operand) -> bool:
    facts = ("address", "shape", "strides", "dtype")
    return all(getattr(one, fact) == getattr(other, fact) for fact in facts)


def _is_read(name: str, steps: Sequence[Step], rank: int) -> bool:
    """Whether anything that `rank` has in an operand is read, by itself or by a peer."""
    return any(
        name in buffers_of(step)
        for step in steps
        if not (isinstance(step, Move) and step.source == name and not step.transfer.out_of(rank))
    )


def _stays_in_place(step: Move, rank: int) -> bool:
    """Whether all that moves to `rank` is its own, and goes where it was."""
    return all(
        move.src == rank
        and all(run.count == 1 and run.src_start == run.dst_start for run in move.runs)
        for move in step.transfer.into(rank)
    )


def _read_at_once(
    name: str, steps: Sequence[Step], result: str, rank: int, *, in_place: bool
) -> bool:
    """Whether only the first step reads an operand, and writes nothing that is still to be read."""
    first, *others = steps
    if isinstance(first, Combine) and first.reduction and first.held.size == 1 and in_place:
        return not others
    if not isinstance(first, Move | Transform | Convert) or name in _read_by(others):
        return False
    stays = isinstance(first, Move) and _stays_in_place(first, rank)
    if stays and in_place and (first.source, first.target) == (name, result):
        return True
    if not isinstance(first, Convert) and first.transfer.crosses:
        return False
    return first.target != result or in_place


def _read_by(steps: Sequence[Step]) -> set[str]:
    names: set[str] = set()
    for step in steps:
        for what in ("source", "left", "right"):
            names.add(getattr(step, what, ""))
    return names
