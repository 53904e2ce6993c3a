"""The verbs for Triton compile for a GPU that need not be there; without Triton they say so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from shardmath import symmetric_memory

HERE = Path(__file__).parent
TYPES = {"memory": "*i64", "out": "*i64", "BLOCK": "constexpr"}  # all others are i32
PARAMETERS = {
    "verbs": ["memory", "part", "nbytes", "out", "BLOCK"],
    "meet": ["memory", "out"],
    "wait_for": ["memory", "kind", "src", "out"],
    "give": ["memory", "kind", "dst"],
    "misuse": ["memory", "kind", "out"],
}
# In a process of its own: Triton, as CUDA, must not be loaded before ranks are forked.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import triton, triton_verbs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

types = {TYPES!r}
for name, parameters in {PARAMETERS!r}.items():
    signature = {{each: types.get(each, "i32") for each in parameters}}
    constants = {{"BLOCK": 256}} if "BLOCK" in signature else {{}}
    source = ASTSource(getattr(triton_verbs, name), signature, constants)
    for warps in (1, 4):
        made = triton.compile(source, GPUTarget("cuda", 90, 32), {{"num_warps": warps}})
        print(name, made.metadata.shared, "st.release.sys" in made.asm["ptx"])
"""


def python(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_kernels_compile():
    done = python(PROGRAM)
    assert done.returncode == 0, done.stderr
    # No shared memory: a reduction through it would be a barrier where threads have parted.
    assert done.stdout.split("\n") == [f"{name} 0 True" for name in PARAMETERS for _ in "12"] + [""]


def test_triton_is_asked_for():
    done = python("import sys; sys.modules['triton'] = None; import shardmath.symm_triton")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shardmath.errors.BackendUnavailable") and "pip install triton" in last


def test_the_header_is_where_it_is_said_to_be():
    header = Path(symmetric_memory.include_path()) / "symm.cuh"
    assert "put_signal" in header.read_text()
