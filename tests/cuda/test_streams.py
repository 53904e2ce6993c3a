"""Two groups compute at once, each on a stream and in a thread of its own."""

from __future__ import annotations

import random
import threading

import pytest

COUNTS = [3, 5000, 300_000]


def work(context, group, seed, results):
    """All-reduces of many sizes in one group, on one stream."""
    import torch

    from shardmath.collectives import all_reduce

    torch.cuda.set_device(context.device_id)
    order, wrong = random.Random(seed), []
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(30):
                count = COUNTS[order.randrange(len(COUNTS))]
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
    groups = [context.split(0), context.split(context.rank // 2 if halves else 0)]
    results: dict[int, object] = {}
    threads = [
        threading.Thread(target=work, args=(context, group, seed, results))
        for seed, group in enumerate(groups)
    ]
    # Which group's kernels come first on the GPU differs by rank.
    for thread in threads if context.rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    context.barrier()
    return results[0], results[1]


@pytest.mark.parametrize("halves", [False, True])
def test_two_groups_at_once(gpus, size, halves):
    assert gpus.run(check_two, halves, ranks=size) == [([], [])] * size
