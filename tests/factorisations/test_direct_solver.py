"""DirectSolver: made, planned, factorised, solved with, reset, released and freed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from matrices import general, is_small, positive, right_sides, singular

import shardmath
from arrangements import part_of
from mistakes import heard
from shardmath.distribution import Slab
from shardmath.linalg import (
    DirectSolver,
    InvalidDirectSolverState,
    SingularMatrix,
    direct_solver,
)

N, COLUMNS = 13, 3
ROWS = [Slab.X, Slab.X]
KEPT = {"inplace_a": False, "inplace_b": False}


def parts(context, seed=0):
    """This rank's parts of a and b, and of x."""
    a, b = general(N, "float64", seed) + 4 * np.eye(N), right_sides(N, COLUMNS, "float64", seed)
    rank, size = context.rank, context.size
    return [np.array(part_of(x, Slab.X, rank, size)) for x in (a, b, np.linalg.solve(a, b))]


def close(x, want):
    return bool(is_small(x - want, want, n=N, dtype="float64", growth=1e3))


def many_solutions(context):
    """What is right of one life."""
    (a, b, x), (a2, b2, x2) = parts(context), parts(context, 5)
    given, options = (a.copy(), b.copy()), KEPT | {"block_size": 4}
    right = []
    with context, DirectSolver(a, b, distributions=ROWS, options=options) as solver:
        first, *lines = solver.explain().split("\n")
        right.append(first.startswith("DirectSolver of 13 x 13 float64"))
        steps = [line.partition(" of ")[0] for line in lines if " of 13 x 13 float64" in line]
        right.append(steps == ["lu_factor", "lu_solve"])
        right.append(sum(line.startswith("look-ahead: ") for line in lines) == 1)
        solver.plan()
        solver.plan()
        solver.factorize()
        right += [close(solver.solve(), x), close(solver.solve(), x)]
        a[...] = 7  # the factors are kept
        b[...] = 2 * given[1]  # what b is refers to it
        right.append(close(solver.solve(), 2 * x))
        solver.reset_operands(b=np.asfortranarray(given[1]))
        right.append(close(solver.solve(), x))
        solver.release_operands()
        solver.reset_operands(a=a2, b=b2)
        solver.factorize()
        right.append(close(solver.solve(), x2))
        solver.reset_operands_unchecked(a=given[0])
        solver.factorize()
        solver.reset_operands_unchecked(b=given[1])
        right.append(close(solver.solve(), x))
        solver.factorize()
        right.append(close(solver.solve(), x))
    with context, DirectSolver(*given, distributions=ROWS) as solver:
        solver.plan()
        solver.factorize()
        right += [solver.solve() is given[1], close(given[1], x)]
        given[1][...] = 3 * b / 2
        right.append(close(solver.solve(), 3 * x))
    return right, repr(solver)


def test_many_solutions_with_one_matrix(contexts):
    for right, text in contexts.run(many_solutions, ranks=3):
        assert right == [True] * len(right)
        assert "freed" in text


def with_distributed_arrays(context):
    """What is right with arrays that know how they are split, in other distributions."""
    a, b = general(N, "float64", 0) + 4 * np.eye(N), right_sides(N, COLUMNS, "float64", 0)
    want, right = np.linalg.solve(a, b), []
    with context:
        rows, columns = (
            shardmath.from_global(x, distribution=how) for x, how in ((a, Slab.X), (b, Slab.Y))
        )
        with DirectSolver(rows, columns) as solver:
            solver.plan()
            solver.factorize()
            x = solver.solve()
            right += [x is columns, close(x.numpy(), want)]
            other = shardmath.from_global(2 * b, distribution=Slab.Y)
            solver.reset_operands(b=other)
            right += [solver.solve() is other, close(other.numpy(), 2 * want)]
            for wrong in (shardmath.from_global(b, distribution=Slab.X), columns.local):
                kind, text = heard(lambda x=wrong: solver.reset_operands(b=x))[:2]
                right.append(kind == "ValueError" and "was made for b as" in text)
        rows, columns = (
            shardmath.from_global(x, distribution=how) for x, how in ((a, Slab.X), (b, Slab.Y))
        )
        x = direct_solver(rows, columns, options=KEPT)
        right += [x.distribution == columns.distribution, close(x.numpy(), want)]
        right.append(np.array_equal(columns.numpy(), b))
        for given, words in (((rows, columns), {"distributions": ROWS}), ((a, columns), {})):
            with pytest.raises(TypeError, match="two distributed arrays alone"):
                DirectSolver(*given, **words)
    return right


