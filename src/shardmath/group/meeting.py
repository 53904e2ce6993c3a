"""Ranks meet at start-up: each calls some of the others and is called by the rest, among strangers.

One loop serves all connections at once and never blocks, so that nobody who is silent or slow holds
up anybody else. What strangers can take is bounded: a connection is read for as many bytes as the
next words have, is closed at the first that a rank would not say, and has one deadline for all of
them together. Of connections that have said nothing right yet only so many are held: the oldest
give way to new ones, and to whatever else needs a descriptor. A rank that was dropped among them
calls again.

A rank that cannot go on tells the ranks that it has met, and meets the others for a moment to tell
them too, so that nobody waits for the deadline of a rank that has given up. They pass it on.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from shardmath.base.immutable import Immutable
from shardmath.errors import BootstrapError, RankFailure
from shardmath.group import handshake
from shardmath.group.handshake import Conversation
from shardmath.group.links import exposed, farewell, in_farewell
from shardmath.group.liveness import GRACE, PeerWatch

# Connections that wait to be accepted, those of strangers too, while ranks are on their way; the
# system takes fewer where net.core.somaxconn says so.
BACKLOG: Final = 4096

_HELD = 128  # connections that are held before they have said anything right
_PATIENCE = 5.0  # seconds that a connection has for the whole handshake
_AT_ONCE = 64  # connections that are accepted before the others are looked at again
_PAUSE, _LONGEST_PAUSE = 1e-3, 0.5  # seconds until the next call after one that was dropped
_SHARE = 0.05  # of the seconds that were waited so far, within these limits
_FAREWELL = 1.0  # seconds in which a rank that gives up meets others, and one that left may be back
_WHY_BYTES = 4096  # of a farewell
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Admits = Callable[[socket.socket, Collection[int]], bool]


class Place(Immutable):
    """An address at which a rank listens, as the socket module takes it; `name` is for messages."""

    name: str
    family: int
    kind: int
    address: Any


class Call(Immutable):
    """Whom to call: the places where it may listen, and the key that it has handed out.

    `reasons` say why there are no other places. A `patient` call keeps trying while nobody, or
    somebody else, listens there.
    """

    places: Sequence[Place]
    key: bytes
    reasons: Sequence[str] = ()
    patient: bool = False


def meet(
    rank: int,
    listeners: Sequence[socket.socket],
    key: bytes,
    *,
    calls: Mapping[int, Call],
    awaited: Collection[int],
    names: Sequence[str],
    watch: PeerWatch,
    timeout: float,
    admits: Admits = lambda connection, ranks: True,
    advice: str = "",
) -> dict[int, socket.socket]:
    """A connection to every rank of `calls` and from every one of `awaited`; they do not block.

    `listeners`, which listen with `BACKLOG`, and `key` are this rank's own. `names[r]` is rank r in
    messages. `watch` tells of ranks that end meanwhile. `admits(connection, ranks)` says what the
    system knows: whether the process at its other end may be one of `ranks`. Raises RankFailure
    when a rank has ended, BootstrapError when not all have met within `timeout` seconds or one does
    not listen any more, with `advice` on what to do, OSError with EMFILE when this process may open
    too few descriptors.
    """
    with ExitStack() as stack:
        meeting = _Meeting(rank, key, awaited, names, watch, timeout, admits, advice, stack)
        return meeting.run(listeners, [_Caller(peer, call) for peer, call in calls.items()])


class _Caller:
    """The calls to one peer: to all its places at once, and again where a connection was dropped.

    The first place that proves the key is spoken to; the other connections are closed.
    """

    def __init__(self, peer: int, call: Call) -> None:
        self.peer = peer
        self.key = call.key
        self.places = list(call.places)  # where the peer may still be
        self.due = dict.fromkeys(call.places, 0.0)  # when to call there next
        self.open: dict[Place, Conversation] = {}
        self.patient = call.patient
        self._begun = time.monotonic()
        self._hopeless = list(call.reasons)
        self._last: dict[str, str] = {}

    def put_off(self, place: Place, reason: str) -> None:
        """Call there again, the later the longer this rank has waited."""
        self._last[place.name] = reason
        now = time.monotonic()
        pause = _SHARE * (now - self._begun)
        self.due[place] = now + min(max(_PAUSE, pause), _LONGEST_PAUSE)
        for other in self.places:  # a connection there may have been closed for this one
            if other not in self.open:
                self.due.setdefault(other, 0.0)

    def give_up(self, place: Place, reason: str) -> None:
        """Do not call there again: the peer is not there."""
        self._last.pop(place.name, None)
        self._hopeless.append(f"{place.name}: {reason}")
        self.places.remove(place)

    def reason(self) -> str:
        """Why there is no connection yet, in words."""
        return "; ".join([*self._hopeless, *map(": ".join, self._last.items())])


class _Meeting:
    """The loop and its state. All that it opens is closed with `stack`, but what `run` returns."""

    def __init__(
        self,
        rank: int,
        key: bytes,
        awaited: Collection[int],
        names: Sequence[str],
        watch: PeerWatch,
        timeout: float,
        admits: Admits,
        advice: str,
        stack: ExitStack,
    ) -> None:
        self.rank = rank
        self.key = key
        self.awaited = frozenset(awaited)
        self.names = names
        self.watch = watch
        self.timeout = timeout
        self.admits = admits
        self.advice = advice
        self._deadline = time.monotonic() + timeout
        self._made: dict[int, socket.socket] = {}
        self._callers: list[_Caller] = []  # that have no connection yet
        self._held: dict[Conversation, None] = {}  # with those who call this rank, the oldest first
        self._nonces: set[bytes] = set()
        self._listeners: list[socket.socket] = []
        self._accepts_from: float | None = 0.0  # when; None while it does
        # Why this rank gives up, once it has met others.
        self._problem: BootstrapError | None = None
        self._left: dict[int, float] = {}  # until when those may be back that have hung up
        self._selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(self._close_all)

    def run(
        self, listeners: Sequence[socket.socket], callers: Sequence[_Caller]
    ) -> dict[int, socket.socket]:
        """Go on until everybody is there."""
        try:
            self._run(listeners, callers)
        except (BootstrapError, RankFailure) as error:
            self._tell(error)
            raise
        made, self._made = self._made, {}
        return made

    def _run(self, listeners: Sequence[socket.socket], callers: Sequence[_Caller]) -> None:
        self._callers = list(callers)
        for caller in callers:
            self._require_places(caller)
        if self.awaited:
            self._listeners = list(listeners)
            for listener in listeners:
                listener.setblocking(False)
        while missing := self._missing():
            now = time.monotonic()
            if now >= self._deadline:
                raise self._problem or self._late(missing)
            for peer in [peer for peer, until in self._left.items() if until <= now]:
                self._require_alive(self.watch.dead())
                name = self.names[peer]
                raise RankFailure(f"rank {self.rank} at start-up: {name} has hung up", [peer])
            self._do_what_is_due(now)
            wait = self._next_due(now) - time.monotonic()
            self.watch.await_readable(self._selector.fileno(), wait)
            self._require_alive(self.watch.dead())
            for key, _ in self._selector.select(0):
                key.data()
        if self._problem is not None:
            raise self._problem

    def _tell(self, error: BootstrapError | RankFailure) -> None:
        """Tell those that this rank has met why it gives up."""
        words = farewell(error)
        for connection in self._made.values():
            with suppress(OSError):
                connection.send(words, socket.MSG_NOSIGNAL)

    def _missing(self) -> list[int]:
        called = {caller.peer for caller in self._callers}
        return sorted((self.awaited - self._made.keys()) | called | self._left.keys())

    def _do_what_is_due(self, now: float) -> None:
        for conversation in [held for held in self._held if held.until <= now]:
            self._drop(conversation)
        if self._accepts_from is not None and now >= self._accepts_from:
            self._accepts_from = None
            for listener in self._listeners:
                accept = partial(self._accept, listener)
                self._selector.register(listener, selectors.EVENT_READ, accept)
        for caller in [*self._callers]:
            for place in [place for place, when in caller.due.items() if when <= now]:
                self._call(caller, place)

    def _next_due(self, now: float) -> float:
        # Where process ids are not visible, nothing wakes this rank when another one ends.
        times = [self._deadline, now + _LONGEST_PAUSE]
        times += [conversation.until for conversation in self._held]
        times += [when for caller in self._callers for when in caller.due.values()]
        times += self._left.values()
        return min(times if self._accepts_from is None else [*times, self._accepts_from])

    # -- who calls this rank -----------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        """Accept connections that wait at `listener`, and read what has come over them."""
        for taken in range(_AT_ONCE):
            try:
                connection = exposed("meeting", listener.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    continue  # that one has gone before it was taken
                # After the first there may be nobody: a shortage is found before that is.
                if not taken and not self._make_room(error):
                    self._rest()
                return
            if self.admits(connection, self.awaited):
                self._hold(connection)
            else:
                connection.close()

    def _rest(self) -> None:
        """Stop accepting for a moment; the listeners would be reported readable again at once."""
        self._accepts_from = time.monotonic() + _PAUSE
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _hold(self, connection: socket.socket) -> None:
        def expects(rank: int) -> bool:
            return rank in self.awaited and self.admits(connection, [rank])

        side = handshake.answer(self.key, expects, self._nonces)
        conversation = Conversation(connection, side, until=time.monotonic() + _PATIENCE)
        self._held[conversation] = None
        hear = partial(self._hear, conversation)
        self._selector.register(connection, selectors.EVENT_READ, hear)
        hear()
        strangers = [held for held in self._held if not held.heard]
        if len(strangers) > _HELD:
            self._drop(strangers[0])

    def _hear(self, conversation: Conversation) -> None:
        if conversation not in self._held:
            return  # dropped since it spoke
        try:
            conversation.go_on()
        except (handshake.Stranger, OSError):
            self._drop(conversation)
            return
        if conversation.result is not None:
            del self._held[conversation]
            self._keep(conversation.result, conversation.connection)

    def _make_room(self, shortage: OSError) -> bool:
        """Drop the stranger that has been here longest; False where there is none.

        Raises `shortage` where waiting does not help: this process itself takes all that it may.
        """
        stranger = next((held for held in self._held if not held.heard), None)
        if stranger is not None:
            self._drop(stranger)
            return True
        in_progress = self._held or any(caller.open for caller in self._callers)
        if shortage.errno == errno.EMFILE and not in_progress:
            raise shortage
        return False

    def _drop(self, conversation: Conversation) -> None:
        del self._held[conversation]
        self._close(conversation.connection)

    # -- whom this rank calls ----------------------------------------------------------------------

    def _call(self, caller: _Caller, place: Place) -> None:
        del caller.due[place]
        try:
            connection = exposed("meeting", socket.socket(place.family, place.kind))
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._make_room(error)
            self._failed(caller, place, error.errno or 0)
            return
        side = handshake.call(caller.key, rank=self.rank, peer=caller.peer)
        conversation = Conversation(connection, side, until=self._deadline)
        code = connection.connect_ex(place.address)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._failed(caller, place, code)
            return
        caller.open[place] = conversation
        reached = partial(self._reached, caller, place, conversation)
        self._selector.register(connection, selectors.EVENT_WRITE, reached)

    def _reached(self, caller: _Caller, place: Place, conversation: Conversation) -> None:
        """Begin the handshake once the system has connected."""
        if caller.open.get(place) is not conversation:
            return  # closed since then
        connection = conversation.connection
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._hang_up(caller, place)
            self._failed(caller, place, code)
            return
        answered = partial(self._answered, caller, place, conversation)
        self._selector.modify(connection, selectors.EVENT_READ, answered)
        answered()

    def _answered(self, caller: _Caller, place: Place, conversation: Conversation) -> None:
        if caller.open.get(place) is not conversation:
            return
        try:
            conversation.go_on()
        except handshake.Stranger:
            self._hang_up(caller, place)
            reason = "what answers there has another key, or is not that rank"
            if caller.patient:
                caller.put_off(place, reason)
            else:
                caller.give_up(place, reason)
                self._require_places(caller)
            return
        except OSError as error:
            self._hang_up(caller, place)
            caller.put_off(place, _in_words(error))
            return
        if conversation.heard:
            caller.due.clear()
            for other in [other for other in caller.open if other != place]:
                self._hang_up(caller, other)
        if conversation.result is not None:
            self._callers.remove(caller)
            self._keep(conversation.result, conversation.connection)

    def _failed(self, caller: _Caller, place: Place, code: int) -> None:
        """Call again later if an end was short of room or is awaited, else give that place up."""
        reason = os.strerror(code)
        if caller.patient or code in (errno.EAGAIN, *_SHORTAGES):
            caller.put_off(place, reason)
        else:
            caller.give_up(place, reason)
            self._require_places(caller)

    def _hang_up(self, caller: _Caller, place: Place) -> None:
        self._close(caller.open.pop(place).connection)

    def _require_places(self, caller: _Caller) -> None:
        """Give up where a peer cannot be called any more: once the others are met, or soon."""
        if not caller.places:
            self._require_alive(self.watch.wait(GRACE))
            self._callers.remove(caller)
            self._problem = self._problem or BootstrapError(
                f"rank {self.rank} cannot reach {self.names[caller.peer]} ({caller.reason()})"
                + self.advice
            )
            self._deadline = min(self._deadline, time.monotonic() + _FAREWELL)

    # -- both --------------------------------------------------------------------------------------

    def _keep(self, peer: int, connection: socket.socket) -> None:
        """Keep a proven connection to `peer`, in place of an earlier one that it has given up."""
        if peer in self._made:
            self._close(self._made.pop(peer))
        self._left.pop(peer, None)
        self._made[peer] = connection
        spoken = partial(self._spoken, peer, connection)
        self._selector.modify(connection, selectors.EVENT_READ, spoken)

    def _spoken(self, peer: int, connection: socket.socket) -> None:
        """React to a rank that was met: it gives up, hangs up, or speaks after its own meeting.

        In the last case its words stay unread, for later.
        """
        if self._made.get(peer) is not connection:
            return
        try:
            words = connection.recv(_WHY_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if (error := in_farewell(self.rank, words)) is not None:
            raise error
        if words:
            self._selector.unregister(connection)
        else:
            self._close(self._made.pop(peer))
            self._left[peer] = time.monotonic() + _FAREWELL

    def _close(self, connection: socket.socket) -> None:
        with suppress(KeyError):  # it is not registered once it has been heard
            self._selector.unregister(connection)
        connection.close()

    def _require_alive(self, dead: Collection[int]) -> None:
        if dead:
            names = ", ".join(self.names[rank] for rank in sorted(dead))
            raise RankFailure(f"rank {self.rank} at start-up: {names} died", sorted(dead))

    def _late(self, missing: Sequence[int]) -> BootstrapError:
        names = ", ".join(self.names[peer] for peer in missing)
        reasons = "; ".join(filter(None, (caller.reason() for caller in self._callers)))
        return BootstrapError(
            f"{self.names[self.rank]} waited {self.timeout:g} s at start-up for {names}"
            f"{f' ({reasons})' if reasons else ''}; SHARDMATH_STARTUP_TIMEOUT sets the limit"
            f"{self.advice}"
        )

    def _close_all(self) -> None:
        for caller in self._callers:
            self._held |= dict.fromkeys(caller.open.values())
        for connection in [*self._made.values(), *(held.connection for held in self._held)]:
            connection.close()


def _in_words(error: OSError) -> str:
    closed = isinstance(error, ConnectionError)
    return "the connection was closed" if closed else error.strerror or str(error)
