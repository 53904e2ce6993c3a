"""The command line: `shardmath`, and `python -m shardmath`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardmath import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A rank that `run` starts returns from here as well."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "command" not in options:
        parser.print_help()
        return 2
    status: int = options.command(parser, options)
    return status


def _parser() -> argparse.ArgumentParser:
    from shardmath.launch.program import add_arguments

    by_name = Path(sys.argv[0]).name == "shardmath"
    parser = argparse.ArgumentParser(
        prog="shardmath" if by_name else "python -m shardmath",
        description="Start a program on several ranks: shardmath run -n 4 script.py",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="command")

    def command(name: str, what: str, does: object) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=f"{what.capitalize()}.")
        made.set_defaults(command=does)
        return made

    start = "start a program on several ranks of this host; the first that fails ends the job"
    add_arguments(command("run", start, _run))
    traced = command("trace", "run a program, and write what all ranks did, and when", _trace)
    traced.add_argument("-o", dest="output", default="trace.json", help="a .png beside it")
    kept = "operations of each rank that are kept: the last (default: 131072)"
    traced.add_argument("--operations", type=int, metavar="K", default=1 << 17, help=kept)
    add_arguments(traced)
    hello = command("hello", "show who computes together, and how fast they meet", _hello)
    hello.add_argument("-n", type=int, metavar="N", default=1, help="ranks of this host")
    hello.add_argument("--device", default="cpu", help='as initialize takes it: "cpu", "cuda"')
    bench = command("bench", "measure: run a benchmark by its name, or list them all", _bench)
    bench.add_argument("-o", dest="output", metavar="FOLDER", default=".", help="for its JSON")
    bench.add_argument("--plot", action="store_true", help="draw a picture beside the JSON")
    bench.add_argument("name", nargs="?", default="", help="without one, all are listed")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own")
    command("doctor", "show what works here, what does not, and why", _doctor)
    where = "show where the ranks of a running job are, and which of them are missing"
    inspect = command("inspect", where, _inspect)
    inspect.add_argument("pid", type=int, help="the process of a rank, or one that has started it")
    command("env", "list the environment variables, and what was built from C", _env)
    shells = command("completion", "print what makes a shell complete these commands", _completion)
    shells.add_argument("shell", choices=("bash", "zsh", "fish"))
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
    size = options.n or 1
    return trace(program, size, threads=options.threads, output=output, kept=options.operations)


def _hello(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.group.environment import is_launched
    from shardmath.launch.program import Program, run

    module = "shardmath.tools.hello"
    if not is_launched():
        return run(Program(module, (options.device,), is_module=True), options.n)
    from shardmath.tools.hello import main as hello

    return hello(options.device)


def _bench(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.tools.bench import bench

    output = Path(options.output)
    return bench(options.name, options.arguments, output=output, plot=options.plot)


def _doctor(*_: object) -> int:
    from shardmath.tools.doctor import main as doctor

    return doctor()


def _completion(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.tools.completion import completion

    print(completion(parser, options.shell))
    return 0


def _inspect(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from shardmath.errors import BootstrapError
    from shardmath.inspection.job import inspected

    try:
        print(inspected(options.pid))
    except BootstrapError as error:
        print(f"shardmath inspect: {error}", file=sys.stderr)
        return 1
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
