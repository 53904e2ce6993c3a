"""Fourier, cosine and sine transforms of arrays that are split across ranks."""
