"""ScaLAPACK as a peer: scalapack.c, compiled if an MPI compiler and Debian's package are there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from record import reason

BLOCKS = 64, 128
KINDS = "mpich", "openmpi"


class Scalapack:
    """The driver, built in `folder`. If it cannot be built, `missing` says why."""

    def __init__(self, folder: str, ranks: int) -> None:
        self.ranks, self.missing = ranks, ""
        self._run: list[str] = []
        self._blocks: dict[str, int] = {}  # the faster of BLOCKS, by case
        source = Path(__file__).with_suffix(".c")
        for kind in KINDS:
            program = f"{folder}/scalapack-{kind}"
            command = [f"mpicc.{kind}", "-O2", "-o", program, str(source), f"-lscalapack-{kind}"]
            try:
                subprocess.run([*command, "-lm"], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.missing += f"{kind}: {reason(error)}. "
                continue
            self._run = [f"mpiexec.{kind}", "-n", str(ranks), program]
            self.missing = ""
            break

    def seconds(self, case: str, n: int) -> float:
        """Seconds of a factorisation of "cholesky", "lu_factor" or "qr", on 1 x `ranks` ranks of
        one thread, in the block size that was faster in the first call.
        """
        if case not in self._blocks:
            self._blocks[case] = min(BLOCKS, key=lambda block: self._seconds(case, n, block))
        return self._seconds(case, n, self._blocks[case])

    @property
    def facts(self) -> dict[str, object]:
        """Facts to record with the figures."""
        return {"ScaLAPACK": self.missing or f"blocks of {self._blocks}, {self._run[0]}"}

    def _seconds(self, case: str, n: int, block: int) -> float:
        words = [case, n, block, 1, self.ranks, 1]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDMATH", "PYTHON"))}
        variables = {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [*self._run, *map(str, words)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
        return float(done.stdout)
