"""A data type is one row of one table: what is moved, combined and multiplied follows from it."""

from changed import run_with

ADDED = """\
    _float8("float8_e4m3fnuz", largest=240.0),
    DType("float8_e8m0fnu", 1, "f", sums="float32", carrier="uint8"),
"""
PROGRAM = '''
import ml_dtypes
import numpy as np
import torch

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab, redistribute
from shardmath.linalg.advanced import MatmulQuantizationScales, matmul

NEW = ("float8_e4m3fnuz", "float8_e8m0fnu")


def host(x):
    """Its numbers."""
    return (x.float().numpy() if isinstance(x, torch.Tensor) else x).astype(np.float64)


def body():
    rank = shardmath.initialize("cpu").rank
    numbers = 2.0 ** np.arange(-6, 6).reshape(3, 4)  # which all types have
    for name in NEW:
        native = getattr(ml_dtypes, name)
        rows = numbers[:2] if rank == 0 else numbers[2:]
        here = rows.astype(native)
        tensor = torch.from_numpy(rows).to(getattr(torch, name))
        for x in (here, tensor, here.copy(order="F")):
            columns = redistribute(x, Slab.X, Slab.Y)
            assert type(columns) is type(x) and columns.dtype == x.dtype, columns
            assert (host(columns) == (numbers[:, :2] if rank == 0 else numbers[:, 2:])).all()
        same = numbers.astype(native)
        for op, wanted in (("sum", 2 * numbers), ("max", numbers), ("min", numbers)):
            assert (host(all_reduce(same, op=op)) == wanted).all(), (name, op)
    a = numbers.astype(ml_dtypes.float8_e4m3fnuz)
    one = MatmulQuantizationScales(a=1.0, b=0.5)
    d = matmul(
        np.asfortranarray(a[:, 2 * rank : 2 * rank + 2]),
        np.asfortranarray(a.T[2 * rank : 2 * rank + 2]),
        distributions=[Slab.Y, Slab.X, Slab.X],
        quantization_scales=one,
        options={"result_type": 0},
    )
    wanted = (numbers @ numbers.T / 2)[:2] if rank == 0 else (numbers @ numbers.T / 2)[2:]
    assert (d == wanted).all(), (d, wanted)
    return rank


if __name__ == "__main__":
    assert shardmath.spawn(body, 2) == [0, 1]
'''


def test_a_row_of_the_table_is_a_data_type(tmp_path):
    table = {"arrays/dtypes.py": {'    _float8("float8_e4m3fn", ': ADDED}}
    run_with(tmp_path, table, PROGRAM)
