"""Reductions of several ranks' elements to one: operations, their types, and the local arithmetic.

Elements are combined in rank order by NumPy's functions: floats narrower than float32 in float32,
rounded once at the end. One rank reduces an element of a result, or all do so in the same way, so
that every rank holds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray, raw_view
from shardmath.base.immutable import Immutable
from shardmath.base.integers import tiles
from shardmath.local import compiled_sum

OPERATIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "mean": np.add,
}

# Combined at a time, so that partial results stay in a core's nearest cache.
_CHUNK_BYTES = 128 << 10


class Reduction(Immutable):
    """An operation on elements of one type: names of the types of the result and of the sums."""

    op: str
    dtype: str
    result: str
    accumulator: str

    @classmethod
    def of(cls, op: object, dtype: str) -> Reduction:
        """The reduction of elements of `dtype` by `op`.

        The mean of integers and of bool is float64, as numpy.mean's; every other result has the
        operands' type, so that integers wrap, and the sum of bool is "or", the product "and".
        Raises ValueError for an unknown operation, and for one that the type does not have.
        """
        if not isinstance(op, str) or op not in OPERATIONS:
            raise ValueError(f"op is one of {', '.join(OPERATIONS)}, not {op!r}")
        return cls._of(op, dtype)

    @classmethod
    @lru_cache(maxsize=256)
    def _of(cls, op: str, dtype: str) -> Reduction:
        kind = dtypes.of(dtype).kind
        if kind == "V":
            raise ValueError(
                f"elements of type {dtype} can be moved, but have no {op}{dtypes.advice(dtype)}"
            )
        if kind == "c" and op in ("min", "max"):
            raise ValueError(f"complex numbers have no order: op={op!r} of {dtype}")
        if op == "mean" and kind in "iub":
            return cls(op, dtype, "float64", "float64")
        return cls(op, dtype, dtype, dtypes.accumulator(dtype).name)


def bind_reduction(
    reduction: Reduction, inputs: Sequence[HostArray], output: HostArray
) -> Callable[[], object]:
    """A function that combines arrays of one shape into `output`, each time that it is called.

    Arrays that do not lie in rows are packed by each call.
    """
    rows = in_rows([*inputs, output])
    if rows is None:
        return partial(_reduce_packed, reduction, inputs, output)
    return partial(reduce_local, reduction, rows[:-1], rows[-1:])


def in_rows(arrays: Sequence[HostArray]) -> list[HostArray] | None:
    """Arrays of one shape as matrices on their memory, with as few rows as possible; else None."""
    shape = arrays[0].shape
    for split in range(len(shape) + 1):
        rows, columns = shape[:split], shape[split:]
        if all(
            _joined(rows, x.strides[:split]) and _joined(columns, x.strides[split:]) for x in arrays
        ):
            return [x.reshape(prod(rows), prod(columns)) for x in arrays]
    return None


def _joined(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these axes are one, with one stride."""
    if 0 in shape:
        return True
    axes = [axis for axis in zip(shape, strides, strict=True) if axis[0] != 1]
    return all(step == inner * n for (_, step), (n, inner) in pairwise(axes))


def _reduce_packed(reduction: Reduction, inputs: Sequence[HostArray], output: HostArray) -> None:
    packed = np.empty(output.size, output.dtype)
    flat = [np.ascontiguousarray(raw_view(x)).view(x.dtype).reshape(1, -1) for x in inputs]
    reduce_local(reduction, flat, [packed[None]])
    np.copyto(raw_view(output), raw_view(packed.reshape(output.shape)))


def reduce_local(
    reduction: Reduction,
    inputs: Sequence[HostArray],
    outputs: Sequence[HostArray],
    *,
    count: int | None = None,
) -> None:
    """Combine `inputs`, one per rank and in their order, into each of `outputs`.

    All are two-dimensional and of one shape. An output may be the very memory of an input. The
    first input may be what earlier ranks have combined, of the accumulator's type; a mean is then
    over `count` ranks.
    """
    plain = reduction.op == "sum" and reduction.accumulator == reduction.dtype
    if plain and inputs[0].nbytes >= compiled_sum.LEAST and compiled_sum.add(inputs, outputs):
        return
    rows, columns = inputs[0].shape
    wide = inputs[0].dtype
    if reduction.accumulator != reduction.dtype:
        wide = dtypes.to_numpy(reduction.accumulator)
    elif len(inputs) == 2 and len(outputs) == 1 and reduction.op != "mean":
        with np.errstate(all="ignore"):
            OPERATIONS[reduction.op](*inputs, out=outputs[0])
        return
    limit = max(1, _CHUNK_BYTES // wide.itemsize)
    partial = np.empty(min(rows * columns, limit), wide)
    with np.errstate(all="ignore"):  # NaN and infinities are results, and no rank may warn alone
        if 0 < rows * columns <= limit:
            _reduce_piece(reduction, inputs, outputs, partial, count)
            return
        for piece in pieces(rows, columns, limit):
            _reduce_piece(
                reduction, [x[piece] for x in inputs], [y[piece] for y in outputs], partial, count
            )


def pieces(rows: int, columns: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Index pairs that cover `rows` x `columns`, each of at most `limit` elements.

    Whole rows together where they are short, else parts of one row.
    """
    return tiles(rows, columns, max(1, limit // max(1, columns)), max(1, min(columns, limit)))


def _reduce_piece(
    reduction: Reduction,
    inputs: Sequence[HostArray],
    outputs: Sequence[HostArray],
    partial: HostArray,
    count: int | None,
) -> None:
    """Combine one piece, as `reduce_local` does, with partial results in `partial`: an output may
    be an input that is still to be read.
    """
    combine = OPERATIONS[reduction.op]
    first, *rest = inputs
    so_far = partial[: first.size].reshape(first.shape)
    if reduction.accumulator != reduction.dtype:
        np.copyto(so_far, first, casting="unsafe")
        for x in rest:
            combine(so_far, x.astype(so_far.dtype), out=so_far)
    elif reduction.op != "mean" and rest:
        *middle, last = rest
        for x in middle:
            first = combine(first, x, out=so_far)
        so_far = combine(first, last, out=outputs[0])
    else:
        np.copyto(so_far, first)
        for x in rest:
            combine(so_far, x, out=so_far)
    if reduction.op == "mean":
        np.divide(so_far, so_far.dtype.type(count or len(inputs)), out=so_far)
    for y in outputs:
        if y is so_far:
            continue
        if y.dtype == so_far.dtype:
            np.copyto(raw_view(y), raw_view(so_far))
        else:
            np.copyto(y, so_far, casting="unsafe")
