"""Fourier transforms of arrays that are split across ranks."""

from shardmath.operators.fft.allocation import allocate_operand
from shardmath.operators.fft.api import FFT, fft, ifft, irfft, rfft
from shardmath.operators.fft.options import FFTDirection, FFTOptions

__all__ = [
    "FFT",
    "FFTDirection",
    "FFTOptions",
    "allocate_operand",
    "fft",
    "ifft",
    "irfft",
    "rfft",
]
