"""A mistake on one rank, or on all, is the same error on all ranks; then everything still works."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mistakes import heard, listening, misses, no_memory
from shardmath.distribution import (
    BlockCyclic,
    Box,
    ProcessGrid,
    Redistribute,
    Slab,
    redistribute,
)
from shardmath.errors import ShardmathError
from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
from shardmath.operators.workspace import Workspace

SHAPE = (9, 7)
RANKS = 3


def my_slab(rank, dtype="f8"):
    """This rank's three rows."""
    whole = np.arange(SHAPE[0] * SHAPE[1], dtype=dtype).reshape(SHAPE)
    return np.array(whole[3 * rank : 3 * rank + 3])


def my_column(rank):
    """This rank's part of `my_slab` by Slab.Y: 3, 2, 2 columns."""
    whole = np.arange(SHAPE[0] * SHAPE[1], dtype="f8").reshape(SHAPE)
    lo = (0, 3, 5)[rank]
    return np.array(whole[:, lo : (3, 5, 7)[rank]])


def blank(rank):
    return np.full(my_column(rank).shape, -1.0)


def freed():
    array = allocate_symmetric_memory(my_slab(0).shape, np, skip_symmetric_check=True)
    free_symmetric_memory(array)
    return array


def misaligned():
    return np.zeros((3, 7), [("a", "u1"), ("b", "f8")])["b"]


def read_only(rank):
    array = blank(rank)
    array.flags.writeable = False
    return array


def boxes(*bounds):
    """What replaces both distributions: this rank's box in, and Slab.Y out."""
    return lambda rank: {"source": Box(*bounds[rank])}


# name: (rank -> the arguments that are wrong, exception type, words of the message)
MISTAKES = {
    "operand None": (lambda r: {"operand": None}, ValueError, "NoneType"),
    "operand a list": (lambda r: {"operand": [1.0]}, ValueError, "list"),
    "operand a number": (lambda r: {"operand": 3.0}, ValueError, "float"),
    "operand masked": (lambda r: {"operand": np.ma.zeros((3, 7))}, ValueError, "Masked"),
    "operand of objects": (
        lambda r: {"operand": np.empty((3, 7), object)},
        ValueError,
        "dtype('O')",
    ),
    "operand of fields": (
        lambda r: {"operand": np.empty((3, 7), [("a", "f4")])},
        ValueError,
        "x.view('V4')",
    ),
    "operand misaligned": (lambda r: {"operand": misaligned()}, ValueError, "strides"),
    "operand sparse": (
        lambda r: {"operand": torch.zeros(3, 7).to_sparse()},
        ValueError,
        "sparse",
    ),
    "operand freed": (lambda r: {"operand": freed()}, RuntimeError, "freed"),
    "one axis": (lambda r: {"operand": np.zeros(3)}, ValueError, "ndim"),
    "no axis": (lambda r: {"operand": np.zeros(())}, ValueError, "ndim"),
    "one column too many": (lambda r: {"operand": np.zeros((3, 7 + r))}, ValueError, "(3, 8)"),
    "source None": (lambda r: {"source": None}, TypeError, "input_distribution"),
    "source a name": (lambda r: {"source": "X"}, TypeError, "'X'"),
    "source a class": (lambda r: {"source": Slab}, TypeError, "input_distribution"),
    "target None": (lambda r: {"target": None}, TypeError, "output_distribution"),
    "target a pair of boxes": (
        lambda r: {"target": (Box((0,), (1,)), Box((0,), (1,)))},
        TypeError,
        "output_distribution",
    ),
    "source Slab.Z of a matrix": (lambda r: {"source": Slab.Z}, ValueError, "Slab(2)"),
    "target Slab.Z of a matrix": (lambda r: {"target": Slab.Z}, ValueError, "Slab(2)"),
    "target of three axes": (lambda r: {"target": Slab(0, 3)}, ValueError, "Slab(0"),
    "target bound elsewhere": (
        lambda r: {"target": Slab.Y.bind((9, 8))},
        ValueError,
        "(9, 8)",
    ),
    "grid of four": (
        lambda r: {"target": BlockCyclic(ProcessGrid(shape=(4, 1)), (2, 2))},
        ValueError,
        "(4, 1)",
    ),
    "blocking off": (lambda r: {"options": {"blocking": False}}, ValueError, "blocking"),
    "blocking unknown": (lambda r: {"options": {"blocking": "no"}}, ValueError, "'no'"),
    "option unknown": (lambda r: {"options": {"block": True}}, TypeError, "'block'"),
    "options a number": (lambda r: {"options": 5}, TypeError, "options"),
    "logger a name": (lambda r: {"options": {"logger": "root"}}, TypeError, "logger"),
    "stream a name": (lambda r: {"stream": "default"}, TypeError, "stream"),
    "stream a bool": (lambda r: {"stream": True}, TypeError, "stream"),
    "out a list": (lambda r: {"out": [0.0]}, ValueError, "list"),
    "out too small": (lambda r: {"out": blank(r)[:-1]}, ValueError, "shape"),
    "out transposed": (lambda r: {"out": blank(r).T}, ValueError, "shape"),
    "out of float32": (lambda r: {"out": blank(r).astype("f4")}, ValueError, "dtype float32"),
    "out a tensor": (lambda r: {"out": torch.from_numpy(blank(r))}, ValueError, "torch"),
    "out read-only": (lambda r: {"out": read_only(r)}, ValueError, "read-only"),
    "out broadcast": (
        lambda r: {"out": np.lib.stride_tricks.as_strided(blank(r), strides=(0, 8))},
        ValueError,
        "broadcast",
    ),
    "out freed": (lambda r: {"out": freed(), "target": Slab.X}, RuntimeError, "freed"),
    "out the operand": (
        lambda r: {"out": (x := my_slab(r)), "operand": x, "target": Slab.X},
        ValueError,
        "overlaps",
    ),
}

