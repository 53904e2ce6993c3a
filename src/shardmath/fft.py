"""Fourier transforms of distributed arrays: four functions, and `FFT` to plan once.

Names and arguments are those of nvmath.distributed.fft, which has `Slab` too.
"""

from shardmath.geometry import Slab
from shardmath.operators.fft import (
    FFT,
    FFTDirection,
    FFTOptions,
    allocate_operand,
    fft,
    ifft,
    irfft,
    rfft,
)

__all__ = [
    "FFT",
    "FFTDirection",
    "FFTOptions",
    "Slab",
    "allocate_operand",
    "fft",
    "ifft",
    "irfft",
    "rfft",
]
