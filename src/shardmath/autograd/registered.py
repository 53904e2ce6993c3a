"""How torch knows the operators of the table: one schema, fake kernel and formula serve all.

Where torch's compiler, a transform or a dispatch mode has to see a call, it is an operator of
torch's. Other calls, those of an eager program, do the same without torch's dispatcher, which takes
many times as long as they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack, unwrap_if_dead
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.fake_impl import allocate_size
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.library import get_ctx

from shardmath.autograd.table import TABLE, Operator
from shardmath.base import current
from shardmath.base.caller import caller_place, file_line
from shardmath.base.immutable import Immutable
from shardmath.base.untraced import is_compiling, without_tangent
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.traced import shapes
from shardmath.traced.words import CURRENT, Words, context_of, read_words, words_of

_UNKNOWN = "the shape of this rank's result depends on its peers':"
_EAGER = {torch.Tensor, torch.nn.Parameter}  # other classes see the operators that are called


class Call(Immutable, eq=False):
    """What a call of an operator has beside its tensors, and what follows from that: it is worked
    out once for all calls with the same words.

    `text` has the words; `counts`, how indices of an axis are distributed; `shape`, this rank's
    result, where the caller knows it; `context`, its number. `recorded` has a digit for each
    operand, see `Context.with_derivatives`. `adjoint` is the operator, and its text, through which
    the gradient of a linear operator goes.
    """

    name: str
    text: str
    counts: Any
    shape: Any
    context: int
    recorded: str
    operator: Operator
    words: Words
    adjoint: tuple[str, str] | None

    @classmethod
    def of(cls, name: str, text: str, counts: Any, shape: Any, context: int, recorded: str) -> Call:
        """The call with these words, one object for equal ones."""
        counts = tuple(counts) if isinstance(counts, list) else counts
        shape = tuple(shape) if isinstance(shape, list) else shape
        try:
            return _read_call(name, text, counts, shape, context, recorded)
        except TypeError:  # a symbol of torch's compiler has no hash, nor have wrong counts
            return _read_call.__wrapped__(name, text, counts, shape, context, recorded)


@lru_cache(maxsize=4096)
def _read_call(name: str, text: str, counts: Any, shape: Any, context: int, recorded: str) -> Call:
    operator, words = TABLE[name], read_words(text)
    linear = operator.adjoint(words)
    adjoint = None if linear is None else (linear[0], words_of(**linear[1]))
    return Call(name, text, counts, shape, context, recorded, operator, words, adjoint)


def call_operator(
    name: str,
    xs: Sequence[Any],
    text: str,
    counts: Any = None,
    shape: Any = None,
    context: int = CURRENT,
    recorded: str = "",
) -> Any:
    """The result of an operator; the arguments are those of `Call`."""
    if is_compiling() or not _is_eager(xs):
        return _OPERATORS[name](xs, text, counts, shape, context, recorded)
    call = Call.of(name, text, counts, shape, context, recorded)
    if torch.is_grad_enabled():
        for x in xs:
            if x.requires_grad:
                return _FUNCTIONS[name](None, call, *map(unwrap_if_dead, xs))
    return _performed(call, xs)


def _is_eager(xs: Sequence[Any]) -> bool:
    """Whether no transform, tangent, dispatch mode, class of tensors or batch of gradients has to
    see the call.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    return _EAGER.issuperset(map(type, xs)) and not any(map(is_legacy_batchedtensor, xs))


class _Function(torch.autograd.Function):
    """A call of an operator that torch differentiates. `made` is how torch's dispatcher has made
    it, see `_differentiated`; None for a call that was made past the dispatcher.
    """

    @staticmethod
    def forward(ctx: Any, made: Any, call: Call, *xs: Any) -> Any:
        if made is None:
            result = _performed(call, xs)
        else:
            keys, backward, forward = made
            # torch records nothing here, but outer levels of torch.func do.
            with torch.set_grad_enabled(backward), _set_fwd_grad_enabled(forward):
                result = _dispatched(keys, call, xs)
        ctx.call, ctx.operand, ctx.place = call, (xs[0].shape, xs[0].dtype), caller_place()
        ctx.result = result.shape, result.dtype
        if call.adjoint is None:
            saved = (*xs, result) if call.operator.saves_result else xs
            ctx.save_for_backward(*saved)
            if made is not None:
                ctx.save_for_forward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        try:
            return None, None, *_gradients(ctx, grad)
        except Exception as error:
            error.add_note(f"It is in the gradient of {ctx.call.name}, {file_line(*ctx.place)}.")
            raise

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        with _set_fwd_grad_enabled(True):  # for outer levels of torch.func: torch disables it
            return _tangent(ctx, tangents[2:])


