"""What a product is made of on GPUs, beside the steps of all programs. Pure data.

A buffer is a matrix in a memory of this rank, or in what a peer publishes. Memories are the user's
arrays, by their names, and the lane's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from shardmath.geometry import Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import Blocks
from shardmath.local.gpu import Matrix
from shardmath.program.steps import Memory, plain
from shardmath.redistribution.parcels import Fetch, Outbox

Name = str  # of a buffer; "" for none


class View(NamedTuple):
    """A matrix in a memory of this rank, whose address counts from where that begins.

    The memory of an array of the user's begins at the multiple of `rank_plan.ALIGNMENT` before it.
    """

    memory: str
    matrix: Matrix

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> View:
        """See Matrix."""
        return View(self.memory, self.matrix.part(rows, columns))


class Peer(NamedTuple):
    """What `rank` has published under a name: a matrix of elements of `dtype`.

    `box` is the rows and the columns, from a first to behind a last; None where moves say what is
    read. A `parcel` is an offset and strides in bytes within what is published; without one the
    rank tells how its matrix lies.
    """

    name: str
    rank: int
    dtype: str
    box: tuple[tuple[int, int], tuple[int, int]] | None = None
    parcel: tuple[int, tuple[int, ...]] | None = None

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Peer:
        """These rows and columns of all of it."""
        return self._replace(box=(rows, columns))


class Published(NamedTuple):
    """A buffer that peers read or write, which is their matrix from row and column `first` on."""

    buffer: Name
    first: tuple[int, int] = (0, 0)


# -- moves -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clear:
    """Zeros in all bytes of a buffer."""

    target: Name

    def __str__(self) -> str:
        return f"clear {self.target}"


@dataclass(frozen=True)
class Gather:
    """Strided boxes of all ranks' matrices to this rank's `target`.

    `sources` are pairs of a rank and the buffer that moves of that rank are read from. Equal names
    stand for equal moves.
    """

    name: str
    moves: tuple[Move, ...] = field(repr=False)
    sources: tuple[tuple[int, Name], ...]
    target: Name

    def __str__(self) -> str:
        return f"gather {self.target} from ranks {', '.join(str(src) for src, _ in self.sources)}"


@dataclass(frozen=True)
class Packed:
    """What peers take of `source`, copied into an outbox that they reach."""

    outbox: Outbox = field(repr=False)
    source: Name
    target: Name

    def __str__(self) -> str:
        return f"pack {self.source} into {self.target}: {self.outbox.nbytes:,} bytes"


@dataclass(frozen=True)
class Fetched:
    """Parts of what ranks on other hosts have published under a name, by `get` into `target`."""

    fetches: tuple[Fetch, ...]
    name: str
    target: Name

    def __str__(self) -> str:
        return f"get {sum(each.nbytes for each in self.fetches):,} bytes of {self.name}"


@dataclass(frozen=True)
class Push:
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


@dataclass(frozen=True)
class Gemm:
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


@dataclass(frozen=True)
class AddUp:
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


@dataclass(frozen=True)
class LayOut:
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


@dataclass(frozen=True)
class Greatest:
    """The greatest of numbers, none of them negative, to the one element of `target`."""

    parts: tuple[Name, ...]
    target: Name

    def __str__(self) -> str:
        return f"{self.target} becomes the greatest of {', '.join(self.parts)}"


# -- what several steps are done by ----------------------------------------------------------------


@dataclass(frozen=True)
class OneKernel:
    """A product that one kernel can do, of the kind that a pattern has: see `patterns`."""

    kind: str

    def explain(self) -> str:
        """How, in a few words."""
        return f"{self.kind}, by one kernel"


@dataclass(frozen=True)
class PanelProduct:
    """A product of factors that come while it runs: see `panel_gemm`."""

    def explain(self) -> str:
        """How, in a few words."""
        return "multiply panels as they come, by one kernel"


@dataclass(frozen=True)
class EpilogProduct:
    """These steps, of which a product does what others would do behind it: see `fused_epilog`."""

    steps: tuple[Any, ...]

    def explain(self) -> str:
        """How, in a few words."""
        return "; ".join(map(str, self.steps))


@dataclass(frozen=True)
class Collective:
    """The ranks' matrices added up by one collective: all of them, or by rank so many elements."""

    source: Name
    target: Name
    counts: tuple[int, ...]

    def explain(self) -> str:
        """How, in a few words."""
        return f"{'reduce-scatter' if self.counts else 'all-reduce'} {self.source} by a collective"


@dataclass(frozen=True)
class ProductProgram:
    """What one rank does, in order, over `buffers` in its own arrays and in `memories`.

    Peers reach what is `published`, by name.
    """

    steps: tuple[Any, ...]
    buffers: Mapping[Name, View | Peer] = field(repr=False)
    memories: Mapping[str, Memory] = field(repr=False)
    published: Mapping[str, Published] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    def memories_of(self, steps: tuple[Any, ...]) -> dict[str, Memory]:
        """The memories of the lane that these steps use, and those that peers reach."""
        names = {name for step in steps for name in buffer_names(step)}
        names |= {each.buffer for each in self.published.values()}
        found = {self.buffers[name] for name in names if name in self.buffers}
        used = {view.memory for view in found if isinstance(view, View)}
        return {name: memory for name, memory in self.memories.items() if name in used}

    @cached_property
    def plain(self) -> tuple[Any, ...]:
        """The steps without any that are fused: what those replace stands in their place."""
        return plain(self.steps)


def buffer_names(step: Any) -> Iterator[Name]:
    """All that may name a buffer in a step, and in those that it is made of or replaces."""
    if isinstance(step, str):
        yield step
    elif isinstance(step, tuple):
        for each in step:
            yield from buffer_names(each)
    elif hasattr(step, "__dataclass_fields__"):
        for each in fields(step):
            if each.name not in ("moves", "fetches", "outbox"):
                yield from buffer_names(getattr(step, each.name))
