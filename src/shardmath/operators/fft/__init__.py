"""Fourier, cosine and sine transforms of arrays that are split across ranks."""

from shardmath.operators.fft.allocation import allocate_operand
from shardmath.operators.fft.api import FFT, fft, ifft, irfft, rfft
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.trigonometric import (
    dct,
    dctn,
    dst,
    dstn,
    idct,
    idctn,
    idst,
    idstn,
)

__all__ = [
    "FFT",
    "FFTDirection",
    "FFTOptions",
    "allocate_operand",
    "dct",
    "dctn",
    "dst",
    "dstn",
    "fft",
    "idct",
    "idctn",
    "idst",
    "idstn",
    "ifft",
    "irfft",
    "rfft",
]
