"""The distributions by name: Slab, Box, BlockCyclic, BlockNonCyclic and Replicated.

Each says only which part of each axis a rank holds; `Distribution` derives the rest. Parts may be
uneven or empty.

Ranks send each other distributions as plain data: tuples, strings, integers and None. `decode`
makes nothing but distributions, from data of exactly the form that `Distribution.encode` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from shardmath.base.integers import index_within, integer, integers
from shardmath.base.untraced import constant_to_compiler
from shardmath.errors import BindDistributionError
from shardmath.geometry.distribution import (
    Argument,
    Distribution,
    asking_rank,
    known_rank,
    refuse_conversion,
)
from shardmath.geometry.grid import ProcessGrid
from shardmath.geometry.spans import Spans


@constant_to_compiler
class Slab(Distribution):
    """One axis in even parts, in rank order: the first `extent % size` ranks hold one more.

        Slab.X on 2 ranks  0 0 0 0    Slab.Y  0 0 1 1
                           1 1 1 1            0 0 1 1

    Raises ValueError when `partition_dim` is no integer, negative, or not below `ndim`.
    """

    _arguments = (Argument("partition_dim"), Argument("ndim", keyword=True))
    _of_numbers = True
    partition_dim: int
    ndim: int | None = None

    X: ClassVar[Slab]
    Y: ClassVar[Slab]
    Z: ClassVar[Slab]

    def __init__(self, partition_dim: int, ndim: int | None = None) -> None:
        dim = integer(partition_dim, "partition_dim", least=0)
        ndim = None if ndim is None else integer(ndim, "ndim", least=1)
        if ndim is not None and dim >= ndim:
            raise ValueError(f"partition_dim {dim} is not an axis of an array of {ndim} axes")
        object.__setattr__(self, "partition_dim", dim)
        object.__setattr__(self, "ndim", ndim)

    @property
    def name(self) -> str:
        """X, Y or Z for the first three axes, the number of the axis for others."""
        return "XYZ"[self.partition_dim] if self.partition_dim < 3 else str(self.partition_dim)

    def _place(self, rank: int, ndim: int, size: int) -> tuple[tuple[int, int], ...]:
        return tuple((rank, size) if axis == self.partition_dim else (0, 1) for axis in range(ndim))

    @classmethod
    def _candidates(cls, given: Distribution, size: int) -> Iterator[Distribution]:
        for axis in range(1 if given.ndim is None else given.ndim):
            yield cls(axis, given.ndim)

    def _bound_fields(self, shape: tuple[int, ...]) -> dict[str, object]:
        return {"ndim": len(shape)}

    def _check(self, shape: tuple[int, ...], size: int | None) -> None:
        Distribution._check(self, shape, size)
        if self.partition_dim >= len(shape):
            raise BindDistributionError(
                f"{self!r} needs an array of ndim {self.partition_dim + 1} or more; this one has "
                f"ndim {len(shape)}"
            )


Slab.X, Slab.Y, Slab.Z = Slab(0), Slab(1), Slab(2)


@constant_to_compiler
class Box(Distribution):
    """One rank's box: the indices lower <= i < upper along each axis; it may be empty.

    Every rank has its own, and knows nothing of the others'. Unpacks to (lower, upper). Raises
    ValueError when lower and upper are no integers, of different length, negative, or when
    upper < lower.
    """

    _arguments = (Argument("lower", appended=0), Argument("upper", appended=1))
    lower: tuple[int, ...]
    upper: tuple[int, ...]

    def __init__(self, lower: Sequence[int], upper: Sequence[int]) -> None:
        lo, hi = integers(lower, "lower", least=0), integers(upper, "upper")
        if len(lo) != len(hi):
            raise ValueError(f"lower {lo} and upper {hi} differ in length")
        if not all(a <= b for a, b in zip(lo, hi, strict=True)):
            raise ValueError(f"upper {hi} must not be less than lower {lo}")
        object.__setattr__(self, "binding", None)
        object.__setattr__(self, "lower", lo)
        object.__setattr__(self, "upper", hi)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.lower)

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The extents of the box."""
        return tuple(b - a for a, b in zip(self.lower, self.upper, strict=True))

    @property
    def per_rank(self) -> bool:
        """True: a box says what its own rank owns."""
        return True

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter((self.lower, self.upper))

    def __getitem__(self, item: int) -> tuple[int, ...]:
        return (self.lower, self.upper)[item]

    def __len__(self) -> int:
        return 2

    def owner(
        self,
        index: Sequence[int],
        global_shape: Sequence[int] | None = None,
        *,
        size: int | None = None,
    ) -> int | tuple[int, ...]:
        """The rank of this box where the box holds the index.

        Raises RuntimeError where it does not, or where the box's rank is not known.
        """
        held = self.binding.global_shape if self.binding else None
        shape = held if global_shape is None else integers(global_shape, "global_shape", least=0)
        place = integers(index, "index") if shape is None else index_within(index, shape)
        rank = known_rank(self)
        if rank is None:
            raise RuntimeError(f"{self!r} does not know its rank: bind it with rank=")
        if len(place) != self.ndim or not all(
            lo <= i < hi for i, lo, hi in zip(place, self.lower, self.upper, strict=True)
        ):
            raise RuntimeError(f"{self!r} of rank {rank} does not know which rank owns {place}")
        return rank

    def draw(self, global_shape: Sequence[int] | None = None, *, size: int | None = None) -> str:
        """A text drawing of this box on the global array; indices of other ranks are dots."""
        from shardmath.geometry.drawing import draw

        shape = self._known_shape(global_shape)
        self._check(shape, None)
        rank = known_rank(self)
        return draw(shape, {-1 if rank is None else rank: self._part(0, shape, 1)})

    def infer_global_shape(self, local_shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Raises RuntimeError: use the function of this name, which takes all ranks' boxes."""
        raise RuntimeError(f"{self!r} knows one rank only: use geometry.infer_global_shape")

    def alike(self, other: Distribution) -> bool:
        """True for every box of as many axes: each rank has another one."""
        return isinstance(other, Box) and self.ndim == other.ndim

    def _known_part(
        self, rank: int, global_shape: Sequence[int] | None, size: int | None
    ) -> tuple[Spans, ...]:
        number = integer(rank, "rank", least=0)
        if size is not None and number >= size:
            raise ValueError(f"rank {number} is not one of {size} ranks")
        if global_shape is not None:
            self._check(integers(global_shape, "global_shape", least=0), size)
        mine = known_rank(self)
        if mine is not None and number != mine:
            raise RuntimeError(
                f"{self!r} is the box of rank {mine}; the box of rank {number} is not known here"
            )
        return self._part(number, (), 1)

    def _part(self, rank: int, shape: tuple[int, ...], size: int) -> tuple[Spans, ...]:
        return tuple(Spans.interval(lo, hi) for lo, hi in zip(self.lower, self.upper, strict=True))

    def _end(self) -> tuple[int, ...]:
        return self.upper

    def _check(self, shape: tuple[int, ...], size: int | None) -> None:
        Distribution._check(self, shape, size)
        if not all(hi <= extent for hi, extent in zip(self.upper, shape, strict=True)):
            raise BindDistributionError(f"{self!r} reaches past the global shape {shape}")

    def _place(self, rank: int, ndim: int, size: int) -> tuple[tuple[int, int], ...]:
        raise AssertionError("a box is placed by its corners")

    @classmethod
    def _converted(cls, given: Distribution, size: int) -> Distribution | None:
        """The asking rank's part as a box, once every rank's part is known to be one box."""
        if given.binding is None:
            raise refuse_conversion(given, cls, "it is not bound to a global shape")
        if isinstance(given, Replicated) and size > 1:
            raise refuse_conversion(given, cls, "the boxes of different ranks must not overlap")
        shape, rank = given.binding.global_shape, asking_rank(given, cls)
        for other in range(size):
            for axis, spans in enumerate(given.part(other, shape, size=size)):
                if spans.count > 1:
                    why = f"rank {other} holds {spans.count} blocks along axis {axis}"
                    raise refuse_conversion(given, cls, why)
        part = given.part(rank, shape, size=size)
        return cls([spans.start for spans in part], [spans.stop for spans in part])


@constant_to_compiler
class BlockCyclic(Distribution):
    """Blocks dealt in turn to the coordinates of a process grid, along every axis.

        grid 2 x 1, blocks 1 x 2  0 0 0 0    grid 1 x 2  0 0 1 1 0 0
                                  1 1 1 1                0 0 1 1 0 0
                                  0 0 0 0                0 0 1 1 0 0

    The first block of each axis goes to the coordinate `first_process` (default: all 0). Raises
    ValueError when the block sizes are not one positive integer per axis of the grid, or when
    `first_process` is not a coordinate; TypeError when the grid is not a `ProcessGrid`.
    """

    _arguments: ClassVar[tuple[Argument, ...]] = (
        Argument("process_grid"),
        Argument("block_sizes", appended=1),
        Argument("first_process", keyword=True, appended=0),
    )
    process_grid: ProcessGrid
    block_sizes: tuple[int, ...]  # for a BlockNonCyclic () until it is bound, then its largest part
    first_process: tuple[int, ...]

    def __init__(
        self,
        process_grid: ProcessGrid,
        block_sizes: Sequence[int],
        *,
        first_process: Sequence[int] | None = None,
    ) -> None:
        self._set_grid(process_grid, first_process)
        blocks = integers(block_sizes, "block_sizes", least=1)
        if len(blocks) != process_grid.ndim:
            raise ValueError(f"block_sizes {blocks} must hold one size per axis of {process_grid}")
        object.__setattr__(self, "block_sizes", blocks)

    def _set_grid(self, grid: ProcessGrid, first_process: Sequence[int] | None) -> None:
        if not isinstance(grid, ProcessGrid):
            raise TypeError(f"process_grid must be a ProcessGrid, not {grid!r}")
        first = (
            (0,) * grid.ndim
            if first_process is None
            else integers(first_process, "first_process", least=0)
        )
        if len(first) != grid.ndim or not all(
            c < p for c, p in zip(first, grid.shape, strict=True)
        ):
            raise ValueError(f"first_process {first} is not a coordinate of {grid}")
        object.__setattr__(self, "binding", None)
        object.__setattr__(self, "process_grid", grid)
        object.__setattr__(self, "first_process", first)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.process_grid.ndim

    @property
    def grid_size(self) -> int:
        """The number of ranks of the grid."""
        return self.process_grid.size

    def _place(self, rank: int, ndim: int, size: int) -> tuple[tuple[int, int], ...]:
        grid = self.process_grid
        return tuple(
            ((c - first) % p, p)
            for c, first, p in zip(
                grid.coordinate(rank), self.first_process, grid.shape, strict=True
            )
        )

    def _part(self, rank: int, shape: tuple[int, ...], size: int) -> tuple[Spans, ...]:
        places = self._place(rank, len(shape), size)
        return tuple(
            Spans.cyclic(extent, block, parts, k)
            for extent, block, (k, parts) in zip(shape, self.block_sizes, places, strict=True)
        )

    @classmethod
    def _candidates(cls, given: Distribution, size: int) -> Iterator[Distribution]:
        if given.ndim is None:
            why = "the number of axes is not known, give ndim="
            raise refuse_conversion(given, cls, why)
        if isinstance(given, BlockCyclic):
            yield BlockNonCyclic(given.process_grid, first_process=given.first_process)
        for axis in range(given.ndim):
            shape = [size if other == axis else 1 for other in range(given.ndim)]
            yield BlockNonCyclic(ProcessGrid(shape=shape))


@constant_to_compiler
class BlockNonCyclic(BlockCyclic):
    """One block per coordinate of a process grid, along every axis in even parts.

        4 x 5 on a 2 x 2 grid  0 0 0 1 1    Along an axis of P coordinates the first extent % P of
                               0 0 0 1 1    them, counted from `first_process`, hold one index more
                               2 2 2 3 3    than the others: the rule of Slab, per axis.
                               2 2 2 3 3

    Raises ValueError when `first_process` is not a coordinate of the grid; TypeError when the grid
    is not a `ProcessGrid`.
    """

    _arguments = (Argument("process_grid"), Argument("first_process", keyword=True, appended=0))

    def __init__(
        self, process_grid: ProcessGrid, *, first_process: Sequence[int] | None = None
    ) -> None:
        self._set_grid(process_grid, first_process)
        object.__setattr__(self, "block_sizes", ())

    def _part(self, rank: int, shape: tuple[int, ...], size: int) -> tuple[Spans, ...]:
        return Distribution._part(self, rank, shape, size)

    def _bound_fields(self, shape: tuple[int, ...]) -> dict[str, object]:
        pairs = zip(shape, self.process_grid.shape, strict=True)
        return {"block_sizes": tuple(-(-extent // p) for extent, p in pairs)}


@constant_to_compiler
class Replicated(Distribution):
    """Every rank holds everything."""

    _arguments = (Argument("ndim", keyword=True),)
    _of_numbers = True
    ndim: int | None = None

    def __init__(self, ndim: int | None = None) -> None:
        ndim = None if ndim is None else integer(ndim, "ndim", least=0)
        object.__setattr__(self, "ndim", ndim)

    def owner(
        self,
        index: Sequence[int],
        global_shape: Sequence[int] | None = None,
        *,
        size: int | None = None,
    ) -> int | tuple[int, ...]:
        """All ranks, ascending. Raises IndexError when the index is outside the global shape."""
        index_within(index, self._known_shape(global_shape))
        return tuple(range(self._known_size(size)))

    def _place(self, rank: int, ndim: int, size: int) -> tuple[tuple[int, int], ...]:
        return ((0, 1),) * ndim

    @classmethod
    def _candidates(cls, given: Distribution, size: int) -> Iterator[Distribution]:
        yield cls(given.ndim)

    def _bound_fields(self, shape: tuple[int, ...]) -> dict[str, object]:
        return {"ndim": len(shape)}


_KINDS = {kind.__name__: kind for kind in (Slab, Box, BlockCyclic, BlockNonCyclic, Replicated)}


def unbound(distribution: Distribution) -> Distribution:
    """The distribution without the shape and the ranks to which it is bound."""
    if distribution.binding is None:
        return distribution
    kind, *fields, _ = distribution.encode()
    if kind in ("Slab", "Replicated"):
        fields[-1] = None  # the number of axes, set when it was bound
    return decode((kind, *fields, None))


def decode(data: Any) -> Distribution:
    """The distribution that was encoded. Raises ValueError for malformed data."""
    try:
        distribution = _decode(data)
        plain = distribution.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"malformed distribution: {error}") from None
    # Data that does not encode to itself was not written by `encode`.
    if plain != data or not _plain(data):
        raise ValueError(f"malformed distribution: {data!r}")
    return distribution


def _decode(data: Any) -> Distribution:
    if not isinstance(data, tuple) or len(data) < 2:
        raise ValueError(f"{data!r}")
    name, *fields, binding = data
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or len(fields) != len(kind._arguments):
        raise ValueError(f"unknown kind {name!r} with {len(fields)} fields")
    values = (
        _decode_grid(x) if argument.name == "process_grid" else x
        for argument, x in zip(kind._arguments, fields, strict=True)
    )
    distribution: Distribution = kind._made_of(*values)
    if binding is None:
        return distribution
    shape, size, rank = binding
    return distribution.bind(shape, size=size, rank=rank)


def _decode_grid(data: Any) -> ProcessGrid:
    shape, layout, array = data
    order = None if layout is None else ProcessGrid.Layout(layout)
    return ProcessGrid(shape=shape, layout=order, process_array=array)


def _plain(data: Any) -> bool:
    """True for nested tuples of strings, integers and None. (1.0 and True would equal 1.)"""
    if type(data) is tuple:
        return all(_plain(item) for item in data)
    return data is None or type(data) in (int, str)
