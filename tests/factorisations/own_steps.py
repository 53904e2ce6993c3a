"""Steps of factorisations as NumPy and SciPy do them, for the interpreters of programs."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import scipy.linalg

sys.path.append(str(Path(__file__).parent.parent / "program"))

import interpreter
import rank_interpreter
from gpu_arithmetic import address_of, on_gpu, packed_factor, subtract_packed
from stream_order import unordered

from shardmath.arrays.dtypes import to_numpy
from shardmath.factorisations import gpus, steps
from shardmath.program.rank_program import View

__all__ = ["interpret_on_gpus", "interpreter"]


def cut(own, part):
    whole = own[part.buffer]
    matrix = whole.reshape(-1, 1) if whole.ndim == 1 else whole
    return matrix[slice(*part.rows), slice(*part.columns)]


def op(matrix, letter):
    return {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[letter]


def note(own, name, code):
    own[name][0] = min(own[name][0], code)


def fill(step, own):
    own[step.target][...] = step.number


def check_finite(step, own):
    if not np.isfinite(own[step.source]).all():
        note(own, step.status, step.code)


def conjugate(step, own):
    own[step.target][...] = own[step.target].conj()


def set_identity(step, own):
    n, width = own[step.target].shape
    own[step.target][...] = np.eye(n)[:, step.first : step.first + width]


def keep_lower(step, own):
    part = cut(own, step.columns)
    part[...] = np.tril(part, -step.first)


def clear(step, own):
    own[step.target][...] = 0


def copy_diagonal(step, own):
    own[step.target][slice(*step.place)] = cut(own, step.block).diagonal()


def factorise_cholesky(step, own):
    panel = cut(own, step.panel)
    diagonal, below = np.vsplit(panel, [panel.shape[1]])
    lower = np.tril(diagonal)
    whole = lower + np.tril(lower, -1).conj().T
    for order in range(1, len(whole) + 1):
        try:
            factor = np.linalg.cholesky(whole[:order, :order])
        except np.linalg.LinAlgError:
            note(own, step.status, step.first + order)
            return
    diagonal[...] = np.tril(factor) + np.triu(diagonal, 1)
    below[...] = np.linalg.solve(factor.conj(), below.T).T


def factorise_lu(step, own):
    panel = cut(own, step.panel)
    with warnings.catch_warnings(action="ignore"):  # of a pivot that is 0
        factors, pivots = scipy.linalg.lu_factor(panel, check_finite=False)
    panel[...] = factors
    zeros = np.flatnonzero(factors.diagonal() == 0)
    if len(zeros):
        note(own, step.status, step.first + int(zeros[0]) + 1)
    own[step.pivots][slice(*step.place)] = pivots + step.first


def exchange_rows(step, own):
    target = cut(own, step.target)
    if not target.size:
        return
    pivots = own[step.pivots][slice(*step.place)] - step.first
    if not all(0 <= row < len(target) for row in pivots):
        note(own, step.status, steps.NOT_PIVOTS)
        return
    for row, other in list(enumerate(pivots))[:: -1 if step.backward else 1]:
        target[[row, other]] = target[[other, row]]


def substitute(step, own):
    triangle, target = cut(own, step.triangle), cut(own, step.target)
    matrix = np.tril(triangle) if step.lower else np.triu(triangle)
    if step.unit:
        np.fill_diagonal(matrix, 1)
    elif step.status and (matrix.diagonal() == 0).any():
        first = int(np.flatnonzero(matrix.diagonal() == 0)[0])
        note(own, step.status, step.first + first + 1)
        return
    if target.size and (matrix.diagonal() != 0).all():
        target[...] = np.linalg.solve(op(matrix, step.op), target)


def near_bfloat16(x):
    parts = [part.astype(ml_dtypes.bfloat16).astype("float32") for part in (x.real, x.imag)]
    return parts[0] + 1j * parts[1] if x.dtype.kind == "c" else parts[0]


def subtract(step, own):
    left, right = op(cut(own, step.left), step.ops[0]), op(cut(own, step.right), step.ops[1])
    if step.precision == "bfloat16":
        left, right = (near_bfloat16(np.array(x)) for x in (left, right))
    cut(own, step.target)[...] -= left @ right


def performer(function):
    return lambda step, rank, buffers: function(step, buffers[rank])


def least(step, own):
    own[step.target][0] = own[step.source].min()


def pack_factor(step, rank):
    x = op(cut(Buffers(rank), step.source), step.op)
    x = x.T if step.right else x
    rank.array(step.target)[...] = packed_factor(x, step.precision, right=step.right)


def multiply_packed(step, rank):
    factors = rank.array(step.left), rank.array(step.right)
    subtract_packed(cut(Buffers(rank), step.target), *factors)


class Buffers:
    """The buffers of a rank on its GPU, by name."""

    def __init__(self, rank):
        self.rank = rank

    def __getitem__(self, name):
        return self.rank.array(self.rank.named(name))


OWN_STEPS = {
    steps.Fill: fill,
    steps.CheckFinite: check_finite,
    steps.Conjugate: conjugate,
    steps.SetIdentity: set_identity,
    steps.Clear: clear,
    steps.KeepLower: keep_lower,
    steps.CopyDiagonal: copy_diagonal,
    steps.FactoriseCholesky: factorise_cholesky,
    steps.FactoriseLU: factorise_lu,
    steps.ExchangeRows: exchange_rows,
    steps.Substitute: substitute,
    steps.Subtract: subtract,
    gpus.Least: least,
}
interpreter.PERFORM |= {kind: performer(function) for kind, function in OWN_STEPS.items()}
rank_interpreter.PERFORM |= {
    kind: lambda step, rank, function=function: function(step, Buffers(rank))
    for kind, function in OWN_STEPS.items()
}
rank_interpreter.PERFORM |= {gpus.PackFactor: pack_factor, gpus.SubtractPacked: multiply_packed}


def interpret_on_gpus(programs, parts, *, seed, staged):
    """The results of all ranks, by rank and name, of the programs as GPUs perform them: in an order
    in which their streams might. `staged` are operands that no peer reaches where they lie.
    """
    ranks, results = [], []
    for number, (program, operands) in enumerate(zip(programs, parts, strict=True)):
        made = {
            name: np.empty(look.local_shape(number), to_numpy(look.dtype), order=look.order)
            for name, look in program.results.items()
        }
        arrays = {name: on_gpu(x) for name, x in {**operands, **made}.items()}
        results.append({name: arrays[name] for name in made})
        seen = {
            name: x.transposed() if name in program.transposed else x for name, x in arrays.items()
        }
        views = {name: View(name, x.shape, x.strides, x.dtype) for name, x in seen.items()}
        lowered = gpus.lowered(program, views, number, len(programs), staged=staged)
        assert not unordered(lowered, number)
        users = {name: (x.keep, x.address - address_of(x.keep)) for name, x in arrays.items()}
        ranks.append(rank_interpreter.Rank(number, lowered, users))
    rank_interpreter.interpret_ranks(ranks, seed=seed)
    return [
        {
            name: np.ndarray(
                x.shape, to_numpy(x.dtype), x.keep, x.address - address_of(x.keep), x.strides
            )
            for name, x in own.items()
        }
        for own in results
    ]
