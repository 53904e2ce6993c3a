"""Compiled, transformed and recomputed calls have the results and the gradients of plain ones."""

from __future__ import annotations

import inspect
import re
from functools import partial

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from shardmath import autograd, collectives, distribution, fft, nn
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab, redistribute
from shardmath.linalg import advanced
from shardmath.linalg.advanced import MatmulEpilog, matmul

X, Y = Slab.X, Slab.Y
N = 4


def operations(x, context):
    """The results of all operators, of which `x` is this rank's rows: the first has one more. Each
    by the name of the public function, and by what is special.
    """
    w, rows = x[:N, :2], x[:N]
    grid = ProcessGrid(shape=(2, 1), layout=ProcessGrid.Layout.ROW_MAJOR)
    bias = x[:N, 0]
    waves = torch.complex(rows, rows)
    odd = fft.FFTOptions(last_axis_parity="odd")
    cube = x.reshape(-1, 2, 2)
    whole = 2 * (x.shape[0] + context.rank) - 1, 2, 2  # a symbol among its extents
    heads = nn.tokens_to_heads(cube, global_shape=whole)
    return {
        "all_gather": collectives.all_gather(x),
        "reduce_scatter": collectives.reduce_scatter(rows, axis=-1, context=context),
        "all_to_all": collectives.all_to_all(x),
        "all_to_all, counts": collectives.all_to_all(x, send_counts=[1, x.shape[0] - 1]),
        "broadcast": collectives.broadcast(w, root=1),
        "all_reduce, mean": collectives.all_reduce(w, op="mean"),
        "all_reduce, max": collectives.all_reduce(w, op="max"),
        "copies": autograd.copies(w),
        "redistribute, cyclic": redistribute(
            collectives.all_reduce(rows), Replicated(), BlockCyclic(grid, (1, 3))
        ),
        "redistribute, bound": redistribute(rows, X.bind((2 * N, N)), Y),
        "fft": fft.fft(waves, distribution=X).abs(),
        "ifft": fft.ifft(waves, distribution=(X, Y), axes=(0, -1), norm="ortho").abs(),
        "rfft": fft.rfft(rows, distribution=X).abs(),
        "irfft": fft.irfft(fft.rfft(rows, distribution=X), distribution=X, axes=1, options=odd),
        "dct": fft.dct(rows, distribution=X),
        "dctn": fft.dctn(rows, axes=[0, 1], distribution=(X, Y)),
        "idct": fft.idct(rows, 4, distribution=X),
        "idctn": fft.idctn(rows, axes=[1], distribution=X),
        "dst": fft.dst(rows, axis=1, distribution=X, norm="forward"),
        "dstn": fft.dstn(rows, distribution=(X, Y)),
        "idst": fft.idst(rows, 3, axis=0, norm="ortho", distribution=X),
        "idstn": fft.idstn(rows, axes=[0], distribution=X),
        "matmul": matmul(x, w, distributions=[X, Y, Y]),
        "matmul, activation": matmul(
            x,
            w,
            distributions=[X, Replicated(), X],
            epilog=MatmulEpilog.GELU,
        ),
        "matmul, c and bias": matmul(
            rows,
            w,
            w,
            distributions=[X, Replicated(), X],
            alpha=2.0,
            beta=0.5,
            epilog=MatmulEpilog.RELU_BIAS,
            epilog_inputs={"bias": bias},
        ),
        "linear": nn.linear(x, w.T, distributions=[X, Replicated(), X], activation="gelu"),
        "tokens_to_heads": nn.tokens_to_heads(cube),
        "heads_to_tokens": cube + nn.heads_to_tokens(heads * heads, global_shape=whole),
    }


# Those that make plans or memory, which is no part of a graph.
NO_OPERATORS = {"infer_global_shape", "allocate_operand"}


def test_every_public_function_is_compiled_here():
    """One that is new has a case in `operations`."""
    modules = autograd, collectives, distribution, fft, advanced, nn
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    functions = {name for name, x in public.items() if callable(x) and not isinstance(x, type)}
    source = inspect.getsource(operations)
    cases = {name.partition(",")[0] for name in re.findall(r'^        "(.*?)":', source, re.M)}
    assert functions - NO_OPERATORS == cases


def total(x, context):
    own = sum((y * y).sum() / (n + 1) for n, y in enumerate(operations(x * 2, context).values()))
    return collectives.all_reduce(own)


