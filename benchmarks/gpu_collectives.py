"""Collectives on GPUs beside NCCL and torch's symmetric memory, in CUDA graphs, in one run.

    python benchmarks/gpu_collectives.py 8

Each figure is the median of several replays of a graph that holds many calls, for the slowest
rank. Results are checked before they are timed.
"""

from __future__ import annotations

from functools import partial

from on_gpus import command, run

from shardmath.arrays import dtypes
from shardmath.cuda.kernel import Argument

KIB, MIB = 1 << 10, 1 << 20
ALL_REDUCE = [size * KIB for size in (2, 16, 64, 256)]
ALL_REDUCE += [size * MIB for size in (1, 4, 8, 16, 32, 64, 128, 256)]
OTHER_TYPES = {"float32": "f32", "float64": "f64", "int32": "i32"}  # of 32 and 256 MiB
REDUCE_SCATTER = [MIB, 32 * MIB, 256 * MIB]  # of what each rank gives
MOVES = [16 * KIB, 256 * KIB, *(count * MIB for count in (1, 2, 4, 16, 32))]
# Goals on 8 H200: microseconds, ratios to NCCL, or GB/s.
TARGETS = {
    ("barrier", 0): "<= 2.5 us",
    ("all_reduce bf16", 2 * KIB): "<= 6.0 us",
    ("all_reduce bf16", 16 * KIB): "<= 6.5 us",
    ("all_reduce bf16", 256 * KIB): "<= 10.5 us",
    ("all_reduce bf16", MIB): "<= 13 us",
    ("all_reduce bf16", 32 * MIB): ">= 1.1 x NCCL",
    ("all_reduce bf16", 256 * MIB): ">= 1.0 x NCCL",
    ("all_to_all", 32 * MIB): ">= 350 GB/s",
    ("all_gather", 32 * MIB): ">= 350 GB/s",
}


def calls_for(nbytes):
    return 100 if nbytes <= MIB else 20 if nbytes <= 4 * MIB else 4


def barriers(ranks):
    team = ranks.context.team
    return {
        "what": "barrier",
        "bytes": 0,
        "ours_us": ranks.time(lambda: team.barrier(ranks.stream()), 200),
        "torch_us": ranks.torch_barrier_us(),
        "launch_us": ranks.time(_nobody(ranks), 200),
    }


def _nobody(ranks):
    """A kernel that waits for nobody: what a launch costs in a graph."""
    import struct

    team = ranks.context.team
    kernel, words = team.kernel("push", "push"), 1 + 3 * ranks.size
    argument = Argument(struct.pack(f"{words}Q", *[0] * words))
    return lambda: kernel.launch(ranks.stream(), 1, 32, argument)


def all_reduces(ranks, nbytes, dtype="bfloat16", name="bf16"):
    torch, dist = ranks.torch, ranks.dist
    kind, known = getattr(torch, dtype), dtypes.of(dtype)
    count = nbytes // known.itemsize
    x = values(ranks, count, kind)
    pushed = ranks.moves.reduction_pushes(nbytes, known) is not None
    if pushed:  # as the call does
        buffer, places = ranks.symmetric_memory(nbytes)
        y = torch.as_tensor(buffer, device=ranks.device).view(kind)
    else:
        y = torch.empty_like(x)

    def ours():
        source, stream = x.data_ptr(), ranks.stream()
        if pushed:
            ranks.moves.all_reduce_into(source, places, count, known, "sum", stream)
        else:
            ranks.moves.all_reduce(source, y.data_ptr(), count, known, "sum", stream)

    ours()
    check(ranks, y, x)
    z = x.clone()
    calls = calls_for(nbytes)
    row = {"what": f"all_reduce {name}", "bytes": nbytes}
    systems = {"ours_us": ours, "nccl_us": lambda: dist.all_reduce(z)}
    if name == "bf16":
        systems |= torchs(ranks, count, nbytes)
    row |= ranks.times(systems, calls)
    for system in ("ours", "nccl"):
        row[f"{system}_GBps"] = (
            2 * nbytes * (ranks.size - 1) / ranks.size / row[f"{system}_us"] / 1e3
        )
    return row


def values(ranks, count, kind):
    torch = ranks.torch
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    if not kind.is_floating_point:
        return torch.randint(-999, 999, (count,), device=ranks.device, generator=generator).to(kind)
    return torch.randn(count, device=ranks.device, generator=generator).to(kind)


