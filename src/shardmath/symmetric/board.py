"""The board: a page of control words that all ranks of a group see, and what they do with it.

`rows` says what the words are and where the page lies, `peers` what a rank knows of the others.
Either all ranks come out of a round of exchange or a barrier, or none does: see `waiting`.

Two mailboxes suffice: a rank publishes round s+2 only after it has finished s+1, for which every
peer had published s+1, which a peer does only after it has read all of round s. A mailbox says of
which round it is, so that no other round's is ever read in its place.

Every use of a board is entered on the record of the public call that it is part of, before anything
is published. A call that did not return leaves its record unfinished, and the board has failed.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardmath.base.caller import caller_line
from shardmath.base.collective_call import CollectiveCall, settled, this_thread
from shardmath.base.compiled import extension
from shardmath.errors import CollectiveMismatch, OpTimeout, RankFailure, ShardmathError
from shardmath.group.liveness import PeerWatch
from shardmath.symmetric.calls import Calls
from shardmath.symmetric.messages import AFTER_FAILURE, RankNames, Reason, bodies, header
from shardmath.symmetric.peers import Peers
from shardmath.symmetric.recovery import Recovery
from shardmath.symmetric.rows import (
    BARRIER,
    EXCHANGE,
    FAILED,
    GONE,
    LEFT,
    MAIL,
    MAIL_BYTES,
    MISMATCHED,
    NAME_BYTES,
    OPERATION,
    REASON,
    RECOVERY,
    ROW_BYTES,
    RUNNING,
    STATE,
    WORD,
    Rows,
    order,
)
from shardmath.symmetric.waiting import LONGEST_REST, Arrivals, WaitPolicy, wait_until

if TYPE_CHECKING:
    from shardmath.symmetric.accesses import Observer

_MAIL_HEAD = struct.Struct("=QQQ")  # number of the round, bytes of the message, of its payload
_CHUNK = MAIL_BYTES - _MAIL_HEAD.size
_MESSAGE_LIMIT = 64 << 20
_NAME = "shardmath.symmetric._board"  # of the module that board.c makes

Texts = tuple[tuple[bytes, ...], tuple[bytes, ...]]  # of all ranks, and their payloads


class Board:
    """This rank's side of the board of one group.

    Rank r is number `numbers[r]` of the job, and `processes[r]` is its process. `job` is the board
    of all ranks of the job, None for that board itself. `look()` sees what all ranks do, and
    returns the function that shows it, given the reason.

    Collective methods: `exchange`, `barrier`. Each raises RankFailure when a peer ends or leaves,
    and OpTimeout when one does not come; after that the board has `failed`, and says so to the
    peers.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        watch: PeerWatch | None,
        numbers: Sequence[int],
        processes: Sequence[str],
        policy: WaitPolicy,
        job: Board | None = None,
        look: Callable[[], Callable[[str], None]] = lambda: lambda _: None,
    ) -> None:
        self.rank = rows.rank
        self.size = rows.size
        self.policy = policy
        self.names: RankNames = RankNames(
            rows, numbers=numbers, processes=processes, job=None if job is None else job.names
        )
        self.peers = Peers(rows, self.names, watch, numbers)
        self.rounds = 0  # that all ranks have published
        self.barriers = 0  # that all ranks have reached
        self.call: CollectiveCall | None = None  # the last public call that used this board
        self.failure: str | None = None
        self.calls: Calls | None = None  # with which ranks run ahead, if any may
        self.observer: Observer | None = None  # of what comes before what, with SHARDMATH_CHECK=1
        self._rows = rows
        self._words = rows.words
        self._own = rows.words[rows.rank]
        self._look = look
        self._arrivals = Arrivals(rows)
        self._operation = "start"
        # Where a rank has one peer, whom it sees, nobody else's arrival can come in between.
        self._looks_twice = rows.size > 2 or rows.needs_polling
        self._page: Any = self._compiled_page(rows, policy)
        self._lock = threading.RLock()
        self._left = ""  # why this rank has left
        self._elsewhere: Callable[[Sequence[int]], Exception | None] = lambda _: None  # see `meet`

    @staticmethod
    def _compiled_page(rows: Rows, policy: WaitPolicy) -> Any:
        """Compiled rounds and barriers, one call each: see board.c. None where it was not built."""
        built = None if rows.needs_polling else extension(_NAME)
        if built is None:
            return None
        page = built.Page(
            *(rows.memory, rows.rank, rows.size, ROW_BYTES, MAIL, MAIL_BYTES),
            *(policy.spin, LONGEST_REST),
        )
        rows.ring_by(page)
        return page

    # -- what the ranks do together ------------------------------------------------------------

    def exchange(self, operation: str, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order. Collective.

        `operation` must be equal on all ranks: CollectiveMismatch, on all of them, when it is not.
        """
        texts, _ = self.exchange_raw(operation, header(operation) + message)
        return self._bodies(texts, operation)

    def _bodies(self, texts: Sequence[bytes], operation: str) -> list[bytes]:
        """The bodies of all ranks' texts of an `exchange_raw`, without their headers.

        Raises CollectiveMismatch, on all ranks, where they called different operations.
        """
        try:
            return bodies(texts, operation)
        except CollectiveMismatch as error:
            self.names.note(error)
            raise settled(error) from None

    def exchange_raw(
        self,
        operation: str,
        text: bytes,
        payload: bytes = b"",
        expected: tuple[bytes, ...] | None = None,
    ) -> Texts:
        """All ranks' texts, with their headers, which are not compared, and payloads. Collective.

        Where the texts equal those `expected`, that very tuple is returned. A payload is the part
        of a message that repeated calls do not compare with the last one's.
        """
        if not self._lock.acquire(blocking=False):
            raise self._second_thread(operation)
        try:
            call = this_thread.call
            if call is not self.call:
                self._enter(call, operation)
            if self.failure is not None:
                self._require_usable()
            if operation != self._operation:
                self.operation = operation
            if self.size == 1:
                self.rounds += 1
                return expected if expected == (text,) else (text,), (payload,)
            calls = self.calls
            if calls is not None:
                calls.meet()
            page, number = self._page, self.rounds + 1
            if self.observer is not None:
                self.observer.come("round", number)
            texts: Texts | None = None
            published = page is not None and len(text) + len(payload) <= _CHUNK
            if published:
                texts = page.exchange(number, text, payload, expected)
            if texts is None:
                texts = self._gather(text, payload, expected, published=published)
            else:
                self.rounds = number
            if self.observer is not None:
                self.observer.met("round", number)
            self.require_level()
            return texts
        finally:
            self._lock.release()

    def late(self, text: bytes, payload: bytes, expected: tuple[bytes, ...]) -> Texts:
        """`exchange_raw`, after compiled code has published this rank's part: a peer is late."""
        texts = self._gather(text, payload, expected, published=True)
        self.require_level()
        return texts

    def meet_calls(self) -> None:
        """Tell the peers that the ranks are about to meet. For compiled code."""
        if self.calls is not None:
            self.calls.meet()

    def require_level(self) -> None:
        """Raise the error of all ranks where they have met after different numbers of calls."""
        calls = self.calls
        if calls is None or not calls.differ():
            return
        behind = calls.behind()
        if not behind:
            raise self.concluded(self._passed_error(calls, calls.ahead()))
        self._await_calls(lambda: behind)  # ranks that were passed know what they called instead
        raise AssertionError("whoever was passed gives up")

    def _gather(
        self, text: bytes, payload: bytes, expected: tuple[bytes, ...] | None, *, published: bool
    ) -> Texts:
        """All ranks' texts and payloads, in as many rounds as the longest needs.

        `published`: this rank's message, which takes one round, is published already.
        """
        message = text + payload
        heads, parts = self._round(message, len(payload), 0, published=published)
        longest = max(length for length, _ in heads)
        if longest > _MESSAGE_LIMIT:
            rank = next(rank for rank, (length, _) in enumerate(heads) if length == longest)
            raise CollectiveMismatch(
                f"rank {rank} has a message of {longest:,} bytes; {_MESSAGE_LIMIT:,} are the most"
            )
        for start in range(_CHUNK, longest, _CHUNK):
            _, more = self._round(message, len(payload), start)
            parts = [a + b for a, b in zip(parts, more, strict=True)]
        ends = [length - behind for length, behind in heads]
        texts = tuple([part[:end] for part, end in zip(parts, ends, strict=True)])
        if expected is not None and texts == expected:
            texts = expected
        return texts, tuple([part[end:] for part, end in zip(parts, ends, strict=True)])

    def _round(
        self, message: bytes, payload: int, start: int, *, published: bool = False
    ) -> tuple[list[tuple[int, int]], list[bytes]]:
        """One round: publish this rank's chunk, then read all ranks'.

        Returns for each rank (bytes of its message, bytes of the payload at its end), and its
        chunk. Chunks begin `start` bytes into the messages. A chunk is written before the word of
        the round, and read after it: a rank that sees the round sees its chunk.
        """
        number = self.rounds + 1
        mailbox = MAIL + (number & 1) * MAIL_BYTES
        if not published:
            chunk = message[start : start + _CHUNK]
            self._rows.write(mailbox, _MAIL_HEAD.pack(number, len(message), payload) + chunk)
            self._rows.publish(EXCHANGE, 2 * number)
        self._await(EXCHANGE, 2 * number)
        self.rounds = number
        word, first = mailbox // WORD, mailbox + _MAIL_HEAD.size
        heads, chunks = [], []
        for words, row in zip(self._words, self._rows.bytes, strict=True):
            if words[word] != number:
                error = RankFailure(
                    f"{self.names.where()}: a peer published round {number} with the message of "
                    f"round {words[word]}"
                )
                self._fail_with(error)
                raise error
            whole = words[word + 1]
            left = whole - start
            end = first + left if left < _CHUNK else first + _CHUNK
            heads.append((whole, words[word + 2]))
            chunks.append(row[first:end].tobytes() if left > 0 else b"")
        return heads, chunks

    # -- calls without a meeting ---------------------------------------------------------------

    def let_run_ahead(self, explain: Callable[[Mapping[int, int | None]], Exception]) -> None:
        """From now on ranks may make calls without meeting here: `run_ahead`. Collective, once.

        `explain(tags)` is the error of all ranks where this rank meets and peers have gone on with
        calls of these tags, by rank; None for a rank that has not come so far. Does nothing for
        ranks on several hosts.
        """
        if self.calls is None and not self._rows.needs_polling:
            self.calls = Calls(self._rows, explain)

    def run_ahead(self, operation: str, tag: int, words: Sequence[int] = ()) -> None:
        """List a call that this rank makes without waiting for its peers, and `words` of it.

        It waits only for peers that are a whole window behind, and then raises as a wait does.
        """
        calls = self.calls
        assert calls is not None, "ranks may run ahead"
        if self.failure is not None:
            self._require_usable()
        if operation != self._operation:
            self.operation = operation
        calls.add(tag, self._await_listed, words)

    def listed_words(self, count: int) -> list[tuple[int, ...]]:
        """By rank, the first `count` words of the call that this rank has listed last. Waits.

        Where ranks have listed different calls, all raise what is wrong.
        """
        calls = self.calls
        assert calls is not None, "ranks may run ahead"
        self._await_listed(calls.made)
        tags = calls.tags()
        if len(set(tags.values())) > 1:
            raise self.concluded(calls.explain(dict(tags)), by_all=True)
        return calls.words(count)

    def next_tag_of(self, rank: int) -> int | None:
        """The tag of the next call of `rank`; None where it meets instead. Waits for either."""
        calls, words, own = self.calls, self._words[rank], self._own
        assert calls is not None, "ranks may run ahead"

        def missing() -> list[int]:
            meets = any(words[word] > own[word] for word in (EXCHANGE, BARRIER))
            return [] if meets or calls.ahead([rank]) else [rank]

        self._await_calls(missing)
        return calls.next_of(rank) if calls.ahead([rank]) else None

    def _await_listed(self, number: int) -> None:
        calls = self.calls
        assert calls is not None, "ranks may run ahead"
        self._await_calls(lambda: calls.missing(number))

    def _passed_error(self, calls: Calls, late: Sequence[int]) -> Exception:
        ahead = calls.ahead(late)
        tags = {rank: calls.next_of(rank) if rank in ahead else None for rank in late}
        self.peers.verdict = calls.explain(tags)
        return self.peers.verdict

    def concluded(self, error: Exception, *, by_all: bool = False) -> Exception:
        """`error`, which this rank raises now; peers are told of one that is raised `by_all`."""
        if by_all:
            self.peers.verdict = error
        if error is self.peers.verdict and self.failure is None:
            self.fail(str(error), raised=type(error).__name__)
            self.names.note(error)
        return error

    def _await_calls(self, missing: Callable[[], Sequence[int]]) -> None:
        """Wait until no rank is `missing`, for calls that are to be listed."""
        try:
            self._wait_until(lambda: not missing(), missing, self.peers.ended_error)
        except BaseException as error:
            self._fail_with(error)
            raise

    def arrive(self, operation: str) -> None:
        """Tell the peers that this rank has reached the next barrier, at which it waits later.

        Peers past that barrier see what this rank wrote before. Local; `barrier` must follow. If
        this rank fails first, `fail` takes the arrival back.
        """
        self.enter(operation)
        if self.observer is not None:
            self.observer.come("barrier", self.barriers + 1)
        self._rows.publish(BARRIER, 2 * (self.barriers + 1))

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until every rank has called it; all then see what each wrote before. Collective."""
        if not self._lock.acquire(blocking=False):
            raise self._second_thread(operation)
        try:
            call = this_thread.call
            if call is not self.call:
                self._enter(call, operation)
            if self.failure is not None:
                self._require_usable()
            if operation != self._operation:
                self.operation = operation
            number = self.barriers + 1
            if self.observer is not None:
                self.observer.come("barrier", number)
            if self._page is None:
                self._rows.publish(BARRIER, 2 * number)
                self._await(BARRIER, 2 * number)
            elif not self._page.arrive(number):
                self._await(BARRIER, 2 * number)
            self.barriers = number
            if self.observer is not None:
                self.observer.met("barrier", number)
        finally:
            self._lock.release()

    def late_barrier(self, value: int) -> bool:
        """`barrier`, after compiled code has set this rank's word and found a peer late."""
        self._await(BARRIER, value)
        return True

    def compiled(self, *, ahead: bool) -> tuple[Any, ...] | None:
        """What compiled code needs to make rounds; None where it cannot make them.

        That is: functions that lock and unlock the board, the page, and functions to call before
        and after a meeting of ranks that run `ahead`, None where none do. Compiled code counts
        `rounds` and `barriers`, and notes the `call`, as the methods here do.
        """
        page = self._page
        if page is None or self.observer is not None:
            return None
        waits = ahead and self.size > 1
        around = (self.meet_calls, self.require_level) if waits else (None, None)
        return self._lock.acquire, self._lock.release, page, *around

    def fits(self, nbytes: int) -> bool:
        """Whether a message of `nbytes` takes one round."""
        return nbytes <= _CHUNK

    def meet(self, operation: str, elsewhere: Callable[[Sequence[int]], Exception | None]) -> None:
        """A barrier of ranks that may not all have this board. Collective among those that do.

        `elsewhere(late)` is the exception to raise where one of these late ranks has told another
        board that it will not come, else None.
        """
        before, self._elsewhere = self._elsewhere, elsewhere
        try:
            self.barrier(operation)
        finally:
            self._elsewhere = before

    def begin(self, operation: str) -> None:
        """Lock the board for this thread. Raises RuntimeError where another thread uses it."""
        if not self._lock.acquire(blocking=False):
            raise self._second_thread(operation)
        try:
            call = this_thread.call
            if call is not self.call:
                self._enter(call, operation)
        except BaseException:
            self.end()
            raise

    def _enter(self, call: CollectiveCall | None, operation: str) -> None:
        """Note that `call` uses this board. Where the last call has not ended, the board fails."""
        last = self.call
        if last is not None and not last.finished:
            if last.thread == threading.get_ident():
                self.fail(f"{self._operation} was interrupted")
            else:
                raise self._second_thread(operation)
        if call is not None:
            call.thread = threading.get_ident()
            if not call.boards:
                call.rounds = self.rounds
            call.boards.append(self)
        self.call = call

    def interrupted(self, error: BaseException, line: str) -> None:
        """Tell the peers that `error` has left an operation, called in `line`, before its end."""
        why = f"{self._operation}, {line}: {type(error).__name__}: {error}".rstrip(": ")
        shown = None
        try:
            if isinstance(error, KeyboardInterrupt):
                shown = self._look()  # before the peers hear of it, and end what they do
        finally:
            self.fail(why, getattr(error, "ranks", ()), late=isinstance(error, OpTimeout))
        if shown is not None:
            shown(f"{self.names.where()} was interrupted")

    def _second_thread(self, operation: str) -> RuntimeError:
        """The error where two threads use this board, which fails."""
        self.fail(f"a second thread called {operation} during {self._operation}")
        return RuntimeError(
            f"rank {self.rank}: {operation} was called while another thread is in "
            f"{self._operation}; give each thread a context of its own, from split() or "
            "new_context()"
        )

    def enter(self, operation: str) -> None:
        """Note that the public call under way is going to use this board.

        An exception that leaves the call from now on fails the board. Raises RankFailure where the
        board has failed before.
        """
        if this_thread.call is not self.call:
            self.begin(operation)
            self.end()
        if self.failure is not None:
            self._require_usable()

    def hand_over(self) -> None:
        """Let another thread use this board during the call under way, which has made it."""
        call, self.call = self.call, None
        if call is not None and self in call.boards:
            call.boards.remove(self)

    def end(self) -> None:
        """Unlock the board."""
        self._lock.release()

    # -- recovery ------------------------------------------------------------------------------

    @property
    def recoveries(self) -> int:
        """The number of the last recovery that this rank has asked for."""
        return self._own[RECOVERY]

    def asked_again(self) -> list[int]:
        """The ranks that have asked for a recovery which this one has not asked for."""
        self._rows.receive()
        return [r for r in self._rows.peers if self._words[r][RECOVERY] > self.recoveries]

    def survivors(self, elsewhere: Callable[[], Exception | None]) -> list[int]:
        """The ranks that go on when this board has failed, equal on all of them. Collective.

        The board fails here if it has not yet, so that ranks that wait in other operations come,
        too. `elsewhere()` is the exception to raise where the ranks do not meet here, else None.
        Raises OpTimeout, naming the ranks that live and do not come, and RankFailure where the
        others have gone on without this rank. It can be called again after either.
        """
        self.fail("it called recover()")
        self.operation = "recover"
        wait = partial(self.await_ranks, elsewhere=elsewhere)
        return Recovery(self._rows, gone=self.peers.gone, wait=wait).survivors()

    def await_ranks(
        self,
        awaited: Callable[[], list[int]],
        timeout: float | None = None,
        elsewhere: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        """Wait until `awaited()` is empty, whatever has failed. Raises `elsewhere()`, OpTimeout."""
        self._wait_until(lambda: not awaited(), awaited, lambda _: elsewhere(), timeout=timeout)

    # -- states --------------------------------------------------------------------------------

    @property
    def operation(self) -> str:
        """The operation that this rank is in; peers name it in messages."""
        return self._operation

    @operation.setter
    def operation(self, name: str) -> None:
        if name != self._operation:
            self._operation = name
            self._rows.write(OPERATION, header(name)[:NAME_BYTES].ljust(NAME_BYTES, b"\0"))

    def leave(self, why: str = "it was dropped") -> None:
        """Tell the peers that this rank has finished. `why` is for its threads that still wait."""
        state = self._own[STATE]
        if state == RUNNING:
            self._left = why
            self._rows.publish(STATE, LEFT)
        elif state in (FAILED, MISMATCHED):  # peers still hear why
            self._rows.publish(STATE, state | GONE)

    def _fail_with(self, error: BaseException) -> None:
        """Fail after an error in a wait: later operations would not be in step with the peers."""
        if isinstance(error, Exception):
            self.concluded(error)
        if isinstance(error, CollectiveMismatch) and self.failure is None:
            self._rows.publish(STATE, MISMATCHED)
        why = str(error) if isinstance(error, ShardmathError) else repr(error)
        shown = self._look() if isinstance(error, OpTimeout) else None
        self.fail(why, getattr(error, "ranks", ()), late=isinstance(error, OpTimeout))
        if shown is not None:
            shown(f"{self.names.where()} has waited too long")

    def fail(
        self, why: str, blamed: Sequence[int] = (), *, late: bool = False, raised: str = ""
    ) -> None:
        """Tell the peers that this rank has given up an operation; later ones would not be in step.

        `why`, `blamed`, `late` and `raised`: see Reason.
        """
        if self.failure is None:
            self.failure = why = why.removesuffix(f"; {AFTER_FAILURE}")  # which readers add
            # A late peer must not read memory that has changed: take unfinished arrivals back.
            for word, done in ((EXCHANGE, self.rounds), (BARRIER, self.barriers)):
                if self._own[word] > 2 * done + 1:
                    self._rows.publish(word, 2 * done + 1)
            if self._own[STATE] == RUNNING:
                self._rows.write(REASON, Reason(why, blamed, late, raised).pack())
                self._rows.publish(STATE, FAILED)

    def _meeting_error(self, late: Sequence[int]) -> Exception | None:
        """The exception to raise where one of these ranks will never meet this one, else None.

        A late peer that has listed calls which this rank has not listed has passed this place. A
        peer that this rank has passed will say so. Once this rank has left, no peer comes.
        """
        if self._own[STATE] == LEFT:
            why = f"this rank has left the context: {self._left}"
            return RankFailure(f"{self.names.where()}: {why}")
        calls = self.calls
        if calls is not None:
            if calls.behind(late):
                return self.peers.ended_error(late)
            if calls.ahead(late):
                return self.peers.ended_error(late) or self._passed_error(calls, late)
        return self.peers.error(late)

    # -- words ---------------------------------------------------------------------------------

    def _await(self, word: int, target: int) -> None:
        """Return when every peer's `word` is `target` and none takes it back: see `waiting`."""
        late = self._arrivals.missing(word, target)
        if late or (self._looks_twice and (late := self._arrivals.second_look(word, target))):
            self._await_late(word, target, late)
        order()

    def _await_late(self, word: int, target: int, late: list[int]) -> None:
        words, policy = self._words, self.policy
        if self._page is not None:  # compiled code has looked in vain
            policy = replace(policy, spin=0.0)

        def arrived() -> bool:
            while late and words[late[-1]][word] >= target:
                late.pop()
            if not late:
                late.extend(self._arrivals.second_look(word, target))
            return not late

        def missing() -> list[int]:  # a rank that has taken its arrival back still waits
            return self._arrivals.missing(word, target - 1) or self._arrivals.missing(word, target)

        def peer_error(late: Sequence[int]) -> Exception | None:
            return self._elsewhere(late) or self._meeting_error(late)

        def wait() -> None:
            self._wait_until(
                arrived,
                missing,
                peer_error,
                rings=True,
                policy=policy,
                late=lambda: self._arrivals.missing(word, target),
            )

        try:
            try:
                wait()
            except OpTimeout:
                if not self._arrivals.come_after_all(word, target):
                    raise
                wait()  # for peers that are finding out the same
        except BaseException as error:
            self._fail_with(error)
            raise

    def wait(
        self,
        arrived: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        operation: str,
        timeout: float | None = None,
    ) -> None:
        """Wait for anything else that peers write: they `ring` afterwards. See `wait_until`.

        A timeout leaves the board usable, since nothing was announced; RankFailure does not. With a
        `timeout` of the caller's, a peer that waits in another operation is no error, since this
        rank will follow.
        """
        self._require_usable()
        self.operation = operation
        self._rows.flush()
        peer_error = self.peers.error if timeout is None else self.peers.ended_error
        try:
            self._wait_until(arrived, missing, peer_error, rings=True, timeout=timeout)
        except OpTimeout as error:
            settled(error)
            raise
        except Exception as error:
            self._fail_with(error)
            raise

    def _wait_until(
        self,
        arrived: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        peer_error: Callable[[Sequence[int]], Exception | None],
        *,
        rings: bool = False,
        timeout: float | None = None,
        policy: WaitPolicy | None = None,
        late: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """`waiting.wait_until`, with the names of this board. `rings`: the awaited peers ring."""
        wait_until(
            self._arrivals.polling(arrived),
            policy=policy or self.policy,
            missing=missing,
            peer_error=peer_error,
            doing=lambda: self.names.where(counted=True),
            named=self.names.described,
            show=self._show,
            timeout=timeout,
            rest=self._rows.rest if rings and self._rows.rings else None,
            late=late,
        )

    def _show(self, why: str) -> None:
        self._look()(why)

    def ring(self) -> None:
        """Wake the peers that sleep until this rank writes, which it has done."""
        self._rows.ring()

    def _require_usable(self) -> None:
        if self.failure is not None:
            raise RankFailure(
                f"{self.names.where()}: an earlier operation of this context failed "
                f"({self.failure}); {AFTER_FAILURE}"
            )


class OperationGuard:
    """A `with` for the work after agreement: an error in it ends the peers' waits at once.

    Only one thread may use the board meanwhile: the words of two threads would mix their calls. A
    thread that finds the board in use raises RuntimeError, and the board fails on all ranks, since
    another thread may have come first elsewhere.
    """

    __slots__ = ("_board", "_operation")

    def __init__(self, board: Board, operation: str) -> None:
        self._board, self._operation = board, operation

    def __enter__(self) -> None:
        self._board.begin(self._operation)

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if isinstance(error, BaseException):
            self._board.interrupted(error, caller_line())
        self._board.end()
