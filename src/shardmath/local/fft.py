"""One rank's Fourier, cosine and sine transforms, along axes that it holds whole.

They are done by ducc0 where it is installed, else by scipy, else by NumPy; for arrays of a library
with transforms, such as torch, by that. All keep single precision and take any strides. ducc0 and
scipy write results where the caller wants them, so that a block of the size of a cache is read,
transformed and written without a copy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from shardmath.arrays import libraries
from shardmath.arrays.base import HostArray
from shardmath.base.compiled import CompiledStep
from shardmath.local.trigonometric import SERIES, bound_series

Kind = str  # "C2C", or a name in HALVING, COMPLETING or SERIES
# Real numbers to the first half of a hermitian spectrum, and back. The adjoint of R2C counts each
# element of the spectrum once, where C2R counts most of them twice, for their conjugates too.
HALVING = ("R2C", "adjoint C2R")
COMPLETING = ("C2R", "adjoint R2C")
ADJOINTS = {"adjoint R2C": "C2R", "adjoint C2R": "R2C"}  # the transforms that compute them
Norm = Literal["backward", "ortho", "forward"] | None


def bound_transform(
    x: HostArray,
    axes: Sequence[int],
    *,
    out: HostArray,
    kind: Kind,
    forward: bool,
    norm: Norm,
    engine: str = "scipy",
) -> Callable[[], object]:
    """A call that writes the transform of `x` along `axes` to `out`, each time it is made.

    `out` may for C2C be `x` itself. The kinds of HALVING halve the last of `axes`, those of
    COMPLETING make it as long as `out` is, as numpy.fft.rfftn and irfftn do, and may overwrite `x`.
    `norm` None scales neither direction. Halves are transformed as float32. The kinds of SERIES,
    which are forward, take float32, float64 and complex numbers.
    """
    scale = norm or ("backward" if forward else "forward")
    if kind in SERIES:
        return bound_series(x, tuple(axes), out, SERIES[kind], scale, engine)
    computed = ADJOINTS.get(kind, kind)
    transform = _Transform(x, tuple(axes), out, computed, forward, scale, engine).bound()
    if kind not in ADJOINTS:
        return transform
    (spectrum, real), factor = ((x, out), 0.5) if kind in COMPLETING else ((out, x), 2.0)
    first, end = paired(real.shape[axes[-1]])
    pairs = np.moveaxis(spectrum, axes[-1], 0)[first:end]
    steps = [lambda: np.multiply(pairs, factor, out=pairs), transform]

    def both() -> None:
        for step in steps if kind in COMPLETING else steps[::-1]:
            step()

    return both


def paired(extent: int) -> tuple[int, int]:
    """The bounds of those elements in the halved spectrum of `extent` real numbers whose conjugates
    are in the other half. C2R counts them twice, and the adjoint of C2R must double them.
    """
    return 1, (extent + 1) // 2


class _Transform(NamedTuple):
    """One transform of `x` into `out`. `scale` is NumPy's `norm`."""

    x: HostArray
    axes: tuple[int, ...]
    out: HostArray
    kind: Kind
    forward: bool
    scale: str
    engine: str

    def bound(self) -> Callable[[], object]:
        """A call that does it, as directly as the engine allows."""
        half = self.kind == "R2C" and self.x.dtype.itemsize == 2
        return self._by_copy if half else self._writing() or self._by_copy

    def _by_copy(self) -> None:
        """Transform by way of a copy: of operands that are widened, or of the result."""
        x = self.x
        if self.kind == "R2C" and x.dtype.itemsize == 2:
            self._replace(x=x.astype(np.float32)).bound()()
            return
        result = self._in_new_memory()
        if not np.may_share_memory(result, self.out):
            np.copyto(self.out, result)

    def _writing(self) -> Callable[[], object] | None:
        """A call of functions that write to `out`; None where there are none."""
        inner, x, out = _inner(self.engine), self.x, self.out
        if inner is None or not (x.flags.aligned and out.flags.aligned):
            return None
        divisor = _divisor(self.scale, self.forward)
        if self.kind == "C2C":
            return CompiledStep(inner.c2c, x, self.axes, self.forward, divisor, out, 1)
        if self.kind == "R2C":
            return CompiledStep(inner.r2c, x, self.axes, True, divisor, out, 1)
        *rest, last = self.axes
        halved = CompiledStep(inner.c2r, x, (last,), out.shape[last], False, divisor, out, 1)
        if not rest:
            return halved

        def both() -> None:
            inner.c2c(x, rest, False, divisor, x, 1)
            halved()

        return both

    def _in_new_memory(self) -> HostArray:
        """The transform by public functions: in new memory, or in `out`."""
        x, axes, sizes = self.x, self.axes, None
        function = "fftn" if self.forward else "ifftn"
        if self.kind == "C2R":
            function, sizes = "irfftn", [self.out.shape[axis] for axis in axes]
        elif self.kind == "R2C":
            function = "rfftn"
        if starts_threads(self.engine):
            return libraries()[self.engine].transform(x, axes, function, self.scale, sizes)
        scipys = self.engine == "scipy"
        library: Any = importlib.import_module("scipy.fft") if scipys else np.fft
        more = {"overwrite_x": x is self.out} if scipys else {}
        transform = getattr(library, function)
        return np.asarray(transform(x, s=sizes, axes=axes, norm=self.scale, **more))


