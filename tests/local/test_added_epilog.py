"""An epilog is a row of a table; an activation one function on the host and one in a kernel."""

from __future__ import annotations

from changed import run_with

HOST = {
    "local/epilog.py": {
        '    RELU = 2, "relu"\n': """\
    SILU_BIAS = 2052, "silu bias"
    SILU_AUX = 2176, "silu aux"
    DSILU_BGRAD = 4112, "derivative silu bgrad"
""",
        "FUNCTIONS = {\n": """\
def _silu(x: HostArray) -> HostArray:
    return x / (1 + np.exp(-x))


def _silu_slope(x: HostArray) -> HostArray:
    p = 1 / (1 + np.exp(-x))
    return p * (1 + x * (1 - p))


""",
        '    "relu": Function(_relu),\n': '    "silu": Function(_silu, _silu_slope),\n',
    }
}
PROGRAM = """
import sys

import numpy as np

import shardmath
from shardmath.distribution import Slab
from shardmath.linalg.advanced import MatmulEpilog, matmul

SPLIT = [Slab.X, Slab.Y, Slab.X]
DEVICE = sys.argv[1]


def given(x):
    if DEVICE == "cpu":
        return x
    import torch

    return torch.from_numpy(x).to("cuda")


def numbers(x):
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


def body():
    context = shardmath.initialize("cpu" if DEVICE == "cpu" else 0)
    size = context.size
    rng = np.random.default_rng(1)
    m, n, k = 16, 12, 10
    a, b, bias = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal(m)
    rows = slice(context.rank * m // size, (context.rank + 1) * m // size)
    columns = slice(context.rank * n // size, (context.rank + 1) * n // size)
    mine = given(np.ascontiguousarray(a[rows])), given(np.ascontiguousarray(b[:, columns]))
    x, p = a @ b, 1 / (1 + np.exp(-(a @ b)))
    d = matmul(
        *mine,
        distributions=SPLIT,
        epilog=MatmulEpilog.SILU_BIAS,
        epilog_inputs={"bias": given(bias[rows].copy())},
    )
    with_bias = x + bias[:, None]
    np.testing.assert_allclose(numbers(d), (with_bias / (1 + np.exp(-with_bias)))[rows])
    d, kept = matmul(*mine, distributions=SPLIT, epilog=MatmulEpilog.SILU_AUX)
    np.testing.assert_allclose(numbers(d), (x * p)[rows])
    mine_x, made = x[rows], numbers(kept["silu_aux"])
    np.testing.assert_allclose(made[: len(mine_x)], mine_x)
    d, sums = matmul(
        *mine,
        distributions=SPLIT,
        epilog=MatmulEpilog.DSILU_BGRAD,
        epilog_inputs={"silu_aux": kept["silu_aux"]},
    )
    wanted = x * p * (1 + x * (1 - p))
    np.testing.assert_allclose(numbers(d), wanted[rows])
    np.testing.assert_allclose(numbers(sums["dsilu_bgrad"]), wanted[rows].sum(1))
    return context.rank


if __name__ == "__main__":
    if DEVICE == "cpu":
        assert shardmath.spawn(body, 2) == [0, 1]
    else:
        body()
"""


def test_a_row_and_a_function_are_an_epilog(tmp_path):
    run_with(tmp_path, HOST, PROGRAM, "cpu")
