"""The steps of products on GPUs, beside those of all programs. Pure data.

A buffer is an array of the rank's program, or a peer's. Memories are the lane's, and the user's
arrays, by their names; a user's memory begins at the multiple of ALIGNMENT before its array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import Blocks
from shardmath.program.steps import Step

Name = str  # the name of a buffer, "" for none


# -- moves -----------------------------------------------------------------------------------------


class Clear(Step, words="clear {target}"):
    """Zeros in all bytes of a buffer."""

    target: Name


class Push(Step):
    """`source`, which has no gaps, is written to its place on every rank, by one kernel."""

    source: Name
    targets: tuple[Name, ...]

    def __str__(self) -> str:
        return f"push {self.source} to {len(self.targets)} ranks"


# -- arithmetic ------------------------------------------------------------------------------------


class ScaleOf(NamedTuple):
    """The scales of an eight-bit factor: their mode, of `local.gpu.scaled`, and their buffer."""

    mode: str
    buffer: Name


class Gemm(Step):
    """target = F(alpha left right + beta addend), by cuBLASLt, where F is an epilog.

    `alpha` are the names of the numbers whose product is alpha, `beta` is the name of beta, "" for
    1. `target` may be the addend. `scales` are those of eight-bit factors; `quantized` are the
    buffers of an eight-bit result's scale, and of the greatest absolute value before it is scaled.
    `spare` multiprocessors are left to what runs beside it.
    """

    left: Name
    right: Name
    target: Name
    conjugate: tuple[bool, bool] = (False, False)
    alpha: tuple[str, ...] = ()
    addend: Name = ""
    beta: str = ""
    epilog: MatmulEpilog = MatmulEpilog.DEFAULT
    bias: Name = ""
    aux: Name = ""
    scales: tuple[ScaleOf, ScaleOf] | None = None
    quantized: tuple[Name, Name] | None = None
    spare: int = 0

    def __str__(self) -> str:
        plus = f", adding {self.addend}" * bool(self.addend)
        return f"multiply {self.left} by {self.right} into {self.target}{plus}"


class AddUp(Step):
    """target = F(alpha (the parts, added in this order) + beta addend), rounded once.

    `alpha` and `beta` are names of numbers, "" for 1. `unrounded` gets the result before it is
    rounded. `extras` is the type of a bias and of an auxiliary matrix, if not the result's.
    """

    parts: tuple[Name, ...]
    target: Name
    alpha: str = ""
    addend: Name = ""
    beta: str = ""
    epilog: MatmulEpilog = MatmulEpilog.DEFAULT
    bias: Name = ""
    aux: Name = ""
    unrounded: Name = ""
    extras: str = ""

    def __str__(self) -> str:
        plus = f" + {self.beta} {self.addend}" * bool(self.addend)
        then = "" if self.epilog is MatmulEpilog.DEFAULT else f": {self.epilog.name.lower()}"
        return f"{self.target} becomes {' + '.join(self.parts) or 'zeros'}{plus}{then}"


class LayOut(Step):
    """Scales in the layout that a product wants, the same in all `targets`: element (i, j) is the
    scale of its block in `source`, 1 without a source, times `number`. Rows from `known` on are 0.
    """

    source: Name
    number: str
    blocks: Blocks
    targets: tuple[Name, ...]
    known: int

    def __str__(self) -> str:
        return f"lay out {self.source or self.number} in {', '.join(self.targets)}"


class Greatest(Step):
    """The greatest of some numbers, none of them negative, goes to the one element of `target`."""

    parts: tuple[Name, ...]
    target: Name

    def __str__(self) -> str:
        return f"{self.target} becomes the greatest of {', '.join(self.parts)}"


# -- plans of fused steps --------------------------------------------------------------------------


class OneKernel(Step, words="{kind}, by one kernel"):
    """One kernel for all of a product of this kind: see `patterns`."""

    kind: str


class ByEngines(Step, words="move by the copy engines"):
    """Copy engines for a move beside a product, where they can: they take no multiprocessor."""


class PanelProduct(Step, words="multiply panels as they come, by one kernel"):
    """One kernel that multiplies panels of the factors as they come: see `panel_gemm`."""


class EpilogProduct(Step):
    """`steps` in which cuBLASLt does the epilog within the product: see `fused_epilog`."""

    steps: tuple[Any, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps))


class Collective(Step):
    """One collective that adds up the ranks' matrices. `counts` are the elements that each rank
    gets, () where all get all.
    """

    source: Name
    target: Name
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{'reduce-scatter' if self.counts else 'all-reduce'} {self.source} by a collective"
