"""CUDA C++ compiled when it is first needed, and kept on disk.

An entry of the cache is a file named by the hash of all that it was made from: the source, every
header that it could include, the flags, the architecture and the compiler. It is written elsewhere
and linked into place, so that a reader finds all of it or nothing; of several ranks that compile
the same thing, the first to finish is believed, and the others use its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardmath.config import Settings, cache_folder
from shardmath.cuda.packages import unavailable
from shardmath.errors import CudaError

__all__ = ["KERNELS", "compiled", "compiled_source"]

KERNELS = Path(__file__).parent.parent / "kernels"
_FLAGS = ("--std=c++17",)


def compiled(name: str, defines: Sequence[str], arch: str) -> bytes:
    """The machine code of `kernels/<name>.cu` for `arch`, such as "sm_90".

    `defines` are like "SIZE=8". Raises CudaError, with the compiler's words, where it cannot be.
    """
    source = (KERNELS / f"{name}.cu").read_text()
    return _cached(name, source, [f"--define-macro={text}" for text in defines], arch)


def compiled_source(source: str, options: Sequence[str], arch: str) -> bytes:
    """The machine code of `source`, which may include our headers; `options` are NVRTC's."""
    return _cached("source", source, options, arch)


def _cached(name: str, source: str, options: Sequence[str], arch: str) -> bytes:
    flags = [*_FLAGS, f"--gpu-architecture={arch}", *options]
    folder = cache_folder(Settings.from_environment())
    if folder is None:
        return _compile(name, source, flags)
    path = folder / f"{name}-{_key(source, flags)}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = _compile(name, source, flags)
    return _kept(path, code)


def _key(source: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (source, _headers(), "\0".join(flags), _compiler_version()):
        digest.update(f"{len(part)}\0{part}".encode())
    return digest.hexdigest()[:32]


@cache
def _headers() -> str:
    return "\0".join(f"{path.name}\0{path.read_text()}" for path in sorted(KERNELS.glob("*.cuh")))


def _kept(path: Path, code: bytes) -> bytes:
    """Put `code` into the cache, unless another process was faster: then the code is its.

    A cache that cannot be written, or is full, costs time and nothing else.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_bytes(code)
            try:
                os.link(made, path)
            except FileExistsError:
                return path.read_bytes()
    return code


def _compile(name: str, source: str, flags: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        options = [flag.encode() for flag in (*flags, f"--include-path={KERNELS}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status):
            log = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program)))
            _done(nvrtc.nvrtcGetProgramLog(program, log))
            raise CudaError(f"compiling {name}.cu failed:\n{log.rstrip(bytes(1)).decode()}")
        code = bytearray(_done(nvrtc.nvrtcGetCUBINSize(program)))
        _done(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def _compiler_version() -> str:
    major, minor = _done(_nvrtc().nvrtcVersion())
    return f"nvrtc {major}.{minor}"


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise unavailable("compiling kernels needs NVRTC", error) from None
    return nvrtc


def _done(answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    if int(status):
        raise CudaError(f"the compiler answered {status!r}")
    return results[0] if len(results) == 1 else tuple(results)
