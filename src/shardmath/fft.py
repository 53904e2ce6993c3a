"""Fourier transforms of distributed arrays: four functions, and `FFT` to plan once.

Names and arguments are those of nvmath.distributed.fft, which has `Slab` too; cosine and sine
transforms have those of scipy.fft.
"""

from shardmath.geometry import Slab
from shardmath.operators.fft.allocation import allocate_operand
from shardmath.operators.fft.api import FFT, fft, ifft, irfft, rfft
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.trigonometric import dct, dctn, dst, dstn, idct, idctn, idst, idstn

__all__ = [
    "FFT",
    "FFTDirection",
    "FFTOptions",
    "Slab",
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


def __dir__() -> list[str]:
    return sorted(__all__)
