"""Calls that an exception leaves at a chosen place, on one of several ranks.

A place is one bytecode with its chain of callers, each with the bytecode that it is at. `Places`
runs a call of public functions under a trace that records the places beneath it, in whatever file;
`Bomb` raises at one of them, as a signal handler could do there. What may follow is a right number
or an error that names what happened, on every rank, in that call and in those after it; then
`recover` has to give all ranks a context that works.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from shardmath import collectives
from shardmath.base import collective_call, immutable, wire
from shardmath.base.recorder import operations, this_process
from shardmath.context import startup
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.errors import OpTimeout, ShardmathError
from shardmath.fft import FFT, allocate_operand, fft, rfft
from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg import cholesky
from shardmath.linalg.advanced import Matmul, matmul
from started import PATIENCE

INTERRUPTED = 1  # the rank
FOLLOWING = 10  # calls after the one that was interrupted
TRIES = 2  # places that are tried at most for each that is to strike


class Interrupted(BaseException):
    """An exception such as KeyboardInterrupt."""


class Alarm(Exception):
    """An exception such as a handler of SIGALRM raises."""


# -- the calls -------------------------------------------------------------------------------------
#
# Each is made for a context, and gives steps: functions of a number, which differs from call to
# call, that return whether what they computed is right.


def values(context: Any, shape: tuple[int, ...], step: int, dtype: str = "float64") -> Any:
    """An array of small whole numbers that depend on rank and step, on this rank's device."""
    made = (np.arange(np.prod(shape)).reshape(shape) % 7 + 10 * context.rank + step).astype(dtype)
    return on_device(context, made)


def right(context: Any, found: Any, wanted: Any) -> bool:
    """Whether a call has given what is wanted, up to the rounding of transforms.

    On GPUs a call returns before its result is there. Where a peer gave up meanwhile, the next call
    in the same context raises what has happened.
    """
    same = plain(found).shape == wanted.shape and np.allclose(plain(found), wanted, rtol=1e-12)
    if not same and context.team is not None:
        collectives.all_reduce(1, context=context)
    return bool(same)


def on_device(context: Any, array: Any) -> Any:
    if context.team is None:
        return array
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(context.team.device.name)


def plain(array: Any) -> Any:
    return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)


def everywhere(
    context: Any, shape: tuple[int, ...], step: int, dtype: str = "float64"
) -> list[Any]:
    """What `values` gives on each rank."""
    base = np.arange(np.prod(shape)).reshape(shape) % 7
    return [(base + 10 * rank + step).astype(float) for rank in range(context.size)]


def all_reduce_of(count: int) -> Callable[[Any], list[Callable[[int], bool]]]:
    def make(context: Any) -> list[Callable[[int], bool]]:
        def step(number: int) -> bool:
            total = collectives.all_reduce(values(context, (count,), number), context=context)
            return right(context, total, sum(everywhere(context, (count,), number)))

        return [step]

    return make


