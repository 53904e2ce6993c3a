"""What the driver and the performers of programs say to each other: a call, in four stages.

read       the arrays of a call, in full: once for all calls whose arrays look and lie alike
prepare    results, workspace and what peers are told, before the ranks agree
complete   the same once more, where a rank had expected another plan
perform    the steps, when nothing may fail any more on one rank only
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardmath.base.immutable import Immutable
from shardmath.call.agreement import Agreement, HashedSpec
from shardmath.program.numbers import Numbers
from shardmath.program.steps import Program


class Names(NamedTuple):
    """The operation, its operands and its results by name, as programs and messages have them.

    `separate` is what is said of a result that overlaps an operand; "" where it may. Operands that
    are `optional` may be None. New results lie on the heap where all operands do but those
    `beside`. `numbers` are those that each call has, by name.
    """

    operation: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    separate: str = ""
    optional: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


class Arguments(NamedTuple):
    """One rank's arguments of a call: its operands, the arrays that it gave for results or None,
    and all `words` that say what is to be done: distributions, axes, and the like. Its `numbers`
    may differ from call to call.
    """

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    words: tuple[Any, ...] = ()
    options: Any = None
    stream: Any = None
    numbers: tuple[Any, ...] = ()


class Plan(Immutable, eq=False):
    """What all ranks have agreed to do. `tag` is the same on all ranks, and no other plan's.

    `kept` is what performers keep for all executions of it.
    """

    tag: bytes
    problem: Any
    program: Program
    explain: Callable[[], str]
    kept: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class Known:
    """What has been found out about calls whose arguments are equal, and whose arrays lie alike.

    `lasting`: it refers to no memory, and serves later calls. `expected` is the plan of the last
    call with that spec, which likely is that of the next; `last` is what was agreed on in the last
    call like this. `prepared` and `repeats` are the performer's. A note begins with the `numbers`,
    packed.
    """

    spec: HashedSpec
    arrays: Any = field(repr=False)
    lasting: bool
    expected: Plan | None = None
    numbers: Numbers = field(default_factory=dict)
    prepared: Any = field(default=None, repr=False)
    last: Agreement[Any] | None = field(default=None, repr=False)
    repeats: Any = field(default=None, repr=False)
    blocks: Any = field(default=None, repr=False)  # what says whether this holds
    direct: Any = field(default=None, repr=False)  # what the driver has last asked `direct` about


class Turn:
    """One call on one rank: what it says, and what is made for it alone.

    Ranks compare `spec` and `note` with those of the last call, and not `payload`; `payloads` are
    all ranks'. `made` are new results by name, `held` is whatever has to live until the call ends.
    """

    __slots__ = (
        *("arguments", "held", "known", "last", "made", "note", "payload", "payloads"),
        *("prepared", "spec"),
    )

    def __init__(self, arguments: Arguments, known: Known, spec: HashedSpec) -> None:
        self.arguments, self.known, self.spec, self.last = arguments, known, spec, known.last
        self.note = self.payload = b""
        self.payloads: Sequence[bytes] = ()
        self.made: dict[str, Any] = {}
        self.held: Any = None
        self.prepared: Any = None  # the performer's


class Direct(NamedTuple):
    """What performs a call that comes again on all ranks, by compiled code: see call.compiled.

    `before` the ranks agree these are called, while what is in `memory` has the `version` there, of
    the workspace and of whatever else may change; None where nothing does. With a `half` that is
    for every other call, in which that half of the double buffer has its turn. `payload`, or what
    it returns, is sent along, and `new()` makes the result of that number, if there are any, or
    (result, its address) where the address is known. `bind(result)` gives the steps that end there,
    in which None is a barrier, or None where the driver is to make this call. A `home` is memory
    and the steps that end there, from which a result is copied where none has lain before. When all
    have agreed, `receive` says where all payloads are put, or how they are summed into the result
    (the address of a function of sum.c, bytes, where they begin in each payload); then come those
    steps.
    """

    before: tuple[Callable[[], object], ...] = ()
    memory: tuple[Any, Any] | None = None
    half: int | None = None
    payload: memoryview | Callable[[], bytes] | None = None
    new: Callable[[], Any] | None = None
    result: int = 0
    bind: Callable[[Any], tuple[Callable[[], object] | None, ...] | None] | None = None
    home: tuple[memoryview, tuple[Callable[[], object] | None, ...]] | None = None
    receive: memoryview | tuple[int, int, int] | None = None


class Performer(Protocol):
    """Cores or GPUs: what performs the programs of one operation, or of one object.

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
        """Make what the turn needs for the plan that it expects, and its note. Local.

        Raises HeapExhausted, or MemoryError; peers have been told nothing then.
        """
        ...

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """The results, when all ranks have agreed. Collective."""
        ...

    @property
    def direct(self) -> Callable[[Turn, Agreement[Any]], Direct | None] | None:
        """What finds how such a call as this was is performed, when it has been; None where its
        steps differ from call to call. Local.
        """
        ...

    def release(self) -> None:
        """Give workspace back. Local."""
        ...
