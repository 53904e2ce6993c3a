"""What one rank of many does in a 3-D transform, on a few GPUs: a rehearsal for a machine of 8.

    python benchmarks/gpu_fft_share.py 4 --ranks 8

All GPUs play rank 0. What rank 0 sends to its peers goes to the other GPUs in turns, each peer's
part to memory of its own there, so a link carries what it would carry, at the same time as the
transforms of a rank's size. Results are not those of a transform, and barriers are of as many as
there are GPUs. `steps` does one thing after another, `chunks` overlaps exchanges with transforms;
`local` and `wire` are the parts of `chunks` alone. Milliseconds, in CUDA graphs. For the cases in
TIMELINES it prints when each part of one execution ended, in microseconds.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace

from on_gpus import command, run
from shardmath.operators.fft.launching import Launch, is_double
from shardmath.operators.fft.pipeline import Pipeline
from shardmath.operators.fft.program import UserArrays

from shardmath.arrays import library_named
from shardmath.cuda.graph import Graph
from shardmath.distribution import Slab
from shardmath.fft import FFTDirection, FFTOptions
from shardmath.local.gpu.fft import CuFFT
from shardmath.operators.fft import rank_plan
from shardmath.operators.fft.local_steps import LocalFFT, packed
from shardmath.operators.fft.problem import check, describe
from shardmath.operators.fft.push_stream import PushStream, PushTables
from shardmath.operators.fft.search import choose
from shardmath.operators.fft.strategy import ON_GPUS
from shardmath.operators.lanes import LANES, Lane

CASES = [
    *itertools.product((256, 512), ("complex64", "float32"), (False, True)),
    *itertools.product((512,), ("complex128",), (False, True)),
    *itertools.product((1024,), ("complex64", "float32", "complex128"), (False, True)),
]
CALLS = {256: 20, 512: 8, 1024: 3}
TIMELINES = [(512, "complex64"), (1024, "complex64")]
HEAD_START = 20_000_000  # cycles that the GPU sleeps while an execution is put on its stream


@dataclass(frozen=True)
class Played(Launch):
    """Rank 0's launches, with its peers' buffers on the other GPUs.

    `shared` has, by name, the addresses of a buffer on this GPU and then on the others, and the
    distance of the blocks that rank 0 writes to its peers.
    """

    shared: dict
    peers: int

    @property
    def rank(self):
        """Rank 0 on all GPUs, or boxes would end behind their buffers."""
        return 0

    def peer_addresses(self, buffer, strides):
        """See Launch; `strides` are those of all results."""
        where, block_bytes = self.shared[buffer]
        if isinstance(self.plan.program, Pipeline):  # whose rows know how far
            return where, []
        players = [player(peer, len(where)) for peer in range(self.peers)]
        return [where[gpu] + peer * block_bytes for peer, gpu in enumerate(players)], strides


def player(peer, gpus):
    """Which GPU has a peer's buffers, counted from this one."""
    return 1 + (peer - 1) % (gpus - 1) if peer else 0


def on_gpus(pipeline, block_bytes, gpus):
    """The rows of all peers as rows for so many GPUs, at a distance from each other."""
    chunks = [
        replace(
            chunk,
            rows=tuple(
                replace(
                    rows,
                    peer=player(rows.peer, gpus),
                    target=rows.target + rows.peer * block_bytes[chunk.exchange],
                )
                for rows in chunk.rows
            ),
        )
        for chunk in pipeline.chunks
    ]
    return replace(pipeline, size=gpus, chunks=tuple(chunks))


