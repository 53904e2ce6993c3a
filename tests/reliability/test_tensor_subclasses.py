"""Tensors without memory of their own are refused by every call, on all ranks that make it.

DTensor, FakeTensor and other subclasses that compute by `__torch_dispatch__`; and what stands for
tensors under torch's transforms.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardmath import collectives, get_context
from shardmath.distribution import Box, Redistribute, Replicated, Slab, redistribute
from shardmath.fft import FFT, fft
from shardmath.handles.allocation import free_symmetric_memory
from shardmath.linalg.advanced import Matmul, MatmulEpilog, matmul
from shardmath.reshape import reshape
from shardmath.symmetric_memory import empty, is_symm_mem_tensor, memset32, rendezvous

X, Y = Slab.X, Slab.Y
N = 6  # rows and columns of what each rank brings


class Wrapper(torch.Tensor):
    """A tensor that only describes itself."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


class Named(torch.Tensor):
    """A subclass with plain memory: it is accepted."""


def dtensor(x):
    from torch.distributed.tensor import DeviceMesh, DTensor
    from torch.distributed.tensor import Replicate as Everywhere

    mesh = DeviceMesh(x.device.type, [0])
    return DTensor.from_local(x, mesh, [Everywhere()], run_check=False)


def fake(x):
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


def given(make):
    return lambda call, x: call(make(x))


# How a call gets `x`, and what it then says, as well as that it is about this argument.
WAYS = {
    "DTensor": (given(dtensor), "pass x.to_local()"),
    "Parameter of a DTensor": (
        given(lambda x: torch.nn.Parameter(dtensor(x), requires_grad=False)),
        "pass x.to_local()",
    ),
    "FakeTensor": (given(fake), "pass a plain tensor"),
    "wrapper": (given(Wrapper), "pass a plain tensor"),
    "vmap": (lambda call, x: torch.vmap(call)(x[None]), "outside of what is transformed"),
    "functionalize": (
        lambda call, x: torch.func.functionalize(call)(x),
        "outside of what is transformed",
    ),
}
TRANSFORMED = ("vmap", "functionalize")
PLANNED = ("Redistribute", "FFT", "Matmul", "rendezvous")
PLAIN = {
    "Parameter": given(lambda x: torch.nn.Parameter(x, requires_grad=False)),
    "named": given(lambda x: x.as_subclass(Named)),
}


def matmul_of(a, b, **more):
    return matmul(a, b, distributions=[X, Replicated(), X], **more)


def rows():
    """The box of this rank's rows."""
    rank = get_context().rank
    return Box((rank * N, 0), (rank * N + N, N))


def reset(kind, x, plain, *arguments, **named):
    """The result of an operator that was planned for `plain` and gets `x`."""
    with kind(plain, *arguments, **named) as operator:
        operator.plan()
        operator.reset_operand(x)
        return operator.execute()


# Calls that all ranks make, with `x` on one of them in place of `p`, a plain tensor.
COLLECTIVE = {
    "all_gather": lambda x, p: collectives.all_gather(x),
    "all_reduce out": lambda x, p: collectives.all_reduce(p + 0, out=x),
    "all_reduce": lambda x, p: collectives.all_reduce(x),
    "all_to_all": lambda x, p: collectives.all_to_all(x),
    "broadcast": lambda x, p: collectives.broadcast(x),
    "reduce_scatter": lambda x, p: collectives.reduce_scatter(x),
    "redistribute": lambda x, p: redistribute(x, X, Y),
    "redistribute out": lambda x, p: redistribute(p + 0, X, X, out=x),
    "Redistribute": lambda x, p: Redistribute(x, X, Y),
    "Redistribute.reset_operand": lambda x, p: reset(Redistribute, x, p, X, Y),
    "reshape": lambda x, p: reshape(x, rows(), rows()),
    "fft": lambda x, p: fft(x, distribution=X),
    "fft out": lambda x, p: fft(p + 0, distribution=X, out=x),
    "FFT": lambda x, p: FFT(x, distribution=X),
    "FFT.reset_operand": lambda x, p: reset(FFT, x, p, distribution=X),
    "matmul a": matmul_of,
    "matmul b": lambda x, p: matmul_of(p, x),
    "matmul c": lambda x, p: matmul_of(p, p, c=x, beta=1.0),
    "matmul bias": lambda x, p: matmul_of(
        p, p, epilog=MatmulEpilog.BIAS, epilog_inputs={"bias": x}
    ),
    "Matmul": lambda x, p: Matmul(x, p, distributions=[X, Replicated(), X]),
    "rendezvous": lambda x, p: rendezvous(empty(N, dtype=torch.int8) if x is p else x),
}
# Calls that one rank makes by itself.
LOCAL = {
    "put": lambda x, handle: handle.put(x, 0),
    "get": lambda x, handle: handle.get(x, 0),
    "free": lambda x, handle: free_symmetric_memory(x),
    "memset32": lambda x, handle: memset32(x, 0, 0),
    "is_symm_mem_tensor": lambda x, handle: is_symm_mem_tensor(x),
}


def heard(give, call, x, other):
    """What `call(x, other)` raises, with x given in that way."""
    try:
        give(lambda given: call(given, other), x)
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def check(context, device="cpu"):
    """What rank 1 hears, and rank 0, of each call that rank 1 makes in each way."""
    collective, local = {}, {}
    with context:
        plain = torch.ones(N, N, dtype=torch.complex64, device=device)
        handle = rendezvous(empty(N, dtype=torch.uint32))
        for way, (give, _) in WAYS.items():
            for name, call in COLLECTIVE.items():
                if way in TRANSFORMED and not name.startswith(PLANNED):
                    continue  # torch has an operator
                mine = give if context.rank == 1 else given(lambda x: x)
                collective[f"{name}, {way}"] = heard(mine, call, plain, plain)
            for name, call in LOCAL.items() if context.rank == 1 else ():
                words = torch.ones(N, dtype=torch.uint32, device=device)
                local[f"{name}, {way}"] = heard(give, call, words, handle)
        total = collectives.all_reduce(plain)  # the context is as good as before
        assert (total == context.size).all()
        for give in PLAIN.values():
            assert (give(collectives.all_reduce, plain) == context.size).all()
    return collective, local


def with_mesh(context, device="cpu"):
    """`check`, where DTensors can be made: on a mesh of this rank alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return check(context, device)
    finally:
        dist.destroy_process_group()


def require_refused(said):
    """Assert that both ranks heard what is said of all of these."""
    assert said[0][0] == said[1][0]
    for what, (kind, text) in (said[0][0] | said[1][1]).items():
        advice = WAYS[what.split(", ")[1]][1]
        free = what.startswith("free")
        assert kind == ("TypeError" if free else "ValueError"), (what, kind, text)
        assert advice in text, (what, text)


def test_they_are_refused_on_all_ranks(contexts):
    require_refused(contexts.run(with_mesh, ranks=2))
