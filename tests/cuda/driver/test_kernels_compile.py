"""Every kernel compiles as the package asks for it. Needs NVRTC, but no GPU."""

from __future__ import annotations

import pytest

from shardmath.collectives.cells import _post_bytes
from shardmath.collectives.heaps import SEGMENTS
from shardmath.cuda import compile as compiling

RANKS = ("SHARDMATH_RANKS=8", "SHARDMATH_CHANNELS=64")
PRODUCT = ("A_ALONG_K=1", "B_ALONG_K=0", "CLUSTER=2", "STAGES=4")
PUSH = ("COPY_BYTES=16384", "STAGES=12", "PREFETCH=10")

# File, what it is compiled with, and the architecture: those of wgmma need sm_90a.
EXCHANGE = f"POST_BYTES={_post_bytes(8, 4096)}", f"SEGMENTS={SEGMENTS}"
CASES = [
    (
        "all_gather_gemm",
        (*RANKS, *PRODUCT, "ELEMENT=Bfloat16", "C_ALONG_N=0", "WIDTH=224", "ALIGNED=1"),
        "sm_90a",
    ),
    ("boxes", ("UNALIGNED=0",), "sm_90"),
    ("boxes", ("UNALIGNED=1",), "sm_90"),
    (
        "epilog",
        (
            "ELEMENT=bfloat16",
            "PART=float32",
            "ADDEND=bfloat16",
            "PARTS=1",
            "BIAS=1",
            "ACTIVATION=gelu",
            "GRADIENT=identity",
            "KEEP_AUX=1",
        ),
        "sm_90",
    ),
    ("exchange", (*RANKS, "MAIL_BYTES=4096", *EXCHANGE), "sm_90"),
    ("experts", RANKS, "sm_90"),
    *(("factors", (f"ELEMENT={name}",), "sm_90") for name in ("complex128", "float32", "float64")),
    ("far_signals", RANKS, "sm_90"),
    ("float8", ("ELEMENT=float8_e5m2",), "sm_90"),
    (
        "gemm_all_reduce",
        (*RANKS, *PRODUCT, "ELEMENT=Float16", "ADDEND=float16", "WHOLE=0", "SHARED=1"),
        "sm_90a",
    ),
    (
        "gemm_reduce_scatter",
        (*RANKS, *PRODUCT, "ELEMENT=Bfloat16", "ADDEND=bfloat16", "WHOLE=1", "SHARED=0"),
        "sm_90a",
    ),
    *(
        ("pack_factor", (f"ELEMENT={x}", f"SPLIT={split}"), "sm_90")
        for x in ("complex64", "float32")
        for split in (0, 1)
    ),
    *(
        ("panel_cholesky", (f"ELEMENT={x}", "THREADS=64"), "sm_90")
        for x in ("float", "double", "Complex<float>", "Complex<double>")
    ),
    (
        "panel_gemm",
        (
            *RANKS,
            *PRODUCT,
            "ELEMENT=Float16",
            "WIDTH=256",
            "C_ALONG_N=1",
            "ALIGNED=1",
            "REGIONS=36",
        ),
        "sm_90a",
    ),
    ("panel_gemm_f64", (*RANKS, *PRODUCT, "PAIRS=1", "REGIONS=36"), "sm_90a"),
    *(("panel_lu", (f"ELEMENT={x}", "THREADS=384"), "sm_90") for x in ("double", "float")),
    ("pipeline", (*RANKS, *PUSH), "sm_90"),
    ("push", RANKS, "sm_90"),
    ("reduce", (*RANKS, "ELEMENT=complex64", "OPERATION=sum", "ALIGNED=0"), "sm_90"),
    ("reduce_local", (*RANKS, "ELEMENT=float16", "OPERATION=sum"), "sm_90"),
    ("remaining_sums", (*RANKS, "ADDEND=bfloat16", "WHOLE=1", "SHARED=0"), "sm_90"),
    ("row_push", RANKS, "sm_90"),
    ("scale", ("SOURCE=float16", "TARGET=float32", "VECTOR=4"), "sm_90"),
    ("scale", ("SOURCE=float32", "TARGET=float16", "VECTOR=1"), "sm_90"),
    ("scale", ("SOURCE=float64", "TARGET=float64", "VECTOR=2"), "sm_90"),
    ("signals", RANKS, "sm_90"),
    *(
        ("solve_triangular", (f"ELEMENT={x}", f"BY_ROWS={by_rows}"), "sm_90")
        for x in ("complex128", "complex64", "float32", "float64")
        for by_rows in (0, 1)
    ),
    ("turn", ("SOURCE=bfloat16", "TARGET=complex64", "FACTOR=complex64"), "sm_90"),
    ("turn", ("SOURCE=complex128", "TARGET=float64", "FACTOR=complex128"), "sm_90"),
]


def size_of_code(_, name, defines, arch):
    source = (compiling.KERNELS / f"{name}.cu").read_text()
    flags = (*compiling._FLAGS, f"--gpu-architecture={arch}")
    made = (f"--define-macro={text}" for text in defines)
    return len(compiling._compile(name, source, [*flags, *made]))


@pytest.mark.parametrize(("name", "defines", "arch"), CASES)
def test_it_compiles(compiler, name, defines, arch):
    assert compiler.run(size_of_code, name, list(defines), arch)[0] > 1000


def test_no_kernel_is_forgotten():
    names = [name for name, *_ in CASES]
    assert {path.stem for path in compiling.KERNELS.glob("*.cu")} == set(names)
    assert names == sorted(names)
