"""cuSOLVERMp on the cases of `gpu_factorisations.py`, timed alike.

    mpirun --allow-run-as-root -n 2 python benchmarks/gpu_factorisations_peers.py
    mpirun --allow-run-as-root -n 2 python benchmarks/gpu_factorisations_peers.py --sizes 16384

float64, a GPU for each process. Cholesky and LU are cuSOLVERMp's potrf and getrf, by its C
interface, with matrices on 1 x P and P x 1 processes in square blocks of several widths; LU and a
solution of 64 right-hand sides are also measured with nvmath-python's DirectSolver. Milliseconds
run from a call until its result is there, for the slowest process: the median of several calls.
Matrices are random, with 3 sqrt(n) added to the diagonal for Cholesky. Each row has the error of
its result, as in `gpu_factorisations.py`. Libraries that are not installed are left out and
reported.

It needs CuPy, mpi4py, and libcusolverMp, libcublasmp and libnccl where the loader finds them.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import record
from mpi4py import MPI

UNTIMED, REPEATS, ENOUGH = 1, 5, 2.0  # calls, and seconds of calls after which there are no more
RIGHT_SIDES = 64
REAL_64 = 1  # cudaDataType
COLUMN_MAJOR, LOWER = 0, 0
EPS = 2.0**-52

World = MPI.COMM_WORLD
RANK, SIZE = World.Get_rank(), World.Get_size()
Int, Size, Pointer = ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


def load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """NCCL and cuSOLVERMp, behind the libraries that these need. Raises OSError, RuntimeError."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    for name in ("cudart", "cublasLt", "cublas", "cusparse", "cusolver"):
        ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path, ctypes.RTLD_GLOBAL)
    nccl = ctypes.CDLL("libnccl.so.2", ctypes.RTLD_GLOBAL)
    ctypes.CDLL("libcublasmp.so.0", ctypes.RTLD_GLOBAL)
    return nccl, ctypes.CDLL("libcusolverMp.so.0", ctypes.RTLD_GLOBAL)


class NcclId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def require(status: int, what: str) -> None:
    """Raise RuntimeError where a library says that something is wrong."""
    if status:
        raise RuntimeError(f"{what}: status {status}")


