"""Calls in a function that torch.compile has seen: as in any other, then and thereafter."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch

import shardmath
from shardmath import autograd, collectives, fft, get_context
from shardmath.base.untraced import untraced
from shardmath.distribution import Redistribute, Replicated, Slab, redistribute
from shardmath.errors import CollectiveMismatch
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.linalg.advanced import Matmul, matmul
from shardmath.symmetric_memory import empty, get_symm_mem_workspace, memset32, rendezvous

X, Y = Slab.X, Slab.Y
N = 6
PRODUCT = {"distributions": [X, Replicated(), X]}


def planned(operator):
    with operator:
        operator.plan()
        return operator.execute()


def symmetric(x):
    array = allocate_symmetric_memory(tuple(x.shape), torch, dtype=x.dtype)
    array.copy_(x)
    return array


def through_a_handle(x):
    array = empty(*x.shape, dtype=x.dtype, device=x.device)
    array.copy_(x)
    handle = rendezvous(array)
    handle.barrier()
    found = handle.get_buffer((handle.rank + 1) % handle.world_size, x.shape, x.dtype).clone()
    handle.barrier()
    return found


def signalled(x):
    array = empty(*x.shape, dtype=x.dtype, device=x.device)
    handle = rendezvous(array)
    handle.put(x, (handle.rank + 1) % handle.world_size)
    handle.put_signal((handle.rank + 1) % handle.world_size)
    handle.wait_signal((handle.rank - 1) % handle.world_size)
    return array.clone()


def filled(x):
    words = torch.zeros(3, dtype=torch.uint32, device=x.device)
    memset32(words, 1, 5, 2)
    return x + words.float().sum()


def in_a_part(x):
    part = get_context().split(0)
    part.barrier()
    with part:
        return collectives.all_reduce(x)


CALLS = {
    "all_gather": collectives.all_gather,
    "all_reduce": collectives.all_reduce,
    "all_reduce out": lambda x: collectives.all_reduce(x, out=x),
    "all_to_all": collectives.all_to_all,
    "broadcast": collectives.broadcast,
    "reduce_scatter": collectives.reduce_scatter,
    "redistribute": lambda x: redistribute(x, X, Y),
    "Redistribute": lambda x: planned(Redistribute(x, X, Y)),
    "matmul": lambda x: matmul(x, x, **PRODUCT),
    "Matmul": lambda x: planned(Matmul(x, x, **PRODUCT)),
    "fft": lambda x: fft.fft(x.to(torch.complex64), distribution=X).real,
    "dct": lambda x: fft.dct(x, distribution=X),
    "FFT": lambda x: planned(fft.FFT(x.to(torch.complex64), distribution=X)).real,
    "allocation": symmetric,
    "workspace": lambda x: x + get_symm_mem_workspace(None, 64).world_size,
    "handle": through_a_handle,
    "signals": signalled,
    "memset32": filled,
    "split": in_a_part,
    "copies": autograd.copies,
}


# Those of which torch has operators: all is one graph.
OPERATORS = (
    *("all_gather", "all_reduce", "all_reduce out", "all_to_all", "broadcast", "reduce_scatter"),
    *("redistribute", "matmul", "fft", "dct", "copies"),
)


def compiled_of_ours():
    """The names of our functions that the compiler has compiled since it was last asked."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    folder = Path(shardmath.__file__).parent
    compiled = get_compilation_metrics()
    clear_compilation_metrics()
    return [entry.co_name for entry in compiled if folder in Path(entry.co_filename).parents]


def check(context, names, device="cpu"):
    """Of which calls the results differ, or more was compiled than the lines around the call."""
    from torch._dynamo import guards

    compiled_of_ours()

    wrong = []
    # What it measures, for its log alone, takes as long as all else.
    with context, patch.object(guards, "profile_guard_manager", lambda *_: 0.0):
        x = torch.arange(N * N, dtype=torch.float32, device=device).reshape(N, N) + context.rank
        for name in names:
            graphs = []

            def program(x, call=CALLS[name]):
                return call(x + 1) * 2

            def backend(graph, inputs, graphs=graphs):
                graphs.append([str(node.target) for node in graph.graph.nodes])
                return graph  # what is cut is the subject here, and not what becomes of it

            expected = program(x)
            torch._dynamo.reset()  # or else it would give up on a function that comes so often
            compiled = torch.compile(program, backend=backend)
            for call in (compiled, compiled):
                if not torch.equal(call(x), expected):
                    wrong.append(name)
            ours = [graph for graph in graphs if "shardmath" in " ".join(graph)]
            if ours if name not in OPERATORS else len(graphs) != 1 or not ours:
                wrong.append(f"{name}: {graphs[0]}")
            if ours := compiled_of_ours():
                wrong.append(f"{name}: {ours}")
            if not torch.equal(program(x), expected):
                wrong.append(f"{name}, afterwards")
    return wrong


def test_a_compiled_function_has_the_same_results(compiling_contexts):
    assert compiling_contexts.run(check, list(CALLS), ranks=2, timeout=600) == [[]] * 2


def met_first(context):
    """Results of a call that the compiler meets, twice, before it was told of any."""
    from torch._C._dynamo.eval_frame import reset_code

    from shardmath.base import untraced

    def call(x):
        return filled(x + 1) * 2  # of which torch has no operator: that would be traced instead

    program = torch.compile(call, backend="eager")
    results = []
    with context:
        expected = call(torch.ones(3)).tolist()
        for _ in range(2):
            torch._dynamo.reset()
            for code in untraced._marked:
                reset_code(code)
            compiled_of_ours()
            results += [program(torch.ones(3)).tolist() == expected for _ in range(2)]
            assert compiled_of_ours()
    return results


def test_a_call_that_the_compiler_meets_before_it_was_told_of_any(compiling_contexts):
    assert compiling_contexts.run(met_first, ranks=2, timeout=600) == [[True] * 4] * 2


def mistaken(context):
    """What a call in compiled code says, which ranks make differently, and where it waits."""
    with context:
        x = torch.ones(N + context.rank, N)
        program = torch.compile(lambda x: collectives.all_reduce(x + 1), backend="eager")
        try:
            program(x)
        except CollectiveMismatch as error:
            said = str(error)
        return said, collectives.all_reduce(torch.ones(2)).tolist()


def test_a_mistake_in_a_compiled_function_is_said_as_in_any_other(compiling_contexts):
    one, other = compiling_contexts.run(mistaken, ranks=2, timeout=600)
    assert one == other and one[1] == [2.0, 2.0]


def test_nothing_but_the_mark_is_added():
    @untraced
    def call(a, *, b=1):
        """What it does."""
        return a, b

    assert call(2, b=3) == (2, 3)
    assert (call.__name__, call.__doc__) == ("call", "What it does.")
