"""Ranks that have gone: kernels that wait for them are told, whatever the host is doing meanwhile.

A kernel that waits looks now and then at words in the host's memory, one for each rank. One thread
of the process sets these words, by plain stores: it calls no driver, so it is never held up by a
driver call of another thread. It sleeps until a peer's process ends, for a tenth of a second at
most, and then looks at the states on the boards. The first group of GPUs starts the thread, which
ends with the last group.

A rank that leaves may have kernels that still send. So it says on the board at once that it has
left, and that its kernels have ended only when its GPU has done all that it was asked to do before:
the GPU sets a mark in the host's memory behind all that, which the thread waits for. When all ranks
have said so, no kernel writes to memory of the group any more: see `groups`.

Kernels also report in such memory whom they waited for in vain (`report_of`). The words of a team
that has ended go to another team only when the device has done all that it was asked to do by then,
so that a late kernel reports to nobody else. They are never freed: the driver's free would wait for
the device.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from shardmath.arrays.base import host_array
from shardmath.base.weak_method import weakly_or
from shardmath.cuda import stream as streams
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.fence import DeferredReuse
from shardmath.errors import CudaError, OpTimeout
from shardmath.symmetric.board import Board

PERIOD = 0.1  # seconds from one look at the boards to the next


class Departures:
    """The ranks of one group that have gone, as this rank's kernels see them.

    `words[rank]` becomes nonzero once that rank sends nothing more; the last of `words` is the mark
    that this rank's own kernels have ended. `set_mark()` makes the GPU set it after everything that
    is queued there, and returns False where the GPU cannot be asked now.
    """

    def __init__(
        self,
        board: Board,
        words: npt.NDArray[np.uint64],
        set_mark: Callable[[], bool],
        *,
        address: int = 0,
    ) -> None:
        self.address = address  # of the words, for the device
        self.board = board
        self._words = words
        self._set_mark = set_mark
        self._gave_up: Callable[[], bool] = lambda: False
        self._leaving = False
        self._told = False

    @classmethod
    def of(cls, device: Device, board: Board) -> Departures:
        """The watch over the ranks of `board`, for kernels of `device`, from now on."""
        _settle()
        report = report_of(device, board.size + 1)
        mark = partial(_mark_behind_all, device, report, board.size)
        made = cls(board, report.words, mark, address=report.address)
        watch(made)
        return made

    def ask(self, gave_up: Callable[[], bool]) -> None:
        """Ask `gave_up()`, a method, whether kernels here have given up what peers count on."""
        self._gave_up = weakly_or(False, gave_up)

    def gone(self) -> list[int]:
        """The ranks that kernels no longer wait for."""
        return [rank for rank in range(self.board.size) if self._words[rank]]

    def end_all(self) -> None:
        """Let kernels wait for nobody any more."""
        self._words[: self.board.size] = 1

    def drop(self) -> None:
        """This rank has left the group: its mark is set when next a group is made or left.

        Only appends to a list: the garbage collector may call it.
        """
        if not self._leaving:
            self._leaving = True
            _left.append(self)

    def leave(self) -> None:
        """This rank leaves the group: what its GPU has been asked to do is the last of it."""
        self.drop()
        _settle()

    def look(self) -> bool:
        """Tell the kernels who has gone, and the peers when this rank's kernels have ended.

        Returns whether to look again. Never waits, and calls no driver; it may be repeated, and
        called by two threads at once.
        """
        peers, words = self.board.peers, self._words
        for rank in peers.silent():
            words[rank] = 1
        if words[-1]:
            peers.end_kernels()
            return False
        if not self._told and self.gone() and self._gave_up():
            self._told = True
            peers.silence_kernels()
        return True

    def wait(self, timeout: float) -> bool:
        """Whether the GPUs of all ranks, which leave, have done their work within `timeout` s."""

        def at_work() -> list[int]:
            _settle()
            return [self.board.rank] * self.look() + self.board.peers.at_work()

        try:
            self.board.await_ranks(at_work, timeout)
        except OpTimeout:
            return False
        return True


_left: deque[Departures] = deque()  # groups that this rank has left, without a mark as yet


def _settle() -> None:
    """Set the marks of the groups that were left, where that can be done now."""
    for _ in range(len(_left)):
        departures = _left.popleft()
        if not departures._set_mark():
            _left.append(departures)


def _mark_behind_all(device: Device, report: Report, place: int) -> bool:
    """Have the device set a word of `report` when it has done all that it was asked to do."""
    try:
        if streams.any_capturing(device):
            return False
        device.mark_behind_all(report.address + 8 * place)
    except CudaError:  # nothing runs on a device that has failed, or at the end of the process
        report.words[place] = 1
    return True


class _Watch:
    """The thread, and what it watches.

    There is no lock, which an exception in another thread could leave held: `add` first extends the
    list and then looks for the thread; the thread first resigns and then looks at the list again.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start afresh, as in a forked child, which has no such thread and is no rank."""
        _left.clear()
        self._watched: list[Departures] = []
        self.thread: threading.Thread | None = None

    def add(self, departures: Departures) -> None:
        self._watched.append(departures)
        if self.thread is None or not self.thread.is_alive():  # an interrupt may have kept it
            self.thread = threading.Thread(
                target=self._run, name="shardmath: departures", daemon=True
            )
            self.thread.start()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the program
        while watched := self._look():
            poll = select.poll()
            watches = [departures.board.peers.watch for departures in watched]
            for processes in {id(watch): watch for watch in watches}.values():
                for descriptor, events in processes.pending() if processes else ():
                    poll.register(descriptor, events)
            poll.poll(PERIOD * 1000)

    def _look(self) -> list[Departures]:
        """Look at all, and return those to look at again; the thread ends when there are none."""
        for departures in list(self._watched):
            if not departures.look():
                self._watched.remove(departures)
        own = threading.current_thread()
        if not self._watched:
            self.thread = None
            if self._watched and self.thread is None:  # `add` has seen it alive
                self.thread = own
        return list(self._watched) if self.thread is own else []


@cache
def _watch() -> _Watch:
    return _Watch()


def watch(departures: Departures) -> None:
    """Look at `departures` from now on, until its mark is set, by the one thread of the process."""
    _watch().add(departures)


# -- words in the host's memory ------------------------------------------------------------------


class Report:
    """`words` that the device writes, at `address` for the device; zero at first."""

    def __init__(self, pool: _Reports, memory: _PinnedWords) -> None:
        self.words = memory.words
        self.words[:] = 0
        self.address = memory.address
        weakref.finalize(self, pool.left.leave, memory).atexit = False


def report_of(device: Device, count: int) -> Report:
    """A report of `count` words of 64 bits."""
    return _reports(device, count).take()


class _PinnedWords:
    """Pinned words, for NumPy and for the device; never freed."""

    def __init__(self, device: Device, count: int) -> None:
        device.activate()
        pinned = int(call("cuMemHostAlloc", 8 * count, 0x01))  # portable: valid in every context
        self.address = int(call("cuMemHostGetDevicePointer", pinned, 0))
        self.words: npt.NDArray[np.uint64] = host_array(pinned, (count,), (8,), "<u8", None)


class _Reports:
    """A pool of reports of one length on one device."""

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._count = count
        self._lock = threading.RLock()
        self._free: list[_PinnedWords] = []
        self.left: DeferredReuse[_PinnedWords] = DeferredReuse(device)

    def take(self) -> Report:
        """A report to which no kernel of an earlier team still writes."""
        with self._lock:
            self._free += self.left.free()
            memory = self._free.pop() if self._free else _PinnedWords(self._device, self._count)
            return Report(self, memory)


@cache
def _reports(device: Device, count: int) -> _Reports:
    return _Reports(device, count)