class Blocks:
    """What this process has of n x n elements in blocks on `rows` x `columns` processes."""

    def __init__(self, n: int, block: int, rows: int, columns: int) -> None:
        self.n, self.block, self.rows, self.columns = n, block, rows, columns
        numbers = cupy.arange(n)
        own = RANK % rows, RANK // rows  # processes are numbered down the columns of the grid
        self.own_rows, self.own_columns = (
            numbers[numbers // block % count == place]
            for count, place in zip((rows, columns), own, strict=True)
        )

    def random(self, *, dominant: bool) -> Any:
        """The same matrix whatever the blocks are, in column-major order."""
        made = cupy.empty((len(self.own_rows), len(self.own_columns)), order="F")
        numbers = self.own_rows.astype(cupy.uint64)[:, None]
        for first in range(0, made.shape[1], 512):
            part = self.own_columns[first : first + 512].astype(cupy.uint64)
            made[:, first : first + 512] = _noise(numbers * np.uint64(self.n) + part)
        if dominant:
            there = self.own_rows[:, None] == self.own_columns[None, :]
            made += there * (3 * self.n**0.5)
        return made

    def times(self, part: Any, v: Any) -> Any:
        """The product of the matrix and vectors that every process has, on every process."""
        made = cupy.zeros((self.n, v.shape[1]))
        made[self.own_rows] = part @ v[self.own_columns]
        return _sum(made)

    def times_adjoint(self, part: Any, v: Any) -> Any:
        """The product of the transposed matrix and vectors."""
        made = cupy.zeros((self.n, v.shape[1]))
        made[self.own_columns] = part.T @ v[self.own_rows]
        return _sum(made)

    def lower(self, part: Any, *, strictly: bool = False) -> Any:
        """The lower triangle of a part."""
        is_below = self.own_rows[:, None] >= self.own_columns[None, :] + int(strictly)
        return cupy.where(is_below, part, 0.0)


def _noise(numbers: Any) -> Any:
    """Numbers of variance 1 that follow from these numbers alone: sums of four uniform ones."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    total = sum((x >> np.uint64(16 * part) & np.uint64(0xFFFF)).astype(float) for part in range(4))
    return (total / 65536 - 2) * 3**0.5


def _sum(x: Any) -> Any:
    return cupy.asarray(World.allreduce(cupy.asnumpy(x)))


class Library:
    """cuSOLVERMp with a communicator of all processes."""

    def __init__(self) -> None:
        self.nccl, self.solver = load()
        number = NcclId()
        if RANK == 0:
            require(self.nccl.ncclGetUniqueId(ctypes.byref(number)), "ncclGetUniqueId")
        number = NcclId.from_buffer_copy(World.bcast(bytes(number)))
        self.communicator = Pointer()
        initialise = self.nccl.ncclCommInitRank
        initialise.argtypes = [Pointer, ctypes.c_int, NcclId, ctypes.c_int]
        require(initialise(ctypes.byref(self.communicator), SIZE, number, RANK), "ncclCommInitRank")
        self.handle = Pointer()
        self.call("Create", ctypes.byref(self.handle), RANK, Pointer(0))
        version = ctypes.c_int()
        self.call("GetVersion", self.handle, ctypes.byref(version))
        self.version = version.value

    def call(self, name: str, *given: Any) -> None:
        """Call a function of the library. Raises RuntimeError."""
        require(getattr(self.solver, f"cusolverMp{name}")(*given), f"cusolverMp{name}")

    def factorisation(
        self, operation: str, blocks: Blocks, a: Any
    ) -> tuple[Callable[[], object], Any]:
        """What factorises a part in place, with workspace and all else made before; and the word of
        the GPU that then says what is wrong.
        """
        n, block, grid, matrix = Int(blocks.n), Int(blocks.block), Pointer(), Pointer()
        shape = ctypes.c_int32(blocks.rows), ctypes.c_int32(blocks.columns)
        to_grid = ctypes.byref(grid)
        self.call("CreateDeviceGrid", self.handle, to_grid, self.communicator, *shape, COLUMN_MAJOR)
        first = ctypes.c_uint32(0), ctypes.c_uint32(0)
        leading = Int(max(1, a.shape[0]))
        look = REAL_64, n, n, block, block, *first, leading
        self.call("CreateMatrixDesc", ctypes.byref(matrix), grid, *look)
        at = Pointer(a.data.ptr), Int(1), Int(1), matrix
        if operation == "cholesky":
            name, given = "Potrf", (self.handle, LOWER, n, *at)
            kept = None
        else:
            kept = cupy.zeros(blocks.n + blocks.block, cupy.int64)
            name, given = "Getrf", (self.handle, n, n, *at, Pointer(kept.data.ptr))
        sizes = Size(), Size()
        self.call(f"{name}_bufferSize", *given, REAL_64, *map(ctypes.byref, sizes))
        device, host = cupy.zeros(sizes[0].value + 1, cupy.uint8), bytearray(sizes[1].value + 1)
        on_host = (ctypes.c_byte * len(host)).from_buffer(host)
        info = cupy.zeros(1, cupy.int32)
        rooms = Pointer(device.data.ptr), sizes[0], on_host, sizes[1], Pointer(info.data.ptr)

        held = kept, device, host  # as long as the call

        def factorise() -> object:
            self.call(name, *given, REAL_64, *rooms)
            return held

        return factorise, info


def seconds(call: Callable[[], Any], before: Callable[[], object]) -> float:
    """The median of several calls, each after `before`, of the slowest process."""
    taken: list[float] = []
    for turn in range(UNTIMED + REPEATS):
        before()
        cupy.cuda.Device().synchronize()
        World.Barrier()
        start = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        spent = World.allreduce(time.perf_counter() - start, MPI.MAX)
        if turn >= UNTIMED:
            taken.append(spent)
        if sum(taken) > ENOUGH:
            break
    return statistics.median(taken)


def by_library(
    library: Library, n: int, operation: str, block: int, shape: tuple[int, int]
) -> dict[str, Any]:
    """A row of potrf or getrf: its time, and the residual of Cholesky's factor, in n eps."""
    blocks = Blocks(n, block, *shape)
    given = blocks.random(dominant=operation == "cholesky")
    a = given.copy(order="F")
    factorise, info = library.factorisation(operation, blocks, a)
    best = seconds(factorise, lambda: cupy.copyto(a, given))
    require(int(info[0]), operation)
    row: dict[str, Any] = {"system": f"cuSOLVERMp, {shape[0]} x {shape[1]}, blocks of {block}"}
    row["ms"] = round(best * 1e3, 2)
    row["TFLOP/s"] = round(n**3 / 3 * (1 + (operation != "cholesky")) / best / 1e12, 2)
    if operation == "cholesky":
        v = cupy.random.default_rng(0).standard_normal((n, 2))
        v = cupy.asarray(World.bcast(cupy.asnumpy(v)))
        want = blocks.times(blocks.lower(given), v)
        want += blocks.times_adjoint(blocks.lower(given, strictly=True), v)
        factor = blocks.lower(a)
        got = blocks.times(factor, blocks.times_adjoint(factor, v))
        row["residual"] = float(cupy.linalg.norm(got - want) / cupy.linalg.norm(want)) / n / EPS
    return row


def by_direct_solver(n: int, block: int) -> Iterator[dict[str, Any]]:
    """Rows of nvmath's DirectSolver on 1 x P processes: LU, and LU with a solution."""
    import nvmath.distributed as nvmath
    from nvmath.distributed.distribution import BlockCyclic, ProcessGrid
    from nvmath.distributed.linalg import DirectSolver

    if nvmath.get_context() is None:
        nvmath.initialize(RANK, World, backends=["nccl"])
    blocks = Blocks(n, block, 1, SIZE)
    given = blocks.random(dominant=False)
    a, right = given.copy(order="F"), _noise(cupy.arange(n * RIGHT_SIDES, dtype=cupy.uint64))
    right = right.reshape(n, RIGHT_SIDES)
    numbers = cupy.arange(n)
    own = numbers[numbers // block % SIZE == RANK]
    of_b = cupy.asfortranarray(right[own])
    b, order = of_b.copy(order="F"), ProcessGrid.Layout.COL_MAJOR
    split = [
        BlockCyclic(ProcessGrid(shape=shape, layout=order), sizes)
        for shape, sizes in (((1, SIZE), (block, block)), ((SIZE, 1), (block, RIGHT_SIDES)))
    ]

    def again() -> None:
        cupy.copyto(a, given)
        cupy.copyto(b, of_b)

    with DirectSolver(a, b, distributions=split) as solver:
        solver.plan()

        def both() -> None:
            solver.factorize()
            solver.solve()

        for operation, call in (("lu_factor", solver.factorize), ("solve", both)):
            best = seconds(call, again)
            flops = 2 / 3 * n**3 + (operation == "solve") * 2 * n * n * RIGHT_SIDES
            row = {"operation": operation, "system": f"DirectSolver, blocks of {block}"}
            row |= {"ms": round(best * 1e3, 2), "TFLOP/s": round(flops / best / 1e12, 2)}
            if operation == "solve":
                x = cupy.zeros((n, RIGHT_SIDES))
                x[own] = b
                x = _sum(x)
                left = cupy.linalg.norm(right - blocks.times(given, x), axis=0)
                norm = float(_sum((given**2).sum().reshape(1))[0]) ** 0.5
                scale = norm * cupy.linalg.norm(x, axis=0) + cupy.linalg.norm(right, axis=0)
                row["backward error"] = float((left / scale).max())
            yield row


def measure(sizes: list[int], block_sizes: list[int]) -> tuple[list[dict[str, Any]], int | None]:
    """All rows, printed as they come, and the library's version."""
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if RANK == 0:
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
        cupy.get_default_memory_pool().free_all_blocks()

    library: Library | None = None
    try:
        library = Library()
    except Exception as error:  # of a library that is not there
        keep({"system": "cuSOLVERMp", "left out": f"{type(error).__name__}: {error}"[:300]})
    for n in sizes:
        for operation in ("cholesky", "lu_factor"):
            for shape in ((1, SIZE), (SIZE, 1)):
                for block in block_sizes:
                    row = {"n": n, "operation": operation}
                    if library is None:
                        continue
                    try:
                        row |= by_library(library, n, operation, block, shape)
                    except Exception as error:  # all processes', such as one of a grid
                        row["left out"] = f"{shape}: {type(error).__name__}: {error}"[:300]
                    keep(row)
        try:
            for row in by_direct_solver(n, block_sizes[-1]):
                keep({"n": n, **row})
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            keep({"n": n, "system": "DirectSolver", "left out": reason})
    return rows, None if library is None else library.version


def main() -> None:
    """Measure, print, keep in results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--blocks", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--commit", default="", help="where the source has no repository")
    options = parser.parse_args()
    cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
    rows, version = measure(options.sizes, options.blocks)
    if RANK == 0:
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        facts = {"gpu": name, "ranks": SIZE, "cuSOLVERMp": version}
        record.keep(f"gpu_factorisations_peers_{SIZE}", rows, options.commit, **facts)


if __name__ == "__main__":
    main()
