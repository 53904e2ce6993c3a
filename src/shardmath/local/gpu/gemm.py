"""One rank's matrix product on its GPU, for every stride that BLAS can describe.

cuBLASLt works by columns: where D lies by rows, it computes D^T = B^T A^T. Operands that it cannot
take, which are conjugates without a transpose and matrices with gaps both ways, `fits` tells, and
the caller packs them first. 16-bit floats are summed in float32; D may be float32 for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardmath.cuda.device import Device
from shardmath.local.gpu.blaslt import (
    EpilogAttributes,
    MatmulProblem,
    MatrixLayout,
    Product,
    product,
)
from shardmath.local.gpu.matrix import Matrix

_DEFAULT = EpilogAttributes()


@dataclass
class Algorithms:
    """The numbers of the cuBLASLt algorithms that products use, by signature; by default the first.

    If `timings` is a dictionary, a product puts there the median seconds of all its algorithms,
    instead of computing. It leaves D undefined, and waits for the stream.
    """

    chosen: dict[bytes, int] = field(default_factory=dict)
    timings: dict[bytes, list[float]] | None = None

    def run(self, product: Product, stream: int, *places: int, **given: Any) -> None:
        """Run a product, or time it. `places` and `given` are those of `Product.run`."""

        def launch(algorithm: int) -> None:
            product.run(stream, *places, **given, algorithm=algorithm)

        if self.timings is None:
            launch(self.chosen.get(product.signature, 0) if self.chosen else 0)
        elif product.signature not in self.timings:
            self.timings[product.signature] = product.times(stream, launch)


def takes_result(d: Matrix) -> bool:
    """Whether a product can be written to `d` where it lies."""
    return d.leading is not None or d.transposed().leading is not None


def fits(x: Matrix, d: Matrix, *, conjugate: bool = False) -> bool:
    """Whether the operand `x` of the product `d` can be taken as it lies."""
    oriented = x.transposed() if _swaps(d) else x
    if conjugate:
        return oriented.transposed().leading is not None
    return takes_result(x)


def multiply(
    device: Device,
    a: Matrix,
    b: Matrix,
    d: Matrix,
    *,
    stream: int,
    workspace: int,
    c: Matrix | None = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    conj_a: bool = False,
    conj_b: bool = False,
    compute: int | None = None,
    extras: EpilogAttributes = _DEFAULT,
    bias: int = 0,
    aux: int = 0,
    processors: int = 0,
    algorithms: Algorithms | None = None,
) -> None:
    """Put d = F(alpha a @ b + beta c) on `stream`, where F is an epilog that cuBLASLt has.

    `c` is `d` if left out, of the same type and order. a, b and d must fit, and have elements.
    `extras`, `bias` and `aux` are what `fused_epilog` says; `processors` are how many
    multiprocessors it is to use, 0 for all. `algorithms` are those that have been chosen. Raises
    RuntimeError where cuBLASLt has no algorithm.
    """
    matrices = a, b, d if c is None else c, d
    shape = _problem(matrices, (conj_a, conj_b))
    planned = _found(device, shape._replace(compute=compute, extras=extras, processors=processors))
    if planned is None:
        raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
    (algorithms or Algorithms()).run(
        planned,
        stream,
        *_places(matrices),
        alpha=alpha,
        beta=beta,
        workspace=workspace,
        bias=bias,
        aux=aux,
    )


def has_algorithm(
    device: Device,
    a: Matrix,
    b: Matrix,
    d: Matrix,
    *,
    extras: EpilogAttributes,
    c: Matrix | None = None,
    conj_a: bool = False,
    conj_b: bool = False,
    compute: int | None = None,
) -> bool:
    """Whether cuBLASLt can do that product, of matrices that fit, with that epilog."""
    shape = _problem((a, b, d if c is None else c, d), (conj_a, conj_b))
    return _found(device, shape._replace(compute=compute, extras=extras)) is not None


_Four = tuple[Matrix, Matrix, Matrix, Matrix]  # A, B, C and D


def _problem(matrices: _Four, conjugate: tuple[bool, bool]) -> MatmulProblem:
    """The product as cuBLASLt describes it."""
    a, b, c, d = matrices
    conj_a, conj_b = conjugate
    if _swaps(d):
        a, b, conj_a, conj_b = b.transposed(), a.transposed(), conj_b, conj_a
        c, d = c.transposed(), d.transposed()
    factors = _operand_layout(a, conj_a), _operand_layout(b, conj_b)
    return MatmulProblem(d.rows, d.columns, a.columns, *factors, layout(c), layout(d))


def _places(matrices: _Four) -> tuple[int, int, int, int]:
    """The addresses of the matrices, in cuBLASLt's order."""
    a, b, c, d = (x.address for x in matrices)
    return (b, a, c, d) if _swaps(matrices[3]) else (a, b, c, d)


def _found(device: Device, shape: MatmulProblem) -> Product | None:
    """The product; without a faster compute type where there is no algorithm for that."""
    planned = product(device, shape)
    if planned is None and shape.compute is not None:
        planned = product(device, shape._replace(compute=None))
    return planned


def _swaps(d: Matrix) -> bool:
    """Whether D lies by rows, so that its transpose is what cuBLASLt writes."""
    return d.leading is None


def _operand_layout(x: Matrix, conjugate: bool) -> MatrixLayout:
    if x.leading is not None and not conjugate:
        return layout(x)
    return layout(x.transposed())._replace(operation="C" if conjugate else "T")


def layout(x: Matrix) -> MatrixLayout:
    """A matrix with contiguous columns as cuBLASLt describes it."""
    leading = x.leading
    assert leading is not None, f"{x} was to be packed first"
    return MatrixLayout(
        x.dtype, x.rows, x.columns, leading, min(x.address & -x.address or 256, 256)
    )
