"""3-D transforms on GPUs beside torch.fft with NCCL's all_to_all, in one run.

    python benchmarks/gpu_fft.py 8

The operand is a slab along X; the result a slab along Y ("transposed"), or along X again ("back").
Each figure is the median of several runs of many calls, and of these the slowest rank's: in a CUDA
graph, and called one by one. Results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import record

from shardmath import startup
from shardmath.distribution import Slab
from shardmath.fft import FFT, FFTOptions
from shardmath.launch.function import spawn
from shardmath.operators.workspace import Workspace

REPEATS = 5
CASES = [
    (n, dtype)
    for dtype in ("complex64", "float32", "complex128")
    for n in (256, 512, 1024)
    if (n, dtype) != (256, "complex128")
]
# On 8 H200, milliseconds (transposed, back): what issue 5 asks for; and what cuFFTMp 12.1 took,
# through nvmath-python 1.0, on such a machine on another day.
TARGETS = {
    (256, "complex64"): (0.090, 0.145),
    (512, "complex64"): (0.45, 0.78),
    (512, "complex128"): (0.95, 1.6),
    (1024, "complex64"): (3.4, 6.0),
    (1024, "complex128"): (7.6, 12.8),
    (256, "float32"): (0.085, 0.135),
    (512, "float32"): (0.28, 0.47),
    (1024, "float32"): (1.9, 3.3),
}
SEEN_ELSEWHERE = {
    (256, "complex64"): (0.097, 0.163),
    (512, "complex64"): (0.552, 0.979),
    (512, "complex128"): (1.153, 1.983),
    (1024, "complex64"): (4.10, 7.34),
    (1024, "complex128"): (9.50, 15.95),
    (256, "float32"): (0.108, 0.176),
    (512, "float32"): (0.358, 0.592),
    (1024, "float32"): (2.383, 4.025),
}


class Ranks:
    """What a rank measures with: its context, and NCCL's group."""

    def __init__(self, store: str, size: int) -> None:
        self.started = time.monotonic()
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.size = int(os.environ["SHARDMATH_RANK"]), size
        torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        self.context = startup.initialize(self.rank)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=size,
            device_id=self.device,
        )

    def slowest(self, value):
        """The largest of all ranks' values."""
        return max(self.context.agree("slowest", lambda: value, lambda values: values))

    def time(self, call, calls, *, graph):
        """Milliseconds per call: of all ranks, the slowest."""
        torch = self.torch

        def many():
            for _ in range(calls):
                call()

        call()
        torch.cuda.synchronize()
        run = many
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                many()
            run = captured.replay
            run()
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            self.context.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / calls)
        self.context.team.check()
        return self.slowest(statistics.median(times))


def operand(ranks, n, dtype):
    """This rank's planes, on the symmetric heap."""
    from shardmath.arrays import library_named
    from shardmath.symmetric.allocation import empty_on_heap

    x = empty_on_heap(
        ranks.context, library_named("torch"), Slab.X.shape(ranks.rank, (n,) * 3), dtype, "C"
    )
    generator = ranks.torch.Generator(ranks.device).manual_seed(ranks.rank)
    real = ranks.torch.view_as_real(x) if dtype.startswith("complex") else x
    real.normal_(generator=generator)
    return x


