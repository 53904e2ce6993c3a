"""An activation is one functor in the kernel beside its row and its function on the host."""

from __future__ import annotations

import pytest
from test_added_epilog import HOST, PROGRAM

from changed import run_with

KERNEL = {
    "kernels/epilog.cu": {
        "struct gelu : Smooth<gelu> {\n": """\
struct silu : Smooth<silu> {
    template <class T>
    static __device__ T apply(T x) {
        T e;
        return over_one_plus(x, -x, e);
    }
    template <class T>
    static __device__ T slope(T x) {
        T e;
        const T p = over_one_plus((T)1, -x, e);
        return p * (1 + x * (1 - p));
    }
};
"""
    }
}


@pytest.mark.usefixtures("gpus")
def test_a_row_and_two_functions_are_an_epilog(tmp_path):
    run_with(tmp_path, {**HOST, **KERNEL}, PROGRAM, "cuda")
