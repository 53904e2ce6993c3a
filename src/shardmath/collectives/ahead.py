"""Which calls of a context of GPUs need no meeting of hosts, and what is raised where ranks differ.

A call may run ahead where this rank's own arguments say what all ranks' are: those of a reduction
are equal, but for `out`, which each rank checks for itself. It is known once all ranks have agreed
on it; from then on its tag, a digest of it, stands for it: in the words that kernels compare
before they write, and in the list that hosts compare where they meet.

All ranks learn such calls in the same order, and forget all of them together when there are too
many, so a call is known on all ranks or on none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

from shardmath.base import wire
from shardmath.call.agreement import Agreement
from shardmath.collectives.operand import OutputSpec
from shardmath.context.agreement import refused_by
from shardmath.context.context import Context
from shardmath.errors import CollectiveMismatch
from shardmath.symmetric.header import different

__all__ = ["Ahead", "KnownCall", "tag_of_agreement", "without_out"]

_KEPT = 1024  # calls of a context
_TAG_BYTES = 6
_OUT = 3  # where `call_spec` has what `out` is


def _tag_of(*what: bytes) -> int:
    """A number of 48 bits that stands for a call, the same on all ranks; never 0."""
    digest = blake2b(b"\0".join(what), digest_size=_TAG_BYTES).digest()
    return int.from_bytes(digest, "little") or 1


def tag_of_agreement(agreement: Agreement[Any]) -> int:
    """The tag of a call for which all ranks have met."""
    operation, digests = agreement.key
    return _tag_of(operation.encode(), *digests)


class KnownCall(NamedTuple):
    """A call that all ranks know: its spec but for `out`, what that must be, and its plan.

    `build` makes a plan of all ranks' specs, or raises what is wrong with them.
    """

    operation: str
    spec: tuple[Any, ...]
    result: OutputSpec
    plan: Any
    build: Callable[[list[Any]], Any]
    tag: int

    @property
    def whole(self) -> tuple[Any, ...]:
        """The spec as a rank without `out` sends it."""
        return with_out(self.spec, None)


def without_out(spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """A rank's spec, as `call_spec` has it, without what is each rank's own."""
    return (*spec[:_OUT], *spec[_OUT + 1 :])


def with_out(spec: tuple[Any, ...], out: OutputSpec) -> tuple[Any, ...]:
    """The spec of which that is left."""
    return (*spec[:_OUT], out, *spec[_OUT:])


class Ahead:
    """The known calls of one context, and what this rank calls while it meets its peers."""

    def __init__(self, context: Context) -> None:
        team = context.team
        assert team is not None, "a context of GPUs"
        self._rank, self._size = context.rank, context.size
        self._board = context.board
        self._context = weakref.ref(context)  # it keeps this
        self._meets = context.multi_host or team.meets  # the same on all ranks
        self._calls: dict[tuple[str, Hashable], KnownCall] = {}
        self._by_tag: dict[int, KnownCall] = {}
        # What this rank says in the meeting under way: its spec, or its mistake.
        self._own: tuple[Any, ...] | Exception | None = None
        if not self._meets and context.size > 1:
            team.explain = self._explain
            self._board.let_run_ahead(self._explain_passed)

    @classmethod
    def of(cls, context: Context) -> Ahead:
        """The context's."""
        made: Ahead = context.cache("calls ahead", lambda: cls(context))
        return made

    def find(self, operation: str, common: tuple[Any, ...]) -> KnownCall | None:
        """The known call of `operation` whose spec, leaving out `out`, is `common`."""
        return self._calls.get((operation, common))

    def find_fitting(self, operation: str, spec: tuple[Any, ...]) -> KnownCall | None:
        """The known call of this spec; None where its `out` is wrong, which a meeting reports."""
        known = self.find(operation, without_out(spec))
        return known if known is not None and spec[_OUT] in (None, known.result) else None

    def keep(
        self,
        operation: str,
        spec: tuple[Any, ...],
        result: OutputSpec,
        plan: Any,
        build: Callable[[list[Any]], Any],
    ) -> None:
        """Let a call that all ranks have agreed on be known, given this rank's spec of it."""
        if self._meets:
            return
        if len(self._calls) >= _KEPT:
            self._by_tag = {each.tag: each for each in self._calls.values()}
            self._calls.clear()
            self._forget()
        common = without_out(spec)
        tag = self.tag(operation, spec)
        known = KnownCall(operation, common, result, plan, build, tag)
        self._by_tag[tag] = self._calls[operation, common] = known

    def _forget(self) -> None:
        context = self._context()
        if context is not None and context.repeats is not None:
            context.repeats.calls.clear()

    def tag(self, operation: str, spec: tuple[Any, ...]) -> int:
        """The tag of a call that may be known, the first time too."""
        return _tag_of(operation.encode(), wire.encode(without_out(spec)))

    def go(self, known: KnownCall) -> None:
        """Make a known call, without waiting for the peers."""
        if self._size > 1:
            self._board.run_ahead(known.operation, known.tag)

    @contextmanager
    def meeting(self, own: tuple[Any, ...] | Exception) -> Iterator[None]:
        """Surround a meeting to which this rank brings `own`, a spec or an error."""
        self._own = own
        try:
            yield
        finally:
            self._own = None

    # -- where ranks differ ------------------------------------------------------------------------

    def _explain(self, tags: Mapping[int, int]) -> Exception:
        """What all ranks raise whose kernels found these tags, by rank, to differ."""
        calls = [self._by_tag.get(tags[rank]) for rank in range(self._size)]
        names = [call.operation if call else "something else" for call in calls]
        return self._difference(names, [call.whole if call else None for call in calls], calls)

    def _explain_passed(self, tags: Mapping[int, int]) -> Exception:
        """What all ranks raise where peers ran ahead by these tags, and this rank meets them."""
        operation, own = self._board.operation, self._own
        calls = [self._by_tag.get(tags[r]) if r in tags else None for r in range(self._size)]
        names = [
            operation if rank not in tags else call.operation if call else "something else"
            for rank, call in enumerate(calls)
        ]
        if isinstance(own, Exception):
            return refused_by(self._rank, own)
        specs = [
            call.whole if call else None if rank in tags else own for rank, call in enumerate(calls)
        ]
        return self._difference(names, specs, calls)

    def _difference(
        self,
        names: Sequence[str],
        specs: Sequence[tuple[Any, ...] | None],
        calls: Sequence[KnownCall | None],
    ) -> Exception:
        if len(set(names)) > 1 or None in specs:
            return CollectiveMismatch(different(names))
        build = next(call.build for call in calls if call is not None)
        try:
            build(list(specs))
        except Exception as error:
            return error.with_traceback(None)
        return CollectiveMismatch(
            f"the ranks called {names[0]} alike, but not at the same place: all ranks must make "
            "the same calls in the same order"
        )
