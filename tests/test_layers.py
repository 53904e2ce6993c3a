"""The house stands as docs/architecture.md draws it: its table of layers is read from there.

A module imports only what stands above it in the table's order of rows, or in its own unit; imports
inside functions and for type checkers count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardmath"
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FUNCTION = 60
MODULES_OF_A_FIRST_CALL = 130  # on cores, where the start and one all_reduce import 128
OPTIONS = ("Options", "Preferences", "QuantizationScales")  # ends of the names of their classes
# Modules and folders that take long to import, of Python and of this package.
UNUSED_AT_START = (
    *("logging", "numpy.typing", "pathlib", "urllib"),
    *("shardmath.geometry", "shardmath.group.mpi", "shardmath.group.torch"),
    *("shardmath.operators", "shardmath.program", "shardmath.transport.wires"),
)
UNUSED_ON_CORES = ("concurrent", "multiprocessing", "scipy", "ducc0", "torch", "triton")

# (importing module, imported unit): why it may look up.
UPWARD: dict[tuple[str, str], str] = {}

FORBIDDEN_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def layers() -> dict[str, int]:
    """Each unit (a module or folder, dotted) of the table, and the number of its row."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, table = text.partition("| layer | units |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return {
        unit.strip("` "): number
        for number, row in enumerate(rows)
        for unit in row.split("|")[2].split(",")
    }


LAYERS = layers()


def dotted(path: Path) -> str:
    """The module's name without `shardmath.`, "" for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


def unit_of(module: str) -> str | None:
    """The unit of the table that a module belongs to: the one that names it most exactly."""
    names = [module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)]
    return next((name for name in names if name in LAYERS), None)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of this package, "from package import name" by name."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "shardmath":
                yield node.lineno, module if unit_of(module) else "__init__"


@cache
def nodes(path: Path) -> list[ast.AST]:
    """A file's module, and all that is in it: parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


@pytest.fixture(scope="module", autouse=True)
def _no_longer_than_these_tests() -> Iterator[None]:
    yield
    nodes.cache_clear()


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_the_table_names_what_there_is() -> None:
    modules = {dotted(path) for path in FILES}
    assert not [module for module in modules if unit_of(module) is None]
    assert not [unit for unit in LAYERS if not (SOURCE / unit.replace(".", "/")).is_dir()
                and unit not in modules]  # fmt: skip


def test_the_page_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = re.findall(r"`([\w*]+/[\w*/.]*|[\w/*]+\.py)`", text)
    assert names
    assert not [name for name in names if not any([*ROOT.glob(name), *SOURCE.rglob(name)])]


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_imports_go_downward(path: Path) -> None:
    own = unit_of(dotted(path))
    assert own is not None
    upward = []
    for line, module in imported_modules(path):
        unit = unit_of(module)
        assert unit is not None
        if unit != own and LAYERS[unit] >= LAYERS[own] and (dotted(path), unit) not in UPWARD:
            upward.append(f"{where(path, line)} imports {module}")
    assert not upward


def reached(imports: dict[str, set[str]], start: str) -> set[str]:
    """The modules that `start` imports, and those that these import, and so on."""
    found: set[str] = set()
    left = [start]
    while left:
        new = imports[left.pop()] - found
        found |= new
        left += new
    return found


def test_no_imports_go_in_circles() -> None:
    """Neither within a unit; imports inside functions and for type checkers count."""
    modules = {dotted(path): path for path in FILES}
    imports = {
        name: {
            found if found in modules else found.rpartition(".")[0] or "__init__"
            for _, found in imported_modules(path)
        }
        & modules.keys()
        for name, path in modules.items()
    }
    everything = {name: reached(imports, name) for name in imports}
    circles: list[set[str]] = []
    for name, found in everything.items():
        circle = {other for other in found if name in everything[other]}
        if circle and circle not in circles:
            circles.append(circle)
    assert not circles


@cache
def public_names(path: Path) -> set[str] | None:
    """The names in a module's `__all__`, None where it has none."""
    (module, *_) = nodes(path)
    assert isinstance(module, ast.Module)
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_what_is_imported_is_public(path: Path) -> None:
    """A name that another module imports has no underscore, and is in any `__all__` there."""
    modules = {f"shardmath.{dotted(other)}": other for other in FILES}
    hidden = []
    for node in nodes(path):
        if not isinstance(node, ast.ImportFrom) or node.module not in modules:
            continue
        offered = public_names(modules[node.module])
        hidden += [
            f"{where(path, node.lineno)} imports {alias.name} of {node.module}"
            for alias in node.names
            if f"{node.module}.{alias.name}" not in modules
            and (alias.name.startswith("_") if offered is None else alias.name not in offered)
        ]
    assert not hidden


