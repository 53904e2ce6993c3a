"""How torch traces and differentiates this package's functions: each is an operator of torch's.

    y = matmul(x, w, distributions=[Slab.X, Slab.Y, Slab.Y])
    loss = all_reduce((y * y).sum())
    loss.backward()                                   # x.grad and w.grad, split as x and w are

`matmul`, `redistribute`, `fft`, `ifft`, `rfft`, `irfft` and the collectives call these operators,
`torch.ops.shardmath.*`, where a tensor requires grad, or where torch traces or transforms the call:
`torch.compile`, `torch.func`, autocast. All other calls never come here.

A gradient has the shape and the distribution of what it is the gradient of, and passes through our
own operators: a backward pass is as collective as the call was, and all ranks run it. What has a
distribution is one global array, also where it is replicated; and so is the sum of `all_reduce`: a
loss that every rank has from it is one loss. What the other collectives return is each rank's own,
and its gradients are those of as many copies: `all_gather` sums them by `reduce_scatter`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

try:
    import torch
except ImportError as error:
    from shardmath.errors import BackendUnavailable

    raise BackendUnavailable(
        f"shardmath.autograd works on torch tensors, and torch cannot be imported ({error}): "
        "pip install 'shardmath[torch]'"
    ) from error

from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._library.fake_impl import allocate_size
from torch.library import get_ctx

from shardmath import collectives, geometry
from shardmath.arrays import dtypes
from shardmath.base import current
from shardmath.base.collective_call import collective_call
from shardmath.base.immutable import Immutable
from shardmath.base.untraced import operators, tell_compiler
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, open_contexts, require_context
from shardmath.geometry import Box, Distribution, Replicated, Slab, Spans
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators import fft as transforms
from shardmath.operators.arguments import options_of
from shardmath.operators.fft.options import FFTOptions
from shardmath.operators.layouts import infer_layout
from shardmath.operators.matmul import matmul as _matmul
from shardmath.operators.matmul.description import arguments_of
from shardmath.operators.matmul.options import MatmulOptions, matrix_qualifiers_dtype
from shardmath.operators.redistribute import redistribute as _redistribute

__all__ = ["copies"]

Words = Mapping[str, Any]
Shape = Sequence[Any]  # of integers, of which some may be symbols of torch's compiler
Tensors = Sequence[Any]
Call = Callable[..., Any]
F = TypeVar("F", bound=Call)
_CURRENT = -1  # in place of a context's number: the one that is current when the call is made


class Operator(Immutable, eq=False):
    """An operator of torch's: one tensor from several, on all ranks together.

    `perform(xs, words, counts, shape)` calls the public function, on tensors that record nothing.
    `shape(xs, words, counts)` is that of this rank's result, None for an extent which only the
    peers know; `dtype(xs, words)` is the result's. `adjoint(words, counts)` is (the name
    of the operator, its words and counts) through which the gradient of a linear operator goes;
    `gradients(saved, call, grad, wanted)` are those of the operands of another.
    """

    perform: Callable[[Tensors, Words, Any, Any], Any]
    shape: Callable[[Tensors, Words, Any], Shape]
    adjoint: Callable[[Words, Any], tuple[str, Words, Any] | None] = lambda words, counts: None
    gradients: Callable[..., list[Any]] | None = None
    dtype: Callable[[Tensors, Words], Any] = lambda xs, words: xs[0].dtype


def _constant(function: F) -> F:
    """`function`, which torch's compiler calls while it traces: its arguments are constants."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


# -- what a call says beside its arrays, as text ---------------------------------------------------


@_constant
def words_of(**given: Any) -> str:
    """The words of a call, as the graphs of torch's compiler have them: a constant of text.

    Raises TypeError for what is no plain data, nor a distribution or options.
    """
    return repr({name: _plain(value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Distribution):
        return {"distribution": value.encode()}
    if isinstance(value, IntEnum):
        return int(value)
    if is_dataclass(value):
        pairs = ((field.name, vars(value)[field.name]) for field in fields(value))
        return {name: _plain(x) for name, x in pairs if name != "logger" and x is not None}
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items() if name != "logger"}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    raise TypeError(f"{value!r} is not what torch traces or differentiates: pass plain data")


@lru_cache(maxsize=4096)
def _read(text: str) -> Words:
    return MappingProxyType({name: _value(x) for name, x in ast.literal_eval(text).items()})


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(x) for x in plain]
    if isinstance(plain, dict) and plain.keys() == {"distribution"}:
        return geometry.decode(plain["distribution"])
    return plain


