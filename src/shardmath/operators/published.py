"""What the ranks of an operation on GPUs show each other: matrices by name, read in place by peers.

A rank shows an array on the heap where it lies, and memory of its lane under the name that it has
there. What travels are a few numbers each, in the one exchange that an execution begins with; then
every rank knows the addresses, and a barrier on the stream says when elements may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardmath.context.context import Context
from shardmath.geometry import Move
from shardmath.handles.exposed import Exposed
from shardmath.handles.operand import Operand
from shardmath.local.gpu import Matrix
from shardmath.operators.lanes import Lane

__all__ = ["Places", "PublishedMatrices", "matrix_of"]

Places = Callable[[int], tuple[int, tuple[int, ...]]]  # by rank: address of (0, 0), byte strides


def matrix_of(array: Operand) -> Matrix:
    """An array of two axes, or a vector as a column."""
    one, two = (stride // array.itemsize for stride in (*array.strides, array.itemsize)[:2])
    rows, columns = (*array.shape, 1)[:2]
    return Matrix(array.address, rows, columns, one, two, array.dtype)


class PublishedMatrices:
    """The shown matrices of one execution. `names` are all that there can be, on any rank."""

    def __init__(self, context: Context, lane: Lane, names: Sequence[str]) -> None:
        self._context = context
        self._lane = lane
        self._names = tuple(names)
        self._shown: dict[str, Exposed] = {}
        self._own: dict[str, Matrix] = {}
        self._found: list[dict[str, Exposed]] = []

    def made(self, name: str, shape: tuple[int, ...], dtype: str, order: str) -> Matrix:
        """Memory of the lane for a packed matrix that peers will read. Raises HeapExhausted."""
        rows, columns = shape
        empty = Matrix.packed(0, (rows, columns), dtype, order)
        buffer = self._lane.buffer(name, empty.size * empty.itemsize)
        made = empty._replace(address=buffer.block.address)
        self._show(name, made, (0, 0))
        return made

    def operand(
        self, name: str, array: Operand, ranges: tuple[tuple[int, int], ...]
    ) -> Matrix | None:
        """Show the ranges of rows and columns of an operand: in place if it is on the heap.

        Otherwise memory of the lane for a copy, which is returned for the caller to fill.
        """
        if array.block is not None:
            self._context.announce(array.block)
            self._shown[name] = array.exposed
            return None
        rows, columns = ranges
        part = matrix_of(array).part(rows, columns)
        shape = (part.rows, part.columns)
        copy = Matrix.packed(0, shape, part.dtype, "F" if part.by_columns else "C")
        buffer = self._lane.buffer(name, copy.size * copy.itemsize)
        copy = copy._replace(address=buffer.block.address)
        self._show(name, copy, (rows[0], columns[0]))
        return copy

    def make_room(
        self,
        name: str,
        parts: Callable[[], Iterable[tuple[str, Sequence[Move]]]],
        itemsize: int,
    ) -> None:
        """Take memory for what `reach` brings of any of these parts, its moves by its name.

        None is needed where every rank is reached in place. Raises HeapExhausted.
        """

    def publish(self, name: str, stream: int) -> None:
        """After this on `stream`, and a barrier, peers may read the matrix of that name."""

    def reach(self, name: str, part: str, moves: Sequence[Move], stream: Any) -> Places:
        """Where the ranks' matrices of that name can be read by `moves`, on `stream`, after the
        barrier; what was reached for another part before may be gone. A `part` stands for the same
        moves each time.
        """
        return lambda rank: self.place(name, rank)

    def _show(self, name: str, lane_matrix: Matrix, first: tuple[int, int]) -> None:
        """Show memory of the lane that holds a matrix from row and column `first` on."""
        block = self._lane.buffer(name, 0).block
        item = lane_matrix.itemsize
        steps = lane_matrix.row_stride * item, lane_matrix.column_stride * item
        origin = -sum(start * step for start, step in zip(first, steps, strict=True))
        nbytes = lane_matrix.size * item
        self._shown[name] = Exposed(block.location, nbytes, origin, steps)
        self._own[name] = lane_matrix

    def pack(self) -> bytes:
        """What to tell the peers."""
        told = b""
        for number, name in enumerate(self._names):
            if name in self._shown:
                text = self._shown[name].pack()
                told += bytes([number, len(text)]) + text
        return told

    def learn(self, texts: Sequence[bytes]) -> None:
        """What all ranks, in order, have told."""
        self._found = []
        for text in texts:
            found, at = {}, 0
            while at < len(text):
                number, length = text[at], text[at + 1]
                at += 2 + length
                found[self._names[number]] = Exposed.unpack(text[at - length : at])
            self._found.append(found)

    def own(self, name: str) -> Matrix:
        """This rank's matrix of that name, which `made` gave."""
        return self._own[name]

    def place(self, name: str, rank: int) -> tuple[int, tuple[int, ...]]:
        """The address of element (0, 0) of a rank's matrix here, and its strides in bytes."""
        shown = self._found[rank][name]
        address = self._context.peer_address(rank, shown.location, shown.nbytes)
        assert address is not None, "ranks of one host have an address for each other's memory"
        return address + shown.origin, shown.strides
