"""One rank's product of eight-bit floats on its GPU, by cuBLASLt on Hopper.

Operands are contiguous along k and aligned to 16 bytes; see `fits` and `takes_result`. The caller
pads and packs others. Scales are at addresses, in the layout of their mode:

    tensor    one number, or none for 1
    outer     one for each line: a row of A, a column of B
    vectors   lines x blocks of 128 along k, lines contiguous; the number of lines a multiple of 4
    squares   blocks of 128 lines x blocks of 128 along k, those along k contiguous, 4 `up`

Tensor goes with tensor, outer with outer, vectors with vectors or squares.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmath.cuda.device import Device
from shardmath.local.gpu.blaslt import MatmulProblem, ScaleModes, product
from shardmath.local.gpu.gemm import Algorithms, layout
from shardmath.local.gpu.matrix import Matrix

GRAIN = 16  # bytes: everything is aligned to it, and k is a multiple of it
_MODES = {"tensor": 0, "outer": 3, "vectors": 4, "squares": 5}


class Scale(NamedTuple):
    """The scales of an operand: their mode, and their address."""

    mode: str = "tensor"
    address: int = 0


class Quantized(NamedTuple):
    """For an eight-bit D, the addresses of its scale and of its greatest value, or 0."""

    scale: int
    amax: int


def fits(x: Matrix) -> bool:
    """Whether an operand's lines, which are the columns of `x`, can be taken as they lie."""
    leading = x.leading
    aligned = leading is not None and leading % GRAIN == 0 and x.address % GRAIN == 0
    return aligned and x.rows % GRAIN == 0


def takes_result(d: Matrix, *, blocks: bool) -> bool:
    """Whether a product, of operands with or without scales of blocks, can be written to `d`."""
    d = d if d.leading is not None else d.transposed()
    if d.leading is None or (blocks and d.columns % 4):
        return False
    return not any(n % GRAIN for n in (d.address, d.leading * d.itemsize, d.rows * d.itemsize))


def multiply(
    device: Device,
    a: Matrix,
    b: Matrix,
    d: Matrix,
    *,
    scale_a: Scale,
    scale_b: Scale,
    stream: int,
    workspace: int,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Matrix | None = None,
    quantized: Quantized | None = None,
    processors: int = 0,
    algorithms: Algorithms | None = None,
) -> None:
    """Put d = alpha (scaled a) @ (scaled b) + beta c on `stream`; c is d if left out.

    The columns of a^T and of b fit, and d takes the result. `quantized` is for an eight-bit d, then
    without c. `processors` and `algorithms` as in `gemm.multiply`.
    Raises RuntimeError where cuBLASLt has no algorithm.
    """
    first, second, scales = a.transposed(), b, (scale_a, scale_b)
    if d.leading is None:
        first, second, scales = second, first, (scale_b, scale_a)
        d, c = d.transposed(), None if c is None else c.transposed()
    c = d if c is None else c
    shape = _problem((first, second, c, d), scales, quantized)._replace(processors=processors)
    planned = product(device, shape)
    if planned is None:
        raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
    last = (0, 0) if quantized is None else quantized
    places = first.address, second.address, workspace if quantized else c.address, d.address
    addresses = scales[0].address, scales[1].address, *last
    (algorithms or Algorithms()).run(
        planned,
        stream,
        *places,
        alpha=alpha,
        beta=beta,
        workspace=workspace,
        scales=addresses,
    )


def _problem(
    matrices: tuple[Matrix, Matrix, Matrix, Matrix],
    scales: tuple[Scale, Scale],
    quantized: Quantized | None,
) -> MatmulProblem:
    """The product as cuBLASLt describes it."""
    first, second, c, d = matrices
    # Beside an eight-bit D it wants a C of 16 bits, which is not read as beta is 0.
    addend = layout(c) if quantized is None else layout(d)._replace(dtype="bfloat16")
    return MatmulProblem(
        m=d.rows,
        n=d.columns,
        k=first.rows,
        a=layout(first)._replace(operation="T"),
        b=layout(second),
        c=addend,
        d=layout(d),
        scaled=ScaleModes(
            _MODES[scales[0].mode],
            _MODES[scales[1].mode],
            d=quantized is not None,
            amax=quantized is not None and quantized.amax != 0,
        ),
    )
