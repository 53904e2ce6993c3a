"""How torch knows the operators of the table: one schema, fake kernel and formula serve all.

Where torch's compiler, a transform or a dispatch mode has to see a call, it is an operator of
torch's. Other calls, those of an eager program, do the same without torch's dispatcher, which takes
many times as long as they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack, unwrap_if_dead
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.fake_impl import allocate_size
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.library import get_ctx

from shardmath.autograd.table import TABLE
from shardmath.base import current
from shardmath.base.untraced import is_compiling, may_have_tangents, without_tangent
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.traced import shapes
from shardmath.traced.words import CURRENT, context_of, read_words, words_of

_UNKNOWN = "the shape of this rank's result depends on its peers':"
_EAGER = (torch.Tensor, torch.nn.Parameter)  # other classes see the operators that are called


class Call(NamedTuple):
    """What a call of an operator has beside its tensors.

    `text` has its words; `counts`, how indices of an axis are distributed; `shape`, this rank's
    result, where the caller knows it; `context`, its number. `recorded` has a digit for each
    operand, see `Context.with_derivatives`.
    """

    name: str
    text: str
    counts: Any = None
    shape: Any = None
    context: int = CURRENT
    recorded: str = ""


def call_operator(
    name: str,
    xs: list[Any],
    text: str,
    counts: Any = None,
    shape: Any = None,
    context: int = CURRENT,
    recorded: str = "",
) -> Any:
    """The result of an operator; the arguments are those of `Call`."""
    if is_compiling():
        return _OPERATORS[name](xs, text, counts, shape, context, recorded)
    if peek_interpreter_stack() is not None or may_have_tangents() or not _is_eager(xs):
        return _OPERATORS[name](xs, text, counts, shape, context, recorded)
    call = Call(name, text, counts, shape, context, recorded)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return _FUNCTIONS[name](None, call, *[unwrap_if_dead(x) for x in xs])
    return _performed(call, xs)


def _is_eager(xs: Sequence[Any]) -> bool:
    """Whether no dispatch mode, class of tensors or batch of gradients has to see the call."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(type(x) in _EAGER and not is_legacy_batchedtensor(x) for x in xs)