def test_distributed_arrays(contexts):
    for right in contexts.run(with_distributed_arrays, ranks=3):
        assert right == [True] * len(right)


# What each method does in each state: "." returns; else what is raised, on all ranks.
LIFE = """
          plan  factorize  solve  reset_b  reset_both  reset_none  unchecked  release  enter  free
made      .     P          P      .        .           N           .          .        .      .
planned   .     .          F      .        .           N           .          .        .      .
factored  .     .          .      .        .           N           .          .        .      .
solved    .     .          .      .        .           N           .          .        .      .
other_a   .     .          F      .        .           N           .          .        .      .
other_b   .     .          .      .        .           N           .          .        .      .
released  R     R          R      B        .           N           .          .        .      .
freed     X     X          X      X        X           X           X          X        X      .
"""
RAISED = {
    ".": ("nothing", None, ""),
    "P": ("RuntimeError", None, "call plan() before"),
    "F": ("RuntimeError", None, "call factorize() before solve()"),
    "R": ("RuntimeError", None, "released"),
    "B": ("ValueError", None, "both a and b"),
    "N": ("ValueError", None, "nothing to reset"),
    "X": ("RuntimeError", InvalidDirectSolverState, "freed"),
}
STATES = {
    "made": [],
    "planned": ["plan"],
    "factored": ["plan", "factorize"],
    "solved": ["plan", "factorize", "solve"],
    "other_a": ["plan", "factorize", "reset_a"],
    "other_b": ["plan", "factorize", "reset_b"],
    "released": ["plan", "factorize", "release"],
    "freed": ["plan", "factorize", "free"],
}


def life(context):
    """What each method does in each state, and whether x is right when all was made good."""
    a, b, x = parts(context)
    named, *rows = LIFE.split("\n")[1:-1]
    found = {}

    def call(solver, name):
        reset = solver.reset_operands
        methods = {
            "reset_a": lambda: reset(a=a),
            "reset_b": lambda: reset(b=b),
            "reset_both": lambda: reset(a=a, b=b),
            "reset_none": reset,
            "unchecked": lambda: solver.reset_operands_unchecked(a=a, b=b),
            "release": solver.release_operands,
            "enter": solver.__enter__,
        }
        return methods.get(name) or getattr(solver, name)

    with context:
        for row in rows:
            state, *wanted = row.split()
            for method, code in zip(named.split(), wanted, strict=True):
                solver = DirectSolver(a, b, distributions=ROWS, options=KEPT)
                for name in STATES[state]:
                    call(solver, name)()
                kind, error, words = RAISED[code]
                said = heard(call(solver, method))
                right = said[0] == kind and words in said[1]
                if error is not None:
                    with pytest.raises(error):
                        call(solver, method)()
                if "free" not in (method, *STATES[state]):
                    for name in ("reset_both", "plan", "factorize"):
                        call(solver, name)()
                    right = right and close(solver.solve(), x)
                solver.free()
                if not right:
                    found[state, method] = said
    return found


def test_every_method_in_every_state(contexts):
    assert contexts.run(life, ranks=2) == [{}, {}]


def other_operands(context):
    """What is said of other operands, after which the object is as it was."""
    said, (a, b, x) = {}, parts(context)
    own = {"a": a} if context.rank == 1 else {"b": b}
    short = b[1:] if context.rank == 1 else b
    with context, DirectSolver(a, b, distributions=ROWS, options=KEPT) as solver:
        solver.plan()
        for name, given in {
            "one rank: another operand": own,
            "dtype": {"b": b.astype("f4")},
            "one rank: shape": {"b": short},
            "no array": {"b": 3},
            "library": {"b": torch.from_numpy(b)},
        }.items():
            said[name] = heard(lambda given=given: solver.reset_operands(**given))
        solver.factorize()
        solver.reset_operands_unchecked(b=b[:, :1])
        said["unchecked"] = heard(solver.solve)
        solver.reset_operands(b=b)
        assert close(solver.solve(), x)
    return said


