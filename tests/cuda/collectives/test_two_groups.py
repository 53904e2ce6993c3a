"""Two groups compute at once, each on a stream and in a thread of its own."""

from __future__ import annotations

import random
import threading

import pytest

COUNTS = [3, 5000, 300_000]


def work(context, group, stream, seed, results):
    """All-reduces of many sizes in one group, on one stream."""
    import torch

    from shardmath.collectives import all_reduce

    torch.cuda.set_device(context.device_id)
    order, wrong = random.Random(seed), []
    try:
        with torch.cuda.stream(stream):
            for number in range(30):
                count = order.choice(COUNTS) if seed else COUNTS[number % len(COUNTS)]
                x = torch.full((count,), float(group.rank + number), device="cuda")
                total = all_reduce(x, context=group)
                wanted = sum(rank + number for rank in range(group.size))
                if not bool((total == wanted).all()):
                    wrong.append((number, count))
        results[seed] = wrong
    except Exception as error:
        results[seed] = f"{type(error).__name__}: {error}"


def check_two(context, halves):
    """Both groups have all ranks; or the second one only those of each half."""
    import torch

    torch.cuda.set_device(context.device_id)
    groups = [context.split(0), context.split(context.rank // 2 if halves else 0)]
    streams = [torch.cuda.Stream() for _ in groups]
    results: dict[int, object] = {}
    # CUDA loads a kernel when it is first launched, and may wait for all that runs to do so: for a
    # kernel that waits for peers, too. So everything is launched once, one group after the other.
    for group, stream in zip(groups, streams, strict=True):
        work(context, group, stream, 0, results)
        torch.cuda.synchronize()
        context.barrier()
    threads = [
        threading.Thread(target=work, args=(context, group, stream, seed, results))
        for seed, (group, stream) in enumerate(zip(groups, streams, strict=True), 1)
    ]
    # Which group's kernels come first on the GPU differs by rank.
    for thread in threads if context.rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    context.barrier()
    return results[0], results[1], results[2]


@pytest.mark.parametrize("halves", [False, True])
def test_two_groups_at_once(gpus, size, halves):
    found = gpus.run(check_two, halves, ranks=size)
    assert found == [([], [], [])] * size