def _gradients(ctx: Any, grad: Any) -> Sequence[Any]:
    """The gradients of the operands of a call, given that of its result."""
    call: Call = ctx.call
    if call.adjoint is None:
        again = partial(call_operator, context=call.context)
        gradients = call.operator.gradients
        assert gradients is not None
        return gradients(_saved(ctx), call.words, grad, ctx.needs_input_grad[2:], again)
    shape, dtype = ctx.operand
    name, text = call.adjoint
    made = call_operator(name, [grad], text, call.counts, shape, call.context)
    return (made if made.dtype == dtype else made.to(dtype),)


def _dispatched(keys: Any, call: Call, xs: Sequence[Any]) -> Any:
    """The result of a call that torch's dispatcher has made, from what follows autograd there."""
    with torch._C._AutoDispatchBelowAutograd():
        after = keys & torch._C._after_autograd_keyset
        words = call.text, call.counts, call.shape, call.context, call.recorded
        return _OPERATORS[call.name].redispatch(after, list(xs), *words)


def _differentiated(name: str, keys: Any, xs: list[Any], *words: Any) -> Any:
    """The result of an operator, for torch's autograd or for one level of torch.func.

    A call that nothing else has to see, as those of compiled code, goes no further through torch's
    dispatcher.
    """
    call = Call.of(name, *words)
    records = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if records or forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        made = keys, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        with enable_single_level_autograd_function():
            return _FUNCTIONS[name](made, call, *xs)
    if _is_eager(xs) and not any(map(torch._is_functional_tensor, xs)):
        return _performed(call, xs)
    return _dispatched(keys, call, xs)


def _performed(call: Call, xs: Sequence[Any]) -> Any:
    """The result of a call that only this package sees. Collective, unless it `is_local`."""
    context, number = context_of(call.context), call.context
    if number != CURRENT and current.get() is not context:
        with context:
            return _performed(call, xs)
    if torch._C._is_any_autocast_enabled():  # types are chosen already
        with torch.autocast(xs[0].device.type, enabled=False):
            return _performed(call, xs)
    operator = call.operator
    arguments = [x.detach() for x in xs], call.words, call.counts, call.shape
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


def _saved(ctx: Any) -> Sequence[Any]:
    """What was saved. If it was written since, on any rank, all ranks raise what torch raises."""
    try:
        saved: Sequence[Any] = ctx.saved_tensors
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # of a checkpoint, which computes them again
            raise
        raise_on_all_ranks(context_of(ctx.call.context), ctx.call.name, error)
    return saved


def _tangent(ctx: Any, tangents: Sequence[Any]) -> Any:
    """The derivative of the result along the tangents of the operands; some may be None."""
    call: Call = ctx.call
    if call.adjoint is not None:
        given = call.text, call.counts, ctx.result[0], call.context
        return call_operator(call.name, list(tangents), *given)
    tangent = call.operator.tangent
    assert tangent is not None
    again = partial(call_operator, context=call.context)
    saved = [without_tangent(x) for x in _saved(ctx)]  # of this level
    return tangent(saved, call.words, ctx.result, tangents, call.counts, again)


def _batched(info: Any, dims: Sequence[Any], call: Call, xs: Sequence[Any]) -> tuple[Any, int]:
    """See torch.vmap: one call where an axis more changes nothing, else one for each."""
    size, name, text, counts, shape = info.batch_size, call.name, call.text, call.counts, call.shape
    context, recorded = call.context, call.recorded
    if call.operator.shape in (shapes.alike, shapes.of_scattering) or "axis" in call.words:
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
        return _performed(Call.of(name, *words), [without_tangent(x) for x in xs])

    def batched(info: Any, dims: Any, xs: list[Any], *words: Any) -> tuple[Any, int]:
        return _batched(info, dims[0], Call.of(name, *words), xs)

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
