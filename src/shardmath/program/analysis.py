"""What cores have to know of a program before they perform it. Pure.

Which moves are parts of products, which operands a result may overwrite too early, which workspace
peers read, and whether a rank waits at the end for its readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardmath.handles.operand import Operand
from shardmath.local.epilog import MatmulEpilog
from shardmath.program.offers import Offers
from shardmath.program.steps import (
    Arrive,
    Axpby,
    Combine,
    Convert,
    Finish,
    Move,
    Multiply,
    Product,
    Program,
    Step,
    Synchronise,
    Transform,
    buffers_of,
)
from shardmath.redistribution import TransferPlan


def fused(program: Program) -> Program:
    """The program, in which moves that bring nothing but factors of products are parts of these."""
    products = [step for step in program.steps if isinstance(step, Multiply)]
    factors = {name for product in products for name in (product.left, product.right)}
    used = Counter(name for step in program.steps for name in buffers_of(step))
    used.subtract(name for product in products for name in buffers_of(product))
    moved = {
        step.target: step
        for step in program.steps
        if isinstance(step, Move)
        and step.target in factors
        and used[step.target] == 1  # by the move
        and _is_factor(step, program)
    }
    steps: list[Step] = []
    for index, step in enumerate(program.steps):
        if isinstance(step, Multiply):
            rounding = program.steps[index + 1 : index + 3]
            only = step.target in program.scratch and _rounds(step.target, rounding)
            moves = moved.get(step.left), moved.get(step.right)
            steps.append(Product(step, moves, rounding if only else ()))
        elif isinstance(step, Move) and step.target in moved:
            continue
        elif not (steps and isinstance(steps[-1], Product) and step in steps[-1].rounding):
            steps.append(step)
    workspace = {name: x for name, x in program.workspace.items() if name not in moved}
    return replace(program, steps=tuple(steps), workspace=workspace)


def _is_factor(move: Move, program: Program) -> bool:
    """Whether a move brings a matrix into workspace."""
    is_matrix = isinstance(move.transfer, TransferPlan) and move.transfer.dst.ndim == 2
    return is_matrix and move.target in program.workspace


def _rounds(sums: str, steps: Sequence[Step]) -> bool:
    """Whether these two steps only multiply the sums by a number, and round them."""
    if len(steps) != 2:
        return False
    scaled, finished = steps
    return (
        isinstance(scaled, Axpby)
        and (scaled.target, scaled.addend) == (sums, "")
        and isinstance(finished, Finish)
        and (finished.source, finished.epilog) == (sums, MatmulEpilog.DEFAULT)
    )


# -- order -----------------------------------------------------------------------------------------


def agreed_at(program: Program) -> int:
    """The number of steps before the ranks agree, which is the first synchronisation."""
    kinds = [isinstance(step, Synchronise) for step in program.steps]
    return kinds.index(True) if True in kinds else 0


def staged(program: Program) -> set[str]:
    """The memory of workspace that peers read, and that is written only once the ranks agree."""
    memory = {name: array.memory or name for name, array in program.workspace.items()}
    early = {name for step in program.steps[: agreed_at(program)] for name in buffers_of(step)}
    read = {memory[name] for name in program.published if name in memory}
    return read - {memory[name] for name in early if name in memory}


def waits_at_end(program: Program, offers: Offers) -> bool:
    """Whether a rank waits for its peers at the end of a program that ends with a synchronisation.

    It does if it has arrived there before, as an `Arrive` says; or if peers may still read what
    they read since the synchronisation before: since its `Arrive`, if there was one.
    """
    steps = program.steps[:-1]
    places = [n for n, step in enumerate(steps) if isinstance(step, Synchronise | Arrive)]
    arrived = [isinstance(steps[place], Arrive) for place in places]
    if arrived[-1:] == [True]:
        return True
    behind = steps[places[-2] if arrived[-2:-1] == [True] else places[-1] :] if places else steps
    return offers.wait(replace(program, steps=behind).published)


# -- overlap ---------------------------------------------------------------------------------------


def overwritten(arrays: Mapping[str, Operand], program: Program, rank: int) -> list[str]:
    """The operands that a result may overwrite before they have been read.

    An operand is safe if only the first step reads it, and no peer does: element by element of the
    result, or before there is a result.
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
                same = operand == target
            if not _read_at_once(name, steps, result, rank, in_place=same):
                names.append(name)
                break
    return names


def _is_read(name: str, steps: Sequence[Step], rank: int) -> bool:
    """Whether this rank or a peer reads anything of the operand of `rank`."""
    return any(
        name in buffers_of(step)
        for step in steps
        if not (isinstance(step, Move) and step.source == name and not step.transfer.out_of(rank))
    )


def _stays_in_place(step: Move, rank: int) -> bool:
    """Whether all that moves to `rank` is its own, and stays where it is."""
    return all(
        move.src == rank
        and all(run.count == 1 and run.src_start == run.dst_start for run in move.runs)
        for move in step.transfer.into(rank)
    )


def _read_at_once(
    name: str, steps: Sequence[Step], result: str, rank: int, *, in_place: bool
) -> bool:
    """Whether only the first step reads an operand, and overwrites nothing that is still read."""
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