def check_compiled(context):
    """The numbers of rows with which results or gradients are others than of plain calls."""
    wrong, graphs = [], []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    with context:
        program = torch.compile(total, backend=backend, fullgraph=True, dynamic=True)
        for rows in (N + 2, N + 3):
            x = torch.linspace(-1, 1, (rows - context.rank) * N, dtype=torch.float64)
            x = x.reshape(-1, N).requires_grad_()
            found = []
            for call in (program, total):
                loss = call(x, context)
                found.append((loss, *torch.autograd.grad(loss, x)))
            if not all(torch.allclose(one, other) for one, other in zip(*found, strict=True)):
                wrong.append(rows)
    return wrong, len(graphs)


def test_all_operators_in_one_graph(compiling_contexts):
    """It is that of any number of rows; those of `step` are static."""
    assert compiling_contexts.run(check_compiled, ranks=2, timeout=600) == [([], 1)] * 2


def step(x, w):
    y = matmul(x, w, distributions=[X, Replicated(), X])
    return collectives.all_reduce(redistribute(y, X.bind((2 * N, N)), Y))


def check_captured(context):
    """Whether a program that torch's own compiler makes for graphs has the same numbers each time.
    There are no graphs on cores: it runs as it is compiled.
    """
    with context:
        program = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        x = torch.linspace(-1, 1, N * N).reshape(N, N) + context.rank
        same = []
        for n in range(3):
            found = []
            for call in (program, step):
                operands = [(x + n).requires_grad_(), (x[:, :N] - n).requires_grad_()]
                made = call(*operands)
                found.append((made, *torch.autograd.grad((made * made).sum(), operands)))
            same += [torch.allclose(one, other) for one, other in zip(*found, strict=True)]
    return same


def test_programs_that_torch_captures(compiling_contexts):
    assert compiling_contexts.run(check_captured, ranks=2, timeout=600) == [[True] * 9] * 2


MISTAKES = {
    "an operator of torch's": lambda x: collectives.all_reduce(x) + torch.ones(N + 1),
    "op": lambda x: collectives.all_reduce(x, op="middle") + torch.ones(N + 1),
    "no distributions": lambda x: matmul(x, x),
    "no distribution": lambda x: redistribute(x, X, "Y"),
    "inner extents": lambda x: matmul(x, x[:, 1:], distributions=[X, X, "Y"]),
    "a number": lambda x: x + collectives.all_reduce(2.0),
}


def check_mistakes(context):
    """What is raised of calls that cannot be traced; then the context is as good as before."""
    said = []
    with context:
        for call in MISTAKES.values() if context.rank == 1 else ():  # alone: they are only traced
            try:
                torch.compile(call, backend="eager", fullgraph=True)(torch.ones(N, N))
            except Exception as error:
                said.append(str(error))
        return len(said), collectives.all_reduce(torch.ones(2)).tolist()


def check_context(context):
    """What is said where code that was compiled in one context, or its backward pass, runs in
    another or in none.
    """
    said = []
    alone = context.split(context.rank)
    with alone:
        program = torch.compile(lambda x: 2 * collectives.all_gather(x), backend="eager")
        x = torch.ones(2, requires_grad=True)
        results = [program(x).sum() for _ in range(2)]
        results[0].backward()
    with context:
        for call in (partial(program, x), results[1].backward):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
    try:
        program(x)
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_compiled_code_says_in_which_context_it_belongs(compiling_contexts):
    for rank, said in enumerate(compiling_contexts.run(check_context, ranks=2, timeout=600)):
        assert len(said) == 3 and all("is rank 0 of 1" in text for text in said)
        assert [f"this is rank {rank} of 2" in text for text in said] == [True, True, False]
        assert "there is none" in said[2]


def test_a_mistake_while_torch_traces_leaves_the_context(compiling_contexts):
    first, second = compiling_contexts.run(check_mistakes, ranks=2, timeout=600)
    assert (first[0], second[0]) == (0, len(MISTAKES)) and first[1] == second[1] == [2.0, 2.0]


def layer(x, w):
    y = matmul(x, w, distributions=[X, Replicated(), X]).tanh()
    return collectives.all_reduce((collectives.all_gather(y)[: len(y)] * y).sum())


def loss(x):
    return collectives.all_reduce((x * x).sum())


