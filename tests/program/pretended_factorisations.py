"""Factorisations performed by what performs them on GPUs, where host memory stands for the GPU's:
cuSOLVER, cuBLAS and our kernels are SciPy and NumPy, on addresses.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import gpu_arithmetic as arithmetic
import numpy as np
from gpu_arithmetic import view
from pretended import BESIDE, Lane

from shardmath.factorisations import gpus
from shardmath.local import lapack as on_cores
from shardmath.local.gpu import Matrix, lapack, packing

__all__ = ["factorisations_at_once"]


def words(address, count, dtype):
    """A vector at an address."""
    return view(Matrix(address, count, 1, 1, max(1, count), dtype))[:, 0]


def note(status, code):
    word = words(status, 1, "int64")
    word[0] = min(word[0], code)


def cholesky(a, *, workspace, status, first):
    diagonal, below = np.vsplit(view(a), [a.columns])
    if order := on_cores.cholesky(diagonal)():
        note(status, first + order)
    on_cores.solve_triangular(diagonal, below, lower=True, op="C", right=True)()


def lu(a, *, workspace, pivots, status, first):
    exchanged = np.zeros(min(a.rows, a.columns), np.int32)
    on_cores.lu(view(a), exchanged)()
    words(pivots, len(exchanged), "int32")[...] = exchanged + first - 1
    note_zeros(a, status=status, first=first)


_beside: dict[int, bool] = {}  # by the address of a workspace: for which of two streams it is


def solve_triangular(device, stream, a, b, *, workspace, beside=False, **flags):
    assert beside is (stream == BESIDE), "its handle is another stream's"
    require_own(workspace, stream)
    device.launch(stream, on_cores.solve_triangular(view(a), view(b), **flags))


def require_own(workspace, stream):
    """What runs at once on two streams must not use the same workspace, in graphs neither."""
    beside = stream == BESIDE
    assert _beside.setdefault(workspace, beside) is beside, "a workspace of both streams"


def check_finite(a, *, status, code):
    if not np.isfinite(view(a)).all():
        note(status, code)


def conjugate(a):
    view(a)[...] = view(a).conj()


def set_identity(a, first):
    view(a)[...] = np.eye(a.rows)[:, first : first + a.columns]


def clear(a):
    view(a)[...] = 0


def keep_lower(a, first):
    view(a)[...] = np.tril(view(a), -first)


def note_zeros(a, *, status, first):
    zeros = np.flatnonzero(view(a).diagonal() == 0)
    if len(zeros):
        note(status, first + int(zeros[0]) + 1)


def begin(status, number):
    words(status, 1, "int64")[0] = number


def least(target, source, count):
    words(target, 1, "int64")[0] = words(source, count, "int64").min()


def exchange_rows(a, pivots, count, *, first, backward, status, code):
    rows = words(pivots, count, "int32") - first
    if a.size and not all(0 <= row < a.rows for row in rows):
        note(status, code)
    elif a.size:
        on_cores.exchange_rows(view(a), (rows + 1).astype(np.int32), backward=backward)()


def multiply(device, a, b, d, *, stream, conj_a, conj_b, workspace, **how):
    require_own(workspace, stream)
    device.launch(stream, arithmetic.multiply, a, b, d, conj_a, conj_b, **how)


def pack(x, target, *, precision, right, conjugate):
    lines = view(x).conj() if conjugate else view(x)
    view(target)[...] = arithmetic.packed_factor(lines, precision, right=right)


def subtract_packed(device, stream, target, left, right, *, workspace):
    require_own(workspace, stream)
    factors = view(left), view(right)
    device.launch(stream, arithmetic.subtract_packed, view(target), *factors)


def launched(function):
    return lambda device, stream, *args, **named: device.launch(stream, function, *args, **named)


@contextmanager
def factorisations_at_once():
    """Within, factorisations of a `pretended_gpu` are performed when they are launched."""
    functions = (
        *(cholesky, lu, check_finite, conjugate, set_identity, clear, keep_lower),
        *(note_zeros, begin, least, exchange_rows),
    )
    _beside.clear()
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(patch.object(lapack, function.__name__, launched(function)))
        for owner, name, stand_in in (
            (gpus, "Lane", Lane),
            (gpus, "WORKSPACE", 1),
            (gpus, "multiply", multiply),
            (packing, "pack", launched(pack)),
            (packing, "subtract_packed", subtract_packed),
            (packing, "load", lambda *_: None),
            (lapack, "solve_triangular", solve_triangular),
            (lapack, "bindings", lambda: None),
            (lapack, "load", lambda *_: None),
            (lapack, "room", lambda *_, **__: 1),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
