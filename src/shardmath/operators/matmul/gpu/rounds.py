"""Rounds in which the lines of an operand get to all ranks, and the products between them. Pure.

Lines are rows of op(A) or columns of op(B). Every rank has some and needs all. Large parts come in
rounds: in each, a rank sends its lines to one other and receives those of one, so that a link
carries one part at a time. Adjacent lines that have come are multiplied while others come.

    4 ranks       own  round 1  2  3      after rounds 0, 1 and 3 products of the lines of ranks
    rank 0        0          1  2  3      0     1     2 and 3
    rank 1        1          0  3  2      1     0     2 and 3
    rank 2        2          3  0  1      2     3     0 and 1
    rank 3        3          2  1  0      3     2     0 and 1

Small parts are pushed to all ranks by one kernel, and one product follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.local.gpu.scaled import GRAIN
from shardmath.machine import h200
from shardmath.operators.matmul.gpu.patterns import gathered_lines
from shardmath.operators.matmul.strategy import Strategy

_TILE = 128  # lines of a tile of a product
_ROOM = 16 << 30  # bytes of all lines; more come in panels along k, which take turns in memory


class Stage(Immutable):
    """Lines `lo` to `hi`, which are multiplied after a round; 0 for this rank's own lines."""

    round: int
    lo: int
    hi: int


class Rounds(Immutable):
    """The rounds of operand `index`, 0 for op(A). `lines` are the number of each rank's, and `cuts`
    the rounds after which there is a product, from 0 to the last; () where all lines come at once.
    """

    index: int
    lines: tuple[int, ...]
    cuts: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Each rank's first line, and the one behind all."""
        return tuple(accumulate(self.lines, initial=0))

    @property
    def count(self) -> int:
        """The number of rounds; 0 where all lines come at once."""
        return len(self.lines) - 1 if self.cuts else 0

    def target(self, rank: int, number: int) -> int:
        """The rank to which a rank sends its lines in round `number`, from 1 on."""
        size = len(self.lines)
        return rank ^ number if size & (size - 1) == 0 else (rank + number) % size

    def source(self, rank: int, number: int) -> int:
        """The rank whose lines a rank receives in that round."""
        size = len(self.lines)
        return rank ^ number if size & (size - 1) == 0 else (rank - number) % size

    def stages(self, rank: int) -> list[Stage]:
        """The products of a rank, in order."""
        if not self.cuts:
            return [Stage(0, 0, self.starts[-1])]
        stages = [Stage(0, self.starts[rank], self.starts[rank + 1])]
        for before, last in pairwise(self.cuts):
            come = sorted(self.source(rank, number) for number in range(before + 1, last + 1))
            runs: list[list[int]] = []
            for src in come:
                if runs and runs[-1][1] == src:
                    runs[-1][1] = src + 1
                else:
                    runs.append([src, src + 1])
            stages += [Stage(last, self.starts[lo], self.starts[hi]) for lo, hi in runs]
        return [stage for stage in stages if stage.lo < stage.hi]

    def __str__(self) -> str:
        what = "columns of b" if self.index else "rows of a"
        if not self.cuts:
            return f"{what} come all at once"
        after = ", ".join(map(str, self.cuts))
        return f"{what} come in {self.count} rounds, products follow on {after}"


def rounds_of(strategy: Strategy) -> Rounds | None:
    """The rounds of a strategy in which all ranks need one operand whole, and nothing else moves;
    None for other strategies, and for too large an operand. The same on all ranks.
    """
    pattern, k = gathered_lines(strategy), strategy.problem.shape[2]
    if pattern is None or strategy.problem.size == 1 or not 0 < k * sum(pattern.rows) <= _ROOM:
        return None
    other = strategy.rows if pattern.transposed else strategy.columns
    widest = max(part.length for part in other)
    after = cuts(pattern.rows, widest, k)
    return Rounds(int(bool(pattern.transposed)), pattern.rows, after)


def cuts(lines: Sequence[int], others: int, k: int) -> tuple[int, ...]:
    """The rounds after which products of `lines` by `others` lines of the other operand are done
    soonest; () where one product, after all lines have been pushed, is done sooner.
    """
    if any(start % GRAIN for start in accumulate(lines)):
        return ()
    size, most, deep = len(lines), max(lines), up(k, GRAIN)
    round_seconds = h200.COPY_START + most * deep / h200.ENGINE
    ends = [_seconds(most, others, k)]  # when all lines up to a round have been multiplied
    follows = [0]
    for number in range(1, size):
        arrival = 2 * h200.BARRIER + h200.ENGINES_START + number * round_seconds
        ways = [
            (max(ends[before], arrival) + _seconds((number - before) * most, others, k), before)
            for before in range(number)
        ]
        end, before = min(ways)
        ends.append(end)
        follows.append(before)
    push = 2 * h200.BARRIER + h200.PUSH_START + (size - 1) * most * deep / h200.PUSHED
    if push + _seconds(size * most, others, k) <= ends[-1]:
        return ()
    rounds = [size - 1]
    while rounds[-1]:
        rounds.append(follows[rounds[-1]])
    return tuple(reversed(rounds))


def _seconds(lines: int, others: int, k: int) -> float:
    """Seconds of one product, whose tiles take turns on the multiprocessors."""
    tiles = up(-(-lines // _TILE) * -(-others // _TILE), h200.PROCESSORS)
    return h200.PRODUCT_START + tiles * 2.0 * _TILE * _TILE * k / h200.FLOAT8_PRODUCT
