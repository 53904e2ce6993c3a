"""What a product is made of on GPUs, beside the steps of all programs. Pure data.

A buffer is an array of the rank's program, or of a peer. Memories are the user's arrays, by their
names, and the lane's; those of the user's begin at the multiple of ALIGNMENT before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from shardmath.base.immutable import Immutable
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import Blocks
from shardmath.program.steps import Fused

Name = str  # of a buffer; "" for none


# -- moves -----------------------------------------------------------------------------------------


class Clear(Immutable, words="clear {target}"):
    """Zeros in all bytes of a buffer."""

    target: Name


class Push(Immutable):
    """`source`, which has no gaps, into its place on all ranks, by one kernel."""

    source: Name
    targets: tuple[Name, ...]

    def __str__(self) -> str:
        return f"push {self.source} to {len(self.targets)} ranks"


# -- arithmetic ------------------------------------------------------------------------------------


class ScaleOf(NamedTuple):
    """The scales of an eight-bit factor: their mode in `local.gpu.scaled`, and where they lie."""

    mode: str
    buffer: Name


class Gemm(Immutable):
    """target = F(alpha left right + beta addend), as BLAS has it, where F is an epilog.

    `alpha` are the names of numbers that are multiplied, none for 1, and `beta` the name of one, ""
    for 1. `target` may be the addend. `scales` are those of eight-bit factors; `quantized` are the
    buffers of an eight-bit result's scale, and of the greatest absolute value of the numbers which
    that stands for. `spare` multiprocessors are left to what runs beside it.
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


class AddUp(Immutable):
    """target = F(alpha (the parts, added in this order) + beta addend), rounded once.

    `alpha` and `beta` are names of numbers, "" for 1. `unrounded` gets the result before it is
    rounded. `extras` is the type of what is beside the result.
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


class LayOut(Immutable):
    """Scales as products want them, the same in all `targets`: element (i, j) is that of the block
    which it is in, times `number`. Rows from `known` on are zeros. Without a `source` all are 1.
    """

    source: Name
    number: str
    blocks: Blocks
    targets: tuple[Name, ...]
    known: int

    def __str__(self) -> str:
        return f"lay out {self.source or self.number} in {', '.join(self.targets)}"


class Greatest(Immutable):
    """The greatest of numbers, none of them negative, to the one element of `target`."""

    parts: tuple[Name, ...]
    target: Name

    def __str__(self) -> str:
        return f"{self.target} becomes the greatest of {', '.join(self.parts)}"


# -- what several steps are done by ----------------------------------------------------------------


class OneKernel(Immutable, words="{kind}, by one kernel"):
    """A product that one kernel can do, of the kind that a pattern has: see `patterns`."""

    kind: str


class ByEngines(Immutable, words="move by the copy engines"):
    """A move beside a product, by the copy engines where they can: they take no multiprocessor."""


class PanelProduct(Immutable, words="multiply panels as they come, by one kernel"):
    """A product of factors that come while it runs: see `panel_gemm`."""


class EpilogProduct(Immutable):
    """Steps of which the product does an epilog that others would do after it; see
    `fused_epilog`.
    """

    steps: tuple[Any, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps))


class Collective(Immutable):
    """The ranks' matrices added up by one collective: all of them, or by rank so many elements."""

    source: Name
    target: Name
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{'reduce-scatter' if self.counts else 'all-reduce'} {self.source} by a collective"


def buffer_names(step: Any) -> Iterator[Name]:
    """All that may name a buffer in a step, and in those that it is done by or replaces."""
    if isinstance(step, str):
        yield step
    elif isinstance(step, tuple):
        for part in step:
            yield from buffer_names(part)
    elif isinstance(step, Fused):
        yield from tuple(buffer_names(step.plan)) or buffer_names(step.replaces)
    elif isinstance(step, Immutable):
        for name in step.__dataclass_fields__:
            if name not in ("transfer", "delivery"):
                yield from buffer_names(getattr(step, name))