def keeps_shape(kind: Kind) -> bool:
    """Whether such a transform has as many elements along its last axis as before."""
    return kind not in HALVING and kind not in COMPLETING


def engine_for(library: str, kind: Kind) -> str:
    """The engine for arrays of this library: the library itself, "ducc0", "scipy" or "numpy"."""
    has_own = libraries()[library].transforms and kind not in SERIES
    return library if has_own else _installed()


def starts_threads(engine: str) -> bool:
    """Whether this engine has threads of its own."""
    return engine in libraries() and libraries()[engine].transforms


@lru_cache(maxsize=1)
def _installed() -> str:
    for engine, module in (("ducc0", "ducc0.fft"), ("scipy", "scipy.fft")):
        if _imported(module) is not None and (engine != "ducc0" or _inner(engine) is not None):
            return engine
    return "numpy"


def _imported(module: str) -> Any:
    """The module, None where it is not installed or cannot be loaded.

    An exception that a signal handler raises while an extension is being loaded may come out of it
    as an ImportError. Such an error does not come a second time.
    """
    try:
        return _loaded(module)
    except ImportError as error:
        try:
            _loaded(module)
        except ImportError:
            return None
        if KeyboardInterrupt.__name__ in str(error):
            raise KeyboardInterrupt from error
        raise


def _loaded(module: str) -> Any:
    """The module, imported after its package.

    An extension such as ducc0 adds its inner modules one by one while it is loaded, so that another
    thread might find only some. Importing the package waits until all are there.
    """
    importlib.import_module(module.partition(".")[0])
    return importlib.import_module(module)


_INNER = {
    "ducc0": ("ducc0.fft",),
    "scipy": ("scipy.fft._duccfft.pyduccfft", "scipy.fft._pocketfft.pypocketfft"),  # since 1.18
}


@lru_cache(maxsize=4)
def _inner(engine: str) -> Any:
    """The module of ducc0, or under scipy.fft, with functions that write to an argument; else None.

    scipy's is not public. Where it is missing, the public functions serve.
    """
    ones, real = np.ones(2, np.complex64), np.ones(2, np.float32)
    for name in _INNER.get(engine, ()):
        whole, half, back = np.zeros_like(ones), np.zeros_like(ones), np.zeros_like(real)
        inner = _imported(name)
        if inner is None:
            continue
        try:
            if engine == "ducc0":
                _end_ducc0_threads()
            inner.c2c(ones, (0,), True, 0, whole, 1)
            inner.r2c(real, (0,), True, 0, half, 1)
            inner.c2r(half, (0,), 2, False, 0, back, 1)
        except (AttributeError, TypeError):
            continue
        if whole[0] == half[0] == back[0] == 2:
            return inner
    return None


def _end_ducc0_threads() -> None:
    """Leave only the calling thread in ducc0's pool: a rank has threads of its own.

    ducc0 joins its threads whenever the process forks, and a join right after another fork may
    never end.
    """
    importlib.import_module("ducc0.misc").resize_thread_pool(1)


def _divisor(scale: str, forward: bool) -> int:
    """The code of the divisor: 0 none, 1 the root of the length, 2 the length."""
    if scale == "ortho":
        return 1
    return 0 if (scale == "backward") == forward else 2
