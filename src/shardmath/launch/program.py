"""`python -m shardmath run`: one program on n ranks of this host, with no MPI and no torch.

The launcher never imports NumPy: its first line of the program comes as fast as Python's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardmath.base.caller import CALL
from shardmath.base.immutable import Immutable
from shardmath.launch.failure import Failure, from_exception
from shardmath.launch.job import FAILURE, Job
from shardmath.launch.output import Prefixer
from shardmath.launch.ranks import Place, fork_ranks, share_cores

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Program(Immutable):
    """A script or a module, and the arguments that it finds in `sys.argv`."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def execute(self) -> None:
        """Run it as `__main__`, as `python` would."""
        if self.is_module:
            sys.argv = ["-m", *self.arguments]
            if not sys.flags.safe_path:  # where a console script has the script's own folder
                sys.path[0] = str(Path.cwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            path = str(Path(self.name).resolve())
            sys.argv = [path, *self.arguments]
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(path).parent)
            runpy.run_path(path, run_name="__main__")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `run`."""
    parser.add_argument("-n", type=positive, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="T",
        help="threads of each rank's libraries (default: this machine's cores, shared)",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("program", metavar="script.py", help="the script, or the module's name")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )
    rest.required = False  # or they would be missed, too, where the program is


def run(
    program: Program, size: int | None, *, threads: int | None = None, command: str = "run"
) -> int:
    """Run `program` on `size` ranks, by default 1; the exit status for this process. What the
    launcher says on stderr begins with the name of the `command`.

    That is the launcher, or a rank. The launcher's is 0, the status of the first failing rank
    (128 + n for signal n), or 128 + n when signal n ended the launcher. The status of a rank is its
    program's.
    """
    if not program.is_module and not Path(program.name).exists():
        hint = ""
        if Path(program.name).name.startswith("python"):
            hint = f": run starts Python itself: leave {program.name!r} out"
        _say(command, f"there is no file {program.name!r}{hint}")
        return 2
    if size is None:
        size = 1
        if "-n" in program.arguments:
            where = f"options of {command} stand before the script"
            _say(command, f"1 rank: {where}, and this -n is the script's own")
    try:
        started = fork_ranks(size, variables=share_cores(size, threads), share_stdin=True)
    except OSError as error:
        _say(command, f"no rank was started: {error.strerror}")
        return 1
    if isinstance(started, Place):
        return _be_rank(started, program)
    return _watch(Job(started, Prefixer(_writer(1)), Prefixer(_writer(2))), command)


def _watch(job: Job, command: str) -> int:
    """Watch the ranks until all have ended; the launcher's exit status."""
    with _signals_to_descriptor() as wake:
        try:
            job.watch(wake=wake)
        except BrokenPipeError:  # whoever read the output has gone, as `head` does
            return 128 + signal.SIGPIPE
        except _UnwrittenError as error:
            _say(command, str(error))
            return 1
    if job.interrupt is not None:
        by = f"ended by {signal.Signals(job.interrupt).name}"
        _say(command, f"{by}{_interrupted(job.failures)}".rstrip())
        return 128 + job.interrupt
    failure = job.first_failure
    if failure is not None:
        _say(command, f"{failure}\n{failure.text}".rstrip())
    return 0 if failure is None else failure.status


def _interrupted(failures: Sequence[Failure]) -> str:
    """The words for ranks that Ctrl-C found in no operation while others were in one.

    With the first one's traceback: the table that a waiting rank prints lacks the stacks of ranks
    that were interrupted with it.
    """
    outside = sorted(
        (each.rank, each.text)
        for each in failures
        if each.error[1] == KeyboardInterrupt.__name__ and CALL not in each.text
    )
    if not outside or not any(CALL in each.text for each in failures):
        return ""
    (first, text), *more = outside
    others = "".join(f", {rank}" for rank, _ in more[:8]) + (", ..." if more[8:] else "")
    return f"; in no operation: rank{'s' if more else ''} {first}{others}\n{text}"


def _be_rank(place: Place, program: Program) -> int:
    """Run the program in this process; what nothing catches goes to the launcher, to print last."""
    try:
        program.execute()
    except SystemExit as error:
        failure = from_exception(place.rank, error)
        if failure.status == 0:
            return 0
    except BaseException as error:
        executes = type(program).execute.__code__.co_filename  # this file, or a subclass's
        hide = (__file__, executes, runpy.__file__ or "", "<frozen runpy>")
        failure = from_exception(place.rank, error, hide=hide)
    else:
        return 0
    place.report(FAILURE, failure.encode())
    return failure.status


def _say(command: str, text: str) -> None:
    with contextlib.suppress(BrokenPipeError, _UnwrittenError):
        _writer(2)(f"shardmath {command}: {text}\n".encode("utf-8", "backslashreplace"))


class _UnwrittenError(Exception):
    """Output of the ranks could not be written: a full disk, a quota."""


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:  # whoever shares the pipe or terminal has set it so
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()
            except BrokenPipeError:
                raise
            except OSError as error:
                name = "stdout" if descriptor == 1 else "stderr"
                raise _UnwrittenError(
                    f"{name} takes no more output: {error.strerror}; the job was ended"
                ) from None

    return write


@contextlib.contextmanager
def _signals_to_descriptor() -> Iterator[int]:
    """A descriptor from which the numbers of signals to the job can be read, one byte each."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    heard = [signum for signum in _HANDLED if signal.getsignal(signum) is not signal.SIG_IGN]
    handlers = {signum: signal.signal(signum, lambda *_: None) for signum in heard}
    try:
        yield reading.fileno()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(before)
        reading.close()
        writing.close()


def positive(text: str) -> int:
    """The number that an argument of a command says. Raises ArgumentTypeError below 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
