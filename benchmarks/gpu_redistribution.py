"""Redistribution on GPUs beside NCCL with packing by torch, in CUDA graphs, in one run.

    python benchmarks/gpu_redistribution.py 8

Each figure is the median of several replays of a graph that holds a few calls, for the slowest
rank. `wire` is NCCL's all-to-all alone, of as many packed bytes. Results are compared bit by bit
with NCCL's before anything is timed. Ours reads and writes arrays on the heap. NCCL uses torch's
own memory, because it registers what it finds in a graph, and hangs on heap memory.
"""

from __future__ import annotations

from on_gpus import command, run

from shardmath.arrays import library_named
from shardmath.distribution import BlockCyclic, ProcessGrid, Redistribute, Slab
from shardmath.handles.allocation import empty_on_heap

CALLS = 4
BLOCK = 256
# Goals on 8 H200: GB/s sent by each GPU.
TARGETS = {
    "slab X -> Y, 512^3 complex64": 300,
    "slab X -> Y, 1024^3 complex64": 300,
    "block-cyclic 256 -> slab X, 16384^2 float32": 250,
}


def flat(x):
    """All elements in one dimension, complex ones as pairs, as NCCL takes them."""
    return (x.view(x.real.dtype) if x.is_complex() else x).view(-1)


def slabs(ranks, shape, dtype="complex64", order="C"):
    """X -> Y of three axes; with order "F" the result is column-major, and NCCL's stays C."""
    size, rank = ranks.size, ranks.rank
    rows = [Slab.X.shape(each, shape, size=size)[0] for each in range(size)]
    columns = [Slab.Y.shape(each, shape, size=size)[1] for each in range(size)]
    numbers = (2 if dtype.startswith("complex") else 1) * shape[2]  # of a row
    sent = [rows[rank] * each * numbers for each in columns]
    came = [each * columns[rank] * numbers for each in rows]
    even = len({*rows}) == len({*columns}) == 1

    def wire(room, out):
        splits = () if even else (came, sent)
        ranks.dist.all_to_all_single(flat(out), flat(room), *splits)

    def theirs(x, room, out):
        if even:
            parts = x.view(rows[0], size, columns[0], shape[2]).permute(1, 0, 2, 3)
            room.view(parts.shape).copy_(parts)
        else:
            for part, place in zip(x.split(columns, 1), flat(room).split(sent), strict=True):
                place.view(part.shape).copy_(part)
        wire(room, out)

    extents = f"{shape[0]}^3" if len({*shape}) == 1 else " x ".join(map(str, shape))
    return {
        "what": f"slab X -> Y, {extents} {dtype}" + (", C -> F" if order == "F" else ""),
        "distributions": (Slab.X, Slab.Y),
        "shape": shape,
        "dtype": dtype,
        "order": order,
        "stays": columns[rank] / shape[1],
        "theirs": theirs,
        "wire": wire,
    }


def cyclic(ranks, n):
    """Square blocks dealt out over a grid of 2 rows -> slabs, float32."""
    size = ranks.size
    rows, columns = (2, size // 2) if size > 1 else (1, 1)
    grid = ProcessGrid(shape=(rows, columns), layout=ProcessGrid.Layout.ROW_MAJOR)
    mine, across = n // size // BLOCK // rows, n // BLOCK // columns  # blocks from each rank

    def wire(room, out):
        ranks.dist.all_to_all_single(flat(out), flat(room))

    def theirs(x, room, out):
        wire(x, room)
        came = room.view(rows, columns, mine, BLOCK, across, BLOCK)
        out.view(mine, rows, BLOCK, across, columns, BLOCK).copy_(came.permute(2, 0, 3, 4, 1, 5))

    return {
        "what": f"block-cyclic {BLOCK} -> slab X, {n}^2 float32",
        "distributions": (BlockCyclic(grid, (BLOCK, BLOCK)), Slab.X),
        "shape": (n, n),
        "dtype": "float32",
        "order": "C",
        "stays": 1 / size,
        "theirs": theirs,
        "wire": wire,
    }


def measured(ranks, case):
    """One row of the table: ours, NCCL's with packing and unpacking, and NCCL's alone."""
    torch, dtype, library = ranks.torch, case["dtype"], library_named("torch")
    from_shape, to_shape = (
        each.shape(ranks.rank, case["shape"], size=ranks.size) for each in case["distributions"]
    )
    x = empty_on_heap(ranks.context, library, from_shape, dtype)
    out = empty_on_heap(ranks.context, library, to_shape, dtype, case["order"])
    flat(x).copy_(torch.randint(0, 100, flat(x).shape, device=ranks.device, dtype=torch.uint8))
    given, room = x.clone(), torch.empty_like(x)
    theirs = torch.empty(to_shape, dtype=x.dtype, device=ranks.device)
    with Redistribute(x, *case["distributions"]) as plan:
        plan.plan()
        plan.execute(out=out)
        case["theirs"](given, room, theirs)
        torch.cuda.synchronize()
        assert torch.equal(out, theirs), case["what"]
        out.zero_()
        ours = ranks.time(lambda: plan.execute(out=out), CALLS)
        assert torch.equal(out, theirs), case["what"]
    packed = ranks.time(lambda: case["theirs"](given, room, theirs), CALLS)
    wire = ranks.time(lambda: case["wire"](given, theirs), CALLS)
    sent = x.numel() * x.element_size() * (1 - case["stays"])
    row = {"what": case["what"], "bytes_sent": sent}
    for name, micros in (("ours", ours), ("nccl", packed), ("wire", wire)):
        row[f"{name}_us"] = micros
        row[f"{name}_GBps"] = sent / micros / 1e3
    row["ratio_to_nccl"] = packed / ours
    row["target_GBps"] = TARGETS.get(case["what"], "")
    return row


def measure(ranks):
    """The rows, small arrays before large ones."""
    cases = [
        slabs(ranks, (256, 256, 256)),
        slabs(ranks, (513, 511, 509), "float32"),
        slabs(ranks, (513, 511, 1017), "float16"),
        slabs(ranks, (512, 512, 512)),
        slabs(ranks, (512, 512, 512), order="F"),
        slabs(ranks, (1023, 1023, 1021), "uint8"),
        cyclic(ranks, 16384),
        slabs(ranks, (1024, 1024, 1024)),
    ]
    for case in cases:
        yield measured(ranks, case)


if __name__ == "__main__":
    run("gpu_redistribution", measure, command(__doc__).parse_args())
