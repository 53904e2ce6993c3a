"""The interface between the driver and what performs programs: the stages of a call.

    read      the arrays of a call, in full: once for all calls whose arrays look and lie alike
    prepare   results, workspace, and the note for the peers, before the ranks agree
    perform   the steps, after agreement, when nothing may fail on one rank only

A rank prepares for the plan that it expects. If any rank expected another, all prepare once more
when they perform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardmath.arrays import ArraySpec
from shardmath.base.immutable import Immutable
from shardmath.call.agreement import Agreement, HashedSpec
from shardmath.program.notes import Numbers
from shardmath.program.steps import Program


class Names(NamedTuple):
    """The names of an operation, its operands and its results, in programs and in messages.

    `separate` ends the message about a result that overlaps an operand; it is "" where results may.
    Operands that are `optional` may be None. New results lie on the heap if all operands do, not
    counting those `beside`. `numbers` are the names of the numbers that each call has.
    """

    operation: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    separate: str = ""
    optional: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


class Arguments(NamedTuple):
    """One rank's arguments of a call.

    `results` are the arrays that it gives for results, or None for new ones. `words` say what is to
    be done: distributions, axes, and the like. `numbers` may differ from call to call.
    """

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    words: tuple[Any, ...] = ()
    options: Any = None
    stream: Any = None
    numbers: tuple[Any, ...] = ()


class Plan(Immutable, eq=False):
    """What all ranks have agreed to do. `tag` names it, and is the same on all ranks.

    Performers keep in `kept` what all its executions share.
    """

    tag: bytes
    problem: Any
    program: Program
    explain: Callable[[], str]
    kept: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class Known:
    """What is known about calls whose arguments are equal, and whose arrays look and lie alike.

    If it is `lasting` it refers to no memory, and serves later calls. `expected` is the plan of the
    last call with that spec, and so probably of the next; `last` is the agreement of the last such
    call. `prepared` and `repeats` belong to the performer.
    """

    spec: HashedSpec
    arrays: Any = field(repr=False)
    lasting: bool
    expected: Plan | None = None
    numbers: Numbers = field(default_factory=dict)
    prepared: Any = field(default=None, repr=False)
    last: Agreement[Any] | None = field(default=None, repr=False)
    repeats: Any = field(default=None, repr=False)
    blocks: Any = field(default=None, repr=False)  # of the heap; this holds while they do
    direct: Any = field(default=None, repr=False)  # (agreement, prepared) of the last `direct`


class Turn:
    """One call on one rank: what the rank sends for it, and what is made for it alone.

    `spec`, `note`, `payload` and `last` are those of `Described`; `payloads` are all ranks'. `made`
    are new results by name, and `held` is whatever has to live until the call ends.
    """

    __slots__ = (
        *("arguments", "held", "known", "last", "made", "note", "payload", "payloads"),
        *("prepared", "spec"),
    )

    def __init__(self, arguments: Arguments, known: Known) -> None:
        self.arguments, self.known, self.spec, self.last = arguments, known, known.spec, known.last
        self.note = self.payload = b""
        self.payloads: Sequence[bytes] = ()
        self.made: dict[str, Any] = {}
        self.held: Any = None
        self.prepared: Any = None  # the performer's


Steps = tuple[Callable[[], object] | None, ...]  # see `Direct.bind`
Copier = tuple[Any, ...] | Callable[[int, int, int], None] | None
"""How compiled code copies memory: None means by memmove; for GPUs see `cuda.copies.copier`."""


class Home(NamedTuple):
    """Memory that `steps` write, `nbytes` at `address`, from which a result is copied to its place.

    Once so `often` a result has been copied to one place, steps are bound to that place instead.
    `memory` keeps the memory alive.
    """

    memory: Any
    address: int
    nbytes: int
    steps: Steps
    often: int
    copier: Copier


class Direct(NamedTuple):
    """How compiled code makes a call that comes again unchanged on all ranks: see call.compiled.

    before    calls made before the ranks agree
    memory    (an object, its `version`): all this holds while the version is the same; None: always
    half      the half of the double buffer for whose turn this is; None for both
    payload   what is sent along, or a function that returns it
    new       makes the new result, or (result, its address); None if there is none
    result    the number of that result
    receive   where the payloads of all ranks are put, or how they are summed into the result:
              (address of a function of sum.c, bytes, where they begin in each payload)
    bind      gives the steps after agreement that write a given result, where None stands for a
              barrier; it gives None if the driver has to make this call
    home      memory from which a result at a new place is copied
    """

    before: tuple[Callable[[], object], ...] = ()
    memory: tuple[Any, Any] | None = None
    half: int | None = None
    payload: memoryview | Callable[[], bytes] | None = None
    new: Callable[[], Any] | None = None
    result: int = 0
    bind: Callable[[Any], Steps | None] | None = None
    home: Home | None = None
    receive: memoryview | tuple[int, int, int] | None = None


class Performer(Protocol):
    """Performs the programs of one operation, or of one object, on cores or on GPUs.

    An object has a `number`, the same on all ranks.
    """

    number: int

    def inspect(self, arguments: Arguments) -> None:
        """Raise what is wrong with this rank's operands. Local. Nothing is copied."""
        ...

    def read(self, arguments: Arguments) -> Any:
        """This rank's arrays. Local. Raises what is wrong with them."""
        ...

    def without_memory(self, arrays: Any) -> Any:
        """These arrays without references to their memory."""
        ...

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """Make what the turn needs for the plan that it expects, None if it expects none, and its
        note. Local. Raises HeapExhausted, or MemoryError.
        """
        ...

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """The results, after agreement. Collective."""
        ...

    @property
    def direct(self) -> Callable[[Turn, Agreement[Any]], Direct | None] | None:
        """A function that finds how compiled code makes a call like the one that was just
        performed, None if it cannot. None in place of the function if it can make none. Local.
        """
        ...

    def most_copied(self, spec: ArraySpec) -> int:
        """The most bytes of operands that are worth copying so that a known call can be repeated;
        0 where copies cannot stand in for them. `spec` is that of the first operand. Local.
        """
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy so much memory where this rank computes, before what is performed next. Local."""
        ...

    @property
    def copier(self) -> Copier:
        """How compiled code does what `copy` does."""
        ...

    def release(self) -> None:
        """Give workspace back. Local."""
        ...
