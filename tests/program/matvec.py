"""A small operator through the driver: y = A x, of any distributions. All of it is here.

x ── move ──► x here      the elements that belong to this rank's columns of A
A, x here ── multiply ──► sums
sums of all ranks ── combine ──► y
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmath.base.collective_call import collective_call
from shardmath.call.driver import call
from shardmath.call.planned import Planned
from shardmath.errors import InvalidRedistributeState
from shardmath.geometry import Layout
from shardmath.operators.facts import ArrayFacts, agreed_facts, require_fits
from shardmath.operators.layouts import bind_layout, infer_layout
from shardmath.operators.redistribute.operation import RedistributeOptions
from shardmath.program.performing import Arguments, Names
from shardmath.program.steps import READ, TAKEN, Combine, Move, Multiply, Program, SplitArray
from shardmath.redistribution import TransferPlan


@dataclass(frozen=True)
class Problem:
    a: Layout
    x: Layout
    y: Layout
    dtype: str
    itemsize: int


class MatrixVector:
    names = Names("matvec", ("a", "x"), ("out",), separate="an operand")
    options = RedistributeOptions

    def describe(self, arrays, words, options):
        a, x, out = (arrays[name] for name in ("a", "x", "out"))
        if (len(a.shape), len(x.shape)) != (2, 1):
            raise ValueError(f"a is a matrix and x a vector, not of shapes {a.shape} and {x.shape}")
        facts = [None if spec is None else ArrayFacts.of(spec) for spec in (a, x, out)]
        return (*facts, *(distribution.encode() for distribution in words))

    def check(self, specs):
        a, x, outs, *encoded = zip(*specs, strict=True)
        a, x = agreed_facts("a", a), agreed_facts("x", x)
        first = a[0]
        if x[0][:4] != first[:4]:
            raise ValueError(f"a is {first.library} {first.dtype} on {first.space}, and x is not")
        layout_a = infer_layout("a", encoded[0], [each.shape for each in a])
        layout_x = infer_layout("x", encoded[1], [each.shape for each in x])
        (m, n), (k,) = layout_a.global_shape, layout_x.global_shape
        if n != k:
            raise ValueError(f"a is {m} x {n}, and x has {k} elements")
        layout_y = bind_layout("y", encoded[2], (m,))
        for rank, out in enumerate(outs):
            if out is not None:
                require_fits(rank, out, first._replace(shape=layout_y.local_shape(rank)))
        return Problem(layout_a, layout_x, layout_y, first.dtype, first.itemsize)

    def program(self, problem, machine, rank):
        a, workspace, moved = problem.a, {}, []
        if not a.disjoint():  # an element of A is to be counted once
            a = Layout.slab(a.global_shape, a.size, axis=0)
            moved.append(Move(TransferPlan(problem.a, a, problem.itemsize), "a", "a here"))
            workspace["a here"] = SplitArray(a, problem.dtype)
        m, n = a.global_shape
        x_here = Layout.product((n,), [a.column(1)], size=a.size)
        sums = Layout.product((m,), [a.column(0)], size=a.size)
        moved.append(Move(TransferPlan(problem.x, x_here, problem.itemsize), "x", "x here"))
        workspace |= {"x here": SplitArray(x_here, problem.dtype)}
        workspace |= {"sums": SplitArray(sums, problem.dtype)}
        left = "a here" if "a here" in workspace else "a"
        steps = (
            READ,
            *moved,
            Multiply(left, "x here", "sums"),
            READ,
            Combine(sums, problem.y, "sums", "out"),
            TAKEN,
        )
        return Program(steps, {"out": SplitArray(problem.y, problem.dtype)}, workspace)

    def explain(self, problem, machine):
        m, n = problem.a.global_shape
        return f"the product of a matrix of {m} x {n} and a vector, {problem.dtype}"


MATVEC = MatrixVector()


@collective_call
def matvec(a, x, distributions, *, out=None, options=None):
    """A x, of distributions (A, x, result). Collective."""
    return call(MATVEC, Arguments((a, x), (out,), tuple(distributions), options))


class MatVec(Planned):
    """The same, planned once."""

    noun = "MatVec"
    invalid = InvalidRedistributeState

    def __init__(self, a, x, distributions):
        super().__init__(MATVEC, Arguments((a, x), (None,), tuple(distributions)))

    @collective_call
    def execute(self, out=None, release_workspace=False):
        return self._execute((out,), None, release_workspace=release_workspace)