# Mistakes that only a difference between ranks can be.
DIFFERENCES = {
    "dtype float32": (lambda r: {"operand": my_slab(r, "f4")}, ValueError, "float32"),
    "real among complex": (lambda r: {"operand": my_slab(r, "c16")}, ValueError, "complex128"),
    "same size, other dtype": (lambda r: {"operand": my_slab(r, "i8")}, ValueError, "int64"),
    "a tensor": (lambda r: {"operand": torch.zeros(3, 7).double()}, ValueError, "torch"),
    "another source": (lambda r: {"source": Slab.Y}, ValueError, "Slab(1)"),
    "another target": (lambda r: {"target": Slab.X}, ValueError, "Slab(0)"),
    "a box among slabs": (lambda r: {"source": Box((3, 0), (6, 7))}, ValueError, "Box"),
    "a box among targets": (lambda r: {"target": Box((3, 0), (6, 7))}, ValueError, "Box"),
    "blocking differs": (lambda r: {"options": {"blocking": True}}, ValueError, "blocking"),
}

# Boxes that are wrong together.
PARTITIONS = {
    "boxes overlap": (
        boxes(((0, 0), (3, 7)), ((2, 0), (5, 7)), ((6, 0), (9, 7))),
        ValueError,
        "overlap",
    ),
    "boxes leave a gap": (
        boxes(((0, 0), (3, 7)), ((3, 0), (6, 7)), ((7, 0), (10, 7))),
        ValueError,
        "no rank owns",
    ),
    "boxes of other shapes": (
        boxes(((0, 0), (3, 7)), ((3, 0), (7, 7)), ((7, 0), (9, 7))),
        ValueError,
        "rank 1",
    ),
    "boxes of three axes": (
        boxes(*[((0, 0, 0), (3, 7, 1))] * 3),
        ValueError,
        "ndim",
    ),
    "target boxes too small": (
        lambda r: {"target": Box((3 * r, 0), (3 * r + 3, 6))},
        ValueError,
        "no rank owns",
    ),
    "target boxes too large": (
        lambda r: {"target": Box((4 * r, 0), (4 * r + 4, 7))},
        ValueError,
        "global shape",
    ),
}

TABLE = [(name, who) for name in MISTAKES for who in ("rank 1", "all")]
TABLE += [(name, "rank 1") for name in DIFFERENCES]
TABLE += [(name, "all") for name in PARTITIONS]


def arguments(rank):
    return {
        "operand": my_slab(rank),
        "source": Slab.X,
        "target": Slab.Y,
        "options": None,
        "stream": None,
        "out": blank(rank),
    }


def call(operand, source, target, **rest):
    return redistribute(operand, source, target, **rest)


def construct(operand, source, target, *, out, **rest):
    """The same through the class: mistakes in `out` appear at execute."""
    with Redistribute(operand, source, target, **rest) as plan:
        plan.plan()
        return plan.execute(out=out)