def all_gather(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        found = collectives.all_gather(values(context, (5, 3), number), context=context)
        return right(context, found, np.concatenate(everywhere(context, (5, 3), number)))

    return [step]


def asynchronous(context: Any) -> list[Callable[[int], bool]]:
    state: dict[str, Any] = {}

    def begin(number: int) -> bool:
        x = values(context, (3,), number)
        state["work"] = collectives.all_reduce(x, context=context, async_op=True)
        state["number"] = number
        return True

    def wait(_: int) -> bool:
        wanted = sum(everywhere(context, (3,), state["number"]))
        return right(context, state["work"].wait(), wanted)

    return [begin, wait]


def reduce_scatter(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        rows = 2 * context.size
        found = collectives.reduce_scatter(values(context, (rows, 3), number), context=context)
        total = sum(everywhere(context, (rows, 3), number))
        return right(context, found, total[2 * context.rank : 2 * context.rank + 2])

    return [step]


def all_to_all(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        rows = 2 * context.size
        found = collectives.all_to_all(values(context, (rows, 3), number), context=context)
        own = slice(2 * context.rank, 2 * context.rank + 2)
        parts = [each[own] for each in everywhere(context, (rows, 3), number)]
        return right(context, found, np.concatenate(parts))

    return [step]


def broadcast(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        x = values(context, (5, 3), number)
        found = collectives.broadcast(x, root=0, context=context)
        return right(context, found, everywhere(context, (5, 3), number)[0])

    return [step]


def redistribution(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        with context:
            found = redistribute(values(context, (2, 12), number), Slab.X, Slab.Y)
        whole = np.concatenate(everywhere(context, (2, 12), number))
        return right(context, found, columns_of(whole, context))

    return [step]


def columns_of(whole: Any, context: Any) -> Any:
    """This rank's columns of a matrix split along them."""
    share = whole.shape[1] // context.size
    return whole[:, share * context.rank : share * (context.rank + 1)]


def rows_of(whole: Any, context: Any) -> Any:
    """This rank's rows of a matrix split along them."""
    return columns_of(whole.T, context).T


def redistribution_object(context: Any) -> list[Callable[[int], bool]]:
    shape = (2, 12)
    state: dict[str, Any] = {}

    def make(_: int) -> bool:
        with context:
            state["object"] = Redistribute(values(context, shape, 0), Slab.X, Slab.Y)
        return True

    def plan(_: int) -> bool:
        state["object"].plan()
        return True

    def reset(number: int) -> bool:
        state["object"].reset_operand(values(context, shape, number))
        state["number"] = number
        return True

    def execute(_: int) -> bool:
        found = state["object"].execute()
        whole = np.concatenate(everywhere(context, shape, state["number"]))
        return right(context, found, columns_of(whole, context))

    return [make, plan, reset, execute]


def product(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        a, b = values(context, (2, 2 * context.size), number), values(context, (2, 12), number + 1)
        with context:
            found = matmul(a, b, distributions=[Slab.X, Slab.X, Slab.Y])
        return right(context, found, product_of(context, number))

    return [step]


def product_of(context: Any, number: int) -> Any:
    a = np.concatenate(everywhere(context, (2, 2 * context.size), number))
    b = np.concatenate(everywhere(context, (2, 12), number + 1))
    return columns_of(a @ b, context)


def factorisation(context: Any) -> list[Callable[[int], bool]]:
    """Ranks arrive at a barrier, go on, and wait at it later."""

    def step(number: int) -> bool:
        # After thousands of trials the matrix of `number` itself is ill-conditioned.
        x = np.concatenate(everywhere(context, (4, 4 * context.size), number % 8))
        a = x @ x.T + np.eye(len(x)) * len(x)
        rows = slice(4 * context.rank, 4 * context.rank + 4)
        with context:
            factor = cholesky(a[rows], distributions=Slab.X, options={"block_size": 2})
        return right(context, factor, np.linalg.cholesky(a)[rows])

    return [step]


def product_object(context: Any) -> list[Callable[[int], bool]]:
    state: dict[str, Any] = {}

    def make(_: int) -> bool:
        a, b = values(context, (2, 2 * context.size), 0), values(context, (2, 12), 1)
        with context:
            state["object"] = Matmul(a, b, distributions=[Slab.X, Slab.X, Slab.Y])
        return True

    def plan(_: int) -> bool:
        state["object"].plan()
        return True

    def reset(number: int) -> bool:
        a, b = values(context, (2, 2 * context.size), number), values(context, (2, 12), number + 1)
        state["object"].reset_operands(a=a, b=b)
        state["number"] = number
        return True

    def execute(_: int) -> bool:
        return right(context, state["object"].execute(), product_of(context, state["number"]))

    return [make, plan, reset, execute]


def transform(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        with context:
            found = fft(values(context, (2, 6), number, "complex128"), distribution=Slab.X)
        whole = np.fft.fft2(np.concatenate(everywhere(context, (2, 6), number)))
        return right(context, found, rows_of(whole, context))

    return [step]


def real_transform(context: Any) -> list[Callable[[int], bool]]:
    def step(number: int) -> bool:
        with context:
            found = rfft(values(context, (2, 10), number), distribution=Slab.X)
        whole = np.fft.rfft2(np.concatenate(everywhere(context, (2, 10), number)))
        return right(context, found, rows_of(whole, context))

    return [step]


def transform_object(context: Any) -> list[Callable[[int], bool]]:
    state: dict[str, Any] = {}

    def make(_: int) -> bool:
        with context:
            x = values(context, (2, 6), 0, "complex128")
            state["object"] = FFT(x, distribution=Slab.X)
        return True

    def plan(_: int) -> bool:
        state["object"].plan()
        return True

    def reset(number: int) -> bool:
        state["object"].reset_operand(values(context, (2, 6), number, "complex128"))
        state["number"] = number
        return True

    def execute(_: int) -> bool:
        whole = np.fft.fft2(np.concatenate(everywhere(context, (2, 6), state["number"])))
        return right(context, state["object"].execute(), rows_of(whole, context))

    return [make, plan, reset, execute]


def memory(context: Any) -> list[Callable[[int], bool]]:
    """Memory is allocated, shown to the peers, written, signalled, read, and freed."""
    state: dict[str, Any] = {}

    def package() -> Any:
        if context.team is None:
            return np
        import torch

        return torch

    def allocate(_: int) -> bool:
        with context:
            state["array"] = allocate_symmetric_memory((6,), package(), dtype=package().float64)
        return True

    def meet(_: int) -> bool:
        state["handle"] = rendezvous(state["array"], context)
        return True

    def write(number: int) -> bool:
        state["array"][:] = 10 * context.rank + number
        state["number"] = number
        return True

    def barrier(_: int) -> bool:
        state["handle"].barrier()
        return True

    def read(_: int) -> bool:
        peer = (context.rank + 1) % context.size
        found = state["handle"].get_buffer(peer, (6,), package().float64)
        return right(context, found, np.full(6, 10.0 * peer + state["number"]))

    def put_signal(_: int) -> bool:
        state["handle"].put_signal((context.rank + 1) % context.size)
        return True

    def wait_signal(_: int) -> bool:
        state["handle"].wait_signal((context.rank - 1) % context.size)
        return True

    def free(_: int) -> bool:
        with context:
            free_symmetric_memory(state["array"])
        return True

    return [allocate, meet, write, barrier, read, put_signal, wait_signal, barrier, free]


def operand(context: Any) -> list[Callable[[int], bool]]:
    def allocate(_: int) -> bool:
        package = np
        if context.team is not None:
            import torch as package  # type: ignore[no-redef]
        with context:
            made = allocate_operand(
                (2, 6), package, distribution=Slab.X, input_dtype=package.complex128, fft_type="C2C"
            )
        return tuple(made.shape) == (2, 6)

    return [allocate]


def split(context: Any) -> list[Callable[[int], bool]]:
    state: dict[str, Any] = {}

    def part(_: int) -> bool:
        state["part"] = context.split(0, key=-context.rank)
        return bool(state["part"].rank == context.size - 1 - context.rank)

    def reduce(number: int) -> bool:
        total = collectives.all_reduce(values(context, (3,), number), context=state["part"])
        return right(state["part"], total, sum(everywhere(context, (3,), number)))

    return [part, reduce]


CALLS: dict[str, Callable[[Any], list[Callable[[int], bool]]]] = {
    "all_reduce": all_reduce_of(3),
    "all_reduce of 1 MiB": all_reduce_of(1 << 17),
    "async_op": asynchronous,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "redistribute": redistribution,
    "Redistribute": redistribution_object,
    "matmul": product,
    "cholesky": factorisation,
    "Matmul": product_object,
    "fft": transform,
    "rfft": real_transform,
    "FFT": transform_object,
    "memory": memory,
    "allocate_operand": operand,
    "split": split,
}


# -- one trial -------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A bytecode of `code` at `offset`, reached by `callers`, executed for the `nth` time.

    `chain()` is that of all places of this code with these callers, of which this is the `number`th
    that was executed. `turn` is 0 for the first time, 1 again, and 2 the last time.
    """

    code: CodeType
    offset: int
    callers: tuple[tuple[CodeType, int], ...]
    nth: int
    turn: int
    number: int
    chain: Callable[[], tuple[int, int]]

    @property
    def digest(self) -> int:
        """The same in every process, and for the last time, after however many.

        Places in pure code have the same digest whoever the callers are, but for the first bytecode
        beneath code that is not pure: what leaves pure code leaves nothing behind.
        """
        alone, below = self.chain()
        entered = not (is_pure(self.code) and is_pure(self.callers[0][0]))
        within = not is_pure(self.code) or (entered and self.number == 0)
        return crc32(b"%d %d" % (self.offset, self.turn), below if within else alone)

    def __str__(self) -> str:
        chain = ((self.code, self.offset), *self.callers)
        names = [f"{code.co_qualname}+{offset}" for code, offset in chain]
        return f"{' < '.join(names)}, time {self.nth}"


def callers_of(frame: Any) -> tuple[tuple[CodeType, int], ...]:
    """The chain of callers, up to the call that this module has made."""
    chain = []
    while (frame := frame.f_back) is not None and frame.f_code.co_filename != __file__:
        chain.append((frame.f_code, frame.f_lasti))
    return tuple(chain)


def digest_of(*chain: tuple[CodeType, int]) -> int:
    words = [f"{name_of_file(code.co_filename)} {code.co_qualname} {at}" for code, at in chain]
    return crc32("\n".join(words).encode())


def chain_of(
    code: CodeType, callers: tuple[tuple[CodeType, int], ...]
) -> Callable[[], tuple[int, int]]:
    """Digests of code alone, and beneath its callers. Worked out when asked for: it takes long."""
    return cache(lambda: (digest_of((code, 0)), digest_of((code, 0), *callers)))


@cache
def name_of_file(path: str) -> str:
    return Path(path).name


PURE_FILES = ("<string>", immutable.__file__, wire.__file__)


@cache
def is_pure_file(name: str) -> bool:
    """Whether the code in a file makes values of values, and has no state.

    Code that dataclasses write, which has no file, is such.
    """
    folder = Path(name).parent
    known = folder.name in ("geometry", "machine") and folder.parent.name == "shardmath"
    return known or folder.name == "json" or name in PURE_FILES


def is_pure(code: CodeType) -> bool:
    return is_pure_file(code.co_filename)


class Places:
    """A trace of the places beneath a call, and how often each is executed.

    It ends with the collective call: an exception that strikes after that is one between two calls.
    """

    def __init__(self) -> None:
        self._counts: dict[Any, tuple[Any, Any, dict[int, int]]] = {}

    def __enter__(self) -> Places:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def listed(self) -> list[Place]:
        """Every place when it is executed first, again, and for the last time."""
        found = []
        for code, callers, counts in self._counts.values():
            chain = chain_of(code, callers)
            for number, (offset, count) in enumerate(counts.items()):
                for turn, nth in enumerate(sorted({1, min(2, count), count})):
                    found.append(Place(code, offset, callers, nth, turn, number, chain))
        return found

    def _enter(self, frame: Any, *_: object) -> Any:
        code = frame.f_code
        if code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        callers = callers_of(frame)
        # By identity: code objects take long to hash.
        key = (id(code), *((id(caller), offset) for caller, offset in callers))
        counts = self._counts.setdefault(key, (code, callers, {}))[2]
        is_entrance = code is collective_call._ENTRANCE

        def step(frame: Any, event: str, _: object) -> Any:
            if event == "opcode":
                if is_entrance and has_finished(frame):
                    sys.settrace(None)
                else:
                    counts[frame.f_lasti] = counts.get(frame.f_lasti, 0) + 1
            return step

        return step


class Bomb:
    """A trace that raises `error` at a place; `struck` says whether that place was reached."""

    def __init__(self, error: BaseException, place: Place) -> None:
        self.struck = False
        self._error, self._place, self._left = error, place, place.nth

    def __enter__(self) -> Bomb:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: Any, *_: object) -> Any:
        if frame.f_code is not self._place.code or callers_of(frame) != self._place.callers:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: Any, event: str, _: object) -> Any:
        if event == "opcode" and frame.f_lasti == self._place.offset:
            self._left -= 1
            if self._left == 0:
                self.struck = True
                raise self._error
        return self._step


def has_finished(frame: Any) -> bool:
    """Whether `frame`, that of a collective call, has come to its end, and returns."""
    record = frame.f_locals.get("record")
    return record is not None and record.finished


def outcome(function: Callable[[], bool]) -> str:
    """ "right", "wrong", or the name of a named error; others pass."""
    try:
        return "right" if function() else "wrong"
    except (OpTimeout, Interrupted, Alarm) as error:
        return type(error).__name__
    except ShardmathError as error:
        return f"named {type(error).__name__}"
    except RuntimeError as error:
        if Alarm.__name__ not in str(error):  # what the interrupted rank raised while it described
            raise
        return "named RuntimeError"


class Trials:
    """One rank's trials of one call, each in the context that the one before was recovered to."""

    def __init__(self, group: Any, name: str, device: Any = "cpu") -> None:
        self.context = startup.initialize(device, group)
        self.make = CALLS[name]
        self.number = 0

    def run(
        self, position: int, trace: Places | Bomb | None, *, warm: int, following: int = FOLLOWING
    ) -> list[str]:
        """Run step `position`, after `warm` calls of all, on one rank under a trace: what came."""
        steps = self.make(self.context)
        for _ in range(warm):
            assert [step(self._next()) for step in steps] == [True] * len(steps)
        numbers = [self._next() for _ in range(len(steps) + following)]
        found = []
        for index, (step, number) in enumerate(zip(steps, numbers, strict=False)):
            once = partial(outcome, partial(step, number))
            if index != position:
                found.append(once())
            else:
                board, rounds = self.context.board, self.context.board.rounds
                with trace if trace and self.context.rank == INTERRUPTED else nullcontext():
                    found.append(once())
                if found[-1] in ("Interrupted", "Alarm") and board.failure is None:
                    if board.rounds != rounds:
                        continue  # it had come to its end, on all ranks
                    found[-1] = once()  # it had not begun
            if found[-1] != "right":
                break  # later steps need what this one gives
        last = operations(bytes(this_process.memory))[-1]
        assert last.ended, f"it seems to be in an operation: {last}"
        for number in numbers[len(steps) :]:
            (step,) = all_reduce_of(4)(self.context)
            has_failed = self.context.board.failure is not None
            found.append(outcome(partial(step, number)))
            if has_failed:
                break  # where calls fail before they look at a peer, all do
        self.context = self.context.recover()
        return found

    def places(self, position: int, *, warm: int) -> list[Place]:
        """Those of a step on the rank that is to be interrupted; on the others, nothing.

        What a process works out but once is known by then, and has no places. From Python 3.12 on
        code that was never traced by bytecodes is so only from its second call on.
        """
        places = Places()
        for trace in (Places() if sys.version_info >= (3, 12) else None, places):
            found = self.run(position, trace, warm=warm, following=0)
            assert set(found) == {"right"}, found
        return places.listed()

    def of_interrupted(self, value: int) -> int:
        """What the rank that is to be interrupted gives here; collective."""
        return self.context.agree("count", lambda: value, list)[INTERRUPTED]

    def _next(self) -> int:
        self.number += 1
        return self.number


@dataclass
class Part:
    """Part `number` of `parts` of all places; `seen` has those that need no trial any more."""

    number: int
    parts: int
    seen: set[int] = field(default_factory=set)

    def take(self, places: list[Place], warm: int) -> list[Place]:
        """The places that are in this part and were not seen before."""
        taken = []
        for place in places:
            digest = place.digest
            key = 2 * digest + (warm > 0)
            if digest % self.parts == self.number and key not in self.seen:
                self.seen.add(key)
                taken.append(place)
        return taken


@contextmanager
def named_if_it_hangs(trial: str) -> Iterator[None]:
    """Raises where this rank waits, long after its peers' time is up."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"it hangs: {trial}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(PATIENCE))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_trials(group: Any, name: str, chosen: int | Part, device: Any = "cpu") -> list[Any]:
    """How many trials of a call were made, how many struck, and what was not acceptable in them.

    Each step is tried until so many trials of it have struck, or at the places of a part, and with
    both kinds of exception: the first time that it is called in a context, and after others like
    it. Of a part, the rank that is interrupted also returns what it has seen.
    """
    mine = Trials(group, name, device)
    made, struck, failures = 0, 0, []
    for warm in (0, 2):
        for position in range(len(mine.make(mine.context))):
            places = mine.places(position, warm=warm)
            pick = random.Random(f"{name} {warm} {position}")
            if isinstance(chosen, int):
                places = pick.sample(places, min(TRIES * chosen, len(places)))
            else:
                places = chosen.take(places, warm)
            count = mine.of_interrupted(len(places))
            struck_before = struck
            for number in range(count):
                kind = pick.choice([Interrupted, Alarm])
                bomb = Bomb(kind(), places[number]) if places else None
                where = f"{kind.__name__} at {places[number]}" if places else "at a peer"
                trial = f"step {position} after {warm}, {where}"
                with named_if_it_hangs(trial):
                    found = mine.run(position, bomb, warm=warm)
                made += 1
                struck += mine.of_interrupted(bomb is not None and bomb.struck)
                if not all(map(acceptable, found)):
                    failures.append(f"{trial}: {found}")
                if struck - struck_before == chosen:
                    break
    startup.finalize()
    seen = [] if isinstance(chosen, int) else sorted(chosen.seen)
    return [made, struck, failures, seen]


def acceptable(found: str) -> bool:
    """Whether it is a right number, a named error, or the exception itself."""
    return found in ("right", "Interrupted", "Alarm") or found.startswith("named ")
