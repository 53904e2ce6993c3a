"""`DistributedArray`: an array that knows how it is split."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base.collective_call import collective_call
from shardmath.call.agreement import raising_on_all_ranks
from shardmath.distributed import (
    calls,
    elementwise,
    halos,
    index_arrays,
    indexing,
    manipulation,
    parts,
    printing,
    products,
    protocols,
    reductions,
    searching,
)
from shardmath.distributed.elementwise import alike, applied, combined, is_operand
from shardmath.distributed.layouts import indices, of_axes
from shardmath.distributed.movement import (
    explanation,
    redistributed,
    require_root,
    whole_everywhere,
    whole_on,
)
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution

_CALL = "__call__"


_Function = Callable[[Any, Any], Any]


def _binary(function: _Function) -> Any:
    """An operator's method, such as __add__."""

    def method(self: Any, other: Any) -> Any:
        return combined(function, self, other)

    return method


def _comparison(function: _Function, *, of_others: bool) -> Any:
    """The method __eq__ or __ne__, which is `of_others` for None and text: no element is either."""

    def method(self: Any, other: Any) -> Any:
        made = combined(function, self, other)
        if made is NotImplemented and (other is None or isinstance(other, str | bytes)):
            return elementwise.full_like(self, of_others, "bool")
        return made

    return method


def _operators(function: _Function, in_place: _Function) -> Any:
    """The methods of an operator: plain, with its operands exchanged, and in place; for example
    __add__, __radd__ and __iadd__.
    """

    def reflected(self: Any, other: Any) -> Any:
        return combined(lambda one, two: function(two, one), self, other)

    def assigned(self: Any, other: Any) -> Any:
        kind = type(other)
        if explanation.get() is None:
            if kind is type(self) and self.layout == other.layout:
                in_place(self.local, other.local)
                return self
            if kind is float or kind is int or kind is complex or kind is bool:
                in_place(self.local, other)
                return self
        write = lambda into, operands: in_place(into, operands[1])  # noqa: E731
        return applied(in_place, (self, other), out=self, write=write)

    return _binary(function), reflected, assigned


