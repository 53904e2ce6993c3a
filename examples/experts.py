"""A mixture of experts with torch's operators, on cores: torch's program with one line changed.

torchrun --nproc-per-node 2 examples/experts.py

tokens, sorted by expert          rank 0              rank 1
rank 0  | 0 | 1 | 2 | 3 |   -->   | 0 0 | 1 1 |       | 2 2 | 3 3 |    tokens of both ranks
rank 1  | 0 | 1 | 2 | 3 |   <--   for its experts     for its experts
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# The one line. For torch's own memory and operators, on GPUs, it is
# import torch.distributed._symmetric_memory as symm_mem
import shardmath.symmetric_memory as symm_mem

TOKENS, WIDTH, EXPERTS = 50, 16, 3  # on each rank


def main() -> None:
    """Send tokens to their experts, multiply there, and bring them back."""
    dist.init_process_group("gloo")
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    device = torch.device("cpu")
    splits = size * EXPERTS  # chunks of tokens: sent, one for each expert; received, as many

    torch.manual_seed(rank)
    tokens = symm_mem.empty(TOKENS, WIDTH, dtype=torch.float32, device=device).normal_()
    chosen = torch.randint(splits, (TOKENS,)).sort().values
    generator = torch.Generator().manual_seed(9)  # the same weights on all ranks, to compare
    weights = torch.randn(splits, WIDTH, WIDTH, generator=generator)

    room = size * TOKENS + EXPERTS  # an expert without tokens still takes one row
    received = symm_mem.empty(room, WIDTH, dtype=torch.float32, device=device)
    returned = symm_mem.empty(TOKENS, WIDTH, dtype=torch.float32, device=device)
    counts = symm_mem.empty(splits, dtype=torch.int64, device=device)
    there = symm_mem.empty(2, splits, dtype=torch.int64, device=device)
    back = symm_mem.empty(2, splits, dtype=torch.int64, device=device)
    counts.copy_(torch.bincount(chosen, minlength=splits))

    torch.ops.symm_mem.all_to_all_vdev_2d(tokens, received, counts, there, group)
    made = symm_mem.empty(room, WIDTH, dtype=torch.float32, device=device)
    for number, (count, start) in enumerate(there.T.tolist()):
        expert = rank * EXPERTS + number // size
        made[start : start + count] = received[start : start + count] @ weights[expert]
    torch.ops.symm_mem.all_to_all_vdev_2d_offset(made, returned, there, back, group)

    expected = torch.einsum("tw,twv->tv", tokens, weights[chosen])
    torch.testing.assert_close(returned, expected, rtol=1e-4, atol=1e-4)
    most = symm_mem.empty(1, dtype=torch.float32, device=device).copy_(there[0].sum())
    most = torch.ops.symm_mem.one_shot_all_reduce(most, "sum", group)
    print(f"rank {rank}: {int(there[0].sum())} of {int(most)} tokens came to its experts")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
