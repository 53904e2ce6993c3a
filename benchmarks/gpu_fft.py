"""3-D transforms on GPUs beside torch.fft with NCCL's all_to_all, in one run.

    python benchmarks/gpu_fft.py 8

The operand is a slab along X; the result a slab along Y ("transposed"), or along X again ("back").
Ours runs in a CUDA graph as it is (`ours`), with no exchange overlapped (`steps`), and called one
by one (`called`). torch.fft with NCCL also runs in a graph; `local` are its transforms alone, and
`wire` is its all_to_all of packed data. Results are compared before they are timed. If a row fails,
this is reported, and the next begins.
"""

from __future__ import annotations

import os
import time
import traceback

from on_gpus import command, run

from shardmath.arrays import library_named
from shardmath.distribution import Slab
from shardmath.fft import FFT, FFTOptions
from shardmath.handles.allocation import empty_on_heap
from shardmath.operators.fft import gpus, lowering
from shardmath.operators.workspace import give_back

# By n and dtype, milliseconds on 8 H200 (transposed, back): the goals; and what cuFFTMp 12.1 took,
# through nvmath-python 1.0, on such a machine on another day.
CASES = {
    (512, "complex64"): ((0.45, 0.78), (0.552, 0.979)),
    (256, "complex64"): ((0.09, 0.145), (0.097, 0.163)),
    (1024, "complex64"): ((3.4, 6.0), (4.1, 7.34)),
    (512, "float32"): ((0.28, 0.47), (0.358, 0.592)),
    (256, "float32"): ((0.085, 0.135), (0.108, 0.176)),
    (1024, "float32"): ((1.9, 3.3), (2.383, 4.025)),
    (512, "complex128"): ((0.95, 1.6), (1.153, 1.983)),
    (1024, "complex128"): ((7.6, 12.8), (9.5, 15.95)),
}
CALLS = {256: 20, 512: 6, 1024: 2}
LARGE = 2 << 30  # bytes of a rank's operand, from which on calls are not captured by torch


def operand(ranks, n, dtype):
    """This rank's planes, on the symmetric heap."""
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
        del y
        taken = torch.empty_like(blocks)
        self.ranks.dist.all_to_all_single(taken, blocks)
        del blocks
        z = torch.fft.fft(taken.view(size * planes, rows // size, columns), dim=0)
        if not self.back:
            return z
        self.ranks.dist.all_to_all_single(taken, z.contiguous())
        shape = (planes, rows, columns)
        return taken.view(size, planes, rows // size, columns).transpose(0, 1).reshape(shape)

    def first(self):
        """Every plane transformed."""
        fft = self.ranks.torch.fft
        return (fft.rfftn if self.real else fft.fftn)(self.x, dim=(1, 2))

    def local(self):
        """The transforms alone."""
        y = self.first()
        self.ranks.torch.fft.fft(y.view(y.shape[0] * self.ranks.size, -1, y.shape[2]), dim=0)


def measured(ranks, x, n, dtype, back):
    """The row of one transform."""
    baseline, calls = Baseline(ranks, x, back), CALLS[n]
    row = {"n": n, "dtype": dtype, "result": "back" if back else "transposed", "ranks": ranks.size}
    with FFT(x, distribution=Slab.X, options=FFTOptions(redistribute=back)) as transform:
        transform.plan()
        result = transform.execute()

        def ours(chunks=True):
            # Transforms without chunks are not cached.
            lowering.USE_CHUNKS = gpus.USE_GRAPHS = chunks
            transform.execute(out=result)

        compare(baseline, result, ours, dtype)
        systems = {
            "ours": ours,
            "steps": lambda: ours(chunks=False),
            "called": lambda: ours(chunks=True),
            "nccl": baseline,
        }
        eager = {"called"} | ({"nccl", "local"} if x.nbytes > LARGE else set())
        if not back:
            systems["local"] = baseline.local
            ready, taken = (ranks.torch.empty_like(result) for _ in range(2))
            systems["wire"] = lambda: ranks.dist.all_to_all_single(taken, ready)
        found = ranks.times(systems, calls, eager=eager)
    row |= {f"{name}_ms": micros / 1e3 for name, micros in found.items()}
    row["ratio_to_nccl"] = found["nccl"] / found["ours"]
    if ranks.size == 8:
        row["target_ms"], row["cufftmp_seen_elsewhere_ms"] = (x[back] for x in CASES[n, dtype])
    return row


def compare(baseline, result, ours, dtype):
    """Raise ArithmeticError unless first calls and later ones, in chunks or not, make the same."""
    wanted = baseline()
    tolerance = 1e-5 if dtype in ("complex64", "float32") else 1e-13
    for chunks in (True, True, True, False):
        difference = float((result - wanted).abs().max() / wanted.abs().max())
        if not difference < tolerance:
            raise ArithmeticError(f"the results differ by {difference}")
        result.zero_()
        ours(chunks)


def measure(ranks, seconds):
    started = time.monotonic()
    for n, dtype in CASES:
        if ranks.largest(time.monotonic() - started) > seconds:
            break
        x = operand(ranks, n, dtype)
        for back in (False, True):
            failure, row = "", {}
            try:
                row = measured(ranks, x, n, dtype, back)
            except Exception:
                failure = traceback.format_exc(limit=-3)
            lowering.USE_CHUNKS = gpus.USE_GRAPHS = True
            ranks.torch.cuda.empty_cache()
            if ranks.largest(bool(failure)):
                print(f"{n}^3 {dtype}, back: {back}: {failure or 'failed elsewhere'}", flush=True)
                continue
            yield row
        del x
        give_back(ranks.context)
        ranks.context.barrier()


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--seconds", type=float, default=40, help="begin no size after so long")
    options = parser.parse_args()
    os.environ.setdefault("SHARDMATH_TIMEOUT", "8")  # a hang costs no more than this
    run("gpu_fft", measure, options, options.seconds)