class DistributedArray(Distributed):
    """An array that is split over the ranks: each has a part.

        x = shardmath.array(part, Slab.X)       # from parts; see also zeros, from_global, ...
        y = np.sin(x) + 2 * x                   # part by part
        y.sum(axis=0), x @ y, x.to(Slab.Y)      # together

    `local` is this rank's part, the user's own array, whose memory it shares; `distribution` says
    how the array is split, and `layout` which part every rank has. It has the operators, functions
    and indices of NumPy's arrays. All ranks make the same calls. Where operands are not split
    alike, elements move: `shardmath.explain` says beforehand what would move, and
    `shardmath.communication` allows or forbids it.
    """

    __slots__ = ()
    __shardmath_functions__ = calls.FUNCTIONS
    __hash__ = None  # type: ignore[assignment]  # as NumPy's, it is compared element by element
    __array_priority__ = 100.0

    # -- the whole ---------------------------------------------------------------------------------

    @collective_call
    def to(self, distribution: Distribution) -> Self:
        """This array in another distribution; itself, if it is already split so. Collective.

        Raises the same on all ranks: BindDistributionError, a ValueError, where the distribution
        does not fit, TypeError where it is not a distribution.
        """
        return redistributed(self, distribution)

    @collective_call
    def numpy(self, root: int | None = None) -> HostArray | None:
        """The global array as a NumPy array, on every rank, or on rank `root` alone, where the
        others get None. Collective.

        Always a new array. Raises the same on all ranks: ValueError where `root` is not a rank,
        CollectiveMismatch where ranks pass different ones.
        """
        if root is not None:
            size = self.context.size
            raising_on_all_ranks(self.context, "numpy", lambda: require_root(root, size))
        part = whole_on(self, root)
        if root not in (None, self.context.rank):
            return None
        host = parts.on_host(part)
        return host.copy() if part is self.local else host

    def item(self) -> Any:
        """The one element, as a Python number. Collective unless every rank has it.

        Raises ValueError unless there is exactly one.
        """
        if self.size != 1:
            raise ValueError(f"an array of shape {self.shape} has not exactly one element")
        return whole_everywhere(self, "one element for all ranks").local.item()

    def tolist(self) -> Any:
        """The global array as nested lists, on every rank. Collective."""
        host = self.numpy()
        assert host is not None, "every rank asked for it"
        return host.tolist()

    def indices(self) -> tuple[HostArray, ...]:
        """The global indices of this rank's part along each axis, which broadcast to its shape.

        This rank's part of numpy.ogrid: `rows, columns = x.indices()`. Local.
        """
        spans = self.layout.spans(self.context.rank)
        return tuple(np.ix_(*(indices(along) for along in spans))) if spans else ()

    def copy(self) -> Self:
        """An array split alike, with elements of its own. Local."""
        return self.with_part(parts.copied(self.local))

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, _: Any) -> Self:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedArray is not pickled, as it is of several processes: "
            "shardmath.save(path, x) writes it, and x.numpy() is the whole on every rank"
        )

    def astype(self, dtype: Any, copy: bool = True) -> Self:
        """The elements in another type, which is NumPy's or torch's object, or a name. Local."""
        wanted = dtypes.of(dtype)
        if self.element_type == wanted:
            return self.copy() if copy else self
        return self.with_part(self.library.cast(self.local, wanted))

    halo = halos.halo

    # -- axes --------------------------------------------------------------------------------------

    @property
    def T(self) -> Self:
        """The transposed array, a view: its distribution is this one's, transposed. Local."""
        return self.transpose()

    def transpose(self, *axes: Any) -> Self:
        """The array with its axes in another order, by default reversed; a view. Local.

        Raises ValueError where `axes` does not permute them.
        """
        given = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = tuple(given) if given else tuple(range(self.ndim))[::-1]
        numbers = reductions.axes_of(order, self.ndim)
        if len(numbers) != self.ndim:
            raise ValueError(f"axes {order} are not a permutation of {self.ndim} axes")
        order = tuple(operator.index(axis) % self.ndim for axis in order)
        made = of_axes(self, parts.permuted(self.local, order), order)
        assert made is not None, "every distribution has a transposed one"
        return made  # type: ignore[return-value]

    @property
    def mT(self) -> Self:
        """The array with its last two axes exchanged, a view. Local."""
        return manipulation.matrix_transpose(self)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> Self:
        """The elements, in C order, in another shape; see `shardmath.distributed.reshape`."""
        given = shape[0] if len(shape) == 1 else shape
        return manipulation.reshape(self, given)  # type: ignore[no-any-return]

    def ravel(self) -> Self:
        """The elements in C order, along one axis."""
        return self.reshape(-1)

    def flatten(self) -> Self:
        """A copy of the elements in C order, along one axis."""
        return manipulation.reshape(self, -1, copy=True)  # type: ignore[no-any-return]

    squeeze, swapaxes = manipulation.squeeze, manipulation.swapaxes
    repeat, take = manipulation.repeat, manipulation.take
    argsort, nonzero, searchsorted = searching.argsort, searching.nonzero, searching.searchsorted
    clip, round = elementwise.clip, elementwise.round
    diagonal, dot, trace = protocols.diagonal, protocols.dot, protocols.trace

    def fill(self, value: Any) -> None:
        """Set all elements to one value. Local."""
        self[...] = value

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.element_type.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the elements of the global array."""
        return self.size * self.itemsize

    @property
    def device(self) -> str:
        """Where the parts are: "cpu", or "cuda" on every rank's GPU."""
        return self.library.spec(self.local).space

    def to_device(self, device: Any, /, *, stream: Any = None) -> Self:
        """The array itself. Raises ValueError for a device other than its own."""
        if str(device) != self.device:
            raise ValueError(f"the parts are on {self.device}, and stay there, not on {device!r}")
        return self

    @property
    def real(self) -> Self:
        """The real parts, a view. Local."""
        return self.with_part(self.local.real)

    @property
    def imag(self) -> Self:
        """The imaginary parts, a view where the elements are complex. Local."""
        if self.element_type.kind != "c":
            return elementwise.zeros_like(self)
        return self.with_part(self.local.imag)

    def conj(self) -> Self:
        """The complex conjugate of each element. Local."""
        return self.with_part(self.library.resolved(self.local.conj()))

    def __getitem__(self, key: Any) -> Any:
        if index_arrays.has_arrays(key):
            return index_arrays.get(self, key)
        return indexing.get(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if index_arrays.has_arrays(key):
            index_arrays.put(self, key, value)
        else:
            indexing.put(self, key, value)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("an array of no axes has no length")
        return self.shape[0]

    def __contains__(self, value: Any) -> bool:
        return bool(reductions.any(self == value))

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("an array of no axes is not iterable")
        return (self[number] for number in range(self.shape[0]))

    # -- reductions --------------------------------------------------------------------------------

    sum, prod = reductions.sum, reductions.prod
    min, max = reductions.min, reductions.max
    any, all = reductions.any, reductions.all
    argmin, argmax = reductions.argmin, reductions.argmax
    mean, var, std = reductions.mean, protocols.var, protocols.std
    cumsum, cumprod = protocols.cumsum, protocols.cumprod

    if not TYPE_CHECKING:  # for type checkers every name would be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(np.ndarray, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            function = f"np.{name}, " if protocols.ours(getattr(np, name, None)) else ""
            raise AttributeError(
                f"a DistributedArray has no {name}, as NumPy's arrays do: use {function}"
                f"x.local.{name}, of this rank's part, or x.numpy().{name}, of the whole"
            )

    # -- text and numbers --------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"DistributedArray(shape={self.shape}, dtype={self.dtype}, {self.distribution!r}, "
            f"rank {self.context.rank} of {self.context.size})"
        )

    def __str__(self) -> str:
        return printing.shown(self)

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how else str(self)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                f"an array of shape {self.shape} is neither true nor false: use x.any() or x.all()"
            )
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    # -- NumPy's protocols -------------------------------------------------------------------------

    def __array_namespace__(self, api_version: str | None = None) -> ModuleType:
        """The functions of the array API standard for these arrays: `shardmath.distributed`.

        Raises ValueError for a version later than 2024.12.
        """
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ValueError(f"the namespace is that of version 2024.12, not {api_version!r}")
        return import_module(__package__)

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(
            "a DistributedArray does not become NumPy's by itself: x.local is this rank's part; "
            "x.numpy() gathers the whole on every rank, x.numpy(root=0) on one"
        )

    def __dlpack__(self, **words: Any) -> NoReturn:
        raise NotImplementedError(
            "DLPack has arrays of one process: x.local is this rank's part, x.numpy() the whole"
        )

    __dlpack_device__ = __dlpack__

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **words: Any) -> Any:
        if method == _CALL and ufunc.nout == 1 and ufunc.signature is None:
            operands = alike(self, inputs)
            if operands is not None and not words:
                return self.with_part(parts.elementwise(self.library, ufunc)(*operands))
            (out,) = words.get("out", (None,)) if len(words) == 1 else (None,)
            if operands is not None and isinstance(out, type(self)) and out.layout == self.layout:
                return (
                    out
                    if explanation.get() is not None
                    else protocols.written(ufunc, operands, out, {})
                )
        return protocols.ufunc(self, ufunc, method, inputs, words)

    def __array_function__(self, function: Any, types: Any, given: Any, words: Any) -> Any:
        return protocols.array_function(function, given, words)

    # -- operators ---------------------------------------------------------------------------------

    __add__, __radd__, __iadd__ = _operators(operator.add, operator.iadd)
    __sub__, __rsub__, __isub__ = _operators(operator.sub, operator.isub)
    __mul__, __rmul__, __imul__ = _operators(operator.mul, operator.imul)
    __truediv__, __rtruediv__, __itruediv__ = _operators(operator.truediv, operator.itruediv)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators(operator.floordiv, operator.ifloordiv)
    __mod__, __rmod__, __imod__ = _operators(operator.mod, operator.imod)
    __pow__, __rpow__, __ipow__ = _operators(operator.pow, operator.ipow)
    __and__, __rand__, __iand__ = _operators(operator.and_, operator.iand)
    __or__, __ror__, __ior__ = _operators(operator.or_, operator.ior)
    __xor__, __rxor__, __ixor__ = _operators(operator.xor, operator.ixor)
    __lshift__, __rlshift__, __ilshift__ = _operators(operator.lshift, operator.ilshift)
    __rshift__, __rrshift__, __irshift__ = _operators(operator.rshift, operator.irshift)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__ = _comparison(operator.eq, of_others=False)
    __ne__ = _comparison(operator.ne, of_others=True)

    def __matmul__(self, other: Any) -> Any:
        is_known = type(other) is type(self) or is_operand(other)
        return products.matmul(self, other) if is_known else NotImplemented

    def __rmatmul__(self, other: Any) -> Any:
        return products.matmul(other, self) if is_operand(other) else NotImplemented

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if is_operand(other) else NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if is_operand(other) else NotImplemented

    def __neg__(self) -> Self:
        return self.with_part(-self.local)

    def __pos__(self) -> Self:
        return self.copy()

    def __abs__(self) -> Self:
        return self.with_part(abs(self.local))

    def __invert__(self) -> Self:
        return self.with_part(~self.local)