TRANSFORMED = {
    "grad": torch.func.grad(lambda x: loss(redistribute(x, X.bind((2 * N, N)), Y))),
    "grad of grad": torch.func.grad(lambda x: torch.func.grad(layer)(x, x).square().sum()),
    "vmap": torch.vmap(collectives.all_reduce),
    "vmap of each": torch.vmap(lambda x: fft.dct(x, distribution=X, axis=-1), in_dims=1),
    "vmap of grad": torch.vmap(torch.func.grad(loss)),
    "jvp": lambda x: torch.func.jvp(loss, (x,), (x,))[1],
    "vjp": lambda x: torch.func.vjp(loss, x)[1](torch.ones(()))[0],
}


def transformed(x):
    several = torch.stack([x, 2 * x, x], 1)
    return [call(several if "each" in name else x) for name, call in TRANSFORMED.items()]


def check_transformed_and_compiled(context):
    """The names of transformed calls of which a compiled program gives another result; and what is
    said of one that cannot be compiled, and whether it is right between graphs.
    """
    with context:
        x = torch.linspace(-1, 1, N * N).reshape(N, N) + context.rank
        program = torch.compile(transformed, backend="aot_eager", fullgraph=True)
        pairs = zip(TRANSFORMED, program(x), transformed(x), strict=True)
        wrong = [name for name, one, other in pairs if not torch.allclose(one, other)]
        gather, said = torch.vmap(collectives.all_gather), ""
        try:
            torch.compile(gather, backend="eager", fullgraph=True)(x)
        except Exception as error:
            said = str(error.__cause__)
        cut = torch.compile(gather, backend="eager")(x)
        return wrong, said, torch.equal(cut, gather(x))


def test_transforms_within_compiled_programs(compiling_contexts):
    found = compiling_contexts.run(check_transformed_and_compiled, ranks=2, timeout=600)
    for wrong, said, same in found:
        assert (wrong, same) == ([], True)
        assert "torch.vmap of all_gather while torch compiles it" in said


def check_transformed(context):
    """Which ways of torch's to call a function have other results than plain calls."""
    with context:
        x = torch.linspace(-1, 1, 3 * N).reshape(3, N)
        w = torch.linspace(0, 1, 2 * N).reshape(N, 2)
        many = torch.stack([x, 2 * x])

        def gradient(x):
            x = x.clone().requires_grad_()
            return torch.autograd.grad(layer(x, w), x)[0]

        def squares(x):
            return torch.func.grad(layer)(x, w).square().sum()

        def recomputed(x):
            x = x.clone().requires_grad_()
            return torch.autograd.grad(checkpoint(layer, x, w, use_reentrant=False), x)[0]

        def twice(x):
            x = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(layer(x, w), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        def stopped(x):
            with torch.no_grad():
                return torch.func.grad(layer)(x, w).square().sum()

        def rows(x):
            return fft.rfft(x, distribution=X)

        pairs = {
            "grad": (torch.func.grad(layer)(x, w), gradient(x)),
            "grad of grad": (torch.func.grad(squares)(x), twice(x)),
            "linearize": (
                torch.func.linearize(squares, x)[1](w.T[:1].expand_as(x)),
                torch.func.jvp(squares, (x,), (w.T[:1].expand_as(x),))[1],
            ),
            "no_grad within": (torch.func.grad(stopped)(x), torch.zeros_like(x)),
            "vmap": (
                torch.vmap(collectives.all_gather)(many),
                [*map(collectives.all_gather, many)],
            ),
            "vmap of each": (torch.vmap(rows)(many), [*map(rows, many)]),
            "vmap of grad": (
                torch.vmap(torch.func.grad(lambda x: layer(x, w)))(many),
                [*map(gradient, many)],
            ),
            "checkpoint": (recomputed(x), gradient(x)),
        }
        wrong = []
        for name, (found, expected) in pairs.items():
            whole = torch.stack(expected) if isinstance(expected, list) else expected
            if not torch.allclose(found, whole):
                wrong.append(name)
        for _ in range(3):  # a call that has come before, and now is traced
            expected = collectives.all_reduce(x)
        traced = make_fx(lambda x: 2 * collectives.all_reduce(x))(x)
        if not torch.equal(traced(x), 2 * expected):
            wrong.append("make_fx")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            made = [matmul(*pair, distributions=[X, Replicated(), X]) for pair in ((a, b), (x, w))]
        made[0].sum().backward()
        types = [y.dtype for y in (*made, a.grad, b.grad)]
        return wrong, types == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_transformed_and_recomputed_calls(contexts):
    assert contexts.run(check_transformed, ranks=2) == [([], True)] * 2
