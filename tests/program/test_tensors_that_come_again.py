"""Calls on torch's tensors that came again, made by compiled code before their function is entered.

Then something is otherwise, on all ranks: torch is to know of the call, or the tensors are others
that lie where those did. What is wrong is named.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from counted import calls_before
from mortal import Raised, run_job
from shardmath.arrays import library_named
from shardmath.arrays.base import host_array
from shardmath.base.collective_call import this_thread
from shardmath.base.compiled import extension
from shardmath.base.recorder import operations, this_process
from shardmath.collectives import all_reduce, reduce_scatter
from shardmath.context import startup
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.errors import RankFailure, UseAfterFree
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory as free
from shardmath.linalg.advanced import Matmul, matmul
from shardmath.tools.kernels import realtime_minus_monotonic, works_of

RANKS = 2
VARIABLES = {"SHARDMATH_TIMEOUT": "100", "SHARDMATH_NOTICE": "100"}
WAYS = {"compiled": VARIABLES, "in Python": VARIABLES | {"SHARDMATH_COMPILED": "0"}}
SPLITS = [Slab.X, Slab.X, Slab.X]
BUILT = extension("shardmath.call._direct") is not None
CLOCKS = 10**8  # nanoseconds between clocks as two libraries read them, on a busy machine


def all_of(body, variables=VARIABLES):
    outcomes = run_job(RANKS, body, variables, timeout=60)
    assert not any(isinstance(outcome, Raised) for outcome in outcomes), outcomes
    return outcomes


def exported_ranges(profiled):
    """The ranges that a profiler exports, read as if a GPU had performed them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranges.json"
        profiled.export_chrome_trace(str(path))
        document = json.loads(path.read_text())
    events = [x for x in document["traceEvents"] if x["name"].startswith("shardmath::")]
    ours = [{**x, "cat": "kernel"} for x in events if x["cat"] == "user_annotation"]
    assert len(ours) == 5
    return works_of({**document, "traceEvents": ours}, realtime_minus_monotonic())


def again(call):
    return [call() for _ in range(4)][-1]


def others(group):
    """By name: whether a call is right that is not as those before it were."""
    startup.initialize("cpu", group)
    waves, out = torch.tensor([[1 + 2j, 3], [4j, 5]]), torch.zeros(2, 2, dtype=torch.complex64)
    x = torch.arange(4.0).reshape(2, 2)
    a, b = torch.ones(2, 4), torch.ones(2, 4)
    right = {}

    def tell(name, found, wanted, *, dtype=None):
        same = dtype in (None, found.dtype) and found.shape == wanted.shape
        right[name] = same and torch.equal(found.detach().to(wanted.dtype), wanted)

    again(lambda: all_reduce(x))
    again(lambda: all_reduce(waves, out=out))
    again(lambda: matmul(a, b, distributions=SPLITS))
    tell("elements", all_reduce(x.mul_(2)), 4 * torch.arange(4.0).reshape(2, 2))
    tell("conjugate", all_reduce(waves.conj()), 2 * waves.conj().resolve_conj())
    tell("transposed", all_reduce(x.T), 2 * x.T)
    tell("another shape", all_reduce(x.view(4)), 2 * x.view(4))
    tell("another type", all_reduce(x.view(torch.int32)), 2 * x.view(torch.int32))
    tell("part of it", all_reduce(x[:1]), 2 * x[:1])
    tell("no elements", all_reduce(x[:0]), x[:0])
    leaf = x.clone().requires_grad_()
    again(lambda: all_reduce(leaf.detach()))
    found = all_reduce(leaf)
    found.sum().backward()
    tell("gradient", leaf.grad, torch.ones_like(x))
    x.requires_grad_()
    right["gradient recorded"] = all_reduce(x).requires_grad
    x.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = matmul(a, b, distributions=SPLITS)
    tell("autocast", found, torch.full((2, 4), 4.0), dtype=torch.bfloat16)
    tell("autocast, before", matmul(a, b, distributions=SPLITS), torch.full((2, 4), 4.0))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.monotonic_ns()
        tell("profiled", all_reduce(x), 2 * x.detach())
        again(lambda: matmul(a, b, distributions=SPLITS))
        ended = time.monotonic_ns()
    ranges = Counter(event.name for event in profiled.events())
    right["named"] = (ranges["shardmath::all_reduce"], ranges["shardmath::matmul"]) == (1, 4)
    right["on our clock"] = all(
        began - CLOCKS < one.begun < one.ended < ended + CLOCKS for one in exported_ranges(profiled)
    )
    with torch.device("cpu"):  # a mode: torch runs Python in each of its functions
        tell("a mode", all_reduce(x), 2 * x.detach())
    derived = torch.func.grad(lambda y: all_reduce(y).sum())(x)
    tell("torch.func", derived, torch.ones_like(x))
    tell("as at first", all_reduce(x), 2 * x)
    return right


@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_are_others(way):
    for right in all_of(others, WAYS[way]):
        assert all(right.values()), right