def _number(context: DistributedContext | None) -> int:
    """The number of a context that a caller names; in code that is compiled, none is the one that
    is current when it runs.
    """
    if context is None:
        return _CURRENT
    if isinstance(context, DistributedContext):
        return context.number
    raise TypeError(f"context is a DistributedContext or None, not {context!r}")


def _context(number: int) -> DistributedContext:
    if number == _CURRENT:
        return require_context()
    found = next((one for one in open_contexts() if one.number == number), None)
    if found is None:
        raise RuntimeError("the context of this call was finalised before its backward pass")
    return found


# -- shapes, by geometry ---------------------------------------------------------------------------


class _Split(Immutable):
    """How an axis is split: part k of so many even parts, or as `other` says."""

    parts: int = 1
    k: int = 0
    other: Any = None


@lru_cache(maxsize=1024)
def _splits(distribution: Distribution, ndim: int, rank: int, size: int) -> tuple[_Split, ...]:
    """How a distribution that is neither bound nor a rank's own splits each axis."""
    extent = 4 * size * size  # tells even parts apart, as any that is long enough
    short, long = (
        distribution.part(rank, (n,) * ndim, size=size) for n in (extent, 2 * extent + 1)
    )
    return tuple(
        next(
            (
                _Split(parts, k)
                for parts in range(1, size + 1)
                for k in range(parts)
                if (Spans.even(extent, parts, k), Spans.even(2 * extent + 1, parts, k)) == pair
            ),
            _Split(0, 0, pair),
        )
        for pair in zip(short, long, strict=True)
    )


class _Axis(Immutable, eq=False):
    """An axis of which this rank has `own` indices, split so: of `whole` ones, where that is known.
    None for a split that says nothing of another rank.
    """

    own: Any
    whole: Any
    split: _Split | None

    @classmethod
    def of(cls, shape: Shape, distribution: Distribution, axis: int) -> _Axis:
        """An axis of an array of which this rank has a part of that shape."""
        if distribution.binding is not None:
            return cls(shape[axis], distribution.binding.global_shape[axis], None)
        if distribution.per_rank:
            return cls(shape[axis], None, None)
        context = require_context()
        split = _splits(distribution, len(shape), context.rank, context.size)[axis]
        return cls(shape[axis], shape[axis] if split.parts == 1 else None, split)

    def to(self, target: Distribution, axis: int, ndim: int, change: Any = None) -> Any:
        """How many indices this rank has by `target` of such an axis, the result's `axis`; None
        where the geometry does not say. `change(n)` of the n that there are become the result's.
        """
        context = require_context()
        rank, size = context.rank, context.size
        if isinstance(target, Box):
            return target.box_shape[axis]
        if target.binding is not None:
            return target.shape(rank, size=size)[axis]
        split = _splits(target, ndim, rank, size)[axis]
        if self.whole is None:
            return self.own if split == self.split and change is None else None
        whole = self.whole if change is None else change(self.whole)
        if split.parts:
            return (whole + split.parts - 1 - split.k) // split.parts
        if not isinstance(whole, int):
            return None
        extents = [whole if n == axis else 1 for n in range(ndim)]
        return target.part(rank, extents, size=size)[axis].length


# -- the operators ---------------------------------------------------------------------------------