def check(ranks, found, x):
    """Check that `found` is the sum of all ranks' `x`, or this rank's part of it."""
    reference = x.float()
    ranks.dist.all_reduce(reference)
    ranks.torch.cuda.synchronize()
    part = reference.numel() // found.numel()
    if part > 1:
        reference = reference.view(part, -1)[ranks.rank]
    assert (found.float() - reference).abs().max() <= 0.04 * ranks.size, "wrong sum"


def torchs(ranks, count, nbytes):
    torch = ranks.torch
    theirs, _ = ranks.torch_memory(count, torch.bfloat16)
    theirs.zero_()
    ops = torch.ops.symm_mem
    found = {"torch_two_shot_us": lambda: ops.two_shot_all_reduce_(theirs, "sum", ranks.group)}
    if nbytes <= 4 * MIB:
        found["torch_one_shot_us"] = lambda: ops.one_shot_all_reduce(theirs, "sum", ranks.group)
    return found


def reduce_scatters(ranks, nbytes):
    """A row of reduce_scatter, of `nbytes` on each rank, from and into ordinary memory."""
    torch, dist, size = ranks.torch, ranks.dist, ranks.size
    bf16 = dtypes.of("bfloat16")
    counts = [nbytes // 2 // size] * size
    x = values(ranks, nbytes // 2, torch.bfloat16)
    y = torch.empty(counts[0], dtype=torch.bfloat16, device=ranks.device)

    def ours():
        source, target = x.data_ptr(), y.data_ptr()
        ranks.moves.reduce_scatter(source, target, counts, bf16, "sum", ranks.stream())

    ours()
    check(ranks, y, x)
    row = {"what": "reduce_scatter bf16", "bytes": nbytes}
    systems = {"ours_us": ours, "nccl_us": lambda: dist.reduce_scatter_tensor(y, x)}
    row |= ranks.times(systems, calls_for(nbytes))
    for system in ("ours", "nccl"):
        row[f"{system}_GBps"] = nbytes * (size - 1) / size / row[f"{system}_us"] / 1e3
    return row


def moves(ranks, nbytes):
    """all_gather of `nbytes` from each rank, and all_to_all of `nbytes` to each rank: ours into
    ordinary memory and into the heap.
    """
    torch, dist, size = ranks.torch, ranks.dist, ranks.size
    data = torch.randint(0, 255, (nbytes * size,), device=ranks.device, dtype=torch.uint8)
    theirs, shard, moves = torch.empty_like(data), data[:nbytes], ranks.moves
    buffer, _ = ranks.symmetric_memory(nbytes * size)
    moves.heaps.renew()
    results = {
        "ours_us": torch.empty_like(data),
        "heap_us": torch.as_tensor(buffer, device=ranks.device),
    }
    table = [[1] * size] * size
    for what, whole, nccl in (
        ("all_gather", True, lambda: dist.all_gather_into_tensor(theirs, shard)),
        ("all_to_all", False, lambda: dist.all_to_all_single(theirs, data)),
    ):
        places = {name: (data.data_ptr(), result.data_ptr()) for name, result in results.items()}

        def move(name, places=places, whole=whole):
            moves.move(*places[name], table, nbytes, ranks.stream(), whole=whole)

        systems = {name: partial(move, name) for name in results}
        nccl()
        for name, result in results.items():
            systems[name]()
            torch.cuda.synchronize()
            assert torch.equal(result, theirs), (what, name)
        row = {"what": what, "bytes": nbytes}
        row |= ranks.times(systems | {"nccl_us": nccl}, calls_for(nbytes * size))
        for name in ("ours", "heap", "nccl"):
            row[f"{name}_GBps"] = nbytes * (size - 1) / row[f"{name}_us"] / 1e3
        yield row


def measure(ranks):
    for row in cases(ranks):
        row["target"] = TARGETS.get((row["what"], row["bytes"]), "")
        if "nccl_us" in row:
            row["ratio_to_nccl"] = row["nccl_us"] / row["ours_us"]
        if "heap_us" in row:
            row["heap_to_nccl"] = row["nccl_us"] / row["heap_us"]
        yield row


def cases(ranks):
    yield barriers(ranks)
    for nbytes in ALL_REDUCE:
        yield all_reduces(ranks, nbytes)
    for dtype, name in OTHER_TYPES.items():
        for nbytes in (32 * MIB, 256 * MIB):
            yield all_reduces(ranks, nbytes, dtype, name)
    for nbytes in REDUCE_SCATTER:
        yield reduce_scatters(ranks, nbytes)
    for nbytes in MOVES:
        yield from moves(ranks, nbytes)


if __name__ == "__main__":
    run("gpu_collectives", measure, command(__doc__).parse_args())