def entered(group):
    """The package's functions that run in calls that come again, by call: in calls of all ranks,
    and in calls of each alone.
    """
    context = startup.initialize("cpu", group)
    of_all = functions_in_calls(RANKS)
    with context.split(context.rank):
        return of_all, functions_in_calls(1)


def functions_in_calls(ranks):
    x, out = torch.ones(8), torch.zeros(8)
    a, b = torch.ones(2, 2 * ranks), torch.ones(2, 4)
    rows, columns = torch.ones(2, 2 * ranks), torch.zeros(2 * ranks, 2)
    product, moved = Matmul(a, b, distributions=SPLITS), Redistribute(rows, Slab.X, Slab.Y)
    product.plan()
    moved.plan()
    calls = {
        "all_reduce": lambda: all_reduce(x, out=out),
        "reduce_scatter": lambda: reduce_scatter(x),
        "matmul": lambda: matmul(a, b, distributions=SPLITS),
        "Matmul.execute": product.execute,
        "redistribute": lambda: redistribute(rows, Slab.X, Slab.Y, out=columns),
        "Redistribute.execute": lambda: moved.execute(out=columns),
    }
    ran = {}
    for name, call in calls.items():
        again(call)
        ran[name] = sorted({each.split(".")[0] for each in calls_before("", call)})
    return ran


@pytest.mark.skipif(not BUILT, reason="the package was built without a C compiler")
def test_functions_are_not_entered():
    for ran in chain.from_iterable(all_of(entered)):
        for name, functions in ran.items():
            operator = {"all_reduce", "reduce_scatter", "matmul", "redistribute", "Driver"}
            assert not operator.intersection(functions), (name, functions)


# -- calls whose operands lie elsewhere each time --------------------------------------------------


def elsewhere(group):
    """By name: whether a product is right whose operands lie where none has lain before, and
    whether the driver was entered for it.
    """
    context, found = startup.initialize("cpu", group), {}
    kept, numbers = [], iter(range(1, 1000))

    def product(a, b):
        return matmul(a, b, distributions=SPLITS)

    def tell(name, a, b, call=product):
        kept.append((a, b))  # so that the next operands lie elsewhere
        made = []
        functions = calls_before("", lambda: made.append(call(a, b)))
        wanted = (a[:, :2] + a[:, 2:]).detach() @ b  # all ranks have the same b
        in_driver = any(each.startswith("Driver.call") for each in functions)
        found[name] = torch.equal(made[0].detach(), wanted), in_driver

    def new(by_columns=False):
        a = torch.full((2, 4), float(next(numbers)))
        return a.T.contiguous().T if by_columns else a

    b = torch.eye(2, 4)
    same = new()
    for _ in range(12):  # on one rank operands lie where they did
        one = new()
        product(one if context.rank else same, b)
        for by_columns in (False, True):
            kept.append((one, new(by_columns), new()))
            product(*kept[-1][1:])
    tell("elsewhere", new(), new())
    tell("the first by columns", new(by_columns=True), new())
    tell("strided", torch.cat([new(), new()], dim=1)[:, ::2], new())
    tell("on the heap", allocate((2, 4), torch).fill_(3), new())
    tell("recorded", new().requires_grad_(), new())
    tell("elsewhere, after other plans", new(), new())
    tell("elsewhere, still", new(), new())
    a, b = new(), new()
    for _ in range(140):
        tell("often there", a, b)
    tell("elsewhere, after all", new(), new())
    freed = allocate((2, 4), torch)
    free(freed)
    try:
        product(freed, new())
    except UseAfterFree:
        found["freed"] = True, True
    return found


@pytest.mark.skipif(not BUILT, reason="the package was built without a C compiler")
def test_operands_that_lie_elsewhere():
    in_driver = {"strided", "recorded", "freed", "elsewhere, after other plans"}
    for found in all_of(elsewhere):
        assert all(right for right, _ in found.values()), str(found)
        assert {name for name, (_, entered) in found.items() if entered} == in_driver, str(found)


# -- calls that ranks do not meet for --------------------------------------------------------------


class Launches:
    """An entry as those of collectives on GPUs, of `all_reduce` on arrays like `x`: it doubles.

    `like(x)` makes a new array, and `double(x, out)` writes to it.
    """

    def __init__(self, context, x, like=torch.empty_like, double=None):
        from shardmath.call.compiled import Lying, direct_calls, seen_in, shared_by_calls

        self.broken, self._stream, self.calls, self.then = "", 0, 0, lambda: 0
        self.double = double or (lambda x, out: torch.mul(x, 2, out=out))
        function = all_reduce.__wrapped__
        compiled = direct_calls()
        rounds = context.board.compiled(ahead=False)
        for name, new in (("out", None), ("", like)):
            named = {"out": like(x)} if name else {}
            call = function, (x,), named, None
            key, _, arrays, objects = seen_in(compiled, call, lying=Lying.CONTIGUOUS)
            context.again[function] = True
            context.again[key] = (
                *((), shared_by_calls(context, None, rounds), self.go, new, 0, len(arrays) - 1),
                *(lambda device: 0, 0, self, self, "all_reduce", self.refuse, objects),
            )

    def go(self, x, out, stream):
        self.calls += 1
        answer = self.then()
        if answer == 0:
            self.double(x, out)
        return answer

    def refuse(self, name, answer):
        raise OSError(f"{name} answers {answer}")


