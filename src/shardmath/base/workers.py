"""Threads that perform tasks, and how to wait for them, in programs that signals interrupt.

An exception may strike the thread that hands over a task, or waits for one, at any place. In
`concurrent.futures` and `queue` it can leave a lock held, and the next task would wait forever.
Here a task is handed over in one call of C, and ends with a lock that is never needed again:
whoever waits looks at the task itself, now and then even if nobody wakes it.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar
from weakref import finalize

T = TypeVar("T")

_LONGEST_REST = 0.05  # seconds between two looks at a task


class Task(Generic[T]):
    """One call of `function`, which a thread of `Workers` makes."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.ended = False
        self.error: BaseException | None = None
        self._calls = [function]  # none once somebody has taken it
        self._result: T | None = None
        self._bell = _thread.allocate_lock()
        self._bell.acquire()

    def perform(self) -> None:
        """Make the call, unless the task was cancelled; its operands are dropped afterwards."""
        if function := self._taken():
            try:
                self._result = function()
            except BaseException as error:
                self.error = error
            del function
            self._end()

    def cancel(self) -> None:
        """End the task if its call has not begun."""
        if self._taken():
            self._end()

    def _taken(self) -> Callable[[], T] | None:
        with suppress(IndexError):
            return self._calls.pop()
        return None

    def _end(self) -> None:
        self.ended = True
        self._bell.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the call has ended, within `timeout` seconds where they are given."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ended:
            rest = _LONGEST_REST
            if deadline is not None:
                rest = min(rest, deadline - time.monotonic())
                if rest <= 0:
                    return False
            if self._bell.acquire(timeout=rest):
                self._bell.release()  # for another thread that waits
        return True

    def result(self, timeout: float | None = None) -> T:
        """What the call returned. Raises what it raised, and TimeoutError after `timeout` seconds.

        It can be asked for again after either.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the call has not ended within {timeout} s")
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]


class Workers:
    """So many threads, which perform tasks in the order in which they are given.

    They end with the process, or when this object has been dropped and what was given is done.
    """

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[Task[object] | None] = SimpleQueue()
        for _ in range(count):
            # Unlike that of threading.Thread, this start takes no lock and waits for nothing.
            _thread.start_new_thread(_work, (self._tasks,))
            finalize(self, self._tasks.put, None).atexit = False

    def give(self, task: Task[T]) -> None:
        """Let a thread perform `task`."""
        self._tasks.put(task)  # type: ignore[arg-type]

    def run(self, functions: Iterable[Callable[[], object]]) -> None:
        """Call all the functions, as many at a time as there are threads; raises what one raises.

        None of them runs any more when this returns or raises, whatever interrupts it.
        """
        tasks = [Task(function) for function in functions]
        try:
            for task in tasks:
                self.give(task)
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                task.wait()


def _work(tasks: SimpleQueue[Task[object] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.perform()
        del task  # its result belongs to those who wait for it
