"""DirectSolver: made, planned, factorised, solved with, reset, released and freed."""

from __future__ import annotations

import logging

import numpy as np
from matrices import general, is_small, positive, right_sides, singular

import shardmath
from arrangements import part_of
from mistakes import heard
from shardmath.distribution import Slab
from shardmath.linalg import DirectSolver, InvalidDirectSolverState, direct_solver

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
    given = a.copy(), b.copy()
    right = []
    with context, DirectSolver(a, b, distributions=ROWS, options=KEPT) as solver:
        right.append(solver.explain().startswith("DirectSolver of 13 x 13 float64"))
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


def out_of_order(context):
    said, (a, b, x) = {}, parts(context)
    with context:
        solver = DirectSolver(a, b, distributions=ROWS, options=KEPT)
        said["factorize, not planned"] = heard(solver.factorize)
        said["solve, not planned"] = heard(solver.solve)
        solver.plan()
        said["solve, not factorised"] = heard(solver.solve)
        solver.factorize()
        solver.reset_operands(a=a)
        said["solve, a reset"] = heard(solver.solve)
        solver.factorize()
        assert close(solver.solve(), x)
        said["nothing to reset"] = heard(solver.reset_operands)
        own = {"a": a} if context.rank == 1 else {"b": b}
        said["one rank: another operand"] = heard(lambda: solver.reset_operands(**own))
        said["another dtype"] = heard(lambda: solver.reset_operands(b=b.astype("f4")))
        said["one rank: shape"] = heard(
            lambda: solver.reset_operands(b=b[1:] if context.rank == 1 else b)
        )
        said["no array"] = heard(lambda: solver.reset_operands(b=3))
        solver.reset_operands_unchecked(b=b[:, :1])
        said["unchecked"] = heard(solver.solve)
        solver.release_operands()
        solver.release_operands()
        for name in ("plan", "factorize", "solve"):
            said[f"{name}, released"] = heard(getattr(solver, name))
        said["a alone"] = heard(lambda: solver.reset_operands(a=a))
        solver.reset_operands(a=a, b=b)
        solver.factorize()
        assert close(solver.solve(), x)
        solver.free()
        solver.free()
        for name in ("plan", "factorize", "solve", "reset_operands", "release_operands"):
            said[f"{name}, freed"] = heard(getattr(solver, name))
        try:
            solver.solve()
        except InvalidDirectSolverState as error:
            said["freed"] = "RuntimeError", type(error).__name__
    return said


def test_steps_out_of_order(contexts):
    first, second = contexts.run(out_of_order, ranks=2)
    assert first == second
    words = {
        "factorize, not planned": "call plan() before factorize()",
        "solve, not planned": "call plan() before solve()",
        "solve, not factorised": "call factorize() before solve()",
        "solve, a reset": "call factorize() before solve()",
        "nothing to reset": "nothing to reset",
        "one rank: another operand": "which operands are reset",
        "another dtype": "dtype float32",
        "a alone": "both a and b",
        "unchecked": "shape",
        "freed": "InvalidDirectSolverState",
    }
    for name, (kind, text) in first.items():
        operands = ("nothing to reset", "one rank", "another dtype", "no array", "a alone")
        is_value = name.startswith(operands) or name == "unchecked"
        assert kind == ("ValueError" if is_value else "RuntimeError"), (name, kind, text)
        ending = name.partition(", ")[2]
        assert words.get(name, ending if ending in ("released", "freed") else "") in text, name


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
