"""How does torch know the operators of the table? One schema, fake kernel and formula serve all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._library.fake_impl import allocate_size
from torch.library import get_ctx

from shardmath.autograd.table import TABLE
from shardmath.base import current
from shardmath.base.collective_call import collective_call
from shardmath.base.untraced import has_tangent, without_tangent
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext
from shardmath.traced import shapes
from shardmath.traced.words import CURRENT, context_of, read_words, words_of


def call_operator(
    name: str,
    xs: list[Any],
    text: str,
    counts: Any = None,
    shape: Any = None,
    context: int = CURRENT,
    recorded: str = "",
) -> Any:
    """The result of an operator. `recorded` has a 1 for each operand that requires grad, a 2 for
    one that has a tangent: ranks compare it, and where it is empty do not.
    """
    compiled = torch.compiler.is_compiling()
    level = None if compiled else peek_interpreter_stack()
    is_transformed = level is not None and level.key() is not TransformType.Functionalize
    if is_transformed or (not compiled and any(map(has_tangent, xs))):
        return _Function.apply(name, text, counts, shape, context, recorded, *xs)
    return _OPERATORS[name](xs, text, counts, shape, context, recorded)


class _Function(torch.autograd.Function):
    """A call of an operator under `torch.func` or along tangents: torch differentiates operators of
    ours otherwise only backward.
    """

    @staticmethod
    def forward(name: str, *arguments: Any) -> Any:
        text, counts, shape, number, recorded, *xs = arguments
        xs = list(map(without_tangent, xs))
        return call_operator(name, xs, text, counts, shape, number, recorded)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, text, counts, shape, number, recorded, *xs = inputs
        _keep(ctx.name, ctx, (xs, text, counts, shape, number, recorded), output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return *[None] * 6, *_gradients(ctx.name, ctx, grad, ctx.needs_input_grad[6:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent(ctx.name, ctx, tangents[6:])

    @staticmethod
    def vmap(info: Any, dims: Any, name: str, *arguments: Any) -> Any:
        text, counts, shape, number, recorded, *xs = arguments
        return _batched(name, info, [dims[6:]], xs, text, counts, shape, number, recorded)


@collective_call
def _perform(
    name: str, xs: list[Any], text: str, counts: Any, shape: Any, number: int, recorded: str
) -> Any:
    context = context_of(number)
    narrows = torch._C._is_any_autocast_enabled()  # types are chosen already
    plain = torch.autocast(xs[0].device.type, enabled=False) if narrows else nullcontext()
    with _entered(context), plain, _compared(name, context, recorded):
        made = TABLE[name].perform([x.detach() for x in xs], read_words(text), counts, shape)
        return made if made.is_contiguous() else made.contiguous()


def _compared(name: str, context: DistributedContext, recorded: str) -> AbstractContextManager[Any]:
    """In which ranks compare which operands have derivatives: in the agreement of the call; where
    that has none, as it is local or on GPUs, whose hosts run ahead, by one of its own. Collective.
    """
    if not recorded:
        return nullcontext()
    if context.team is None and not TABLE[name].is_local:
        return context.comparing_derivatives(recorded)
    context.agree(
        f"{name} of tensors that require grad",
        lambda: recorded,
        partial(require_equal, "which operands require grad"),
    )
    return nullcontext()


def _entered(context: DistributedContext) -> AbstractContextManager[Any]:
    return nullcontext() if current.get() is context else context


def _fake(
    name: str, xs: list[Any], text: str, counts: Any, shape: Any, number: int, recorded: str
) -> Any:
    """What torch's compiler traces in place of the result: its shape and its type. Local."""
    operator, words = TABLE[name], read_words(text)
    with _entered(context_of(number)):
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
    xs, text, counts, shape, number, _ = inputs
    ctx.text, ctx.counts, ctx.number = text, counts, number
    ctx.shape = list(output.shape) if shape is None else shape
    ctx.operands = [(list(x.shape), x.dtype) for x in xs]
    if TABLE[name].adjoint(read_words(text), counts) is None:
        ctx.save_for_backward(*xs, output)
        if hasattr(ctx, "save_for_forward"):  # which an operator's context has not
            ctx.save_for_forward(*xs, output)


def _differentiate(name: str, ctx: Any, grad: Any) -> tuple[Any, ...]:
    return _gradients(name, ctx, grad, ctx.needs_input_grad[0]), None, None, None, None, None


def _gradients(name: str, ctx: Any, grad: Any, wanted: Sequence[bool]) -> list[Any]:
    operator, words = TABLE[name], read_words(ctx.text)
    call = partial(call_operator, context=ctx.number)
    adjoint = operator.adjoint(words, ctx.counts)
    if adjoint is not None:
        to, own, counts = adjoint
        shape, dtype = ctx.operands[0]
        return [call(to, [grad], words_of(**own), counts, shape).to(dtype)]
    assert operator.gradients is not None
    return operator.gradients(ctx.saved_tensors, words, grad, wanted, call)


def _tangent(name: str, ctx: Any, tangents: Sequence[Any]) -> Any:
    """The derivative of the result along these of the operands, of which some may be None."""
    operator, words = TABLE[name], read_words(ctx.text)
    call = partial(call_operator, context=ctx.number)
    if operator.adjoint(words, ctx.counts) is not None:
        return call(name, list(tangents), ctx.text, ctx.counts, ctx.shape)
    assert operator.tangent is not None
    return operator.tangent(ctx.saved_tensors, words, tangents, ctx.counts, call)


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
    if TABLE[name].shape in (shapes.alike, shapes.of_scattering) or "axis" in read_words(text):
        (x,), (dim,) = xs, dims[0]
        wide = None if shape is None else [*shape, size]
        made = call_operator(name, [x.movedim(dim, -1)], text, counts, wide, number, recorded)
        return made, made.ndim - 1
    calls = [
        [x if dim is None else x.select(dim, n) for x, dim in zip(xs, dims[0], strict=True)]
        for n in range(size)
    ]
    each = [call_operator(name, one, text, counts, shape, number, recorded) for one in calls]
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
