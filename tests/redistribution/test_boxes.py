"""The tables that the kernel for strided boxes reads, byte by byte, without a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from shardmath.redistribution.boxes import BASES, tables
from shardmath.redistribution.copies import StridedCopy

MIB = 1 << 20


def dense(shape, unit, order=None):
    """Strides of a packed array whose axes are nested in `order`, the last the densest."""
    strides, step = [0] * len(shape), unit
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def box(shape, unit, source=None, target=None, at=(0, 0)):
    return StridedCopy(
        0, 0, unit, shape, at[0], source or dense(shape, unit), at[1], target or dense(shape, unit)
    )


def units(row, tile):
    """Which (source byte, target byte, bytes) a tile of a row of the table copies."""
    dims = row["dims"][: row["ndim"]]

    def located(index):
        from_, to = int(row["from"]), int(row["to"])
        for at, dim in reversed(list(enumerate(dims))):
            extent, magic, shift = (int(dim[name]) for name in ("extent", "magic", "shift"))
            quotient = (index * magic >> 32) >> shift if at else 0
            rest = index - quotient * extent
            from_, to, index = from_ + rest * int(dim["from"]), to + rest * int(dim["to"]), quotient
        return from_, to

    def ranged(start, step, end):
        return range(start * step, min((start + 1) * step, end))

    number = {name: int(row[name]) for name in row.dtype.names if name != "dims"}
    if not number["transposed"]:
        group, piece = divmod(tile, number["pieces"])
        columns = ranged(piece, number["piece"], number["unit"])
        for index in ranged(group, number["rows"], number["count"]):
            from_, to = located(index)
            yield from_ + columns[0], to + columns[0], len(columns)
        return
    rest, along = divmod(tile, number["tiles_along"])
    beside, across = divmod(rest, number["tiles_across"])
    for index, i, j in itertools.product(
        ranged(beside, number["rows"], number["count"]),
        ranged(along, number["tile_along"], number["along"]),
        ranged(across, number["tile_across"], number["across"]),
    ):
        from_, to = located(index)
        from_ += i * number["from_along"] + j * number["from_across"]
        yield from_, to + i * number["to_along"] + j * number["to_across"], number["unit"]


def every_byte(box):
    """(source byte, target byte) of all of a box."""
    offsets = np.arange(box.unit)
    pairs = []
    for start, strides in (
        (box.src_offset, box.src_strides),
        (box.dst_offset, box.dst_strides),
    ):
        at = start + sum(
            np.arange(n).reshape(-1, *[1] * (len(box.shape) - axis)) * stride
            for axis, (n, stride) in enumerate(zip(box.shape, strides, strict=True))
        )
        pairs.append(np.broadcast_to(at + offsets, (*box.shape, box.unit)).ravel())
    return sorted(zip(*(each.tolist() for each in pairs), strict=True))


BOXES = {
    "nothing": box((0, 4), 4),
    "one byte": box((), 1),
    "one long row": box((), 300_000),
    "rows": box((7, 30), 40, (2000, 60), (1800, 50)),
    "long rows": box((3,), 20_001, (30_000,), (20_001,)),
    "odd rows": box((300, 3), 24, (100, 30), None),
    "transposed": box((70, 90), 4, dense((70, 90), 4, (1, 0))),
    "transposed, uneven": box((67, 3, 101), 3, dense((67, 3, 101), 3, (2, 1, 0))),
    "transposed, thin": box((2, 3000), 8, dense((2, 3000), 8, (1, 0))),
    "transposed, other way": box((3000, 2), 8, dense((3000, 2), 8, (1, 0))),
    "transposed, beside": box((5, 6, 7, 8), 2, dense((5, 6, 7, 8), 2, (3, 1, 0, 2))),
    "reversed": box((9, 8), 4, (-32, -4), (32, 4), (284, 0)),
    "target reversed": box((9, 8), 4, None, (-64, -8), (0, 600)),
    "broadcast": box((9, 8), 4, (0, 4)),
    "many axes": box(
        (2,) * 10, 1, tuple(3**k for k in range(10)), tuple(3 ** (9 - k) for k in range(10))
    ),
}


@pytest.mark.parametrize("name", BOXES)
def test_every_byte_is_in_one_tile(name):
    made = tables([BOXES[name]])
    found = [
        (from_ + k, to + k)
        for number, tile in made.tiles.tolist()
        for from_, to, nbytes in units(made.boxes[number], tile)
        for k in range(nbytes)
    ]
    assert sorted(found) == every_byte(BOXES[name])
    assert made.nbytes == len(found) == BOXES[name].nbytes


@pytest.mark.parametrize(
    ("shape", "unit", "order", "transposed"),
    [
        ((64, 64), 4, (1, 0), True),
        ((64, 64), 127, (1, 0), True),
        ((64, 64), 128, (1, 0), False),  # a line at a time in any order
        ((64, 64), 4, (0, 1), False),
        ((64, 64, 8), 4, (1, 0, 2), True),
        ((64, 64, 64), 4, (1, 0, 2), False),
    ],
)
def test_only_short_units_pass_through_shared_memory(shape, unit, order, transposed):
    made = tables([box(shape, unit, dense(shape, unit, order))])
    assert made.boxes["transposed"].tolist() == [transposed]


def test_a_large_box_is_counted_in_parts():
    row = tables([box((), 5 << 30)]).boxes
    assert row["unit"].sum(dtype=int) == 5 << 30
    assert (row["from"] == np.cumsum([0, *row["unit"][:-1].astype(int)])).all()
    many = tables([box((3 << 20, 1 << 11), 1, (1 << 13, 2), (1 << 13, 3))])
    assert many.nbytes == 3 << 31
    assert (many.boxes["count"] <= 1 << 30).all()
    assert many.boxes["count"].sum(dtype=int) == 3 << 31


@pytest.mark.parametrize("seed", range(3))
def test_links_are_busy_in_proportion(seed):
    """At any time, of every link the same part has been done, give or take two tiles."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 64, 6) * MIB
    boxes = [StridedCopy(0, k, int(n), (), 0, (), 0, ()) for k, n in enumerate(sizes)]
    boxes += [StridedCopy(0, k, 1024, (4096,), 0, (2048,), 0, (4096,)) for k in range(6)]
    made = tables(boxes)
    links = made.boxes["target"][made.tiles[:, 0]]
    assert links[:6].tolist() == list(range(1, 7))  # after the one source
    counts = np.bincount(links)[1:]
    for link, count in enumerate(counts, 1):
        done = np.cumsum(links == link) / count
        even = np.arange(1, len(links) + 1) / len(links)
        assert np.abs(done - even).max() <= 2 / count + 2 / len(links)