class _Function(torch.autograd.Function):
    """A call of an operator that torch differentiates. `made` is how torch's dispatcher has made
    it, see `_differentiated`; None for a call that was made past the dispatcher.
    """

    @staticmethod
    def forward(made: Any, call: Call, *xs: Any) -> Any:
        if made is None:
            return _performed(call, xs)
        keys, backward, forward = made
        # torch records nothing here, but outer levels of torch.func do.
        with torch.set_grad_enabled(backward), _set_fwd_grad_enabled(forward):
            return _dispatched(keys, call, xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, call, *xs = inputs
        ctx.call, ctx.shape = call, list(output.shape) if call.shape is None else call.shape
        ctx.operand = list(xs[0].shape), xs[0].dtype
        if _adjoint(call.name, call.text) is None:
            ctx.save_for_backward(*xs, output)
            ctx.save_for_forward(*xs, output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None, *_gradients(ctx, grad, ctx.needs_input_grad[2:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        with _set_fwd_grad_enabled(True):  # for outer levels of torch.func: torch disables it
            return _tangent(ctx, tangents[2:])


def _dispatched(keys: Any, call: Call, xs: Sequence[Any]) -> Any:
    """The result of a call that torch's dispatcher has made, from what follows autograd there."""
    name, *words = call
    with torch._C._AutoDispatchBelowAutograd():
        after = keys & torch._C._after_autograd_keyset
        return _OPERATORS[name].redispatch(after, list(xs), *words)


def _differentiated(name: str, keys: Any, xs: list[Any], *words: Any) -> Any:
    """The result of an operator, for torch's autograd or for one level of torch.func."""
    call = Call(name, *words)
    records = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if records or may_have_tangents() or peek_interpreter_stack() is not None:
        made = keys, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        with enable_single_level_autograd_function():
            return _FUNCTIONS[name](made, call, *xs)
    return _dispatched(keys, call, xs)


def _performed(call: Call, xs: Sequence[Any]) -> Any:
    """The result of a call that only this package sees. Collective, unless it `is_local`."""
    context = context_of(call.context)
    if current.get() is not context:
        with context:
            return _performed(call, xs)
    if torch._C._is_any_autocast_enabled():  # types are chosen already
        with torch.autocast(xs[0].device.type, enabled=False):
            return _performed(call, xs)
    operator = TABLE[call.name]
    if may_have_tangents():
        xs = [without_tangent(x) for x in xs]
    arguments = [x.detach() for x in xs], read_words(call.text), call.counts, call.shape
    if operator.is_local:  # ranks compare where they meet next
        context.note_derivatives(call.recorded or "0")
        made = operator.perform(*arguments)
    else:
        made = context.with_derivatives(call.recorded, operator.perform, *arguments)
    return made if made.is_contiguous() else made.contiguous()


def _fake(
    name: str, xs: list[Any], text: str, counts: Any, shape: Any, number: int, recorded: str
) -> Any:
    """What torch's compiler traces in place of the result: its shape and its type. Local."""
    operator, words = TABLE[name], read_words(text)
    with current.within(context_of(number)):
        extents = operator.shape(xs, words, counts) if shape is None else shape
        made = [_unknown(name) if extent is None else extent for extent in extents]
        return xs[0].new_empty(made, dtype=getattr(torch, shapes.type_of(name, xs, words).name))


def _unknown(name: str) -> Any:
    """An extent that is known when the call has been made."""
    shape_env = get_ctx()._shape_env
    if shape_env is None:
        raise NotImplementedError(
            f"{name}: {_UNKNOWN} pass distributions that are bound, distribution.bind(global_shape)"
        )
    return allocate_size(shape_env)


@lru_cache(maxsize=4096)
def _adjoint(name: str, text: str) -> tuple[str, str] | None:
    """The operator and its text through which the gradient of a linear one goes."""
    adjoint = TABLE[name].adjoint(read_words(text))
    return None if adjoint is None else (adjoint[0], words_of(**adjoint[1]))


def _gradients(ctx: Any, grad: Any, wanted: Sequence[bool]) -> Sequence[Any]:
    call: Call = ctx.call
    adjoint = _adjoint(call.name, call.text)
    if adjoint is not None:
        shape, dtype = ctx.operand
        name, text = adjoint
        made = call_operator(name, [grad], text, call.counts, shape, call.context)
        return (made if made.dtype == dtype else made.to(dtype),)
    gradients = TABLE[call.name].gradients
    assert gradients is not None
    again = partial(call_operator, context=call.context)
    return gradients(_saved(ctx), read_words(call.text), grad, wanted, again)


def _saved(ctx: Any) -> Sequence[Any]:
    """The operands and the result. Where one was written since, on any rank, all ranks raise what
    torch raises for it.
    """
    try:
        saved: Sequence[Any] = ctx.saved_tensors
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # of a checkpoint, which computes them again
            raise
        raise_on_all_ranks(context_of(ctx.call.context), ctx.call.name, error)
    return saved


def _tangent(ctx: Any, tangents: Sequence[Any]) -> Any:
    """The derivative of the result along these of the operands, of which some may be None."""
    call: Call = ctx.call
    if _adjoint(call.name, call.text) is not None:
        given = call.text, call.counts, ctx.shape, call.context
        return call_operator(call.name, list(tangents), *given)
    tangent = TABLE[call.name].tangent
    assert tangent is not None
    again = partial(call_operator, context=call.context)
    saved = [without_tangent(x) for x in _saved(ctx)]  # of this level
    return tangent(saved, read_words(call.text), tangents, call.counts, again)


def _batched(info: Any, dims: Sequence[Any], call: Call, xs: Sequence[Any]) -> tuple[Any, int]:
    """See torch.vmap: one call where an axis more changes nothing, else one for each."""
    size = info.batch_size
    name, text, counts, shape, context, recorded = call
    if TABLE[name].shape in (shapes.alike, shapes.of_scattering) or "axis" in read_words(text):
        (x,), (dim,) = xs, dims
        wide = None if shape is None else [*shape, size]
        made = call_operator(name, [x.movedim(dim, -1)], text, counts, wide, context, recorded)
        if has_free_unbacked_symbols(made):
            raise NotImplementedError(
                f"torch.vmap of {name} while torch compiles it: {_UNKNOWN} leave the "
                "axis in the array, or call it outside of torch.compile"
            )
        return made, made.ndim - 1
    calls = [
        [x if dim is None else x.select(dim, n) for x, dim in zip(xs, dims, strict=True)]
        for n in range(size)
    ]
    each = [call_operator(name, one, text, counts, shape, context, recorded) for one in calls]
    return torch.stack(each), 0


_LIBRARY = torch.library.Library("shardmath", "DEF")
_SCHEMA = (
    "(Tensor[] xs, str words, SymInt[]? counts, SymInt[]? shape, int context, str recorded)"
    " -> Tensor"
)


def _register(name: str) -> Any:
    """The operator of that name, as torch's compiler and transforms see it."""

    def performed(xs: list[Any], *words: Any) -> Any:
        return _performed(Call(name, *words), xs)

    def batched(info: Any, dims: Any, xs: list[Any], *words: Any) -> tuple[Any, int]:
        return _batched(info, dims[0], Call(name, *words), xs)

    qualified = f"shardmath::{name}"
    _LIBRARY.define(f"{name}{_SCHEMA}")
    _LIBRARY.impl(name, performed, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, partial(_differentiated, name), "Autograd", with_keyset=True)
    torch.library.register_fake(qualified, partial(_fake, name), lib=_LIBRARY)
    torch.library.register_vmap(qualified, batched, lib=_LIBRARY)
    return getattr(torch.ops.shardmath, name).default


_OPERATORS = {name: _register(name) for name in TABLE}
# `apply` of torch's base class: that of `torch.autograd.Function` binds arguments by a signature,
# and has torch.func transform the function, where here it transforms the operator.
_FUNCTIONS = {
    name: super(torch.autograd.Function, type(name, (_Function,), {})).apply for name in TABLE
}
