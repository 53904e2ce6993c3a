"""One rank's matrix product on its GPU, for every stride that a BLAS can be told of.

cuBLASLt thinks in columns: where D lies by rows, D^T = B^T A^T is asked for. What it cannot take as
it lies, a conjugate without a transpose or strides with gaps both ways, `fits` says, and the caller
packs it first. Halves are summed in float32; D may be float32 for them.
"""

from __future__ import annotations

from shardmath.cuda.device import Device
from shardmath.local.gpu.blaslt import Extras, Product, Shape, Side, product
from shardmath.local.gpu.matrix import Matrix

__all__ = ["fits", "multiply", "takes_result"]

_DEFAULT = Extras()


def takes_result(d: Matrix) -> bool:
    """Whether a product can be written to `d` where it lies."""
    return d.leading is not None or d.transposed().leading is not None


def fits(x: Matrix, d: Matrix, *, conjugate: bool = False) -> bool:
    """Whether the factor `x` of the product `d` can be taken as it lies."""
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
    extras: Extras = _DEFAULT,
    bias: int = 0,
    aux: int = 0,
    processors: int = 0,
    tune: bool = False,
) -> None:
    """Put d = F(alpha a @ b + beta c) on `stream`, where F is an epilog that cuBLASLt has.

    `c` is `d` if left out, of the same type and order. a, b and d must fit, and have elements. An
    epilog with a bias or an auxiliary matrix wants d by columns. `tune`: time the algorithms first
    if this product has not been timed, which waits for the stream.
    Raises RuntimeError where cuBLASLt has no algorithm.
    """
    c = d if c is None else c
    if _swaps(d):
        a, b, conj_a, conj_b = b.transposed(), a.transposed(), conj_b, conj_a
        c, d = c.transposed(), d.transposed()
    shape = Shape(
        m=d.rows,
        n=d.columns,
        k=a.columns,
        a=_factor(a, conj_a),
        b=_factor(b, conj_b),
        c=_side(c),
        d=_side(d),
        compute=compute,
        extras=extras,
        processors=processors,
    )
    found = _found(device, shape)
    places = a.address, b.address, c.address, d.address
    if tune and beta == 0:  # what is timed overwrites D
        found.tune(stream, places, workspace)
    found.run(stream, *places, alpha=alpha, beta=beta, workspace=workspace, bias=bias, aux=aux)


def _found(device: Device, shape: Shape) -> Product:
    """The product; where a faster way to sum is not there for these operands, the usual one."""
    found = product(device, shape)
    if found is None and shape.compute is not None:
        found = product(device, shape._replace(compute=None))
    if found is None:
        raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
    return found


def _swaps(d: Matrix) -> bool:
    """Whether D lies by rows, so that its transpose is what cuBLASLt writes."""
    return d.leading is None


def _factor(x: Matrix, conjugate: bool) -> Side:
    if x.leading is not None and not conjugate:
        return _side(x)
    return _side(x.transposed())._replace(operation="C" if conjugate else "T")


def _side(x: Matrix) -> Side:
    leading = x.leading
    assert leading is not None, f"{x} was to be packed first"
    return Side(x.dtype, x.rows, x.columns, leading, _alignment(x.address))


def _alignment(address: int) -> int:
    """The power of two that divides it, at most 256."""
    return min(address & -address, 256) if address else 256
