"""Matrix multiplication, FFT and redistribution on arrays that are split across processes."""

__version__ = "0.1.0"
