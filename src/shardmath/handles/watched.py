"""NumPy arrays on symmetric memory that report each access, for SHARDMATH_CHECK=1.

They report reads and writes of their elements by indices, operators, NumPy's functions and their
own methods. Views of them report, too; results that are no views are plain arrays. Accesses of
other code are not seen: compiled code, torch, and `np.asarray`, whose result is a plain array on
the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shardmath.base.immutable import Immutable
from shardmath.context.context import Context
from shardmath.symmetric.accesses import Extent, Observer
from shardmath.symmetric.heap import Location

_Plain = np.ndarray[Any, Any]

# Functions that write into their first argument, and methods that write or read. Ufuncs, indices
# and views are recognised without their names.
_WRITING = {np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis}
_WRITERS = ("fill", "partition", "put", "setfield", "sort")
_READERS = (
    *("all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "choose", "clip"),
    *("compress", "copy", "cumprod", "cumsum", "dot", "dumps", "item", "max", "mean", "min"),
    *("nonzero", "prod", "repeat", "round", "searchsorted", "std", "sum", "take", "tobytes"),
    *("tofile", "tolist", "trace", "var"),
)


class _Memory(Immutable, eq=False):
    """`nbytes` at `location` of `rank`, which this rank finds from `address` on."""

    observer: Observer
    rank: int
    location: Location
    address: int
    nbytes: int

    def tell(self, x: _Plain, *, writes: bool, what: str) -> None:
        """Report an access to all elements of `x`, if it lies here. Raises DataRace."""
        start = x.__array_interface__["data"][0] - self.address
        extent = Extent.of(start, x.shape, x.strides, x.itemsize)
        if extent is not None and extent.low >= 0 and extent.high <= self.nbytes:
            self.observer.access(self.rank, self.location, extent, writes=writes, what=what)


class WatchedArray(np.ndarray[Any, Any]):
    """An array on symmetric memory that reports accesses. Made by `watched`."""

    _memory: _Memory | None = None

    def __array_finalize__(self, parent: Any) -> None:
        self._memory = getattr(parent, "_memory", None)

    # -- indices -----------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        plain = _plain(self)
        found = plain[key]
        if isinstance(found, np.ndarray) and np.may_share_memory(found, plain):
            return _like(found, self)
        _tell_selected(self, key, writes=False)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, WatchedArray):
            tell_of(value, writes=False, what="an array that is assigned")
        _plain(self)[key] = _plain(value)
        _tell_selected(self, key, writes=True)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    # -- NumPy's functions -------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        into = kwargs.get("out") or ()
        if into:
            kwargs["out"] = tuple(map(_plain, into))
        result = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        written = {0} if method == "at" else set()
        for number, x in enumerate(inputs):
            tell_of(x, writes=number in written, what=f"np.{ufunc.__name__}")
        for x in into:
            tell_of(x, writes=True, what=f"np.{ufunc.__name__}")
        if into:
            return into[0] if len(into) == 1 else into
        return result

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        what = f"np.{function.__name__}"
        result = function(*_plain_within(args), **{k: _plain_within(x) for k, x in kwargs.items()})
        operands = [*_watched_within((args, {k: x for k, x in kwargs.items() if k != "out"}))]
        views = [*_arrays_within(result)]
        for x in operands:
            if function in _WRITING and x is args[0]:
                tell_of(x, writes=True, what=what)
            elif not any(np.may_share_memory(x, view) for view in views):
                tell_of(x, writes=False, what=what)
        written = [*_watched_within(kwargs.get("out"))]
        for x in written:
            tell_of(x, writes=True, what=what)
        if written:
            return kwargs["out"]
        if isinstance(result, np.ndarray):
            shared = (x for x in operands if np.may_share_memory(result, x))
            return next((_like(result, x) for x in shared), result)
        return result

    # -- what is a plain array ---------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return self.copy().__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __copy__(self) -> Any:
        return self.copy()


def _telling(name: str, *, writes: bool) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)

    def call(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        result = method(_plain(self), *_plain_within(args), **kwargs)
        tell_of(self, writes=writes, what=f"{name}()")
        return result

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


for _name in _READERS:
    setattr(WatchedArray, _name, _telling(_name, writes=False))
for _name in _WRITERS:
    setattr(WatchedArray, _name, _telling(_name, writes=True))


def watched(
    context: Context, array: Any, rank: int, location: Location, address: int, nbytes: int
) -> Any:
    """`array`, or where accesses are observed and it is NumPy's, a view of it that reports them.

    It lies in `nbytes` of `rank`'s memory, at `location` there and at `address` in this process.
    """
    if context.observer is None or type(array) is not np.ndarray:
        return array
    made = array.view(WatchedArray)
    made._memory = _Memory(context.observer, rank, location, address, nbytes)
    return made


def tell_of(array: Any, *, writes: bool, what: str) -> None:
    """Report an access to all elements of `array`, if it is a watched one. Raises DataRace."""
    memory = getattr(array, "_memory", None)
    if memory is not None:
        memory.tell(_plain(array), writes=writes, what=what)


def _tell_selected(x: WatchedArray, key: Any, *, writes: bool) -> None:
    """Report an access to `x[key]`."""
    memory, plain = x._memory, _plain(x)
    if memory is None:
        return
    keys = key if isinstance(key, tuple) else (key,)
    if all(_is_basic(one) for one in keys):
        whole = keys if any(one is ... for one in keys) else (*keys, ...)
        memory.tell(plain[whole], writes=writes, what="an index")
        return
    # A list or a mask: the elements that it selects, in runs of neighbours.
    rows = plain.reshape(-1) if plain.flags.c_contiguous else None
    if rows is None:
        memory.tell(plain, writes=writes, what="an index")
        return
    chosen = np.unique(np.arange(plain.size).reshape(plain.shape)[key])
    cuts = np.flatnonzero(np.diff(chosen) > 1) + 1
    for run in np.split(chosen, cuts):
        if len(run):
            memory.tell(rows[run[0] : run[-1] + 1], writes=writes, what="an index")


def _is_basic(key: Any) -> bool:
    """Whether an index of this kind makes a view."""
    if key is None or key is ... or isinstance(key, slice):
        return True
    return hasattr(key, "__index__") and not isinstance(key, (bool, np.bool_, np.ndarray))


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, WatchedArray) else x


def _like(view: _Plain, x: WatchedArray) -> WatchedArray:
    made = view.view(WatchedArray)
    made._memory = x._memory
    return made


def _plain_within(x: Any) -> Any:
    """`x` with plain arrays in place of watched ones, also within tuples and lists."""
    if type(x) in (tuple, list):
        return type(x)(map(_plain_within, x))
    return _plain(x)


def _arrays_within(x: Any) -> Iterator[Any]:
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for one in x.values() if isinstance(x, dict) else x:
            yield from _arrays_within(one)


def _watched_within(x: Any) -> Iterator[WatchedArray]:
    return (array for array in _arrays_within(x) if isinstance(array, WatchedArray))
