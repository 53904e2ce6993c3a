"""A cluster of Slurm's own on this machine: one node, for as long as it is needed.

It takes root, and Debian's package slurm-wlm. Its files are in one folder, its ports are free ones,
and its daemons end with the process that has started them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardmath.launch.ranks import die_with

CPUS = 8  # of which the node tells, whatever it has
_UP = 60.0  # seconds in which the node is to be there
_LOOK = 0.1
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
EpilogMsgTime=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """There is no Slurm here: why."""


class Cluster:
    """The cluster whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        variables = {**os.environ, **self._variables}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster, whose node is idle. Raises Unavailable."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("srun", "slurmctld", "slurmd", "munged"))):
        raise Unavailable("Slurm takes root and its daemons: apt install slurm-wlm")
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for path in (folder, *folder.parents):  # the daemons look at who may write there
        if path.stat().st_uid == os.geteuid() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode & ~0o022 | 0o111)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    ports = [free_port(), free_port()]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host, folder=folder, cpus=CPUS, controller=ports[0], daemon=ports[1]
        )
    )
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    names = {"socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    options = [f"--{names[name]}={path}" for name, path in files.items()]
    with ExitStack() as stack:
        made = Cluster(folder)
        variables = {**os.environ, **made._variables}
        start(
            stack, ["munged", "--foreground", "--force", f"--key-file={key}", *options], variables
        )
        wait_until(files["socket"].exists, "munged does not start")
        start(stack, ["slurmctld", "-D", "-c"], variables)
        start(stack, ["slurmd", "-D", "-c", "-N", host], variables)
        wait_until(lambda: " idle" in made.run("sinfo", "-h").stdout, "Slurm has no idle node")
        yield made
        made.run("scancel", "--full", "--state=RUNNING", "--user=root")


def start(stack: ExitStack, command: Sequence[str], variables: dict[str, str]) -> None:
    """Start a daemon that ends with the stack, and with this process."""
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: die_with(parent),  # noqa: PLW1509  (here is one thread)
    )

    def end() -> None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.send_signal(signal.SIGKILL)
        process.wait()

    stack.callback(end)


def wait_until(there: object, why: str) -> None:
    """Wait for what `there()` says. Raises Unavailable with `why` where it does not come."""
    assert callable(there)
    deadline = time.monotonic() + _UP
    while not there():
        if time.monotonic() > deadline:
            raise Unavailable(why)
        time.sleep(_LOOK)


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
