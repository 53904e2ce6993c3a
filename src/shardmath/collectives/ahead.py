"""Calls of a context of GPUs in which hosts do not meet, and what is raised if the ranks differ.

A call is known once all ranks have agreed on the part of it that they share (see `forms`). From
then on its tag, a digest of that part, stands for it: in the words that kernels compare before they
write, and in the lists that hosts compare when they meet. The part that differs by rank is listed
beside the tag.

All ranks learn such calls in the same order, and forget all of them together when there are too
many. So a call is known on all ranks or on none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

from shardmath.base import wire
from shardmath.base.lru_cache import LRUCache
from shardmath.base.weak_method import weakly
from shardmath.collectives.cells import DeviceCollectives
from shardmath.collectives.forms import Form, Spec
from shardmath.collectives.operand import OutputSpec, Shape
from shardmath.context.agreement import refused_by
from shardmath.context.context import Context
from shardmath.errors import CollectiveMismatch
from shardmath.symmetric.messages import different
from shardmath.symmetric.rows import MOST_WORDS

_KEPT = 1024  # known calls of a context
_PLANS = 64  # plans of calls with parts that the peers have listed
_TAG_BYTES = 6


class KnownCall(NamedTuple):
    """A call that all ranks know: the part that they share (`common`), and its plan.

    `result` is the spec that `out` must have, None if that is not the same in all such calls.
    `build` makes a plan of all ranks' specs, or raises what is wrong with them.
    """

    operation: str
    form: Form
    common: Spec
    result: OutputSpec
    plan: Any
    build: Callable[[list[Any]], Any]
    tag: int

    def whole(self, words: Sequence[int] = ()) -> Spec:
        """The spec of a rank that has listed these words, and has no `out`."""
        return self.form.whole(self.common, words)


class Ahead:
    """The known calls of one context, and the call for which this rank meets its peers."""

    def __init__(self, context: Context) -> None:
        team = context.gpu_team
        self._rank, self._size = context.rank, context.size
        self._board = context.board
        self._context = weakref.ref(context)  # it keeps this
        self._meets = context.multi_host or team.meets  # the same on all ranks
        self._calls: dict[tuple[str, Hashable], KnownCall] = {}
        self._by_tag: dict[int, KnownCall] = {}
        self._plans: LRUCache[Hashable, Any] = LRUCache(_PLANS)
        # What this rank brings to the meeting under way: its spec, or its error.
        self._own: Spec | Exception | None = None
        if not self._meets and context.size > 1:
            # Weakly: team and board outlive a context that is dropped, and plans refer to it.
            team.explain = weakly(self._explain)
            team.explain_misfit = weakly(self._explain_misfit)
            self._board.let_run_ahead(weakly(self._explain_passed))

    @classmethod
    def of(cls, context: Context) -> Ahead:
        """The known calls of a context."""
        return context.cache("calls ahead", lambda: cls(context))

    def find(self, operation: str, common: Spec) -> KnownCall | None:
        """The known call of `operation` whose shared part is `common`."""
        return self._calls.get((operation, common))

    def find_fitting(self, operation: str, form: Form, spec: Spec) -> KnownCall | None:
        """The known call of this spec; None if `out` is wrong, which a meeting then reports."""
        common = form.common(spec)
        known = None if common is None else self.find(operation, common)
        if known is None or not form.fits(spec, known.result):
            return None
        if form.counted and self._size == 1:  # this rank alone can tell whether it is right
            try:
                known.build([spec])
            except Exception:
                return None
        return known

    def find_of(self, rank: int, operation: str) -> KnownCall | None:
        """The known call of `operation` that `rank` makes next; None if it meets all ranks instead.

        Waits for that rank's host.
        """
        if self._meets or self._size == 1:
            return None
        tag = self._board.next_tag_of(rank)
        known = None if tag is None else self._by_tag.get(tag)
        return known if known is not None and known.operation == operation else None

    def keep(
        self,
        operation: str,
        form: Form,
        common: Spec,
        result: OutputSpec,
        plan: Any,
        build: Callable[[list[Any]], Any],
    ) -> KnownCall | None:
        """Let a call be known on which all ranks have agreed, given the part that they share. None
        if ranks meet for such calls.
        """
        if self._meets or (form.counted and self._size > MOST_WORDS):
            return None
        if len(self._calls) >= _KEPT:
            self._by_tag = {listed.tag: listed for listed in self._calls.values()}
            self._calls.clear()
            self._forget()
        tag = self.tag(operation, common)
        known = KnownCall(operation, form, common, result, plan, build, tag)
        self._by_tag[tag] = self._calls[operation, common] = known
        return known

    def _forget(self) -> None:
        context = self._context()
        if context is not None and context.repeats is not None:
            context.repeats.forget()

    def tag(self, operation: str, common: Spec) -> int:
        """The tag of a call, known or not: 48 bits, the same on all ranks, and never 0."""
        text = operation.encode() + b"\0" + wire.encode(common)
        return int.from_bytes(blake2b(text, digest_size=_TAG_BYTES).digest(), "little") or 1

    def go(self, known: KnownCall, words: Shape) -> None:
        """List a known call, with `words` as this rank's own part. Does not wait."""
        if self._size > 1:
            self._board.run_ahead(known.operation, known.tag, words)

    def others(self, own: Shape) -> Sequence[Shape]:
        """Each rank's own part of the known call that this rank makes. Waits for their hosts."""
        return [own] if self._size == 1 else self._board.listed_words(len(own))

    def asked(self, known: KnownCall, spec: Spec) -> Sequence[Shape] | None:
        """The words for which `plan` has asked the peers in the last call; None if it has not."""
        form = known.form
        if not form.counted or form.alone(spec) is not None:
            return None
        return self.others(form.words(spec))

    def plan(self, known: KnownCall, spec: Spec) -> Any:
        """The plan of the known call that this rank makes, or its own part if that is enough."""
        form = known.form
        if not form.counted:
            return known.plan
        alone = form.alone(spec)
        if alone is not None:
            return alone
        others = self.others(form.words(spec))
        key = known.tag, spec, tuple(others)
        plan = self._plans.find(key)
        if plan is None:
            specs = [known.whole(words) for words in others]
            specs[self._rank] = spec
            try:
                plan = self._plans.keep(key, known.build(specs))
            except Exception as error:  # the peers have gone on, and have to raise it, too
                raise self._board.concluded(error, by_all=True) from None
        return plan

    @contextmanager
    def meeting(self, own: Spec | Exception) -> Iterator[None]:
        """Surround a meeting to which this rank brings `own`, a spec or an error.

        Ranks also announce to each other the heaps that they have by then.
        """
        context = self._context()
        assert context is not None, "it is in use"
        self._own = own
        try:
            if context.heaps is not None:
                context.heaps.announce(context)
            yield
            if context.heaps is not None:
                context.heaps.renew()
        finally:
            self._own = None

    # -- where ranks differ ------------------------------------------------------------------------

    def _explain(self, tags: Mapping[int, int]) -> Exception:
        """The error that all ranks raise if kernels have found these tags, by rank, to differ."""
        calls = [self._by_tag.get(tags[rank]) for rank in range(self._size)]
        names = [call.operation if call else "something else" for call in calls]
        return self._difference(names, [call.whole() if call else None for call in calls], calls)

    def _explain_misfit(self, tag: int, launch: int) -> Exception:
        """The error that all ranks raise if one does not take what that launch sends to it."""
        known, context = self._by_tag.get(tag), self._context()
        assert context is not None, "it is in use"
        collectives = DeviceCollectives.of(context)
        assert isinstance(collectives, DeviceCollectives), "ranks of one host"
        if known is None:
            return CollectiveMismatch("the ranks exchanged other counts than they had agreed on")
        specs = [known.form.of_row(known.common, row) for row in collectives.rows(launch)]
        return self._difference([known.operation], specs, [known])

    def _explain_passed(self, tags: Mapping[int, int | None]) -> Exception:
        """The error that all ranks raise if peers ran ahead with these tags while this rank meets.

        Nothing is known about a rank without a tag. So that it is not blamed, it is taken to agree
        with the first rank that ran ahead.
        """
        operation, own = self._board.operation, self._own
        if isinstance(own, Exception):
            return refused_by(self._rank, own)
        first = min(rank for rank, tag in tags.items() if tag is not None)
        names: list[str | None] = [operation] * self._size
        specs: list[Spec | None] = [own] * self._size
        calls: list[KnownCall | None] = [None] * self._size
        for rank, tag in tags.items():
            like = rank if tag is not None else first
            call = calls[rank] = self._by_tag.get(tags[like] or 0)
            names[rank] = call.operation if call else "something else"
            specs[rank] = call.whole(self._words_of(like, call)) if call else None
            if like != rank:
                names[rank] = None
        return self._difference(names, specs, calls)

    def _words_of(self, rank: int, call: KnownCall) -> Shape:
        """The words that a peer has listed with the call by which it has run ahead."""
        calls, count = self._board.calls, len(call.form.words(call.whole((0,) * self._size)))
        return () if calls is None else calls.next_words_of(rank, count)

    def _difference(
        self,
        names: Sequence[str | None],
        specs: Sequence[Spec | None],
        calls: Sequence[KnownCall | None],
    ) -> Exception:
        known = set(names) - {None}
        if len(known) > 1 or None in specs:
            return CollectiveMismatch(different(names))
        build = next(call.build for call in calls if call is not None)
        try:
            build(list(specs))
        except Exception as error:
            return error.with_traceback(None)
        return CollectiveMismatch(
            f"the ranks called {known.pop()} alike, but not at the same place: all ranks must make "
            "the same calls in the same order"
        )
