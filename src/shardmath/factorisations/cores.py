"""Performing the steps of factorisations on cores, by LAPACK's routines on blocks of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

from shardmath.arrays import ArraySpec
from shardmath.arrays.base import HostArray
from shardmath.factorisations.steps import (
    NOT_PIVOTS,
    CheckFinite,
    Clear,
    Conjugate,
    CopyDiagonal,
    Cut,
    ExchangeRows,
    FactoriseCholesky,
    FactoriseLU,
    Fill,
    KeepLower,
    SetIdentity,
    Substitute,
    Subtract,
)
from shardmath.local import lapack
from shardmath.program.cores import Cores, HostArrays, Performing
from shardmath.program.performing import Arguments
from shardmath.program.steps import Step
from shardmath.redistribution.bound_copies import Calls

Arrays = Mapping[str, HostArray]

_CHECKED_ELEMENTS = 64 << 10  # at once, so that temporaries stay in a cache


def block(arrays: Arrays, cut: Cut) -> HostArray:
    """The block of a buffer, on its memory. A vector is a matrix of one column."""
    whole = arrays[cut.buffer]
    matrix = whole.reshape(-1, 1) if whole.ndim == 1 else whole
    return matrix[slice(*cut.rows), slice(*cut.columns)]


def note(status: HostArray, code: int) -> None:
    """Let `status` be `code`, if that is less."""
    status[0] = min(int(status[0]), code)


def is_finite(array: HostArray) -> bool:
    """Whether no element is NaN or infinite."""
    lines = array.T if array.ndim == 2 and abs(array.strides[0]) < abs(array.strides[1]) else array
    if lines.ndim == 1:
        lines = lines[np.newaxis]
    step = max(1, _CHECKED_ELEMENTS // max(1, lines.shape[1]))
    return all(
        bool(np.isfinite(lines[lo : lo + step]).all()) for lo in range(0, lines.shape[0], step)
    )


def _fill(step: Fill, arrays: Arrays) -> Calls:
    return [partial(arrays[step.target].fill, step.number)]


def _check_finite(step: CheckFinite, arrays: Arrays) -> Calls:
    source, status = arrays[step.source], arrays[step.status]

    def check() -> None:
        if not is_finite(source):
            note(status, step.code)

    return [check]


def _conjugate(step: Conjugate, arrays: Arrays) -> Calls:
    target = arrays[step.target]
    return [partial(np.conjugate, target, target)] if target.dtype.kind == "c" else []


def _set_identity(step: SetIdentity, arrays: Arrays) -> Calls:
    target = arrays[step.target]

    def identity() -> None:
        target.fill(0)
        np.fill_diagonal(target[step.first : step.first + target.shape[1]], 1)

    return [identity]


def _clear(step: Clear, arrays: Arrays) -> Calls:
    return [partial(arrays[step.target].fill, 0)]


def _keep_lower(step: KeepLower, arrays: Arrays) -> Calls:
    columns = block(arrays, step.columns)
    above = columns[: step.first]
    corner = columns[step.first : step.first + columns.shape[1]]
    mask = np.triu(np.ones(corner.shape, bool), 1)
    return [partial(above.fill, 0), partial(np.copyto, corner, 0, where=mask)]


def _copy_diagonal(step: CopyDiagonal, arrays: Arrays) -> Calls:
    target = arrays[step.target][slice(*step.place)]
    return [partial(np.copyto, target, block(arrays, step.block).diagonal())]


def _factorise_cholesky(step: FactoriseCholesky, arrays: Arrays) -> Calls:
    panel = block(arrays, step.panel)
    diagonal, below = np.vsplit(panel, [panel.shape[1]])
    factorise = lapack.cholesky(diagonal)
    status = arrays[step.status]

    def factorise_and_note() -> None:
        order = factorise()
        if order:
            note(status, step.first + order)

    divide = lapack.solve_triangular(diagonal, below, lower=True, op="C", right=True)
    return [factorise_and_note, divide]


def _factorise_lu(step: FactoriseLU, arrays: Arrays) -> Calls:
    panel, pivots = block(arrays, step.panel), arrays[step.pivots][slice(*step.place)]
    exchanged = np.zeros(len(pivots), np.int32)
    factorise, status = lapack.lu(panel, exchanged), arrays[step.status]

    def factorise_and_note() -> None:
        number = factorise()
        if number:
            note(status, step.first + number)
        np.add(exchanged, step.first - 1, out=pivots)

    return [factorise_and_note]


def _exchange_rows(step: ExchangeRows, arrays: Arrays) -> Calls:
    pivots, target = arrays[step.pivots][slice(*step.place)], block(arrays, step.target)
    if step.target.is_empty:
        return []
    height, status = step.target.rows[1] - step.target.rows[0], arrays[step.status]
    rows = np.zeros(len(pivots), np.int32)
    exchange = lapack.exchange_rows(target, rows, backward=step.backward)

    def number_and_exchange() -> None:
        np.subtract(pivots, step.first - 1, out=rows)
        if len(rows) and not (rows.min() >= 1 and rows.max() <= height):
            note(status, NOT_PIVOTS)
        else:
            exchange()

    return [number_and_exchange]


def _substitute(step: Substitute, arrays: Arrays) -> Calls:
    triangle, target = block(arrays, step.triangle), block(arrays, step.target)
    solve = lapack.solve_triangular(triangle, target, lower=step.lower, op=step.op, unit=step.unit)
    if not step.status or step.unit:
        return [solve]
    status, diagonal = arrays[step.status], triangle.diagonal()

    def look() -> None:
        zeros = np.flatnonzero(diagonal == 0)
        if len(zeros):
            note(status, step.first + int(zeros[0]) + 1)

    return [look, solve]


def _subtract(step: Subtract, arrays: Arrays) -> Calls:
    target, left, right = (block(arrays, cut) for cut in (step.target, step.left, step.right))
    one, two = step.ops
    if step.precision != "bfloat16":
        return [lapack.subtract_product(target, left, one, right, two)]

    def subtract() -> None:
        factors = lapack.rounded(left), lapack.rounded(right)
        lapack.subtract_product(target, factors[0], one, factors[1], two)()

    return [subtract]


PERFORMERS: Mapping[type[Step], Performing] = {
    Fill: _fill,
    CheckFinite: _check_finite,
    Conjugate: _conjugate,
    SetIdentity: _set_identity,
    Clear: _clear,
    KeepLower: _keep_lower,
    CopyDiagonal: _copy_diagonal,
    FactoriseCholesky: _factorise_cholesky,
    FactoriseLU: _factorise_lu,
    ExchangeRows: _exchange_rows,
    Substitute: _substitute,
    Subtract: _subtract,
}


class FactorisationsOnCores(Cores):
    """Performs programs of factorisations, all in the same workspace: one follows another."""

    performers: ClassVar[Mapping[type[Step], Performing]] = PERFORMERS

    def read(self, arguments: Arguments) -> HostArrays:
        """See Performer. Raises BackendUnavailable without SciPy."""
        lapack.require()
        return super().read(arguments)

    def most_copied(self, spec: ArraySpec) -> int:
        """See Performer. Some operands are overwritten."""
        return 0

    def _name(self, name: str) -> str:
        return f"factorisation: {name}"
