"""A process that has loaded the libraries that programs import, and forks one for each program.

So they are loaded once, and not by every rank of every program. Of shardmath a launcher loads what
its program imports, before it forks the ranks, and nothing else: what is missing there is missed.
Its bytecode alone is read once for all of them.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

sys.path.append(str(Path(__file__).parent.parent))

from huge_pages import use_huge_pages

__all__ = ["Prepared"]

ROOT = Path(__file__).parent.parent.parent
# The last two are what the first step of an optimizer loads, and the first compilation.
LIBRARIES = (
    "PIL.Image",
    "ducc0",
    "scipy.fft",
    "sklearn.datasets",
    "torch",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
)


class Prepared:
    """Such a process, as whoever has programs to run sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(
        self, program: str | Path, ranks: int | None = None, launcher: str = "shardmath"
    ) -> str:
        """What it prints, alone or on ranks of a launcher. AssertionError when it fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile() as printed, tempfile.NamedTemporaryFile() as errors:
            request = (str(program), ranks, launcher, printed.name, errors.name)
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            status = self._process.stdout.readline().strip()
            assert status == "0", f"{program} has ended with {status}:\n{errors.read().decode()}"
            return printed.read().decode()

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def serve() -> None:
    """Answer requests until there are no more. In a process that was forked for one, run that."""
    gc.disable()  # what is loaded stays
    for library in LIBRARIES:
        importlib.import_module(library)
    keep_bytecode("shardmath")
    importlib.import_module("threadpoolctl").threadpool_info()  # ranks know where libraries lie
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's operators are not taken apart by each rank that ends
    gc.freeze()
    gc.enable()
    use_huge_pages()
    for line in sys.stdin:
        program, ranks, launcher, *streams = json.loads(line)
        pid = os.fork()
        if pid == 0:
            for number, path in enumerate((os.devnull, *streams)):
                os.dup2(os.open(path, os.O_RDWR), number)
            end(partial(run, program, ranks, launcher))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, flush=True)


def keep_bytecode(package: str) -> None:
    """Read that of a package's modules, which those that are forked execute when they import them.

    To read it takes longer than to execute it.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    read = SourceFileLoader.get_code
    kept: dict[str, CodeType | None] = {}
    for folder in spec.submodule_search_locations:
        for path in map(str, Path(folder).rglob("*.py")):
            kept[path] = read(SourceFileLoader(package, path), package)

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return kept[loader.path] if loader.path in kept else read(loader, name)

    setattr(SourceFileLoader, "get_code", get_code)  # noqa: B010


def run(program: str, ranks: int | None, launcher: str) -> None:
    """As `python PROGRAM`, as `python -m shardmath run -n RANKS PROGRAM`, or by torchrun."""
    if launcher == "torchrun":
        import preloaded
        from started import command

        assert ranks is not None
        words = [*command(launcher, ranks, preloaded.python()), program]
        sys.exit(subprocess.run(words, check=False).returncode)
    if ranks is not None:
        from shardmath.__main__ import main

        tree = ast.parse(Path(program).read_text())
        imports = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
        ours = [each for each in imports if "shardmath" in ast.unparse(each)]
        exec(compile(ast.Module(ours, []), program, "exec"), {})
        sys.exit(main(["run", "-n", str(ranks), program]))
    sys.argv = [program]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def end(program: Callable[[], None]) -> None:
    """Run it and end as Python does, but for taking all that was loaded apart."""
    status = 1
    try:
        program()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