def test_other_operands(contexts):
    first, second = contexts.run(other_operands, ranks=2)
    assert first == second
    words = {
        "one rank: another operand": "which operands are reset",
        "dtype": "dtype float32",
        "one rank: shape": "shape",
        "library": "torch",
        "unchecked": "shape",
    }
    for name, (kind, text) in first.items():
        assert kind == "ValueError" and words.get(name, "") in text, (name, kind, text)


def mistaken(context):
    """What is said of wrong arguments and matrices, after which operands are as they were."""
    said, own = {}, context.rank == 1
    a, b, x = parts(context)
    rank, size = context.rank, context.size
    bad = np.array(part_of(singular(N), Slab.X, rank, size))
    nan = np.where(b == b[0, 0], np.nan, b)

    def call(a=a, b=b, distributions=ROWS, **options):
        return lambda: direct_solver(a, b, distributions=distributions, options=options)

    table = {
        "singular": (call(a=bad), bad),
        "not finite": (call(a=np.where(a > 1, np.inf, a)), a),
        "b not finite": (call(b=nan, inplace_a=False), nan),
        "one distribution": (call(distributions=[Slab.X]), a),
        "three distributions": (call(distributions=[*ROWS, Slab.X]), a),
        "no distributions": (call(distributions=Slab.X), a),
        "not square": (call(a=a[:, :5]), a),
        "dtype of b": (call(b=b.astype("c16")), b),
        "integers": (call(a=np.ones_like(a, dtype=int)), a),
        "one rank: in place": (call(inplace_b=own), a),
        "in place": (call(inplace_a=3), a),
        "unknown option": (call(inplace=True), a),
        "blocking": (call(blocking=False), a),
        "block size": (call(block_size=-1), a),
    }
    with context:
        for name, (action, operand) in table.items():
            before = operand.copy()
            said[name] = heard(action)
            if name == "singular":  # as nvmath.distributed has it, and as NumPy
                for kind in (SingularMatrix, RuntimeError, np.linalg.LinAlgError):
                    with pytest.raises(kind):
                        action()
            assert operand.tobytes() == before.tobytes(), name
            assert close(call(**KEPT)(), x), name
        said["stream"] = heard(lambda: direct_solver(a, b, distributions=ROWS, stream="one"))
    return said


def test_mistakes_of_direct_solvers(contexts):
    first, second = contexts.run(mistaken, ranks=2)
    assert first == second
    words = {
        "singular": f"pivot {N} is 0",
        "not finite": "a has NaN",
        "b not finite": "b has NaN",
        "one distribution": "two",
        "three distributions": "two",
        "not square": "13 x 5",
        "dtype of b": "complex128",
        "one rank: in place": "inplace_b",
        "unknown option": "no field 'inplace'",
        "blocking": "blocking is True",
    }
    assert {name: words.get(name, "") in said[1] for name, said in first.items()} == dict.fromkeys(
        first, True
    )
    types = {name for name, (kind, _) in first.items() if kind == "TypeError"}
    assert types == {"integers", "unknown option", "stream"}
    assert {kind for name, (kind, _) in first.items() if name not in types} == {"ValueError"}


def elsewhere(context):
    """An object computes in the context that it was made in, and tells its logger what it plans."""
    lines, logger, handler = [], logging.getLogger("solver"), logging.Handler()
    logger.setLevel(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    a, b = positive(4, "float32"), np.ones(4, "float32")
    alone = context.split(context.rank)
    with alone:
        solver = DirectSolver(a, b, distributions=ROWS, options=dict(KEPT, logger=logger))
    with context:
        solver.plan()
        solver.factorize()
        x = solver.solve()
        solver.free()
    alone.close()
    logger.removeHandler(handler)
    return bool(np.allclose(a @ x, 1, atol=1e-4)), [line.split("\n")[0] for line in lines]


def test_a_context_and_a_logger(contexts):
    for right, lines in contexts.run(elsewhere, ranks=2):
        assert right
        assert [line.partition(" on ")[0] for line in lines] == ["DirectSolver of 4 x 4 float32"]


def test_names_are_those_of_the_package():
    assert shardmath.errors.InvalidDirectSolverState is InvalidDirectSolverState