class Baseline:
    """torch.fft and NCCL: two local transforms, blocks in order, all_to_all, one more transform."""

    def __init__(self, ranks, x, back):
        self.ranks, self.x, self.back = ranks, x, back
        self.real = not x.is_complex()

    def __call__(self):
        """The result of all."""
        torch, size = self.ranks.torch, self.ranks.size
        y = self.first()
        planes, rows, columns = y.shape
        blocks = y.view(planes, size, rows // size, columns).transpose(0, 1).contiguous()
        taken = torch.empty_like(blocks)
        self.ranks.dist.all_to_all_single(taken, blocks)
        z = torch.fft.fft(taken.view(size * planes, rows // size, columns), dim=0)
        if not self.back:
            return z
        self.ranks.dist.all_to_all_single(taken, z.contiguous())
        return taken.view(size, planes, rows // size, columns).transpose(0, 1).reshape(y.shape)

    def first(self):
        """Every plane transformed."""
        fft = self.ranks.torch.fft
        return (fft.rfftn if self.real else fft.fftn)(self.x, dim=(1, 2))

    def local(self):
        """The transforms alone."""
        y = self.first()
        self.ranks.torch.fft.fft(y.view(y.shape[0] * self.ranks.size, -1, y.shape[2]), dim=0)


def measure_one(ranks, x, n, dtype, back):
    """One row."""
    torch = ranks.torch
    calls = {256: 20, 512: 8, 1024: 2}.get(n, 2)
    row = {"n": n, "dtype": dtype, "result": "back" if back else "transposed", "ranks": ranks.size}
    with FFT(x, distribution=Slab.X, options=FFTOptions(redistribute=back)) as transform:
        transform.plan()
        result = transform.execute()
        baseline = Baseline(ranks, x, back)
        wanted = baseline()
        error = (result - wanted).abs().max() / wanted.abs().max()
        row["difference"] = ranks.slowest(float(error))
        assert row["difference"] < (1e-5 if dtype in ("complex64", "float32") else 1e-13), row
        del wanted

        def ours():
            transform.execute(out=result)

        row["ours_ms"] = ranks.time(ours, calls, graph=True)
        row["ours_called_ms"] = ranks.time(ours, calls, graph=False)
        row["nccl_ms"] = ranks.time(baseline, calls, graph=True)
        row["local_ms"] = ranks.time(baseline.local, calls, graph=True)
    row["ratio_to_nccl"] = row["nccl_ms"] / row["ours_ms"]
    if ranks.size == 8 and (n, dtype) in TARGETS:
        row["target_ms"] = TARGETS[n, dtype][back]
        row["cufftmp_seen_elsewhere_ms"] = SEEN_ELSEWHERE[n, dtype][back]
    torch.cuda.synchronize()
    return row


def measure(store, size, seconds):
    ranks = Ranks(store, size)
    rows = []
    for n, dtype in CASES:
        if ranks.slowest(time.monotonic() - ranks.started) > seconds:
            break
        x = operand(ranks, n, dtype)
        for back in (False, True):
            rows.append(measure_one(ranks, x, n, dtype, back))
            if ranks.rank == 0:
                print(json.dumps(rounded(rows[-1])), flush=True)
        del x
        Workspace.of(ranks.context).release()
        ranks.torch.cuda.empty_cache()
        ranks.context.barrier()
    facts = {
        "gpu": ranks.torch.cuda.get_device_name(),
        "gpus": size,
        "versions": {
            "torch": ranks.torch.__version__,
            "nccl": ".".join(map(str, ranks.torch.cuda.nccl.version())),
            "cuda": ranks.torch.version.cuda,
        },
        "note": "cufftmp_seen_elsewhere_ms: cuFFTMp 12.1 through nvmath-python 1.0 on such a "
        "machine on another day, for orientation; the other figures are of this run",
    }
    ranks.torch.cuda.synchronize()
    ranks.dist.destroy_process_group()
    startup.finalize()
    return [rows, facts]


def table(rows):
    """The rows as lines of text."""
    names = ("ours_ms", "ours_called_ms", "nccl_ms", "local_ms", "target_ms",
             "cufftmp_seen_elsewhere_ms")  # fmt: skip
    lines = [f"{'size':>6} {'dtype':10} {'result':10} " + " ".join(f"{n[:14]:>14}" for n in names)]
    for row in rows:
        figures = " ".join(f"{row[n]:14.4g}" if n in row else 14 * " " for n in names)
        lines.append(f"{row['n']:4}^3 {row['dtype']:10} {row['result']:10} {figures}")
    return "\n".join(lines)


def rounded(row):
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", type=int, nargs="?", default=8)
    parser.add_argument("--seconds", type=float, default=18, help="begin no size after so long")
    parser.add_argument("--commit", default="", help="where the source has no repository")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = spawn(measure, options.gpus, f"{folder}/store", options.gpus, options.seconds)
    rows, facts = found[0]
    if options.commit:
        facts["commit"] = options.commit
    path = record.write("gpu_fft", [rounded(row) for row in rows], **facts)
    out = os.environ.get("OUT")
    if out:
        Path(out, path.name).write_text(path.read_text())
    print(table(rows))


if __name__ == "__main__":
    main()
