"""The principal components of handwritten digits, whose images are split over the ranks.

    python -m shardmath run -n 4 examples/principal_components.py

Each rank has some of the images as rows. The singular vectors of the images minus their mean are
the directions in which images differ most: every digit is nearly the mean plus a few of them.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import shardmath
from shardmath.distribution import Slab
from shardmath.linalg import norm, svd

KEPT = 15


def main() -> None:
    """Compare with NumPy's singular values; draw the mean, and the components, dark if negative."""
    context = shardmath.initialize("cpu")
    images = load_digits().data
    x = shardmath.from_global(images, Slab.X)  # a large set would be read from files
    mean = x.mean(axis=0)
    centred = x - mean
    u, s, vh = svd(centred)
    few = (u[:, :KEPT] * s[:KEPT]) @ vh[:KEPT]
    rest = (norm(centred - few) / norm(centred)).item() ** 2

    values, components = s.numpy(), vh.numpy()
    expected = np.linalg.svd(images - images.mean(axis=0), compute_uv=False)
    assert np.allclose(values, expected)
    if context.rank == 0:
        print(f"{len(images)} digits on {context.size} rank(s): {KEPT} of {len(values)} components")
        print(f"explain {1 - rest:.1%} of the variance")
        drawn = np.stack([mean.numpy(), *components[:KEPT]])
        drawn = 0.5 + drawn / (2 * abs(drawn).max(axis=1, keepdims=True))
        tiles = np.pad(drawn.reshape(-1, 8, 8), [(0, 0), (1, 1), (1, 1)], constant_values=1)
        sheet = tiles.reshape(2, 8, 10, 10).transpose(0, 2, 1, 3).reshape(20, 80)
        Path("build").mkdir(exist_ok=True)
        Image.fromarray(np.uint8(255 * sheet)).resize((1280, 320), 0).save("build/components.png")
    shardmath.finalize()


if __name__ == "__main__":
    main()
