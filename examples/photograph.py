"""Soften and sharpen a photograph with all ranks together: two filters, by Fourier transform.

    python -m shardmath run -n 4 examples/photograph.py [out.png]     (or mpiexec, or plain python)

A filter keeps some waves of an image and drops the others. Long waves are its large shapes, short
ones its edges. Rows of pixels are split over the ranks, and so are the waves:

     pixels, rows             waves, rows              pixels, rows
    r0 +--------+   rfft     r0 +----+    irfft       r0 +--------+   low:  long waves; half of
    r1 +--------+  ----->    r1 +----+   ------->     r1 +--------+         those of CUT pixels
    r2 +--------+  axes      r2 +----+  x low, high   r2 +--------+   high: what is left
    r3 +--------+  0, 1      r3 +----+                r3 +--------+

The third axis, red green blue, is a batch: `axes=(0, 1)`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardmath
from shardmath.collectives import broadcast
from shardmath.distribution import Replicated, Slab, redistribute

CUT = 20.0  # pixels per wave
AXES = (0, 1)


def main() -> None:
    """Filter the photograph; rank 0 writes a picture, and compares with plain scipy."""
    context = shardmath.initialize("cpu")
    photograph = read_photograph(context.rank)
    height, width, _ = photograph.shape

    # From here on each rank works on its own rows alone.
    mine = redistribute(photograph, Replicated(), Slab.X)
    context.barrier()
    start = time.perf_counter()
    waves = shardmath.fft.rfft(mine, distribution=Slab.X, axes=AXES)
    low = kept_of_long(height, width, own_rows(context, height))
    parity = {"last_axis_parity": "odd" if width % 2 else "even"}
    filtered = [
        shardmath.fft.irfft(
            waves * kept, distribution=Slab.X, axes=AXES, norm="backward", options=parity
        )
        for kept in (low, 1 - low)
    ]
    context.barrier()
    seconds = time.perf_counter() - start

    soft, sharp = (redistribute(part, Slab.X, Replicated()) for part in filtered)
    if context.rank == 0:
        print(f"{height} x {width} pixels in 3 colours, rows split over {context.size} rank(s)")
        print(f"one rfft and two irfft in {seconds * 1e3:.0f} ms; the cut is at {CUT:.0f} pixels")
        compare(photograph, soft, sharp)
        path = Path(sys.argv[1] if len(sys.argv) > 1 else "build/photograph.png")
        write_picture(path, [photograph, soft, 0.5 + 2 * sharp])
        print(f"original, low-pass and high-pass side by side: {path}")
    shardmath.finalize()


def read_photograph(rank: int) -> Any:
    """The pixels, 0 to 1, of shape (height, width, 3): rank 0 reads them and tells the others."""
    if rank != 0:
        return broadcast(None)
    try:
        from sklearn.datasets import load_sample_image  # a large library: only the reader loads it
    except ImportError:
        sys.exit("this example needs scikit-learn and pillow: pip install 'shardmath[demo]'")

    return broadcast(load_sample_image("china.jpg") / 255.0)


def own_rows(context: Any, height: int) -> slice:
    """The rows that this rank owns."""
    return Slab.X.slices(context.rank, (height, 1))[0]


def kept_of_long(height: int, width: int, rows: slice) -> Any:
    """For each wave of these rows, how much the low-pass keeps of it; of shape (rows, width, 1).

    A bell curve: a sharp limit would leave ripples around every edge.
    """
    down = np.fft.fftfreq(height)[rows, None]  # waves per pixel
    across = np.fft.rfftfreq(width)[None, :]
    return 0.5 ** ((down**2 + across**2) * CUT**2)[..., None]


def compare(photograph: Any, low: Any, high: Any) -> None:
    """Print how far the two images are from what scipy makes of the photograph in one process."""
    import scipy.fft

    height, width, _ = photograph.shape
    waves = scipy.fft.rfftn(photograph, axes=AXES)
    share = kept_of_long(height, width, slice(None))
    for name, image, kept in (("low-pass", low, share), ("high-pass", high, 1 - share)):
        plain = scipy.fft.irfftn(waves * kept, s=(height, width), axes=AXES)
        print(f"{name:9}  largest difference from scipy.fft: {shown(image - plain)}")
    print(f"both       largest difference from the original: {shown(low + high - photograph)}")


def shown(differences: Any) -> str:
    """The largest, in words where it is rounding alone."""
    largest = np.abs(differences).max()
    return "below 1e-14" if largest < 1e-14 else f"{largest:.1e}"


def write_picture(path: Path, images: list[Any]) -> None:
    """Write the images side by side, with a white line between."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    line = np.ones((images[0].shape[0], 8, 3))
    row = [part for image in images for part in (line, image)][1:]
    pixels = np.clip(np.concatenate(row, axis=1), 0, 1)
    Image.fromarray((255 * pixels).round().astype(np.uint8)).save(path)


if __name__ == "__main__":
    main()
