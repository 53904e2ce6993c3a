"""Steps of factorisations: what one rank does with blocks of its matrices. Pure data.

A factorisation does not stop at a number that it cannot use. It notes the fault in `status`, which
keeps the least code; at the end all ranks take the least of theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmath.local.lapack import Op, Precision
from shardmath.program.steps import Step

# Codes of a `status`. Numbers from 1 on are that of the first minor or pivot at fault.
NOT_FINITE_B, NOT_FINITE_A, NOT_PIVOTS, GOOD = -2, -1, 1 << 61, 1 << 62


class Cut(NamedTuple):
    """The block of these rows and columns, each (from, to), of one rank's buffer."""

    buffer: str
    rows: tuple[int, int]
    columns: tuple[int, int]

    def of_rows(self, lo: int, hi: int) -> Cut:
        """Rows `lo` to `hi` of the block."""
        return self._replace(rows=(self.rows[0] + lo, self.rows[0] + hi))

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return not (self.rows[0] < self.rows[1] and self.columns[0] < self.columns[1])

    def __str__(self) -> str:
        (top, bottom), (left, right) = self.rows, self.columns
        return f"{self.buffer}[{top}:{bottom}, {left}:{right}]"


class Fill(Step, words="fill {target} with {number}"):
    """Every element of a buffer becomes a number."""

    target: str
    number: int


class CheckFinite(Step, words="look for NaN and infinity in {source}"):
    """`status` becomes `code`, if that is less, where an element of `source` is NaN or infinite."""

    source: str
    status: str
    code: int


class Conjugate(Step, words="conjugate {target}"):
    """Every element of a buffer becomes its complex conjugate."""

    target: str


class SetIdentity(Step, words="fill {target} with the identity from column {first} on"):
    """A buffer becomes columns of the identity, from column `first` of it on."""

    target: str
    first: int


class Clear(Step, words="fill {target} with zeros"):
    """Every element of a buffer becomes 0."""

    target: str


class KeepLower(Step, words="keep the lower triangle of {columns}"):
    """Elements of `columns` above the diagonal, which begins in row `first`, become 0."""

    columns: Cut
    first: int


class CopyDiagonal(Step, words="copy the diagonal of {block} to {target}"):
    """Elements of a diagonal block to elements (from, to) of a vector."""

    block: Cut
    target: str
    place: tuple[int, int]


class FactoriseCholesky(Step, words="factorise {panel}, without pivots"):
    """The Cholesky factor of a panel: of the diagonal block at its top, which begins in row `first`
    of the matrix, and of the rows below.
    """

    panel: Cut
    status: str
    first: int


class FactoriseLU(Step, words="factorise {panel}, with pivots of all its rows"):
    """The LU factors of a panel, whose first row is `first` of the matrix. All rows of the panel
    are candidates for a pivot. Elements `place` of `pivots` get the rows, of the matrix, that were
    exchanged.
    """

    panel: Cut
    pivots: str
    place: tuple[int, int]
    status: str
    first: int


class ExchangeRows(Step, words="exchange rows of {target} by {pivots}"):
    """Exchange rows of `target`, whose first row is `first` of the matrix, as elements `place` of
    `pivots` say, from the last to the first if `backward`. If one of these is no row of `target`,
    that is noted in `status`, and none are exchanged.
    """

    pivots: str
    place: tuple[int, int]
    target: Cut
    first: int
    status: str
    backward: bool = False


class Substitute(Step):
    """`target` becomes op(triangle)^-1 target. The place of the first 0 on the diagonal is noted in
    `status`, if that is given; `first` is the triangle's first row in the matrix.
    """

    triangle: Cut
    target: Cut
    lower: bool
    op: Op = "N"
    unit: bool = False
    status: str = ""
    first: int = 0

    def __str__(self) -> str:
        return f"solve {self.target} by the {'lower' if self.lower else 'upper'} {self.triangle}"


class Subtract(Step):
    """`target` minus op(left) op(right), with factors in that precision and sums in the target's
    type.
    """

    target: Cut
    left: Cut
    right: Cut
    ops: tuple[Op, Op] = ("N", "N")
    precision: Precision = "full"

    def __str__(self) -> str:
        left, right = (
            f"{cut}{'' if op == 'N' else '^' + op}"
            for cut, op in zip((self.left, self.right), self.ops, strict=True)
        )
        precision = "" if self.precision == "full" else f", in {self.precision},"
        return f"subtract {left} {right}{precision} from {self.target}"
