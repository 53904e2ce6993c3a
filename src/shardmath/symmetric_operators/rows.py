"""Rows to all ranks, or to their experts and back, as many as tensors say: `all_to_all_vdev`.

Every rank has `experts` experts, and a part of the rows of each of all of them, one chunk for each.

    rank-major    the experts of rank 0, one after the other, then those of rank 1 ...
    expert-major  the first expert of each rank, one rank after the other, then the second ...

`all_to_all_vdev_2d` sends rank-major chunks to their experts, where they arrive expert-major;
`all_to_all_vdev_2d_offset` sends such chunks back to the ranks, where they are rank-major again. On
cores the ranks tell each other the counts, and copy by `all_to_all`; on GPUs kernels read them, see
`shardmath.collectives.experts`.
Source: torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu, for offsets and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from shardmath.base.immutable import Immutable
from shardmath.collectives import all_to_all
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext
from shardmath.handles.rendezvous import context_of_group, rendezvous

Counts = Sequence[int]


class Shuffle(Immutable, words="{operation}: {ranks} ranks of {experts} experts"):
    """Which chunk goes where. Where it `combines`, chunks are sent expert-major, and come
    rank-major; else the other way round, and what an expert gets is padded to a multiple of
    `align` rows, at least one: 0 pads nothing.
    """

    operation: str
    ranks: int
    experts: int
    combines: bool = False
    align: int = 0

    @property
    def chunks(self) -> int:
        """How many chunks a rank sends, and how many come."""
        return self.ranks * self.experts

    def sent(self, rank: int, expert: int) -> int:
        """The number, at its sender, of the chunk for or from that expert of that rank."""
        return expert * self.ranks + rank if self.combines else rank * self.experts + expert

    def coming(self, table: Sequence[Counts], rank: int) -> list[int]:
        """The counts of the chunks that come to `rank`, in their order there."""
        pairs = [(r, e) for e in range(self.experts) for r in range(self.ranks)]
        if self.combines:
            pairs.sort()
        return [table[src][self.sent(rank, expert)] for src, expert in pairs]

    def came(self, src: int, expert: int) -> int:
        """The number, where it has come, of the chunk from rank `src` of that expert."""
        return src * self.experts + expert if self.combines else expert * self.ranks + src

    def offsets(self, coming: Counts) -> list[int]:
        """Where chunks that come begin, in rows."""
        if not self.align or self.combines:
            return _before(coming)
        starts, start = [], 0
        for first in range(0, self.chunks, self.ranks):
            part = coming[first : first + self.ranks]
            starts += [start + before for before in _before(part)]
            start += max(-(-sum(part) // self.align), 1) * self.align
        return starts

    def end(self, coming: Counts) -> int:
        """Behind the last row that comes."""
        ends = zip(self.offsets(coming), coming, strict=True)
        return max((start + count for start, count in ends if count), default=0)


def _integers(x: Any) -> list[int]:
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise ValueError(f"counts and offsets are integers, not {x.dtype}")
    numbers: list[int] = x.reshape(-1).tolist()
    return numbers


def _before(counts: Counts) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


class _Spec(Immutable):
    """What one rank says of its call: its rows, its room, the type of both, and the counts."""

    rows: int
    room: int
    kinds: list[list[Any]]
    told: list[int]
    counts: Counts
    starts: Counts
    shuffle: list[Any]


def _all_to_all_vdev(x: Any, out: Any, in_splits: Any, told: Any, group_name: str) -> None:
    """Rows of `x` to all ranks: `in_splits[r]` of them, in order, to rank r. Collective.

    Rows that came stand at the start of `out`, by rank; its other rows stay. Row 0 of `told`
    (2, ranks) becomes how many came from each rank, row 1 where they start.

    Raises on all ranks: ValueError for counts that are negative, or are not one for each rank, for
    more rows than a rank's `x` has, and where a rank's `out` has no room.
    """
    context = context_of_group(group_name)

    def shuffle() -> Shuffle:
        return Shuffle("all_to_all_vdev", context.size, 1)

    _exchange(context, ("all_to_all_vdev", 0), shuffle, x, out, in_splits, told)


def _all_to_all_vdev_2d(
    x: Any, out: Any, in_splits: Any, told: Any, group_name: str, major_align: int | None = None
) -> None:
    """Rows of `x` to experts: `in_splits` (ranks * experts) counts them, rank-major. Collective.

    `out` has those of this rank's first expert, from all ranks in order, then those of the next,
    which begin at a multiple of `major_align` rows, 1 unless given; an expert that gets no rows has
    as many of nobody's. Row 0 of `told` (2, ranks * experts) becomes the counts of what came,
    expert-major, row 1 where it starts.

    Raises on all ranks as `all_to_all_vdev`, and for another `major_align` on some.
    """
    context = context_of_group(group_name)
    align = 1 if major_align is None else major_align

    def shuffle() -> Shuffle:
        if align < 1:
            raise ValueError(f"major_align is 1 or more, not {align}")
        experts = _experts(context, in_splits.numel())
        return Shuffle("all_to_all_vdev_2d", context.size, experts, align=align)

    _exchange(context, ("all_to_all_vdev_2d", align), shuffle, x, out, in_splits, told)


def _all_to_all_vdev_2d_offset(
    x: Any, out: Any, in_splits_offsets: Any, told: Any, group_name: str
) -> None:
    """Rows of experts back to the ranks: the inverse of `all_to_all_vdev_2d`. Collective.

    Row 0 of `in_splits_offsets` (2, ranks * experts) counts the rows, expert-major, and row 1 says
    where they begin in `x`. `out` has those from rank 0, by its experts, then those from rank 1,
    and so on, without gaps; `told` is of the same shape as there, rank-major.

    Raises on all ranks as `all_to_all_vdev`.
    """
    context = context_of_group(group_name)

    def shuffle() -> Shuffle:
        if in_splits_offsets.ndim != 2 or len(in_splits_offsets) != 2:
            raise ValueError(
                f"in_splits_offsets has two rows, and the shape {tuple(in_splits_offsets.shape)}"
            )
        experts = _experts(context, in_splits_offsets.shape[1])
        return Shuffle("all_to_all_vdev_2d_offset", context.size, experts, combines=True)

    call = "all_to_all_vdev_2d_offset", 0
    _exchange(context, call, shuffle, x, out, in_splits_offsets, told, with_starts=True)


def _experts(context: DistributedContext, chunks: int) -> int:
    experts, rest = divmod(chunks, context.size)
    if rest or not experts:
        raise ValueError(f"{chunks} counts are no multiple of {context.size} ranks")
    return experts


def _exchange(
    context: DistributedContext,
    call: tuple[str, int],
    make: Callable[[], Shuffle],
    x: Any,
    out: Any,
    splits: Any,
    told: Any,
    *,
    with_starts: bool = False,
) -> None:
    """Exchange the rows of `x`. `make` gives the order of chunks, and may raise; ranks of one size
    that make the same `call`, with as many counts, have the same order.

    Where `splits` come `with_starts`, the second of its two rows has these; else chunks lie one
    after the other.
    """
    if x.is_cuda:
        _exchange_on_gpus(context, call, make, x, out, splits, told, with_starts)
        return

    def describe() -> Any:
        shuffle, counts = make(), _integers(splits)
        if with_starts:
            half = len(counts) // 2
            return _described(shuffle, x, out, told, counts[:half], counts[half:])
        return _described(shuffle, x, out, told, counts, _before(counts))

    shuffle, table, begins = context.agree("all_to_all_vdev", describe, _checked)
    rank, ranks, experts = context.rank, range(shuffle.ranks), range(shuffle.experts)
    order = [shuffle.sent(dst, expert) for dst in ranks for expert in experts]
    rows, counts = x.detach(), table[rank]
    if not with_starts:
        packed = rows[: sum(counts)]
    else:
        chunks = [rows[begins[rank][n] :][: counts[n]] for n in order]
        packed = torch.cat(chunks) if any(counts) else rows[:0]
    sent = [sum(counts[shuffle.sent(dst, expert)] for expert in experts) for dst in ranks]
    received = [sum(row[shuffle.sent(rank, expert)] for expert in experts) for row in table]
    came = all_to_all(packed, send_counts=sent, receive_counts=received, context=context)
    coming = shuffle.coming(table, rank)
    offsets, start = shuffle.offsets(coming), 0
    for src in ranks:
        for expert in experts:
            number = shuffle.came(src, expert)
            count, place = coming[number], offsets[number]
            out.detach()[place : place + count].copy_(came[start : start + count])
            start += count
    told.detach()[0].copy_(torch.tensor(coming))
    told.detach()[1].copy_(torch.tensor(offsets))


def _described(
    shuffle: Shuffle, x: Any, out: Any, told: Any, counts: Counts, begins: Counts
) -> list[Any]:
    kinds = [[str(each.dtype), list(each.shape[1:])] for each in (x, out)]
    words = [shuffle.operation, shuffle.experts, shuffle.combines, shuffle.align]
    return [len(x), len(out), kinds, list(told.shape), counts, begins, words]


def _checked(
    specs: Sequence[Sequence[Any]],
) -> tuple[Shuffle, list[Counts], list[Counts]]:
    """The order of chunks, and by rank their counts and where they begin."""
    ranks = [_Spec(*spec) for spec in specs]
    operation, experts, combines, align = require_equal("the exchange", [r.shuffle for r in ranks])
    shuffle = Shuffle(operation, len(specs), experts, combines, align)
    kind = require_equal("the rows of input", [r.kinds[0] for r in ranks])
    for rank, spec in enumerate(ranks):
        if spec.kinds[1] != kind:
            raise ValueError(f"rank {rank}: out has rows of {spec.kinds[1]}, and input of {kind}")
        if len(spec.counts) != shuffle.chunks or list(spec.told) != [2, shuffle.chunks]:
            raise ValueError(
                f"rank {rank}: expected in_splits of {shuffle.chunks} counts and "
                f"out_splits_offsets of 2 x {shuffle.chunks}, got {len(spec.counts)} and "
                f"{list(spec.told)}"
            )
    table = [spec.counts for spec in ranks]
    for rank, spec in enumerate(ranks):
        _require_within(rank, spec)
    for rank, spec in enumerate(ranks):
        end = shuffle.end(shuffle.coming(table, rank))
        if end > spec.room:
            raise ValueError(f"rank {rank}: {end} rows come, and out has room for {spec.room}")
    return shuffle, table, [spec.starts for spec in ranks]


def _require_within(rank: int, spec: _Spec) -> None:
    """Raise ValueError for counts that are no numbers of rows, or of rows that there are not."""
    if min(spec.counts) < 0:
        raise ValueError(f"rank {rank}: {min(spec.counts)} is no count of rows")
    for count, start in zip(spec.counts, spec.starts, strict=True):
        if count and (start < 0 or start + count > spec.rows):
            raise ValueError(
                f"rank {rank} sends rows {start} to {start + count} of an input of {spec.rows}"
            )


def _exchange_on_gpus(
    context: DistributedContext,
    call: tuple[str, int],
    make: Callable[[], Shuffle],
    x: Any,
    out: Any,
    splits: Any,
    told: Any,
    with_starts: bool,
) -> None:
    """Exchange rows by a kernel, which reads the counts. Where the call is known, no host waits.

    A call is known by its shapes, and by `out`, which has to be symmetric, as the ranks bring it to
    a rendezvous, and other memory than `x`, from which rows are still sent when others come.
    """
    from shardmath.collectives.experts import Experts, RowExchange, RowLaunch

    if with_starts:
        splits = splits.contiguous()
    tensors = x, out, splits, told

    def describe() -> Any:
        shuffle = make()
        if any(not t.is_contiguous() or t.device != x.device for t in tensors):
            raise ValueError("the tensors of an exchange of rows are contiguous, on one GPU")
        if any(t.dtype != torch.int64 for t in tensors[2:]):
            raise ValueError("in_splits and out_splits_offsets are of int64")
        nothing = [0] * (splits[0].numel() if with_starts else splits.numel())
        return _described(shuffle, x, out, told, nothing, nothing)

    def meet() -> RowLaunch:
        shuffle, *_ = context.agree("all_to_all_vdev", describe, _checked)
        handle = rendezvous(out.detach(), context)
        exchange = RowExchange(
            targets=handle.array_ptrs,
            width=prod(x.shape[1:]) * x.element_size(),
            rows=len(x),
            room=len(out),
            experts=shuffle.experts,
            align=shuffle.align,
            combines=shuffle.combines,
            starts=with_starts,
        )
        return kernels.prepare(exchange, keeps=handle)

    kernels = Experts.of(context)
    if context.team is not None and context.team.meets:
        kernels.calls.clear()
    key = (
        *(call, x.shape, x.dtype, out.shape, out.dtype, out.data_ptr()),
        *(splits.shape, splits.dtype, told.shape, told.dtype),
    )
    launch = kernels.calls.find(key)
    if launch is None or not launch.takes(tensors):
        launch = kernels.calls.keep(key, meet())
    with context.executing(call[0]):
        launch.put(x, splits, told)


KERNELS: dict[str, Callable[..., Any]] = {
    "all_to_all_vdev": _all_to_all_vdev,
    "all_to_all_vdev_2d": _all_to_all_vdev_2d,
    "all_to_all_vdev_2d_offset": _all_to_all_vdev_2d_offset,
}