def interrupted():
    raise KeyboardInterrupt


def launches(group):
    """What came of calls that are launched, by name."""
    context, seen = startup.initialize("cpu", group), {}
    x, out = torch.arange(3.0), torch.zeros(3)
    made = Launches(context, x)
    elsewhere = torch.arange(3.0) + 1
    seen["out"] = all_reduce(elsewhere, out=out) is out and torch.equal(out, 2 * elsewhere)
    seen["new"] = torch.equal(all_reduce(x), 2 * x) and made.calls == 2
    last = operations(bytes(this_process.memory))[-1]
    seen["recorded"] = (last.name, last.operands, last.ended > 0) == (
        *("all_reduce", "Tensor[3]"),
        True,
    )
    wide = torch.zeros(6)[::2]
    seen["strided"] = torch.equal(all_reduce(wide + 1), torch.full((3,), 2.0)) and made.calls == 3
    all_reduce(wide)
    seen["left to Python"] = made.calls == 3
    made.then = lambda: None
    seen["nothing done"] = torch.equal(all_reduce(x), RANKS * x) and made.calls == 4
    made.then, made._stream = (lambda: 0), 7
    seen["another stream"] = torch.equal(all_reduce(x), RANKS * x) and made.calls == 4
    made._stream, made.broken = 0, "for a reason"
    seen["broken"] = torch.equal(all_reduce(x), RANKS * x) and made.calls == 4
    made.broken = ""
    seen["no call is left"] = all_reduce(x) is not None and this_thread.call is None
    return seen


@pytest.mark.skipif(not BUILT, reason="the package was built without a C compiler")
def test_launches_that_come_again():
    for seen in all_of(launches):
        assert all(seen.values()), seen


def launches_of_cupy(group):
    """As `launches`: the arrays lie in memory of the host, on which Python cannot compute here."""
    import cupy

    context, library, seen = startup.initialize("cpu", group), library_named("cupy"), {}

    def array(values):
        host = np.array(values, "f4")
        return library.viewer("float32", host.shape, (1,), "cuda:0")(host, host.ctypes.data)

    def host(x):
        return host_array(x.data.ptr, x.shape, x.strides, "<f4", x)

    def double(x, out):
        host(out)[...] = 2 * host(x)

    def refused(x):
        try:
            all_reduce(x)
        except ValueError:
            return True
        return False

    x, out = array([0, 1, 2]), array([0, 0, 0])
    made = Launches(context, x, lambda x: array(np.zeros(x.shape)), double)
    assert type(x) is cupy.ndarray
    seen["out"] = all_reduce(array([5, 6, 7]), out=out) is out and (host(out) == [10, 12, 14]).all()
    seen["new"] = (host(all_reduce(x)) == [0, 2, 4]).all() and made.calls == 2
    seen["another shape"] = refused(x[:2])
    seen["strided"] = refused(array([0, 1, 2, 3, 4])[::2])
    seen["left to Python"] = made.calls == 2
    made._stream = 7
    seen["another stream"] = refused(x) and made.calls == 2
    return {name: bool(value) for name, value in seen.items()}


@pytest.mark.skipif(not BUILT, reason="the package was built without a C compiler")
def test_launches_of_cupy_that_come_again():
    pytest.importorskip("cupy")
    for seen in all_of(launches_of_cupy):
        assert all(seen.values()), seen


def failures(kind):
    def body(group):
        context = startup.initialize("cpu", group)
        x = torch.arange(3.0)
        made = Launches(context, x)
        if context.rank == 1:
            made.then = interrupted if kind is KeyboardInterrupt else lambda: 700
        try:
            for _ in range(3):
                all_reduce(x) if context.rank == 1 else context.barrier()
        except kind as error:
            found = str(error)
        except RankFailure as error:
            found = str(error)
        try:
            all_reduce(x)
        except RankFailure:
            return found
        raise AssertionError("the context is usable")

    return body


@pytest.mark.skipif(not BUILT, reason="the package was built without a C compiler")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_launch_that_fails_is_told_to_all(kind):
    told, own = all_of(failures(kind))
    assert "rank 1" in told and kind.__name__ in told
    assert kind is KeyboardInterrupt or own == "cuLaunchKernel answers 700"


def test_arrays_of_numpys_are_told_from_tensors():
    """Both in one call, which takes a closer look: one lies as the other did."""

    def body(group):
        startup.initialize("cpu", group)
        x = np.arange(4.0)
        tensor = torch.from_numpy(x)
        again(lambda: all_reduce(tensor))
        again(lambda: all_reduce(x))
        kinds = type(all_reduce(x)), type(all_reduce(tensor))
        return kinds == (np.ndarray, torch.Tensor)

    assert all_of(body) == [True] * RANKS
