"""What one rank of many does in a 3-D transform, on a few GPUs: a rehearsal for a machine of 8.

    python benchmarks/gpu_fft_share.py 4 --ranks 8

All GPUs play rank 0. What rank 0 sends to its peers goes to the other GPUs in turns, each peer's
part to memory of its own there. So a link carries what it would carry on 8, at the same time as the
transforms of a rank's size. Results are not those of a transform, and barriers are among the GPUs
that there are. `steps` does one thing after another, `chunks` overlaps exchanges with transforms;
`local` and `wire` are the two parts of `chunks` alone. Milliseconds, in CUDA graphs. For the cases
in TIMELINES it prints when each part of one execution ended, in microseconds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from on_gpus import command, run

from shardmath.arrays import library_named
from shardmath.cuda.graph import Graph
from shardmath.distribution import Slab
from shardmath.fft import FFTDirection, FFTOptions
from shardmath.operators.fft.gpus import PushStream, TransformProgram
from shardmath.operators.fft.local_steps import LocalStep
from shardmath.operators.fft.lowering import GPUPlan, Results, UserArrays, lowered
from shardmath.operators.fft.problem import check, describe
from shardmath.operators.fft.pushes import Signal, Start, started
from shardmath.operators.fft.strategy import ON_GPUS, choose
from shardmath.operators.lanes import LANES, Lane
from shardmath.program.gpu_steps import Memories
from shardmath.program.rank_program import packed
from shardmath.program.steps import Fused

CASES = [
    *itertools.product((256, 512), ("complex64", "float32"), (False, True)),
    *itertools.product((512,), ("complex128",), (False, True)),
    *itertools.product((1024,), ("complex64", "float32", "complex128"), (False, True)),
]
CALLS = {256: 20, 512: 8, 1024: 3}
READY = Signal("signal_ready")
TIMELINES = [(512, "complex64"), (1024, "complex64")]
HEAD_START = 20_000_000  # cycles that the GPU sleeps while an execution is put on its stream


class Played(TransformProgram):
    """Rank 0's program on every GPU, with its peers' memories on the other GPUs.

    `places` has, by name, the addresses of a memory on this GPU and then on the others, and the
    distance of the blocks that rank 0 writes to its peers.
    """

    def __init__(self, context, lane, program, places, peers):
        self.places, self.peers = places, peers
        super().__init__(context, lane, program, forward=True)
        self.rank, self.size = 0, peers  # or boxes would end behind their memories

    def reached(self, peer, memory, memories):
        """See GPUProgram. The rows of chunks know how far; results lie as this one."""
        where, block_bytes = self.places[memory]
        if self.tables is not None:
            return where[peer], ()
        strides = self.program.arrays["out"].strides if memory == "out" else ()
        return where[player(peer, len(where))] + peer * block_bytes, strides


def player(peer, gpus):
    """Which GPU has a peer's memory, counted from this one."""
    return 1 + (peer - 1) % (gpus - 1) if peer else 0


