"""`shardmath trace` of a program on GPUs: kernels and copies, by the devices' clocks."""

from __future__ import annotations

import importlib.util

import pytest
from launched import write
from PIL import Image
from test_trace import traced
from visible import GPUS

RANKS = 2
NUMBERS = 1 << 20
PROGRAM = f"""
import torch
import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab, redistribute
from shardmath.linalg.advanced import matmul

context = shardmath.initialize(rank % {GPUS})
device = torch.device("cuda", rank % {GPUS})
x = torch.ones({NUMBERS}, device=device)
a = torch.ones(512, 1024, device=device, dtype=torch.bfloat16)
b = torch.ones(512, 1024, device=device, dtype=torch.bfloat16)
y = torch.empty_like(x)
for _ in range(3):
    all_reduce(x)
    matmul(a, b, distributions=[Slab.X] * 3)
    redistribute(a, Slab.X, Slab.Y)
    y.copy_(x)
torch.cuda.synchronize()
if rank == 0:
    assert not torch.autograd.profiler._is_profiler_enabled, "calls would not be compiled"
shardmath.finalize()
"""
SLACK = 1e3  # microseconds between the clocks of host and device
CALLS = ("all_reduce", "matmul", "redistribute")


@pytest.mark.skipif(not GPUS, reason="this machine has no GPU")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_kernels_and_copies(tmp_path):
    done, found = traced(tmp_path, write(tmp_path, PROGRAM), ranks=RANKS)
    assert done.returncode == 0, done.stderr
    assert "not shown" not in done.stderr, done.stderr
    for rank in range(RANKS):
        boxes = [each for each in found if each["pid"] == rank + 1 and each["ph"] == "X"]
        calls = {each["args"]["number"]: each for each in boxes if each["cat"] == "call"}
        names = [each["name"] for each in calls.values()]
        assert all(names.count(name) == 3 for name in CALLS), names
        kernels = [each for each in boxes if each["cat"] == "kernel"]
        copies = [each for each in boxes if each["cat"] == "copy"]
        assert [each["args"]["bytes"] for each in copies].count(4 * NUMBERS) >= 3, copies
        launched = [each for each in kernels if "operation" in each.get("args", {})]
        by = {calls[each["args"]["operation"]]["name"] for each in launched}
        assert by & {*CALLS}, (by, [each["name"] for each in kernels])
        for each in launched:
            assert each["ts"] >= calls[each["args"]["operation"]]["ts"] - SLACK, each
        last = max(each["ts"] + each["dur"] for each in calls.values())
        assert all(each["ts"] + each["dur"] <= last + SLACK for each in kernels)
    streams = [each for each in found if "stream" in str(each.get("args", {}).get("name"))]
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size[1] > (RANKS + len(streams)) * 34


@pytest.mark.skipif(not GPUS, reason="this machine has no GPU")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_program_that_uses_the_profiler(tmp_path):
    program = PROGRAM.replace(
        "y = torch", "profile = torch.profiler.profile()\nprofile.start()\ny = torch"
    )
    program = program.replace("if rank == 0:\n", "profile.stop()\nif rank == 0:\n")
    program += "assert any('all_reduce' in each.key for each in profile.key_averages())\n"
    done, found = traced(tmp_path, "--no-kernels", write(tmp_path, program), ranks=RANKS)
    assert done.returncode == 0, done.stderr
    assert not [each for each in found if each.get("cat") == "kernel"]