def mistaken(context, table, who):
    rank = context.rank
    heard_by_case = {}
    with context:
        for name in table:
            change = {**MISTAKES, **DIFFERENCES, **PARTITIONS}[name][0]
            for form in (call, construct):
                given = arguments(rank)
                wrong = change(rank) if who == "all" or rank == 1 else {}
                if "target" in wrong and ("out" in wrong or name.startswith("target")):
                    given["out"] = None
                if who != "all" and name == "out the operand":
                    given.update(target=Slab.X, out=None)
                if who != "all" and name == "out freed":
                    given.update(target=Slab.X, out=None)
                given.update(wrong)
                kept = [np.array(x) for x in (given["operand"], given["out"]) if plain(x)]
                heard_by_case[f"{name}, {form.__name__}"] = heard(lambda f=form, g=given: f(**g))
                now = [np.array(x) for x in (given["operand"], given["out"]) if plain(x)]
                assert all((a == b).all() for a, b in zip(kept, now, strict=True)), name
                assert (call(**arguments(rank)) == my_column(rank)).all(), name
    return heard_by_case


def plain(x):
    """An ordinary array, whose contents can be compared."""
    return type(x) is np.ndarray and x.dtype.kind == "f" and x.flags.owndata


@pytest.mark.parametrize("who", ["rank 1", "all"])
def test_a_mistake_is_the_same_error_on_all_ranks(contexts, who):
    names = [name for name, whose in TABLE if whose == who]
    everywhere = contexts.run(mistaken, names, who, ranks=RANKS)
    table = {**MISTAKES, **DIFFERENCES, **PARTITIONS}

    def expected(case):
        _, kind, words = table[case.rpartition(",")[0]]
        return kind, words, "" if who == "all" else "rank 1"

    wrong = misses(everywhere, expected)
    assert not wrong, "\n".join(map(str, wrong))


def a_row_too_many(context):
    with context:
        return heard(
            lambda: redistribute(np.zeros((3 + 2 * (context.rank == 1), 7)), Slab.X, Slab.Y)
        )


def test_a_global_shape_that_cannot_be_lists_all_local_shapes(contexts):
    said = contexts.run(a_row_too_many, ranks=RANKS)
    assert said == [said[0]] * RANKS
    assert said[0][0] == "ValueError"
    assert "(5, 7)" in said[0][1]


def test_the_table_is_as_long_as_promised():
    assert len(TABLE) >= 80


# -- the life of an object ----------------------------------------------------------------------

LIFE = {
    "execute before plan": (lambda p, r: p.execute(), "RuntimeError", "plan()"),
    "execute after release": (
        lambda p, r: (p.plan(), p.release_operand(), p.execute()),
        "RuntimeError",
        "released",
    ),
    "execute after free": (
        lambda p, r: (p.plan(), p.free(), p.execute()),
        "RuntimeError",
        "freed",
    ),
    "plan after free": (lambda p, r: (p.free(), p.plan()), "RuntimeError", "freed"),
    "reset after free": (
        lambda p, r: (p.free(), p.reset_operand(my_slab(r))),
        "RuntimeError",
        "freed",
    ),
    "reset to None": (lambda p, r: p.reset_operand(None), "ValueError", "release_operand"),
    "reset to a list": (
        lambda p, r: p.reset_operand([1.0]),
        "ValueError",
        "operand: expected an array",
    ),
    "reset to float32": (
        lambda p, r: p.reset_operand(my_slab(r, "f4")),
        "ValueError",
        "float32",
    ),
    "reset to another shape": (
        lambda p, r: p.reset_operand(np.zeros((4, 7))),
        "ValueError",
        "(4, 7)",
    ),
    "reset to a tensor": (
        lambda p, r: p.reset_operand(torch.zeros(3, 7).double()),
        "TypeError",
        "torch",
    ),
    "reset with a bad stream": (
        lambda p, r: p.reset_operand(my_slab(r), stream="s"),
        "TypeError",
        "stream",
    ),
    "plan with a bad stream": (lambda p, r: p.plan(stream="s"), "TypeError", "stream"),
    "execute with a bad stream": (
        lambda p, r: (p.plan(), p.execute(stream="s")),
        "TypeError",
        "stream",
    ),
    "unchecked reset to another shape": (
        lambda p, r: (p.plan(), p.reset_operand_unchecked(np.zeros((2, 7))), p.execute()),
        "ValueError",
        "(2, 7)",
    ),
    "unchecked reset to None": (
        lambda p, r: (p.plan(), p.reset_operand_unchecked(None), p.execute()),
        "ValueError",
        "None",
    ),
    "execute into the wrong shape": (
        lambda p, r: (p.plan(), p.execute(out=np.zeros((1, 1)))),
        "ValueError",
        "(1, 1)",
    ),
}

