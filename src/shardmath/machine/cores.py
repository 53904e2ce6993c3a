"""One core of a server, as measured on an AMD EPYC of family 25, model 1, at 2.45 GHz.

Two ranks were at work, on two cores that share a last-level cache of 32 MiB, with OpenBLAS and
ducc0. `benchmarks/predictions.py` shows how far predictions are from measured times.
"""

from shardmath.machine.rates import Rates

_DOUBLE, _SINGLE = 3.7e10, 7.6e10

# A complex product costs four real ones; 16-bit floats are widened first.
CORES = Rates(
    products={
        "float64": _DOUBLE,
        "float32": _SINGLE,
        "float16": 0.75 * _SINGLE,
        "bfloat16": 0.75 * _SINGLE,
        "complex64": _SINGLE / 4,
        "complex128": _DOUBLE / 4,
    },
    transforms=1.3e10,
    memory=1.9e10,
    strided=1.2e10,
    cached=4.2e10,
    cache=12 << 20,
    packing=8e9,
    link=6e9,
    latency=1e-5,
    gathering=2e-5,
    finishing=1.2e-4,
)