class Share:
    """Memory, stages and launches of one case."""

    def __init__(self, ranks, n, dtype, back, size):
        self.ranks, self.size = ranks, size
        kind = "R2C" if dtype.startswith("float") else "C2C"
        own = n // size
        self.operand = library_named("torch").empty((own, n, n), dtype, "C", str(ranks.device))
        whole = self.operand
        (ranks.torch.view_as_real(whole) if whole.is_complex() else whole).normal_()
        spec = library_named("torch").spec(whole)
        options = FFTOptions(redistribute=back)
        said = describe(spec, Slab.X, None, None, kind, FFTDirection.FORWARD, options, None)
        self.problem = check([said] * size)
        self.plan = rank_plan.DevicePlan(self.problem, choose(self.problem, ON_GPUS), (0,) * size)
        self.result = packed("result", self.problem.target.local_shape(0), self.problem.result)
        nbytes = self.result.size * self.result.itemsize
        block = nbytes // size  # what goes to one peer
        buffers = {"receive 0": block, "result": block // own if back else block}
        self.block_bytes = [buffers["receive 0"], buffers["result"]]
        self.shared, self.held = {}, []
        for place, block_bytes in buffers.items():
            buffer, addresses = ranks.shared(nbytes)
            self.held.append(buffer)
            mine = ranks.rank
            self.shared[place] = ([*addresses[mine:], *addresses[:mine]], block_bytes)
        self.held += [ranks.context.heap.allocate(nbytes) for _ in range(2)]
        self.addresses = {
            "operand": whole.data_ptr(),
            "work": self.held[2].block.address,
            "receive 1": self.held[3].block.address,
            **{place: where[0] for place, (where, _) in self.shared.items()},
        }

    def launch(self, chunks):
        """Rank 0's launches; None where there are no chunks."""
        ranks, team = self.ranks, self.ranks.context.team
        rank_plan.USE_CHUNKS = chunks
        source = packed("operand", tuple(self.operand.shape), self.problem.dtype)
        arrays, results = UserArrays(source, self.result), rank_plan.Results(True, True)
        plan = rank_plan.make_rank_plan(self.plan, team.device, 0, arrays, results)
        rank_plan.USE_CHUNKS = True
        if isinstance(plan.program, Pipeline) != chunks:
            return None
        if chunks:
            program = on_gpus(plan.program, self.block_bytes, ranks.size)
            plan = rank_plan.RankPlan(team.device, program, PushTables(team.device, program))
        stream, cufft = ranks.stream(), CuFFT.of(team.device)
        for step in plan.program.local:
            if isinstance(step, LocalFFT):
                cufft.prepare(step.kind, double=is_double(step), plan=step.plan, stream=stream)
        made = Played(
            ranks.context,
            plan,
            self.addresses,
            Lane.numbered(ranks.context, LANES - 1),
            True,
            stream,
            self.shared,
            self.size,
        )
        for step in plan.program.local:  # loads the kernels
            made.local(stream, step)
        return made

    def time(self, launches):
        """Milliseconds."""
        graph = Graph(self.ranks.context.team.device, launches)
        calls = CALLS[self.problem.source.global_shape[0]]
        micros = self.ranks.time(lambda: graph.launch(self.ranks.stream()), calls, graph=False)
        return float(f"{micros / 1e3:.4g}")


def piped(launch, stream, *, local, mark=lambda name, stream: None):
    """What a pipeline launches, with or without its transforms; after each part, `mark`."""
    program, push_stream = launch.plan.program, PushStream.of(launch.context)
    sources = [launch.addresses[place] for place in program.sources]
    targets = [launch.peer_addresses(place, ())[0] for place in program.shared]

    def transform(steps, name):
        if local:
            for step in steps:
                launch.local(stream, step)
        mark(name, stream)

    mark("begin", stream)
    push_stream.start(launch.plan.tables, stream, sources, targets)
    mark("all pushed", push_stream.stream)
    for number, steps in enumerate(program.first):
        transform(steps, f"first {number}")
        push_stream.signal_ready(stream)
    for number, steps in enumerate(program.second):
        push_stream.wait_for_chunk(stream)
        mark(f"arrived {number}", stream)
        transform(steps, f"second {number}")
        if program.two_exchanges:
            push_stream.signal_ready(stream)
    if program.two_exchanges:
        push_stream.wait_for_chunk(stream)
    transform(program.last, "last")
    push_stream.join(stream)
    mark("end", stream)


def timeline(ranks, launch):
    """{what: microseconds after the begin when it had ended}, of one execution."""
    torch, marks = ranks.torch, []

    def mark(name, stream):
        event = torch.cuda.Event(enable_timing=True)
        pushing = int(stream) != ranks.stream()
        event.record(torch.cuda.ExternalStream(int(stream)) if pushing else None)
        marks.append((name, event))

    for _ in range(3):
        marks.clear()
        torch.cuda.synchronize()
        ranks.context.barrier()
        torch.cuda._sleep(HEAD_START)
        piped(launch, ranks.stream(), local=True, mark=mark)
    torch.cuda.synchronize()
    begin = marks[0][1]
    found = [(begin.elapsed_time(event) * 1e3, name) for name, event in marks]
    return {name: round(micros) for micros, name in sorted(found)}


def measured(ranks, n, dtype, back, size):
    """One row."""
    share = Share(ranks, n, dtype, back, size)
    row = {"n": n, "dtype": dtype, "result": "back" if back else "transposed", "of": size}
    strides = [share.result.strides] * size
    steps, chunks = share.launch(False), share.launch(True)
    row["steps_ms"] = share.time(lambda on: steps.run(on, strides))
    if chunks is not None:
        row["chunks_ms"] = share.time(lambda on: chunks.run(on, strides))
        row["wire_ms"] = share.time(lambda on: piped(chunks, on, local=False))
        row["cuts"] = str(share.plan.chunking)
        if (n, dtype) in TIMELINES:
            row["timeline_us"] = timeline(ranks, chunks)
    alone = chunks or steps
    row["local_ms"] = share.time(
        lambda on: [alone.local(on, step) for step in alone.plan.program.local]
    )
    return row


def measure(ranks, size):
    rows = []
    for n, dtype, back in CASES:
        rows.append(measured(ranks, n, dtype, back, size))
        ranks.torch.cuda.empty_cache()
        ranks.context.barrier()
        if ranks.rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="how many ranks there would be")
    options = parser.parse_args()
    assert options.gpus > 1, "peers have their buffers on other GPUs"
    run("gpu_fft_share", measure, options, options.ranks)


if __name__ == "__main__":
    main()
