"""The command line: `python -m shardmath run`, `env`, `inspect`, `--version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardmath import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A rank that `run` starts returns from here as well."""
    from shardmath.launch.program import Program, add_arguments, run

    parser = argparse.ArgumentParser(
        prog="python -m shardmath",
        description="Start a program on several ranks: python -m shardmath run -n 4 script.py",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = "start a program on several ranks of this host; the first that fails ends the job"
    add_arguments(commands.add_parser("run", help=start, description=f"{start.capitalize()}."))
    commands.add_parser("env", help="list the environment variables, and what was built from C")
    where = "show where the ranks of a running job are, and which of them are missing"
    inspect = commands.add_parser("inspect", help=where, description=f"{where.capitalize()}.")
    inspect.add_argument("pid", type=int, help="the process of a rank, or one that has started it")
    options = parser.parse_args(arguments)
    if options.command == "env":
        return _print_variables()
    if options.command == "inspect":
        return _inspect(options.pid)
    program = Program(options.program, tuple(options.arguments), options.is_module)
    return run(program, options.n, threads=options.threads)


def _inspect(pid: int) -> int:
    from shardmath.errors import BootstrapError
    from shardmath.inspection.job import inspected

    try:
        print(inspected(pid))
    except BootstrapError as error:
        print(f"shardmath inspect: {error}", file=sys.stderr)
        return 1
    return 0


def _print_variables() -> int:
    from shardmath.base import compiled, config

    for name, kind, default, sentence in config.table():
        print(f"{name:26} {kind:6} {default:>10}  {sentence}")
    for name, purpose in compiled.BUILT.items():
        print(f"{purpose}: {'compiled' if compiled.is_built(name) else 'in Python'} ({name})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