def on_gpus(program, block_bytes, gpus):
    """Chunks for all peers as chunks for so many GPUs, at a distance from each other."""
    first, *others = program.steps
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
        for chunk in first.plan.chunks
    ]
    start = replace(first.plan, size=gpus, chunks=tuple(chunks))
    return replace(program, steps=(started(start), *others))


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
        self.plan = GPUPlan(self.problem, choose(self.problem, ON_GPUS), (0,) * size)
        self.result = packed("out", self.problem.target.local_shape(0), self.problem.result)
        nbytes = self.result.size * self.result.itemsize
        block = nbytes // size  # what goes to one peer
        buffers = {"receive 0": block, "out": block // own if back else block}
        self.block_bytes = [buffers["receive 0"], buffers["out"]]
        self.shared, self.held = {}, []
        for place, block_bytes in buffers.items():
            buffer, addresses = ranks.symmetric_memory(nbytes)
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

    def program(self, chunking):
        """(rank 0's program, its memories); None where it is not cut."""
        context = self.ranks.context
        source = packed("operand", tuple(self.operand.shape), self.problem.dtype)
        arrays, results = UserArrays(source, self.result), Results(True, True)
        program = lowered(self.plan, 0, arrays, results, chunking)
        if chunking is not None:
            if not starts(program.steps[0]):
                return None
            program = on_gpus(program, self.block_bytes, self.ranks.size)
        lane = Lane.numbered(context, LANES - 1)
        made = Played(context, lane, program, self.shared, self.size)
        own = {name: lane.private(name, memory.nbytes) for name, memory in program.memories.items()}
        own |= self.addresses
        made.prepare(own, self.ranks.stream(), (0, self.result.end))
        return made, Memories(own, (), self.ranks.stream())

    def time(self, launches):
        """Milliseconds."""
        graph = Graph(self.ranks.context.team.device, launches)
        calls = CALLS[self.problem.source.global_shape[0]]
        return self.ranks.time(lambda: graph.launch(self.ranks.stream()), calls, graph=False) / 1e3


def starts(step):
    """Whether a step starts the kernel that pushes."""
    return isinstance(step, Fused) and isinstance(step.plan, Start)


def piped(program, memories, *, local=True, pushes=True, mark=lambda name, stream: None):
    """What launches a program, with or without its transforms or pushes; `mark` at each part."""
    launches = []
    for _, step in program.steps:
        name = str(step) if isinstance(step, Fused) else ""
        launch = program.bound(step, memories)
        wanted = local if isinstance(step, LocalStep) else pushes
        if launch is not None and wanted:
            launches.append((name, step, launch))

    def run(stream):
        mark("begin", stream)
        for name, step, launch in launches:
            if name == str(READY):
                mark("transformed", stream)
            launch(stream)
            if starts(step):
                mark("all pushed", PushStream.of(program.context).stream)
            elif name:
                mark(name, stream)

    return run


def timeline(ranks, program, memories):
    """{what: microseconds after the begin when it had ended}, of one execution."""
    torch, marks = ranks.torch, []

    def mark(name, stream):
        event = torch.cuda.Event(enable_timing=True)
        pushing = int(stream) != ranks.stream()
        event.record(torch.cuda.ExternalStream(int(stream)) if pushing else None)
        marks.append((name, event))

    run = piped(program, memories, mark=mark)
    for _ in range(3):
        marks.clear()
        torch.cuda.synchronize()
        ranks.context.barrier()
        torch.cuda._sleep(HEAD_START)
        run(ranks.stream())
    torch.cuda.synchronize()
    begin = marks[0][1]
    found = [(begin.elapsed_time(event) * 1e3, name) for name, event in marks]
    return {name: round(micros) for micros, name in sorted(found)}


def measured(ranks, n, dtype, back, size):
    """The row of one case."""
    share = Share(ranks, n, dtype, back, size)
    row = {"n": n, "dtype": dtype, "result": "back" if back else "transposed", "of": size}
    steps, chunks = share.program(None), share.program(share.plan.chunking)
    row["steps_ms"] = share.time(piped(*steps))
    if chunks is not None:
        row["chunks_ms"] = share.time(piped(*chunks))
        row["wire_ms"] = share.time(piped(*chunks, local=False))
        row["cuts"] = str(share.plan.chunking)
        if (n, dtype) in TIMELINES:
            row["timeline_us"] = timeline(ranks, *chunks)
    row["local_ms"] = share.time(piped(*(chunks or steps), pushes=False))
    return row


def measure(ranks, size):
    for n, dtype, back in CASES:
        yield measured(ranks, n, dtype, back, size)
        ranks.torch.cuda.empty_cache()
        ranks.context.barrier()


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="how many ranks there would be")
    options = parser.parse_args()
    assert options.gpus > 1, "peers have their buffers on other GPUs"
    run("gpu_fft_share", measure, options, options.ranks)
