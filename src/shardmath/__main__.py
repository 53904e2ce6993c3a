"""The command line: `shardmath`, and `python -m shardmath`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from shardmath import __version__
from shardmath.errors import ShardmathError

_RANK_BYTES = 24 << 20  # of memory that a rank takes which has imported NumPy and met the others
_RANKS_PER_CORE = 16  # more than these take seconds to start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A rank that `run` starts returns from here as well.

    What an operator can mend is one line on stderr: a traceback would be of our code.
    """
    if sys.stdout is None:  # this process was started with it closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    name = "shardmath"
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if "command" not in options:
            parser.print_help()
            return 2
        name += f" {options.word}"
        status: int = options.command(parser, options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        _drop_unwritten()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        why, status = "ended by SIGINT", 128 + signal.SIGINT
    except ShardmathError as error:  # some are an OSError too
        why, status = str(error), 1
    except ModuleNotFoundError as error:
        why, status = f"{error.name} is not installed: pip install {error.name}", 1
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        why, status = f"{error.strerror or error}{where}", 1
    print(f"{name}: {why}", file=sys.stderr)
    _drop_unwritten()
    return status


def _drop_unwritten() -> None:
    """Throw away what stdout cannot write: Python would try once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)


def _parser() -> argparse.ArgumentParser:
    from shardmath.launch.program import add_arguments, positive

    by_name = Path(sys.argv[0]).name == "shardmath"
    parser = argparse.ArgumentParser(
        prog="shardmath" if by_name else "python -m shardmath",
        description="Start a program on several ranks: shardmath run -n 4 script.py",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="command")

    def command(
        name: str, what: str, does: object, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        sentence = f"{what[0].upper()}{what[1:]}."
        made = commands.add_parser(name, help=what, description=sentence, parents=parents)
        made.set_defaults(command=does, word=name)
        return made

    start = "start a program on several ranks of this host; the first that fails ends the job"
    add_arguments(command("run", start, _run))
    traced = command("trace", "run a program, and write what all ranks did, and when", _trace)
    file = "the trace's file (default: trace.json); a picture, .png, is written beside it"
    traced.add_argument("-o", dest="output", metavar="FILE", default="trace.json", help=file)
    kept = "operations of each rank that are kept: the last (default: 131072)"
    traced.add_argument("--operations", type=positive, metavar="K", default=1 << 17, help=kept)
    without = "leave out what GPUs do, in a program that uses torch's profiler itself"
    traced.add_argument("--no-kernels", dest="kernels", action="store_false", help=without)
    add_arguments(traced)
    hello = command("hello", "show who computes together, and how fast they meet", _hello)
    count = "number of ranks (default: 1), where no launcher has started them"
    hello.add_argument("-n", type=positive, metavar="N", default=1, help=count)
    device = 'where the ranks compute: "cpu" (the default), "cuda", or "cuda:1"'
    hello.add_argument("--device", default="cpu", help=device)
    measure = "measure: run a benchmark by its name, or list them all"
    bench = command("bench", measure, _bench, _bench_options())
    bench.add_argument("name", nargs="?", default="", help="without one, all are listed")
    own = "arguments of the benchmark itself"
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=own)
    command("doctor", "show what works here, what does not, and why", _doctor)
    where = "show where the ranks of a running job are, and which of them are missing"
    inspect = command("inspect", where, _inspect)
    inspect.add_argument(
        "pid", type=positive, help="the process of a rank, or one that has started it"
    )
    command("env", "list the environment variables, and what was built from C", _env)
    shells = command("completion", "print what makes a shell complete these commands", _completion)
    shells.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _bench_options() -> argparse.ArgumentParser:
    """The options of `bench`, which stand before or behind the benchmark's name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    folder = "where its JSON is written (default: the current folder)"
    parser.add_argument("-o", dest="output", metavar="FOLDER", default=".", help=folder)
    parser.add_argument("--plot", action="store_true", help="draw a picture beside the JSON")
    return parser


def _run(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.launch.program import Program, run

    program = Program(options.program, tuple(options.arguments), options.is_module)
    return run(program, options.n, threads=options.threads)


def _trace(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.launch.program import Program
    from shardmath.tools.trace import trace

    program = Program(options.program, tuple(options.arguments), options.is_module)
    output = Path(options.output)
    return trace(
        program,
        options.n or 1,
        threads=options.threads,
        output=output,
        kept=options.operations,
        kernels=options.kernels,
    )


def _hello(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.group.environment import is_launched
    from shardmath.launch.program import Program, run

    class Hello(Program):
        def execute(self) -> None:
            from shardmath.tools.hello import main as hello

            hello(options.device)

    program = Hello("hello", is_module=True)
    if is_launched():
        program.execute()
        return 0
    if why := _too_many(options.n):
        print(f"shardmath hello: {why}", file=sys.stderr)
        return 1
    return run(program, options.n, command="hello")


def _too_many(size: int) -> str:
    """Why this machine has no room for so many ranks; empty if it has. Says if they will be slow.

    What runs out is memory: the system would then kill processes, of whatever program.
    """
    from shardmath.transport.available import available_memory

    available, cores = available_memory(), len(os.sched_getaffinity(0))
    if size * _RANK_BYTES > available:
        return (
            f"{size} ranks take about {size * _RANK_BYTES / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are available here: start at most "
            f"{available // _RANK_BYTES}"
        )
    if size > _RANKS_PER_CORE * cores:
        print(
            f"shardmath hello: {size} processes start on {cores} cores, which takes a while",
            file=sys.stderr,
        )
    return ""


def _bench(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.tools.bench import bench

    options, own = _bench_options().parse_known_args(options.arguments, options)
    return bench(options.name, own, output=Path(options.output), plot=options.plot)


def _doctor(*_: object) -> int:
    from shardmath.tools.doctor import main as doctor

    return doctor()


def _completion(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.tools.completion import completion

    print(completion(parser, options.shell))
    return 0


def _inspect(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.inspection.job import inspected

    print(inspected(options.pid))
    return 0


def _env(*_: object) -> int:
    from shardmath.base import compiled, config

    for name, kind, default, sentence in config.table():
        print(f"{name:26} {kind:6} {default:>10}  {sentence}")
    for name, built in compiled.BUILT.items():
        print(f"{built.purpose}: {'compiled' if compiled.is_built(name) else 'in Python'} ({name})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