def test_a_launch_has_room_for_so_many_memories():
    each = [StridedCopy(k, 0, 1, (), 0, (), k, ()) for k in range(BASES)]
    assert tables(each[:-1]).sources == BASES - 1
    with pytest.raises(ValueError, match="the most is 128"):
        tables(each)


@pytest.mark.parametrize("bytes_", [1, 10_000, 3 * MIB, 100 * MIB])
@pytest.mark.parametrize("unit", [1, 2, 3, 4, 8, 12, 16, 64, 100])
def test_tiles_fit_into_shared_memory(bytes_, unit):
    for ratio in (1, 7, 300):
        side = max(1, int((bytes_ / unit / ratio) ** 0.5))
        for shape in ((side, side * ratio), (side * ratio, side)):
            if prod(shape) == max(shape):
                continue
            row = tables([box(shape, unit, dense(shape, unit, (1, 0)))]).boxes[0]
            assert row["transposed"]
            across = int(row["tile_across"]) * unit + 32
            assert int(row["rows"]) * int(row["tile_along"]) * across <= 24 << 10


# Whether rows lie at multiples of 16 bytes: by unit, strides of source and target, and offsets.
ALIGNED = [
    (64, (64, 80), (0, 0), False),
    (64, (64, 72), (0, 0), True),
    (64, (72, 64), (0, 0), True),
    (60, (64, 64), (0, 0), True),
    (64, (64, 64), (16, 0), False),
    (64, (64, 64), (4, 0), True),
    (64, (64, 64), (0, 1), True),
]


@pytest.mark.parametrize(("unit", "strides", "offsets", "anywhere"), ALIGNED)
def test_unaligned_rows_are_known(unit, strides, offsets, anywhere):
    (source, target), shape = strides, (3,)
    given = box(shape, unit, (source,), (target,), offsets)
    assert tables([given]).unaligned == anywhere
    assert tables([box((3, 4), 128, (1024, 128)), given]).unaligned == anywhere


class Device:
    processors = 1


class Loaded:
    """A kernel that takes notes."""

    def __init__(self, device, file, function, defines):
        self.defines = defines

    def load(self):
        pass

    def ready(self, blocks, threads, argument):
        return self.defines

    def launch(self, stream, blocks, threads, argument):
        stream.append(self.defines)


@pytest.mark.parametrize("address", [4096, 4096 + 8])
@pytest.mark.parametrize("unit", [64, 60])
def test_the_kernel_is_the_one_for_such_rows(unit, address, monkeypatch):
    from shardmath.redistribution import box_copies

    monkeypatch.setattr(box_copies, "kernel", Loaded)
    monkeypatch.setattr(box_copies, "Constant", lambda device, array: SimpleNamespace(address=0))
    monkeypatch.setattr(box_copies, "beside_captures", nullcontext)
    copies = box_copies.BoxCopies(Device(), [box((3,), unit, (64,), (64,))])
    want = (f"UNALIGNED={unit % 16 != 0 or address % 16 != 0:d}",)
    put = []
    copies.launch(put, [0], [address])
    assert put == [want]
    assert copies.ready([address], [0]) == want