# What the ranks without the mistake do meanwhile, where it is another call than the mistaken one.
MEANWHILE = {
    "execute before plan": lambda p, r: p.execute(),
    "plan after free": lambda p, r: p.plan(),
    "plan with a bad stream": lambda p, r: p.plan(),
}


def meanwhile(plan, rank, name):
    if name in MEANWHILE:
        return MEANWHILE[name](plan, rank)
    if name.startswith("reset"):
        return plan.reset_operand(my_slab(rank))
    plan.plan()
    return plan.execute()


def lived(context, name, who):
    rank = context.rank
    with context:
        plan = Redistribute(my_slab(rank), Slab.X, Slab.Y)
        if who == "all" or rank == 1:
            said = heard(lambda: LIFE[name][0](plan, rank))
        else:
            said = heard(lambda: meanwhile(plan, rank, name))
        plan.free()
        plan.free()
        assert (redistribute(my_slab(rank), Slab.X, Slab.Y) == my_column(rank)).all()
    return said


@pytest.mark.parametrize("who", ["rank 1", "all"])
@pytest.mark.parametrize("name", LIFE)
def test_a_mistake_in_the_life_of_an_object(contexts, name, who):
    said = contexts.run(lived, name, who, ranks=RANKS)
    _, kind, words = LIFE[name]
    assert all(each == said[0] for each in said)
    assert said[0][0] == kind
    assert words in said[0][1]
    assert who == "all" or "rank" in said[0][1]


# -- other calls than the peers' ------------------------------------------------------------


def crossed(context, what):
    """Rank 1 does something else; the context is lost, so it is a split one."""
    split = context.split(0)
    rank = context.rank
    with split:
        one = Redistribute(my_slab(rank), Slab.X, Slab.Y)
        two = Redistribute(my_slab(rank), Slab.X, Slab.Y)
        one.plan()
        two.plan()
        other = {
            "another object": two.execute,
            "another method": lambda: one.reset_operand(my_slab(rank)),
            "the function": lambda: redistribute(my_slab(rank), Slab.X, Slab.Y),
            "a barrier": split.barrier,
        }[what]
        return heard(other if rank == 1 else one.execute)


@pytest.mark.parametrize("what", ["another object", "another method", "the function", "a barrier"])
def test_different_calls_are_a_mismatch_on_all_ranks(contexts, what):
    said = contexts.run(crossed, what, ranks=RANKS)
    assert all(each == said[0] for each in said)
    assert said[0][0] == "ValueError"


def exhausted(context, which):
    """Arrays in ordinary memory are so large that they have to be staged."""
    rank, times = context.rank, 1 if which == "result" else 20_000
    slab, column = (np.repeat(each(rank), times, 0) for each in (my_slab, my_column))
    with context:
        operand, out = slab, np.full_like(column, -1) if which == "staging" else None
        if which == "result":
            operand = allocate_symmetric_memory(slab.shape, np)
            operand[...] = slab
        Workspace.of(context).release()  # what earlier calls have left would do
        with no_memory(context):
            said = heard(lambda: redistribute(operand, Slab.X, Slab.Y, out=out))
        assert out is None or (out == -1).all()
        assert (redistribute(operand, Slab.X, Slab.Y) == column).all()
    return said


@pytest.mark.parametrize("which", ["staging", "result"])
def test_want_of_memory_on_one_rank_is_an_error_on_all(contexts, which):
    said = contexts.run(exhausted, which, ranks=RANKS)
    assert said == [("MemoryError", "rank 1: no memory today")] * RANKS


def after_the_end(context):
    split = context.split(0)
    with split:
        plan = Redistribute(my_slab(context.rank), Slab.X, Slab.Y)
        plan.free()
    split.close()
    try:
        plan.execute()
    except ShardmathError as error:
        return type(error).__name__
    return "nothing"


def test_a_freed_object_says_so_after_its_context_has_ended(contexts):
    assert contexts.run(after_the_end, ranks=2) == ["InvalidRedistributeState"] * 2


def told(context):
    with context, listening() as (logger, lines):
        options = {"logger": logger, "blocking": True}
        redistribute(my_slab(context.rank), Slab.X, Slab.Y, options=options)
    assert options == {"logger": logger, "blocking": True}
    return lines


def test_the_logger_is_told_what_is_planned(contexts):
    for lines in contexts.run(told, ranks=RANKS):
        assert len(lines) == 1
        assert "all-to-all" in lines[0]


def test_without_a_context_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="initialize"):
        redistribute(np.zeros(3), Slab.X, Slab.X)
