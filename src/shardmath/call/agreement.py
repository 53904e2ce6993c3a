"""Agreement on calls: which plan is this one's? One small exchange, once the plan is known.

The first call of a kind exchanges full specs, and builds a plan from all of them. In later calls
each rank sends the digest of its spec, 16 bytes; the digests of all ranks together name the plan.
Every rank keeps and drops plans in the same order, since all take part in the same calls. The
number of plans made so far travels along: ranks whose caches differ, because one was interrupted,
notice it, and clear them together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from shardmath.base import wire
from shardmath.base.lru_cache import LRUCache
from shardmath.context.agreement import beginning, checked, described, require_accepted

if TYPE_CHECKING:
    from shardmath.context.context import Context

Plan = TypeVar("Plan")
T = TypeVar("T")

_Key = tuple[str, tuple[bytes, ...]]  # operation, digests of all ranks' specs
_Texts = tuple[bytes, ...]  # what the ranks have sent, in rank order

_NAME = "plans"  # under which a context keeps its Plans
_KEPT = 256  # plans per context
_MADE = struct.Struct("<I")  # plans made, before the digest of the spec
_DIGEST_BYTES = 16
_HEADER_BYTES = _MADE.size + _DIGEST_BYTES


class HashedSpec:
    """A spec with its encoding, which the first call sends, and its digest, which later ones send.

    Calls with equal specs are equal. Raises TypeError for a spec that is not plain data.
    """

    __slots__ = ("digest", "encoded", "spec")

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.encoded = wire.encode(spec)
        self.digest = blake2b(self.encoded, digest_size=_DIGEST_BYTES).digest()


class Described(Protocol):
    """What one rank sends for its call; a class may have more, for the rank's own use.

    The ranks compare `note` with that of the last such call, since it may differ: it says, for
    example, where operands lie. The `payload` mostly differs, and is not compared. `last` is the
    agreement of the last such call, if there was one.
    """

    spec: HashedSpec
    note: bytes
    payload: bytes
    last: Agreement[Any] | None


Own = TypeVar("Own", bound=Described)


class Agreement(Generic[Plan]):
    """The plan of a call, and the notes of all ranks.

    Calls in which every rank sends the same, apart from payloads, get the same object. By it a rank
    finds what it has prepared for such calls.
    """

    __slots__ = ("key", "notes", "plan", "texts")

    def __init__(self, plan: Plan, notes: list[bytes], key: _Key, texts: _Texts) -> None:
        self.plan, self.notes, self.key, self.texts = plan, notes, key, texts


def agree(
    context: Context,
    operation: str,
    describe: Callable[..., Own],
    build: Callable[[list[Any]], Plan],
    *arguments: Any,
) -> tuple[Own, Agreement[Plan], Sequence[bytes]]:
    """This rank's `describe(*arguments)`, the agreement, and all ranks' payloads. Collective.

    `build(specs)` makes the plan of all ranks' specs, which are in rank order. It is pure: where it
    raises, it raises the same on all ranks. It runs when these specs come together for the first
    time; its result is kept, and must not be changed.

    Raises on every rank what `describe` raised on the first rank where it did, what `build` raises,
    or CollectiveMismatch when the operations differ.
    """
    if context.closed:
        context.require_open()
    board = context.board
    plans: Plans = context.caches.get(_NAME) or Plans.of(context)
    own = described(board, operation, describe, *arguments)
    text = beginning(operation) + plans.made + own.spec.digest + own.note
    known = own.last
    expected = None if known is None else known.texts
    texts, payloads = board.exchange_raw(operation, text, own.payload, expected)
    if known is None or texts is not known.texts:
        return own, concluded(context, operation, own.spec, texts, build), payloads
    if plans.find(known.key) is None:
        return own, _agreed(context, plans, operation, own.spec, texts, build), payloads
    return own, known, payloads


def concluded(
    context: Context,
    operation: str,
    spec: HashedSpec,
    texts: _Texts,
    build: Callable[[list[Any]], Plan],
) -> Agreement[Plan]:
    """The agreement of the ranks, given the texts that all have exchanged. Collective."""
    plans = Plans.of(context)
    known = plans.repeated.find(texts)
    if known is not None and plans.find(known.key) is not None:
        return known
    return _agreed(context, plans, operation, spec, texts, build)


def _agreed(
    context: Context,
    plans: Plans,
    operation: str,
    spec: HashedSpec,
    texts: _Texts,
    build: Callable[[list[Any]], Plan],
) -> Agreement[Plan]:
    """The agreement of texts that have not come together since a plan was made. Collective."""
    messages = require_accepted(context.board, operation, texts)
    plans.compare(messages)
    key = (operation, tuple([text[_MADE.size : _HEADER_BYTES] for text in messages]))
    notes = [text[_HEADER_BYTES:] for text in messages]
    plan = plans.find(key)
    if plan is None:
        specs = context.board.exchange(operation, spec.encoded)
        decoded = {spec: wire.decode(spec) for spec in set(specs)}
        built = checked(context.board, build, [decoded[spec] for spec in specs])
        plan = plans.keep(key, (built,))
        return Agreement(plan[0], notes, key, texts)
    return plans.repeated.keep(texts, Agreement(plan[0], notes, key, texts))


class Plans:
    """The plans that the ranks of one context have agreed on.

    `made` is their number, packed as messages begin with it. `repeated` has the agreements since
    the last plan was made, by the texts of all ranks.
    """

    def __init__(self) -> None:
        self._count = 0
        self.made = _MADE.pack(0)
        self.all: LRUCache[_Key, tuple[Any]] = LRUCache(_KEPT)  # the same on all ranks
        self.repeated: LRUCache[_Texts, Agreement[Any]] = LRUCache(_KEPT)
        self.find = self.all.find

    @classmethod
    def of(cls, context: Context) -> Plans:
        """The plans of a context."""
        return context.cache(_NAME, cls)

    def compare(self, messages: Sequence[bytes]) -> None:
        """Forget all plans where ranks have made different numbers of them."""
        if not all(text.startswith(self.made) for text in messages):
            self.restart(1 + max(_MADE.unpack_from(text)[0] for text in messages))

    def restart(self, count: int) -> None:
        """Forget all plans, and count from `count` on."""
        self.all.clear()
        self._set_count(count)

    def keep(self, key: _Key, plan: tuple[Any]) -> tuple[Any]:
        """Keep a plan that was made now."""
        self._set_count(self._count + 1)
        return self.all.keep(key, plan)

    def _set_count(self, count: int) -> None:
        self._count, self.made = count, _MADE.pack(count)
        self.repeated.clear()


def raise_on_all_ranks(context: Context, operation: str, mistake: Exception) -> NoReturn:
    """Raise `mistake` on all ranks, whether they make it, too, or call `operation`. Collective."""

    def describe() -> bytes:
        raise mistake

    context.gather(operation, describe)
    raise AssertionError("a mistake was sent")


def raising_on_all_ranks(context: Context, operation: str, compute: Callable[[], T]) -> T:
    """`compute()`, which reads arguments of the user's. Collective where it raises TypeError,
    ValueError or OverflowError: all ranks raise it then.
    """
    try:
        return compute()
    except (TypeError, ValueError, OverflowError) as mistake:
        raise_on_all_ranks(context, operation, mistake)
