"""CUDA C++ compiled when it is first needed, and kept on disk.

An entry of the cache is a file named by the hash of all that it was made from: the source, every
header that it could include, the flags, the architecture and the compiler. Where several ranks
compile the same source, all use the file of the first to finish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardmath.base.config import Settings, cache_folder
from shardmath.cuda import kernel_cache
from shardmath.cuda.packages import bindings_of
from shardmath.errors import CudaError

KERNELS = Path(__file__).parent.parent / "kernels"
_FLAGS = ("--std=c++17",)


def compiled(name: str, defines: Sequence[str], arch: str) -> bytes:
    """The machine code of `kernels/<name>.cu` for `arch`, such as "sm_90".

    `defines` are like "SIZE=8". Raises CudaError, with the compiler's words, where that fails.
    """
    source = (KERNELS / f"{name}.cu").read_text()
    return _cached(name, source, [f"--define-macro={text}" for text in defines], arch)


def compiled_source(source: str, options: Sequence[str], arch: str) -> bytes:
    """The machine code of `source`, which may include our headers; `options` are NVRTC's."""
    return _cached("source", source, options, arch)


def _cached(name: str, source: str, options: Sequence[str], arch: str) -> bytes:
    flags = [*_FLAGS, f"--gpu-architecture={arch}", *options]
    folder_name = cache_folder(Settings.from_environment())
    if folder_name is None:
        return _compile(name, source, flags)
    folder = Path(folder_name)
    entry = f"{name}-{_key(source, flags)}.cubin"
    code = kernel_cache.kept(folder, entry)
    return kernel_cache.keep(folder, entry, _compile(name, source, flags)) if code is None else code


def _key(source: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (source, _headers(), "\0".join(flags), _compiler_version()):
        digest.update(f"{len(part)}\0{part}".encode())
    return digest.hexdigest()[:32]


@cache
def _headers() -> str:
    return "\0".join(f"{path.name}\0{path.read_text()}" for path in sorted(KERNELS.glob("*.cuh")))


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
    return bindings_of("cuda.bindings.nvrtc", "nvrtcVersion", "compiling kernels needs NVRTC")


def _done(answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    if int(status):
        raise CudaError(f"the compiler answered {status!r}")
    return results[0] if len(results) == 1 else tuple(results)
