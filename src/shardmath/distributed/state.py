"""The state of a distributed array: this rank's part, and the layout of all parts.

Functions on arrays are in layers below the class that users see. They make results by `like`,
`with_part` and `everywhere`, which give an array of the operand's class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Self

from shardmath.arrays import DType, Library, array_of, dtypes, library_of
from shardmath.context.context import DistributedContext
from shardmath.geometry import Distribution, Layout, Replicated

_EVERYWHERE = Replicated()
_replicated = lru_cache(maxsize=1024)(Layout.replicated)


class Distributed:
    """This rank's part of a global array.

    `local` is the part, an array of the user's; `distribution` says how the global array is split,
    `layout` which part every rank has, and `context` who the ranks are.
    """

    __slots__ = ("__weakref__", "context", "distribution", "layout", "local")

    local: Any
    distribution: Distribution
    layout: Layout
    context: DistributedContext

    @classmethod
    def of(
        cls, local: Any, distribution: Distribution, layout: Layout, context: DistributedContext
    ) -> Self:
        """The array whose part on this rank is `local`. Local."""
        made = object.__new__(cls)
        made.local, made.distribution, made.layout = local, distribution, layout
        made.context = context
        return made

    def like(self, local: Any, distribution: Distribution, layout: Layout) -> Self:
        """An array on the same ranks, with another part and layout. Local."""
        made = object.__new__(type(self))  # as `of`, without the call
        made.local, made.distribution, made.layout = local, distribution, layout
        made.context = self.context
        return made

    def with_part(self, local: Any) -> Self:
        """An array that is split alike, with another part: an array or a number. Local."""
        made = object.__new__(type(self))  # as `like`, without the call
        made.local, made.distribution, made.layout = array_of(local), self.distribution, self.layout
        made.context = self.context
        return made

    def everywhere(self, local: Any) -> Self:
        """The array that every rank has whole in `local`. Local."""
        layout = _replicated(tuple(local.shape), self.context.size)
        return self.like(local, _EVERYWHERE, layout)

    def require_same_ranks(self, *others: Distributed) -> None:
        """Raise ValueError if one of the others is of another context. Local."""
        for x in others:
            if x.context is not self.context:
                raise ValueError("the operands are split over the ranks of different contexts")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.layout.global_shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.layout.global_shape)

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return self.layout.elements

    @property
    def dtype(self) -> Any:
        """The type of the elements, an object of the parts' library."""
        return self.local.dtype

    @property
    def element_type(self) -> DType:
        """The type of the elements, independent of the parts' library."""
        return dtypes.of(self.library.spec(self.local).dtype)

    @property
    def library(self) -> Library:
        """The array library of the parts."""
        return library_of(self.local)
