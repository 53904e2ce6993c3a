"""Functions that make arrays: from parts, from one rank's array, from numbers, from indices.

Those that compute elements from numbers or indices are local: every rank makes its part. Boxes are
the exception: a rank knows only its own, so the ranks exchange them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays import (
    Library,
    array_of,
    dtypes,
    library_and_spec,
    library_named,
    library_of_package,
)
from shardmath.arrays.base import HostArray
from shardmath.base.collective_call import collective_call
from shardmath.base.integers import index, integers
from shardmath.collectives import broadcast
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, require_context
from shardmath.distributed import parts
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.layouts import indices, placed_part, selector
from shardmath.distributed.movement import agreed_layout, rearranged, require_root
from shardmath.geometry import Distribution, Layout, Replicated, unbound
from shardmath.operators.layouts import bind_layout, infer_layout

Shape = int | Sequence[int]
EVERYWHERE = Replicated()


@collective_call
def array(part: Any, distribution: Distribution) -> DistributedArray:
    """The global array of which `part`, an array of any library, is this rank's part. Collective.

        x = shardmath.array(np.load(f"part{rank}.npy"), Slab.X)

    The part is not copied: it becomes `x.local`. Raises the same on all ranks:
    BindDistributionError, a ValueError, where the parts do not fit the distribution;
    CollectiveMismatch where they are of different libraries or types; TypeError where
    `distribution` is not one.
    """
    context = require_context()
    part = array_of(part)

    def described() -> tuple[Any, ...]:
        require_distribution(distribution)
        _, spec = library_and_spec(part, "part")
        return spec.library, spec.space, spec.dtype, spec.shape, distribution.encode()

    def bound(specs: list[Any]) -> Layout:
        *facts, shapes, encoded = zip(*specs, strict=True)
        for what, values in zip(("library", "memory space", "dtype"), facts, strict=True):
            require_equal(f"the {what} of the part", values)
        return infer_layout("distribution", encoded, shapes)

    layout = context.agree("array", described, bound)
    return DistributedArray.of(part, unbound(distribution), layout, context)


@collective_call
def from_global(x: Any, distribution: Distribution, *, root: int | None = None) -> DistributedArray:
    """The array `x`, split by `distribution`. Collective.

    Without `root` every rank passes all of `x`, and takes its part. With `root` only that rank
    passes it, and the others, which pass None, receive their parts. Parts are copies, in host
    memory if `x` is there. Raises the same on all ranks: ValueError where the distribution does not
    fit, where `root` is not a rank, and where what it passes is not an array.
    """
    context = require_context()
    x = array_of(x)

    def described() -> tuple[Any, ...]:
        require_distribution(distribution)
        require_root(root, context.size)
        has = root is None or root == context.rank
        facts = None
        if has:
            _, spec = library_and_spec(x, "x")
            facts = spec.library, spec.space, spec.dtype, spec.shape
        return root, facts, unbound(distribution).encode()

    def bound(specs: list[Any]) -> tuple[Layout, Any]:
        roots, facts, encoded = zip(*specs, strict=True)
        require_equal("root", roots)
        kind = facts[0 if root is None else root]
        if root is None:
            require_equal("the library, the memory space, the dtype and the shape of x", facts)
        return bind_layout("distribution", encoded, kind[3]), kind

    layout, (name, space, dtype, shape) = context.agree("from_global", described, bound)
    rank = context.rank
    if root is None:
        along = [placed_part(spans) for spans in layout.spans(rank)]
        local = parts.copied(array_of(x[selector(along)]))
        return DistributedArray.of(local, unbound(distribution), layout, context)
    if layout.is_replicated:
        whole = broadcast(x if rank == root else None, root=root, context=context)
        return DistributedArray.of(whole, unbound(distribution), layout, context)
    source = Layout.on_one_rank(shape, context.size, rank=root)
    if rank != root:
        library = library_named(name)
        device = "cpu" if space == "cpu" else device_of(context, library)
        x = library.empty(source.local_shape(rank), dtype, "C", device)
    held = DistributedArray.of(x, distribution, source, context)
    return DistributedArray.of(rearranged(held, layout), unbound(distribution), layout, context)


# -- numbers ---------------------------------------------------------------------------------------


def full(
    shape: Shape,
    fill_value: Any,
    dtype: Any = None,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """An array of one value. Local, except for boxes, which the ranks exchange.

    Without a `distribution` every rank has all of it. `package` is the library of the parts: the
    module numpy, the default, torch or cupy. `device`, if given, must be that of the context.
    Raises ValueError where the distribution does not fit the shape.
    """
    if dtype is None:
        dtype = np.asarray(fill_value).dtype
    made = empty(shape, dtype, distribution=distribution, package=package, device=device)
    parts.assign(made.local, ..., fill_value)
    return made


def zeros(
    shape: Shape,
    dtype: Any = None,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """An array of zeros. Arguments and errors as `full`; see `empty` for the type."""
    made = empty(shape, dtype, distribution=distribution, package=package, device=device)
    made.local[...] = 0
    return made


def ones(
    shape: Shape,
    dtype: Any = None,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """An array of ones. Arguments and errors as `full`; see `empty` for the type."""
    made = empty(shape, dtype, distribution=distribution, package=package, device=device)
    made.local[...] = 1
    return made


def empty(
    shape: Shape,
    dtype: Any = None,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """An array of undefined elements, by default of the type that `package` defaults to.

    That is float64 in NumPy, and torch's default type in torch. Arguments and errors as `full`.
    """
    context, library, layout = placed(shape, distribution, package, device)
    kind = library.default_dtype() if dtype is None else dtypes.of(dtype)
    local = library.empty(layout.local_shape(context.rank), kind, "C", device_of(context, library))
    return DistributedArray.of(local, unbound(distribution), layout, context)


# -- indices ---------------------------------------------------------------------------------------


def fromfunction(
    function: Callable[..., Any],
    shape: Shape,
    *,
    distribution: Distribution,
    dtype: Any = float,
    package: ModuleType | None = None,
) -> DistributedArray:
    """The array of `function(i, j, ...)`, called with the global indices of this rank's part.

        x = shardmath.fromfunction(lambda i, j: np.sin(i) * j, (n, m), distribution=Slab.X)

    As numpy.fromfunction: the indices are NumPy arrays of the part's shape and of type `dtype`; the
    elements have the type of the result. Local, except for boxes; errors as `full`.
    """
    kind = dtypes.to_numpy(dtype)

    def elements(*along: HostArray) -> HostArray:
        local = np.broadcast_shapes(*(numbers.shape for numbers in along))
        given = [np.broadcast_to(numbers.astype(kind), local) for numbers in along]
        return np.array(np.broadcast_to(function(*given), local))

    return _of_indices(elements, shape, distribution, package)


def arange(
    start: Any,
    stop: Any = None,
    step: Any = 1,
    dtype: Any = None,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """The numbers start, start + step, ... below `stop`, as numpy.arange. Local, as `full`."""
    if stop is None:
        start, stop = 0, start
    extent = max(0, ceil((stop - start) / step))
    kind = np.asarray(start + step * 0 + stop * 0).dtype if dtype is None else dtype
    first, second = np.asarray([start, start + step]).astype(dtypes.to_numpy(kind))
    elements = lambda i: first + i * (second - first)  # noqa: E731
    return _of_indices(elements, extent, distribution, package, device, kind)


def linspace(
    start: float,
    stop: float,
    num: int = 50,
    endpoint: bool = True,
    dtype: Any = None,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """`num` numbers, evenly from `start` to `stop`, as numpy.linspace. Local, as `full`."""
    count = index(num, "num")
    gaps = count - 1 if endpoint else count
    kind = np.result_type(start, stop, 0.0) if dtype is None else dtypes.to_numpy(dtype)

    def elements(i: HostArray) -> HostArray:
        made = i * ((stop - start) / max(gaps, 1)) + start
        if endpoint and count > 1:
            made = np.where(i == count - 1, stop, made)
        return np.floor(made) if np.issubdtype(kind, np.integer) else made

    return _of_indices(elements, count, distribution, package, device, kind)


def eye(
    rows: int,
    columns: int | None = None,
    k: int = 0,
    dtype: Any = float,
    *,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """A matrix of ones on diagonal `k` and zeros elsewhere, as numpy.eye. Local, as `full`."""
    shape = (rows, rows if columns is None else columns)
    return _of_indices(lambda i, j: j - i == k, shape, distribution, package, device, dtype)


def fftfreq(
    n: int,
    d: float = 1.0,
    *,
    dtype: Any = None,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """The frequencies of a transform of `n` elements at distance `d`, as numpy.fft.fftfreq. Local.

    kx = shardmath.distributed.fft.fftfreq(n, 1 / n, distribution=Slab.X)[:, None, None]
    """
    elements = lambda i: np.where(i > (n - 1) // 2, i - n, i) * (1.0 / (n * d))  # noqa: E731
    return _of_indices(elements, n, distribution, package, device, dtype)


def rfftfreq(
    n: int,
    d: float = 1.0,
    *,
    dtype: Any = None,
    distribution: Distribution = EVERYWHERE,
    package: ModuleType | None = None,
    device: Any = None,
) -> DistributedArray:
    """The frequencies of a real transform, as numpy.fft.rfftfreq: n // 2 + 1 of them. Local."""
    elements = lambda i: i * (1.0 / (n * d))  # noqa: E731
    return _of_indices(elements, n // 2 + 1, distribution, package, device, dtype)


def _of_indices(
    elements: Callable[..., HostArray],
    shape: Shape,
    distribution: Distribution,
    package: ModuleType | None,
    device: Any = None,
    dtype: Any = None,
) -> DistributedArray:
    """The array whose elements are a function of their global indices. `elements` is called with
    the indices along each axis, which broadcast; the result is cast to `dtype`, if that is given.
    """
    context, library, layout = placed(shape, distribution, package, device)
    spans = layout.spans(context.rank)
    made = elements(*(np.ix_(*map(indices, spans)) if spans else ()))
    host = made if dtype is None else made.astype(dtypes.to_numpy(dtype))
    return of_host(host, library, layout, distribution)


# -- where a new array lies ------------------------------------------------------------------------


def placed(
    shape: Shape, distribution: Distribution, package: ModuleType | None, device: Any = None
) -> tuple[DistributedContext, Library, Layout]:
    """The current context, the library of the parts and the layout of a new array."""
    context = require_context()
    require_distribution(distribution)
    library = library_named("numpy") if package is None else library_of_package(package)
    lies_on = device_of(context, library)
    if device is not None and str(device) != lies_on.partition(":")[0]:
        raise ValueError(f"new arrays of {library.name} lie on {lies_on}, not on {device!r}")
    extents = integers((shape,) if isinstance(shape, int) else shape, "shape", least=0)
    return context, library, agreed_layout(distribution, extents, context)


def of_host(
    host: HostArray, library: Library, layout: Layout, distribution: Distribution
) -> DistributedArray:
    """The array whose part on this rank has the elements of `host`."""
    context = require_context()
    local = parts.on_device(host, library, device_of(context, library))
    return DistributedArray.of(local, unbound(distribution), layout, context)


def device_of(context: DistributedContext, library: Library) -> str:
    """The device of new parts: the host for NumPy's, whatever the ranks compute on."""
    on_host = context.device_id == "cpu" or library.name == "numpy"
    return "cpu" if on_host else f"cuda:{context.device_id}"


def require_distribution(distribution: Any) -> None:
    """Raise TypeError unless `distribution` is a Distribution."""
    if not isinstance(distribution, Distribution):
        raise TypeError(f"distribution must be one such as Slab.X or a Box, not {distribution!r}")