def test_public_modules_and_packages_list_their_names() -> None:
    """`__all__` stands in public modules and where a package gathers names: nowhere else."""
    last = max(LAYERS.values())
    public = {unit for unit, row in LAYERS.items() if row == last - 2} | {"errors"}
    listing = {dotted(path) for path in FILES if public_names(path) is not None}
    packages = {dotted(path) for path in FILES if path.name == "__init__.py"}
    assert public <= listing
    assert not [name for name in listing - packages if unit_of(name) not in public]


def test_public_methods_say_what_they_do() -> None:
    """Each has a docstring, or overrides one that has."""
    classes: dict[str, list[ast.ClassDef]] = {}  # by name: several may have the same
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def says(kind: ast.ClassDef, method: str) -> bool:
        own = [m for m in kind.body if isinstance(m, ast.FunctionDef) and m.name == method]
        bases = {ast.unparse(base).split("[")[0] for base in kind.bases} - {kind.name}
        return any(map(ast.get_docstring, own)) or any(
            says(base, method) for name in bases for base in classes.get(name, ())
        )

    silent = [
        f"{kind.name}.{method.name}"
        for kind in (kind for kinds in classes.values() for kind in kinds)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and not (kind.name + method.name).startswith("_")
        and not method.name.startswith("_") and not says(kind, method.name)
    ]  # fmt: skip
    assert not silent


def test_nothing_unpickles_or_runs_text() -> None:
    found = []
    for path in FILES:
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [name for name in FORBIDDEN_CALLS if name == node.func.id]
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = ["allow_pickle"]
            bad = FORBIDDEN_MODULES | FORBIDDEN_CALLS | {"allow_pickle"}
            found += [f"{where(path, node.lineno)}: {name}" for name in names if name in bad]
    assert not found


def test_groups_never_pickle() -> None:
    """mpi4py pickles what its lower-case methods carry, torch what its object functions carry."""
    found = []
    for path in [SOURCE / "group" / "mpi.py", SOURCE / "group" / "torch.py"]:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_comm = isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "_comm"
            if "object" in node.func.attr or (of_comm and node.func.attr.islower()):
                found.append(f"{where(path, node.lineno)}: {node.func.attr}")
    assert not found


def test_only_config_reads_the_environment() -> None:
    found = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "os" and node.attr in ENVIRONMENT:
                    found.append((dotted(path), node.lineno))
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [(dotted(path), node.lineno) for a in node.names if a.name in ENVIRONMENT]
    assert {module for module, _ in found} == {"base.config"}, found


def test_functions_are_short() -> None:
    long = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                count = node.end_lineno - node.lineno + 1
                if count > LONGEST_FUNCTION:
                    long.append(f"{where(path, node.lineno)} {node.name} has {count} lines")
    assert not long


def test_immutable_objects_are_defined_without_compiling_source() -> None:
    """But for options, which users make, and for what geometry makes by the thousand, in slots."""
    compiled = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.endswith(OPTIONS):
                made_by = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any("frozen=True" in how and "slots=True" not in how for how in made_by):
                    compiled.append(f"{where(path, node.lineno)} {node.name}")
    assert not compiled


def test_a_first_call_on_cores_imports_what_cores_need() -> None:
    program = """
import sys, numpy
def loaded():
    return {name for name in sys.modules if name not in before}
before = set(sys.modules)
import shardmath
shardmath.initialize("cpu")
print(*loaded())
from shardmath.collectives import all_reduce
all_reduce(numpy.ones(3))
print(*loaded())
"""
    path = str(SOURCE.parent)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{program}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    started, called = ({*line.split()} for line in result.stdout.splitlines())
    own = {name.removeprefix("shardmath.") for name in called if name.startswith("shardmath")}
    other = ("cuda", "launch", "transport.gpus.", "operators.fft", "operators.matmul")
    assert not [name for name in called if name.startswith(UNUSED_ON_CORES)]
    assert not [
        name for name in own if name.startswith(other) or name.split(".")[-1].startswith("gpu_")
    ]
    assert not [name for name in started if name.startswith(UNUSED_AT_START)]
    assert len(own) <= MODULES_OF_A_FIRST_CALL


HEAVY = ["cuda", "cupy", "mpi4py", "numpy", "scipy", "sklearn", "torch"]


@pytest.mark.parametrize(
    ("program", "loaded"),
    [
        ("import shardmath; dir(shardmath)", []),
        ("import shardmath.geometry", []),
        ("import shardmath.launch.program", []),
        ("import shardmath as s; s.initialize('cpu'); s.linalg, s.symmetric_memory", ["numpy"]),
        ("from shardmath import *", ["numpy"]),
        ("import inspect, shardmath; inspect.getmembers(shardmath)", ["numpy"]),  # as help does
    ],
)
def test_importing_starts_nothing(program: str, loaded: list[str]) -> None:
    program += f"\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    path = str(SOURCE.parent)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{program}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.split() == loaded