def _perform_redistribute(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    return _redistribute(xs[0], words["source"], words["target"])


def _perform_fft(name: str, xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    pair, options = [words["source"], words["target"]], {}
    if name == "irfft":
        options["last_axis_parity"] = words["parity"]
    function = getattr(transforms, name)
    return function(
        xs[0], distribution=pair, axes=words["axes"], norm=words["norm"], options=options
    )


_SWAPPED = {None: None, "backward": "forward", "ortho": "ortho", "forward": "backward"}
_ADJOINT = {
    "fft": "ifft",
    "ifft": "fft",
    "rfft": "rfft_adjoint",
    "rfft_adjoint": "rfft",
    "irfft": "irfft_adjoint",
    "irfft_adjoint": "irfft",
}


def _adjoint_fft(name: str, words: Words, counts: Any) -> tuple[str, Words, Any]:
    back = dict(words, source=words["target"], target=words["source"])
    return _ADJOINT[name], dict(back, norm=_SWAPPED[words["norm"]]), None


def _perform_rfft_adjoint(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """Of what is kept of a real array's transform, n // 2 + 1 elements along the last axis, what
    the whole would have come from: each element counts once, where `irfft` counts it twice.
    """
    (grad,), axes = xs, words["axes"]
    *others, last = axes
    source, target = words["source"], words["target"]
    extent = _global_shape(target, shape)[last]
    halved = [
        extent // 2 + 1 if n == last else m for n, m in enumerate(_global_shape(source, grad))
    ]
    if others:  # first along them: what counts once is real only then
        grad = transforms.ifft(grad, distribution=source, axes=others, norm=words["norm"])
    weights = _weights(source, halved, last, extent, others=0.5)
    return transforms.irfft(
        (grad * weights.to(grad.real.dtype)).to(grad.dtype),
        distribution=[source, target],
        axes=[last],
        norm=words["norm"],
        options={"last_axis_parity": "odd" if extent % 2 else "even"},
    )


def _perform_irfft_adjoint(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """The transform of a real array, in which each element that stands for two counts twice."""
    (grad,), axes = xs, words["axes"]
    source, target = words["source"], words["target"]
    halved = _global_shape(target, shape)
    extent = 2 * (halved[axes[-1]] - 1) + (words["parity"] == "odd")
    made = transforms.rfft(grad, distribution=[source, target], axes=axes, norm=words["norm"])
    return made * _weights(target, halved, axes[-1], extent, others=2.0).to(made.real.dtype)


def _weights(
    distribution: Distribution, halved: Sequence[int], axis: int, extent: int, *, others: float
) -> Any:
    """1 for the elements along a halved axis that stand for themselves alone, and `others`."""
    context = require_context()
    if isinstance(distribution, Box):
        ranges = [(distribution.lower[axis], distribution.upper[axis])]
    else:
        ranges = distribution.index_ranges(context.rank, halved, size=context.size)[axis]
    indices = torch.cat([torch.arange(*ends) for ends in ranges] or [torch.arange(0)])
    alone = (indices == 0) | (2 * indices == extent)
    weights = torch.where(alone, 1.0, others)
    return weights.reshape([-1 if n == axis else 1 for n in range(len(halved))])


def _global_shape(distribution: Distribution, part: Any) -> tuple[int, ...]:
    """The global shape of an array of which ranks have such parts. Collective."""
    shape = tuple(int(n) for n in getattr(part, "shape", part))

    def check(specs: list[Any]) -> tuple[int, ...]:
        encoded, shapes = zip(*specs, strict=True)
        return infer_layout("the operand", encoded, shapes).global_shape

    return require_context().agree(
        "the gradient of a real transform", lambda: (distribution.encode(), shape), check
    )


def _shape_of_fft(name: str, xs: Tensors, words: Words, counts: Any) -> Shape:
    shape, target, odd = xs[0].shape, words["target"], words["parity"] == "odd"
    changes = {"rfft": lambda n: n // 2 + 1, "irfft": lambda n: 2 * (n - 1) + odd}
    return [
        _Axis.of(shape, words["source"], axis).to(
            target, axis, len(shape), changes.get(name) if axis == words["axes"][-1] else None
        )
        for axis in range(len(shape))
    ]


def _shape_of_redistribute(xs: Tensors, words: Words, counts: Any) -> Shape:
    return _shape_of_fft("fft", xs, dict(words, axes=[0], parity=""), counts)


def _real(xs: Tensors, words: Words) -> Any:
    return xs[0].dtype.to_real()


def _complex(xs: Tensors, words: Words) -> Any:
    return torch.complex128 if xs[0].dtype == torch.float64 else torch.complex64


def _counted(xs: Tensors, words: Words, extent: Any) -> Shape:
    made = list(xs[0].shape)
    made[words["axis"]] = extent
    return made


def _scattered(xs: Tensors, words: Words, counts: Any) -> Shape:
    context = require_context()
    extent = xs[0].shape[words["axis"]]
    if counts is not None:
        return _counted(xs, words, counts[context.rank])
    return _counted(xs, words, (extent + context.size - 1 - context.rank) // context.size)


def _perform_reduce_scatter(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    if shape is not None:  # it knows how much this rank is to have, and the peers say it of them
        counts = _of_all(shape[words["axis"]])
    return collectives.reduce_scatter(xs[0], op=words["op"], axis=words["axis"], counts=counts)


def _of_all(extent: Any) -> list[int]:
    """The extents of all ranks, by rank. Collective."""
    extents: list[int] = collectives.all_gather(np.array([int(extent)])).tolist()
    return extents


def _perform_all_to_all(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    context, axis = require_context(), words["axis"]
    sent = None if counts is None else counts[: context.size]
    received = None if counts is None else counts[context.size :] or None
    return collectives.all_to_all(xs[0], axis=axis, send_counts=sent, receive_counts=received)


def _shape_of_all_to_all(xs: Tensors, words: Words, counts: Any) -> Shape:
    size = require_context().size
    received = () if counts is None else counts[size:]
    return _counted(xs, words, sum(received) if received else None)


def _perform_all_to_all_adjoint(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """What came goes back to where it came from."""
    context, axis = require_context(), words["axis"]
    if counts is None:
        whole = int(shape[axis])
        sent = [Spans.even(whole, context.size, rank).length for rank in range(context.size)]
    else:
        sent = list(counts[: context.size])
    came = collectives.all_gather(np.array([sent]))[:, context.rank].tolist()
    return collectives.all_to_all(xs[0], axis=axis, send_counts=came, receive_counts=sent)


def _perform_reduce(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """The sum of all ranks' tensors on the root; zeros elsewhere."""
    context, flat = require_context(), xs[0].reshape(-1)
    counts = [flat.numel() * (rank == words["root"]) for rank in range(context.size)]
    made = collectives.reduce_scatter(flat, counts=counts)
    return made.reshape(xs[0].shape) if made.numel() else torch.zeros_like(xs[0])


def _scaled_copies(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    return xs[0] / require_context().size if words["op"] == "mean" else xs[0].clone()


def _alike(xs: Tensors, words: Words, counts: Any) -> Shape:
    return list(xs[0].shape)


def _same(name: str) -> Callable[[Words, Any], tuple[str, Words, Any]]:
    """The adjoint of that name, with the same words and counts."""
    return lambda words, counts: (name, words, counts)


def _perform_matmul(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    a, b, *c = xs
    return _matmul(
        a,
        b,
        *c,
        distributions=words["distributions"],
        alpha=words["alpha"],
        beta=words["beta"] if c else None,
        qualifiers=_qualifiers(words["transpose"], words["conjugate"]),
        options=words["options"],
    )


def _qualifiers(transpose: Sequence[bool], conjugate: Sequence[bool]) -> Any:
    made = np.zeros(3, dtype=matrix_qualifiers_dtype)
    made["is_transpose"][:2], made["is_conjugate"][:2] = transpose, conjugate
    return made


def _shape_of_matmul(xs: Tensors, words: Words, counts: Any) -> Shape:
    if len(xs) == 3:
        return list(xs[2].shape)
    (a, b), (of_a, of_b, target) = xs, words["distributions"]
    ta, tb = words["transpose"]
    rows, columns = _Axis.of(a.shape, of_a, int(ta)), _Axis.of(b.shape, of_b, int(not tb))
    return [rows.to(target, 0, 2), columns.to(target, 1, 2)]


def _dtype_of_matmul(xs: Tensors, words: Words) -> Any:
    if len(xs) == 3:
        return xs[2].dtype
    number = words["options"].get("result_type")
    return xs[0].dtype if number is None else getattr(torch, str(dtypes.numbered(number)))


def _matmul_gradients(
    xs: Tensors, words: Words, grad: Any, wanted: Sequence[bool], call: Call
) -> list[Any]:
    """D = alpha op(A) op(B) + beta C: gradients that are split as the operands, two of them
    products again.
    """
    a, b, *c, _ = xs
    of_a, of_b, of_d = words["distributions"]
    (ta, tb), (ca, cb) = words["transpose"], words["conjugate"]
    narrow = grad.to(a.dtype)

    def product(x: Any, y: Any, split: Any, flags: Any, like: Any, *, conjugated: bool) -> Any:
        scale = words["alpha"]
        if isinstance(scale, complex) and not conjugated:
            scale = scale.conjugate()
        conjugate = [bool(flag) and x.is_complex() for flag in flags[1]]
        text = words_of(
            distributions=split,
            alpha=scale,
            beta=None,
            transpose=flags[0],
            conjugate=conjugate,
            options={},
        )
        return call("matmul", [x, y], text, shape=list(like.shape))

    grads: list[Any] = [None] * (2 + len(c))
    if wanted[0] and ta:
        flags = [tb, True], [cb ^ (not ca), ca]
        grads[0] = product(b, narrow, [of_b, of_d, of_a], flags, a, conjugated=ca)
    elif wanted[0]:
        flags = [False, not tb], [ca, ca ^ (not cb)]
        grads[0] = product(narrow, b, [of_d, of_b, of_a], flags, a, conjugated=ca)
    if wanted[1] and tb:
        flags = [True, ta], [cb, ca ^ (not cb)]
        grads[1] = product(narrow, a, [of_d, of_a, of_b], flags, b, conjugated=cb)
    elif wanted[1]:
        flags = [not ta, False], [cb ^ (not ca), cb]
        grads[1] = product(a, narrow, [of_a, of_d, of_b], flags, b, conjugated=cb)
    if c and wanted[2]:
        beta = words["beta"]
        grads[2] = grad * (beta.conjugate() if isinstance(beta, complex) else beta)
    return grads


def _perform_all_gather(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    made = collectives.all_gather(xs[0], axis=words["axis"])
    return made / require_context().size if words["op"] == "mean" else made


def _perform_broadcast(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    return collectives.broadcast(xs[0], root=words["root"])


def _perform_all_reduce(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    return collectives.all_reduce(xs[0], op=words["op"])


def _linear(name: str) -> Callable[[Words, Any], tuple[str, Words, Any] | None]:
    """The adjoint of a sum or a mean, with the same words; of other reductions there is none."""
    return lambda words, counts: (name, words, None) if words["op"] in ("sum", "mean") else None


def _gradients_of_all_reduce(
    xs: Tensors, words: Words, grad: Any, wanted: Sequence[bool], call: Call
) -> list[Any]:
    """Of min and max the ranks that have it share the gradient; of a product the others' product
    counts.
    """
    x, made = xs
    added, rows = words_of(op="sum"), words_of(axis=0, op="sum")
    grad = call("copies", [grad], added)
    if words["op"] in ("min", "max"):
        holds = (x == made).to(x.dtype)
        return [grad * holds / call("all_reduce", [holds], added)]
    if words["op"] != "product":
        raise NotImplementedError(f"all_reduce by {words['op']!r} has no gradient")
    all_ = call("all_gather", [x.unsqueeze(0)], rows, shape=[require_context().size, *x.shape])
    own = torch.arange(len(all_), device=x.device) == require_context().rank
    others = all_.where(~own.reshape(-1, *[1] * x.ndim), 1).prod(0)
    return [grad * others.conj()]


def _refuse_scattered(*given: Any) -> list[Any]:
    raise NotImplementedError('reduce_scatter has gradients for op="sum" and op="mean" alone')


def _transform(name: str, dtype: Any = None) -> Operator:
    made = {} if dtype is None else {"dtype": dtype}
    perform: Call = partial(_perform_fft, name)
    if name.endswith("adjoint"):  # whose shape its caller says
        perform = _perform_rfft_adjoint if name == "rfft_adjoint" else _perform_irfft_adjoint
    return Operator(perform, partial(_shape_of_fft, name), partial(_adjoint_fft, name), **made)


TABLE = {
    "matmul": Operator(
        _perform_matmul, _shape_of_matmul, gradients=_matmul_gradients, dtype=_dtype_of_matmul
    ),
    "redistribute": Operator(
        _perform_redistribute,
        _shape_of_redistribute,
        lambda words, counts: (
            "redistribute",
            {"source": words["target"], "target": words["source"]},
            None,
        ),
    ),
    "fft": _transform("fft"),
    "ifft": _transform("ifft"),
    "rfft": _transform("rfft", _complex),
    "rfft_adjoint": _transform("rfft_adjoint", _real),
    "irfft": _transform("irfft", _real),
    "irfft_adjoint": _transform("irfft_adjoint", _complex),
    "all_gather": Operator(
        _perform_all_gather,
        lambda xs, words, counts: _counted(xs, words, None),
        _linear("reduce_scatter"),
    ),
    "reduce_scatter": Operator(
        _perform_reduce_scatter, _scattered, _linear("all_gather"), _refuse_scattered
    ),
    "all_to_all": Operator(_perform_all_to_all, _shape_of_all_to_all, _same("all_to_all_adjoint")),
    "all_to_all_adjoint": Operator(_perform_all_to_all_adjoint, _alike, _same("all_to_all")),
    "broadcast": Operator(_perform_broadcast, _alike, _same("reduce")),
    "reduce": Operator(_perform_reduce, _alike, _same("broadcast")),
    "all_reduce": Operator(
        _perform_all_reduce, _alike, _linear("copies"), _gradients_of_all_reduce
    ),
    "copies": Operator(_scaled_copies, _alike, _same("all_reduce")),
}


# -- how torch knows them --------------------------------------------------------------------------


def _call(
    name: str,
    xs: list[Any],
    text: str,
    counts: Any = None,
    shape: Any = None,
    context: int = _CURRENT,
    recorded: str = "",
) -> Any:
    """The result of an operator. `recorded` has a 1 for each operand that requires grad: ranks
    compare it, and where it is empty do not.
    """
    level = None if torch.compiler.is_compiling() else peek_interpreter_stack()
    if level is not None and level.key() is not TransformType.Functionalize:
        return _Function.apply(name, text, counts, shape, context, recorded, *xs)
    return _OPERATORS[name](xs, text, counts, shape, context, recorded)


class _Function(torch.autograd.Function):
    """A call of an operator under `torch.func`, which does not differentiate operators of ours."""

    @staticmethod
    def forward(name: str, *arguments: Any) -> Any:
        text, counts, shape, number, recorded, *xs = arguments
        return _call(name, xs, text, counts, shape, number, recorded)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, text, counts, shape, number, recorded, *xs = inputs
        _keep(ctx.name, ctx, (xs, text, counts, shape, number, recorded), output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return *[None] * 6, *_gradients(ctx.name, ctx, grad, ctx.needs_input_grad[6:])

    @staticmethod
    def vmap(info: Any, dims: Any, name: str, *arguments: Any) -> Any:
        text, counts, shape, number, recorded, *xs = arguments
        return _batched(name, info, [dims[6:]], xs, text, counts, shape, number, recorded)


@collective_call
def _perform(
    name: str, xs: list[Any], text: str, counts: Any, shape: Any, number: int, recorded: str
) -> Any:
    context = _context(number)
    narrows = torch._C._is_any_autocast_enabled()  # types are chosen already
    plain = torch.autocast(xs[0].device.type, enabled=False) if narrows else nullcontext()
    with _entered(context), plain:
        if recorded:
            context.agree(
                f"{name} of tensors that require grad",
                lambda: recorded,
                partial(require_equal, "which operands require grad"),
            )
        made = TABLE[name].perform([x.detach() for x in xs], _read(text), counts, shape)
        return made if made.is_contiguous() else made.contiguous()


def _entered(context: DistributedContext) -> AbstractContextManager[Any]:
    return nullcontext() if current.get() is context else context


def _fake(
    name: str, xs: list[Any], text: str, counts: Any, shape: Any, number: int, recorded: str
) -> Any:
    """What torch's compiler traces in place of the result: its shape and its type. Local."""
    operator, words = TABLE[name], _read(text)
    with _entered(_context(number)):
        extents = operator.shape(xs, words, counts) if shape is None else shape
        made = [_unknown(name) if extent is None else extent for extent in extents]
        return xs[0].new_empty(made, dtype=operator.dtype(xs, words))


def _unknown(name: str) -> Any:
    """An extent that is known when the call has been made."""
    shape_env = get_ctx()._shape_env
    if shape_env is None:
        raise NotImplementedError(
            f"the shape of this rank's result of {name} depends on its peers': pass distributions "
            "that are bound, distribution.bind(global_shape)"
        )
    return allocate_size(shape_env)


def _keep(name: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs, text, counts, _, number, _ = inputs
    ctx.text, ctx.counts, ctx.number = text, counts, number
    ctx.operands = [(list(x.shape), x.dtype) for x in xs]
    if TABLE[name].adjoint(_read(text), counts) is None:
        ctx.save_for_backward(*xs, output)


def _differentiate(name: str, ctx: Any, grad: Any) -> tuple[Any, ...]:
    return _gradients(name, ctx, grad, ctx.needs_input_grad[0]), None, None, None, None, None


def _gradients(name: str, ctx: Any, grad: Any, wanted: Sequence[bool]) -> list[Any]:
    operator, words = TABLE[name], _read(ctx.text)
    call = partial(_call, context=ctx.number)
    adjoint = operator.adjoint(words, ctx.counts)
    if adjoint is not None:
        to, own, counts = adjoint
        shape, dtype = ctx.operands[0]
        return [call(to, [grad], words_of(**own), counts, shape).to(dtype)]
    assert operator.gradients is not None
    return operator.gradients(ctx.saved_tensors, words, grad, wanted, call)


def _batched(
    name: str,
    info: Any,
    dims: Any,
    xs: list[Any],
    text: str,
    counts: Any,
    shape: Any,
    number: int,
    recorded: str,
) -> tuple[Any, int]:
    """See torch.vmap: one call where an axis more changes nothing, else one for each."""
    size = info.batch_size
    if TABLE[name].shape in (_alike, _scattered) or "axis" in _read(text):
        (x,), (dim,) = xs, dims[0]
        wide = None if shape is None else [*shape, size]
        made = _call(name, [x.movedim(dim, -1)], text, counts, wide, number, recorded)
        return made, made.ndim - 1
    calls = [
        [x if dim is None else x.select(dim, n) for x, dim in zip(xs, dims[0], strict=True)]
        for n in range(size)
    ]
    each = [_call(name, one, text, counts, shape, number, recorded) for one in calls]
    return torch.stack(each), 0


_LIBRARY = torch.library.Library("shardmath", "DEF")
_SCHEMA = (
    "(Tensor[] xs, str words, SymInt[]? counts, SymInt[]? shape, int context, str recorded)"
    " -> Tensor"
)


def _register(name: str) -> Any:
    qualified = f"shardmath::{name}"
    _LIBRARY.define(f"{name}{_SCHEMA}")
    _LIBRARY.impl(name, partial(_perform, name), "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, partial(_fake, name), lib=_LIBRARY)
    torch.library.register_autograd(
        qualified, partial(_differentiate, name), setup_context=partial(_keep, name), lib=_LIBRARY
    )
    torch.library.register_vmap(qualified, partial(_batched, name), lib=_LIBRARY)
    return getattr(torch.ops.shardmath, name).default


_OPERATORS = {name: _register(name) for name in TABLE}


# -- the public functions, with tensors that are recorded or traced --------------------------------


def _operated(
    name: str, xs: list[Any], text: str, counts: Any = None, context: Any = None, out: Any = None
) -> Any:
    """The result of an operator of a call of the user's; in `out` where that is given."""
    compiled = torch.compiler.is_compiling()
    recorded = ""
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        recorded = "".join("1" if x.requires_grad else "0" for x in xs)
    if out is not None and not compiled:
        _refuse(name, context, "a result with a gradient, or that torch transforms, is no `out`")
    if context is None and not compiled:
        context = require_context()
    made = _call(name, xs, text, counts, None, _number(context), recorded)
    return made if out is None else out.copy_(made)


def _refuse(operation: str, context: Any, why: str) -> None:
    """Raise ValueError; on all ranks, but in code that is being compiled. Collective."""
    error = ValueError(f"{operation}: {why}")
    if torch.compiler.is_compiling():
        raise error
    raise_on_all_ranks(context or require_context(), operation, error)


def _said(operation: str, context: Any, words: Callable[..., Any], *given: Any) -> Any:
    """The words of a call. What is wrong with them is raised on all ranks. Collective."""
    if torch.compiler.is_compiling():
        return words(*given)
    try:
        return words(*given)
    except (TypeError, ValueError) as error:
        raise_on_all_ranks(context or require_context(), operation, error)


@_constant
def _words_of_matmul(
    distributions: Any, alpha: Any, beta: Any, epilog: Any, qualifiers: Any, options: Any
) -> str:
    flags: Any = arguments_of(None, None, distributions=None, qualifiers=qualifiers).words
    if flags.error is not None:
        raise flags.error
    kept = _plain(options_of(MatmulOptions, options))
    if kept.pop("inplace"):
        raise ValueError(
            "options.inplace=True overwrites c: leave it out where there are gradients"
        )
    if MatmulEpilog(epilog or 0) is MatmulEpilog.ALLREDUCE:
        distributions = [*distributions[:2], Replicated()]
    return words_of(
        distributions=distributions,
        alpha=1.0 if alpha is None else alpha,
        beta=beta,
        transpose=flags.qualifiers.transpose[:2],
        conjugate=flags.qualifiers.conjugate[:2],
        options=kept,
    )


@_constant
def _functions_of(epilog: Any) -> tuple[str, bool, bool]:
    """The function of an epilog, whether there is a bias, and whether it sums every rank's C.

    Raises ValueError for an epilog of a backward pass that is written by hand.
    """
    known = MatmulEpilog(epilog or 0)
    if known.gradient or known.makes_aux or known.makes_bgrad:
        raise ValueError(
            f"epilog {known.name} is for backward passes written by hand: torch has one"
        )
    return known.activation or "", known.has_bias, known is MatmulEpilog.ALLREDUCE


def matmul(
    a: Any,
    b: Any,
    /,
    c: Any = None,
    *,
    distributions: Any = None,
    alpha: Any = None,
    beta: Any = None,
    epilog: Any = None,
    epilog_inputs: Any = None,
    qualifiers: Any = None,
    quantization_scales: Any = None,
    options: Any = None,
    preferences: Any = None,
    stream: Any = None,
) -> Any:
    """See `shardmath.linalg.advanced.matmul`. What an epilog does, torch does to the product."""
    if quantization_scales is not None or stream is not None:
        _refuse("matmul", None, "quantization_scales and stream are for calls without gradients")
    given = distributions, alpha, beta, epilog, qualifiers, options
    text = _said("matmul", None, _words_of_matmul, *given)
    function, has_bias, sums_c = _said("matmul", None, _functions_of, epilog)
    device = a.device.type
    if torch.is_autocast_enabled(device):
        narrow = torch.get_autocast_dtype(device)
        a, b = _autocast(a, narrow), _autocast(b, narrow)
        c = None if c is None else _autocast(c, narrow)
    added = c is not None and not sums_c
    made = _operated("matmul", [a, b, c] if added else [a, b], text)
    if sums_c and c is not None:
        made = made + beta * all_reduce(c)
    if has_bias:
        made = made + epilog_inputs["bias"].reshape(-1, 1).to(made.dtype)
    if function == "relu":
        return torch.relu(made)
    return torch.nn.functional.gelu(made, approximate="tanh") if function == "gelu" else made


def _autocast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def redistribute(
    operand: Any,
    /,
    input_distribution: Any,
    output_distribution: Any = None,
    *,
    sync_symmetric_memory: bool = True,
    options: Any = None,
    stream: Any = None,
    out: Any = None,
) -> Any:
    """See `shardmath.distribution.redistribute`."""
    if stream is not None:
        _refuse("redistribute", None, "stream is for calls without gradients")
    given = _words_of_redistribute, input_distribution, output_distribution
    return _operated("redistribute", [operand], _said("redistribute", None, *given), out=out)


@_constant
def _words_of_redistribute(source: Any, target: Any) -> str:
    return words_of(source=source, target=target)


@_constant
def _words_of_fft(ndim: int, distribution: Any, axes: Any, norm: Any, options: Any) -> str:
    read = options_of(FFTOptions, options)
    if read.inplace or read.halves:
        raise ValueError("options.inplace and options.halves are for calls without gradients")
    numbers = range(ndim) if axes is None else [axes] if hasattr(axes, "__index__") else axes
    axes = [axis + ndim if axis < 0 else axis for axis in numbers]
    pair = list(distribution) if isinstance(distribution, list | tuple) else [distribution] * 2
    if pair[1] is distribution and isinstance(distribution, Slab) and not read.redistribute:
        split = distribution.partition_dim
        pair[1] = Slab(int(split == 0)) if split in axes else distribution
    elif pair[1] is distribution and isinstance(distribution, Distribution):
        pair[1] = _unbound(distribution)
        if not read.redistribute:
            raise ValueError("redistribute=False: give a pair of distributions (input, output)")
    source, target = pair
    return words_of(
        source=source, target=target, axes=axes, norm=norm, parity=read.last_axis_parity
    )


def _unbound(distribution: Distribution) -> Distribution:
    """What the result of a transform is split by, whose shape may be another."""
    return geometry.decode((*distribution.encode()[:-1], None))


def _fft(name: str) -> Callable[..., Any]:
    def fft(
        operand: Any,
        /,
        *,
        distribution: Any = None,
        sync_symmetric_memory: bool = True,
        options: Any = None,
        stream: Any = None,
        axes: Any = None,
        norm: Any = None,
        out: Any = None,
    ) -> Any:
        """See `shardmath.fft`."""
        if stream is not None:
            _refuse(name, None, "stream is for calls without gradients")
        given = _words_of_fft, operand.ndim, distribution, axes, norm, options
        return _operated(name, [operand], _said(name, None, *given), out=out)

    return fft


def all_gather(x: Any, *, axis: int = 0, out: Any = None, context: Any = None) -> Any:
    """See `shardmath.collectives`."""
    text = words_of(axis=_axis(x, axis), op="sum")
    return _operated("all_gather", [x], text, None, context, out)


def _axis(x: Any, axis: Any) -> Any:
    return axis + x.ndim if isinstance(axis, int) and -x.ndim <= axis < 0 else axis


def reduce_scatter(
    x: Any,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Any = None,
    out: Any = None,
    context: Any = None,
) -> Any:
    """See `shardmath.collectives`."""
    text = words_of(axis=_axis(x, axis), op=op)
    return _operated("reduce_scatter", [x], text, counts, context, out)


def all_to_all(
    x: Any,
    *,
    axis: int = 0,
    send_counts: Any = None,
    receive_counts: Any = None,
    out: Any = None,
    context: Any = None,
) -> Any:
    """See `shardmath.collectives`."""
    counts = None if send_counts is None else [*send_counts, *(receive_counts or ())]
    text = words_of(axis=_axis(x, axis))
    return _operated("all_to_all", [x], text, counts, context, out)


def broadcast(x: Any, *, root: int = 0, out: Any = None, context: Any = None) -> Any:
    """See `shardmath.collectives`. A tensor is given on all ranks."""
    return _operated("broadcast", [x], words_of(root=root), None, context, out)


def all_reduce(x: Any, *, op: str = "sum", out: Any = None, context: Any = None) -> Any:
    """See `shardmath.collectives`."""
    return _operated("all_reduce", [x], words_of(op=op), None, context, out)


def copies(x: Any, *, context: DistributedContext | None = None) -> Any:
    """`x`, a tensor that all ranks have, as each rank's own: gradients of all copies are summed.

        y = norm(tokens, autograd.copies(weight))     # each rank has tokens of its own

    For what every rank has, and uses on data of its own: without it the gradient on a rank is the
    share of that rank. Local; its backward pass is an `all_reduce`.
    """
    return _operated("copies", [x], words_of(op="sum"), None, context)


operators.update(
    {
        "matmul": matmul,
        "redistribute": redistribute,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "all_reduce": all_reduce,
        **{name: _fft(name) for name in ("fft", "ifft", "rfft", "irfft")},
    }
)
tell_compiler()
