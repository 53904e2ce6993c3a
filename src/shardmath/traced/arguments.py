"""The arguments of public functions other than arrays, as words: see `words`. Local."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardmath.base.untraced import constant
from shardmath.geometry import Distribution, Replicated, Slab, unbound
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.arguments import options_of
from shardmath.operators.fft.options import FFTOptions
from shardmath.operators.matmul.description import arguments_of, three_distributions
from shardmath.operators.matmul.options import MatmulOptions, matrix_qualifiers_dtype
from shardmath.traced.words import plain, read_words, words_of

SWAPPED = {None: None, "backward": "forward", "ortho": "ortho", "forward": "backward"}
TURNED = {1: 1, 2: 3, 3: 2, 4: 4}  # type of the inverse


@constant
def words_of_matmul(
    distributions: Any, alpha: Any, beta: Any, epilog: Any, qualifiers: Any, options: Any
) -> str:
    """The words of a product. Raises TypeError and ValueError for wrong arguments."""
    flags: Any = arguments_of(None, None, distributions=None, qualifiers=qualifiers).words
    if flags.error is not None:
        raise flags.error
    kept = plain(options_of(MatmulOptions, options))
    if kept.pop("inplace"):
        raise ValueError(
            "options.inplace=True overwrites c: leave it out where there are gradients"
        )
    distributions = three_distributions(distributions)
    if MatmulEpilog(epilog or 0) is MatmulEpilog.ALLREDUCE:
        distributions = [*distributions[:2], Replicated()]
    return words_of(
        distributions=distributions,
        alpha=1.0 if alpha is None else alpha,
        beta=beta,
        transpose=flags.qualifiers.transpose[:2],
        conjugate=flags.qualifiers.conjugate[:2],
        options=kept,
    )


@constant
def words_of_layer(distributions: Any) -> str:
    """The words of the product A @ B.T, by distributions of A, of B and of the result."""
    qualifiers = np.zeros(2, matrix_qualifiers_dtype)
    qualifiers["is_transpose"][1] = True
    return words_of_matmul(distributions, None, None, None, qualifiers, None)


@constant
def functions_of(epilog: Any) -> tuple[str, bool, bool]:
    """The function of an epilog, whether there is a bias, and whether it sums every rank's C.

    Raises ValueError for an epilog of a backward pass that is written by hand.
    """
    known = MatmulEpilog(epilog or 0)
    if known.gradient or known.makes_aux or known.makes_bgrad:
        raise ValueError(
            f"epilog {known.name} is for backward passes written by hand: torch has one"
        )
    return known.activation or "", known.has_bias, known is MatmulEpilog.ALLREDUCE


@constant
def words_of_redistribute(source: Any, target: Any) -> str:
    """The words of a redistribution."""
    return words_of(source=source, target=target)


@constant
def words_of_fft(ndim: int, distribution: Any, axes: Any, norm: Any, options: Any) -> str:
    """The words of a Fourier transform of an array of `ndim` axes. Raises ValueError."""
    read = options_of(FFTOptions, options)
    if read.inplace or read.halves:
        raise ValueError("options.inplace and options.halves are for calls without gradients")
    numbers = range(ndim) if axes is None else [axes] if hasattr(axes, "__index__") else axes
    axes = [axis + ndim if axis < 0 else axis for axis in numbers]
    pair = list(distribution) if isinstance(distribution, list | tuple) else [distribution] * 2
    if pair[1] is distribution and isinstance(distribution, Slab) and not read.redistribute:
        split = distribution.partition_dim
        pair[1] = Slab(int(split == 0)) if split in axes else distribution
    elif pair[1] is distribution and isinstance(distribution, Distribution):
        pair[1] = unbound(distribution)  # the result may have another shape
        if not read.redistribute:
            raise ValueError("redistribute=False: give a pair of distributions (input, output)")
    source, target = pair
    return words_of(
        source=source, target=target, axes=axes, norm=norm, parity=read.last_axis_parity
    )


@constant
def words_of_trigonometric(
    ndim: int,
    distribution: Any,
    axes: Any,
    norm: Any,
    options: Any,
    number: Any,
    orthogonalize: Any,
    extents: Any,
    is_inverse: bool,
) -> str:
    """The words of a transform by cosines or sines. Raises NotImplementedError and ValueError."""
    if extents is not None:
        raise NotImplementedError(
            "n and s are for arrays that know how they are split; pad the whole array first"
        )
    if number not in TURNED or norm not in SWAPPED:
        raise ValueError(
            f"type is 1 to 4, and norm one of {', '.join(map(repr, SWAPPED))}: not {number!r} and "
            f"{norm!r}"
        )
    words = read_words(words_of_fft(ndim, distribution, axes, norm, options))
    if is_inverse:  # that of the other type
        number = TURNED[number]
        words = dict(words, norm=SWAPPED["backward" if norm is None else norm])
    return words_of(**dict(words, type=int(number), orthogonalize=orthogonalize))
