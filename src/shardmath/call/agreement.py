"""Agreement on repeated calls: one small exchange once their plan is known.

The first call of a kind exchanges full specs and builds a plan from all of them. Later calls
exchange 16 bytes each, the digest of the own spec; the digests of all ranks together name the plan.
Every rank keeps and drops plans in the same order, since all take part in the same calls; a count
of the plans made travels along, so that ranks whose caches differ (one was interrupted) notice it,
and clear them together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from shardmath import wire
from shardmath.agreement import checked, gather
from shardmath.lru_cache import LRUCache

if TYPE_CHECKING:
    from shardmath.context import Context

__all__ = ["Agreement", "Described", "HashedSpec", "Statement", "agree", "agree_plan"]

Plan = TypeVar("Plan")

_Key = tuple[str, tuple[bytes, ...]]  # operation, digests of all ranks' specs
_Messages = tuple[str | bytes, ...]  # operation, and the message of each rank

_KEPT = 256  # plans per context
_MADE = struct.Struct("<I")  # plans made, before the digest of the spec
_DIGEST_BYTES = 16
_HEADER_BYTES = _MADE.size + _DIGEST_BYTES


class HashedSpec:
    """A spec that many calls send, and its digest, which is what they send once it is known.

    Raises TypeError when it is not plain data.
    """

    __slots__ = ("digest", "spec")

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.digest = blake2b(wire.encode(spec), digest_size=_DIGEST_BYTES).digest()


class Described(Protocol):
    """What one rank says of its call, with whatever else it has found out for itself.

    `spec` is plain hashable data (tuples, strings, numbers, None) of which equal values mean equal
    calls, or a `HashedSpec` of such data. `note` is bytes that may differ from call to call, such
    as where operands lie.
    """

    @property
    def spec(self) -> Hashable | HashedSpec:
        """See the class."""
        ...

    @property
    def note(self) -> bytes:
        """See the class."""
        ...


Own = TypeVar("Own", bound=Described)


class Agreement(Generic[Plan]):
    """The plan of a call, and the notes of all ranks on this one execution of it.

    It is the same object in calls in which every rank sends what it sent before, so that what a
    rank has prepared for such calls can be found by it.
    """

    __slots__ = ("key", "notes", "plan")

    def __init__(self, plan: Plan, notes: list[bytes], key: _Key) -> None:
        self.plan, self.notes, self.key = plan, notes, key


def agree(
    context: Context,
    operation: str,
    describe: Callable[..., Own],
    build: Callable[[list[Any]], Plan],
    *arguments: Any,
) -> tuple[Own, Agreement[Plan]]:
    """This rank's `describe(*arguments)`, and what all ranks have agreed on. Collective.

    `build(specs)`, given every rank's spec in rank order, is pure: it returns the plan, or raises
    the same error on all ranks. It runs when these specs come together for the first time; the
    result is kept, and must not be changed.

    Raises on every rank what `describe` raised on the first rank where it did, what `build` raises,
    or CollectiveMismatch when the operations differ.
    """
    cache: _PlanCache = context.cache("plans", _PlanCache)
    described: list[Own] = []

    def message() -> bytes:
        own = describe(*arguments)
        described.append(own)
        return cache.header(operation, own.spec) + own.note

    context.require_open()
    messages = gather(context.board, operation, message)
    own = described[0]
    agreement: Agreement[Plan] | None = cache.find_repeated(operation, messages)
    if agreement is not None:
        return own, agreement
    cache.compare(messages)
    key = (operation, tuple([text[_MADE.size : _HEADER_BYTES] for text in messages]))
    notes = [text[_HEADER_BYTES:] for text in messages]
    plan = cache.find(key)
    if plan is None:
        spec = own.spec
        text = wire.encode(spec.spec if isinstance(spec, HashedSpec) else spec)
        texts = context.board.exchange(operation, text)
        built = checked(context.board, build, [wire.decode(each) for each in texts])
        plan = cache.keep(key, (built,))
        return own, Agreement(plan[0], notes, key)
    return own, cache.keep_repeated(operation, messages, Agreement(plan[0], notes, key))


def agree_plan(
    context: Context,
    operation: str,
    describe: Callable[[], tuple[Hashable | HashedSpec, bytes]],
    build: Callable[[list[Any]], Plan],
) -> tuple[Plan, list[bytes]]:
    """As `agree`, for operators that have found out nothing else. Collective."""
    _, agreement = agree(context, operation, lambda: Statement(*describe()), build)
    return agreement.plan, agreement.notes


class Statement(NamedTuple):
    """A description with nothing else."""

    spec: Hashable | HashedSpec
    note: bytes


class _PlanCache:
    """The plans that one context has agreed on; the same on all its ranks."""

    def __init__(self) -> None:
        self._made = 0  # equal on all ranks
        self._header = _MADE.pack(0)  # the same, as messages have it
        self._plans: LRUCache[_Key, tuple[Any]] = LRUCache(_KEPT)  # all ranks use them alike
        self._digests: LRUCache[tuple[str, Hashable], bytes] = LRUCache(_KEPT)  # this rank's own
        # By the messages of a call since the last plan was made.
        self._repeated: LRUCache[_Messages, Agreement[Any]] = LRUCache(_KEPT)

    def header(self, operation: str, spec: Hashable | HashedSpec) -> bytes:
        """How many plans were made, and 16 bytes that stand for `spec`.

        Raises TypeError when it is not plain hashable data.
        """
        if isinstance(spec, HashedSpec):
            return self._header + spec.digest
        digest = self._digests.find((operation, spec))
        if digest is None:
            digest = self._digests.keep((operation, spec), HashedSpec(spec).digest)
        return self._header + digest

    def compare(self, messages: Sequence[bytes]) -> None:
        """Clear the cache where ranks have made different numbers of plans, given all messages."""
        if not all(text.startswith(self._header) for text in messages):
            self.restart(1 + max(_MADE.unpack_from(text)[0] for text in messages))

    def restart(self, made: int) -> None:
        """Forget all plans, as if so many had been made."""
        self._plans.clear()
        self._count(made)

    def find_repeated(self, operation: str, messages: Sequence[bytes]) -> Agreement[Any] | None:
        """What was agreed on in a call in which all ranks sent the same. A use of its plan."""
        agreement = self._repeated.find((operation, *messages))
        if agreement is None or self._plans.find(agreement.key) is None:
            return None
        return agreement

    def keep_repeated(
        self, operation: str, messages: Sequence[bytes], agreement: Agreement[Any]
    ) -> Agreement[Any]:
        """Let `find_repeated` find it."""
        return self._repeated.keep((operation, *messages), agreement)

    def find(self, key: _Key) -> tuple[Any] | None:
        return self._plans.find(key)

    def keep(self, key: _Key, plan: tuple[Any]) -> tuple[Any]:
        self._count(self._made + 1)
        return self._plans.keep(key, plan)

    def _count(self, made: int) -> None:
        self._made, self._header = made, _MADE.pack(made)
        self._repeated.clear()
