"""What is to be redistributed, as every rank sees it.

`describe` turns one rank's call into plain data, and raises for what that rank can see is wrong.
`check` turns all ranks' descriptions into one `Problem`, and raises, the same on every rank, for
what does not fit together. Both are pure: neither touches an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from logging import Logger
from typing import Any, Literal

from shardmath.agreement import require_equal
from shardmath.arrays import ArraySpec
from shardmath.errors import CollectiveMismatch
from shardmath.geometry import Distribution
from shardmath.operators.layouts import bind_layout, infer_layout, result_order
from shardmath.operators.lifecycle import check_blocking, check_logger
from shardmath.redistribution import TransferPlan

__all__ = [
    "Description",
    "Problem",
    "RedistributeOptions",
    "check",
    "check_distributions",
    "describe",
    "misfit",
]


@dataclass(frozen=True)
class RedistributeOptions:
    """`logger` is told what each call plans; without one, a logger below "shardmath" is told of
    each plan once. `blocking`: True, or "auto" for operands in host memory.

    A call that does not block returns when its work has been put on the stream.

    Raises TypeError where `logger` is not a logging.Logger, ValueError for another `blocking`.
    Source: nvmath.distributed.distribution.RedistributeOptions.
    """

    logger: Logger | None = None
    blocking: Literal[True, "auto"] = "auto"

    def __post_init__(self) -> None:
        check_logger(self.logger)
        check_blocking(self.blocking)


@dataclass(frozen=True)
class Problem:
    """The redistribution that all ranks have agreed on.

    `transfer` is what moves; `library`, `space` and `dtype` are the arrays', and `order` the
    memory order of results. `blocking`: a call returns when the result is there.
    """

    transfer: TransferPlan
    library: str
    space: str
    dtype: str
    order: Literal["C", "F"]
    blocking: bool = False

    def explain(self) -> str:
        """What moves, in a few lines."""
        return (
            f"{self.transfer.explain()}\n{self.library} {self.dtype}, results in {self.order} order"
        )

    def __str__(self) -> str:
        return self.explain()


# (operand, input distribution, output distribution, blocking, out), where an array is
# (library, space, dtype, itemsize, local shape, order) and a distribution what it encodes to.
Description = tuple[Any, ...]


def describe(
    operand: ArraySpec,
    input_distribution: Distribution,
    output_distribution: Distribution,
    options: RedistributeOptions,
    out: ArraySpec | None,
) -> Description:
    """The call in plain data."""
    encoded = input_distribution.encode(), output_distribution.encode()
    return _facts(operand), *encoded, options.blocking, None if out is None else _facts(out)


def check_distributions(source: object, target: object) -> None:
    """Raise TypeError for what is not a distribution."""
    for name, given in (("input_distribution", source), ("output_distribution", target)):
        if not isinstance(given, Distribution):
            raise TypeError(f"{name} is a distribution such as Slab.X or a Box, not {given!r}")


def check(descriptions: Sequence[Description]) -> Problem:
    """The problem that all ranks' descriptions make. Raises ValueError where they do not fit."""
    operands, sources, targets, blocking, outs = zip(*descriptions, strict=True)
    for index, what in ((0, "library"), (1, "memory space"), (2, "dtype"), (3, "itemsize")):
        require_equal(f"the {what} of the operand", [operand[index] for operand in operands])
    require_equal("the ndim of the operand", [len(operand[4]) for operand in operands])
    require_equal("options.blocking", blocking)
    src = infer_layout("input_distribution", sources, [operand[4] for operand in operands])
    dst = bind_layout("output_distribution", targets, src.global_shape)
    library, space, dtype, itemsize, *_ = operands[0]
    problem = Problem(
        transfer=TransferPlan(src, dst, itemsize),
        library=library,
        space=space,
        dtype=dtype,
        order=result_order([operand[5] for operand in operands]),
        blocking=blocking[0] is True,
    )
    for rank, out in enumerate(outs):
        wrong = None if out is None else misfit(problem, rank, out)
        if wrong:
            raise CollectiveMismatch(f"rank {rank}: {wrong}")
    return problem


def misfit(problem: Problem, rank: int, out: ArraySpec | Sequence[Any]) -> str | None:
    """What is wrong with `out` on `rank`, in words, or None."""
    library, space, dtype, _, shape, _ = _facts(out) if isinstance(out, ArraySpec) else out
    expected = (
        problem.library,
        problem.space,
        problem.dtype,
        problem.transfer.dst.local_shape(rank),
    )
    given = (library, space, dtype, tuple(shape))
    for what, one, other in zip(
        ("library", "memory space", "dtype", "shape"), given, expected, strict=True
    ):
        if one != other:
            return f"out has {what} {one}, the result has {other}"
    return None


def _facts(spec: ArraySpec) -> tuple[Any, ...]:
    return (spec.library, spec.space, spec.dtype, spec.itemsize, spec.shape, spec.order)
