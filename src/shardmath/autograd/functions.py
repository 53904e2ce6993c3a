"""The public functions where torch records, traces or transforms the call: they call operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch

from shardmath.autograd.registered import call_operator
from shardmath.base.untraced import (
    constant,
    has_tangent,
    is_compiling,
    may_have_tangents,
    operators,
)
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives.background import refuse
from shardmath.context.context import DistributedContext, require_context
from shardmath.geometry import Replicated, Slab
from shardmath.traced.arguments import (
    functions_of,
    words_of_fft,
    words_of_layer,
    words_of_matmul,
    words_of_redistribute,
    words_of_trigonometric,
)
from shardmath.traced.words import number_of, words_of

T = TypeVar("T")


def _operated(
    name: str, xs: list[Any], text: str, counts: Any = None, context: Any = None, out: Any = None
) -> Any:
    """The result of an operator of a call of the user's; in `out` where that is given."""
    if not torch.compiler.is_compiling():
        if out is not None:
            why = "out= is for results that torch neither differentiates nor transforms"
            _refuse(name, context, f"{why}: leave it out")
        # A backward pass may run in a thread of torch's, where no context is current.
        context = context or require_context()
    made = call_operator(name, xs, text, counts, None, number_of(context), _recorded(xs))
    return made if out is None else out.copy_(made)


def _recorded(xs: Sequence[Any]) -> str:
    """Which operands have derivatives: see `Context.with_derivatives`. "" where none has."""
    requires_grad = torch.is_grad_enabled()
    digits = ["1" if requires_grad and x.requires_grad else "0" for x in xs]
    if not is_compiling() and may_have_tangents():
        pairs = zip(digits, xs, strict=True)
        digits = [str(int(digit) + 2 * has_tangent(x)) for digit, x in pairs]
    text = "".join(digits)
    return text if text.strip("0") else ""


def _refuse(operation: str, context: Any, why: str, *, async_op: bool = False) -> None:
    """Raise ValueError; on all ranks, but in code that is being compiled. Collective."""
    error = ValueError(f"{operation}: {why}")
    if torch.compiler.is_compiling():
        raise error
    if async_op:
        refuse(operation, context, error)
    raise_on_all_ranks(context or require_context(), operation, error)


def _said(operation: str, context: Any, words: Callable[..., T], *given: Any) -> T:
    """The words of a call. What is wrong with them is raised on all ranks. Collective.

    An eager call that comes again finds them by its arguments.
    """
    if is_compiling():
        return words(*given)
    try:
        key = [tuple(x) if type(x) is list else x for x in given]
        signed = repr(key[1:3]) if words is _product else ""  # 0.0 equals -0.0
        said: T = _said_before(signed, words, *key)
    except TypeError:  # something has no hash, or is wrong: which, the words say
        pass
    except (ValueError, NotImplementedError) as error:
        raise_on_all_ranks(context or require_context(), operation, error)
    else:
        return said
    try:
        return words(*given)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise_on_all_ranks(context or require_context(), operation, error)


@lru_cache(maxsize=1024, typed=True)
def _said_before(signed: str, words: Callable[..., Any], *given: Any) -> Any:
    return words(*given)


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
        why = "quantization_scales= and stream= are for calls without gradients: leave them out"
        _refuse("matmul", None, why)
    given = distributions, alpha, beta, epilog, qualifiers, options
    text, function, has_bias, sums_c = _said("matmul", None, _product, *given)
    a, b, *cs = narrowed(a, b) if c is None else narrowed(a, b, c)
    made = _operated("matmul", [a, b] if sums_c else [a, b, *cs], text)
    if sums_c and cs:
        made = made + beta * all_reduce(cs[0])
    bias = _bias_of(made, epilog_inputs["bias"], distributions) if has_bias else None
    return finished(made, bias, function) if function or has_bias else made


@constant
def _product(*given: Any) -> tuple[str, str, bool, bool]:
    """The words of a product, and what its epilog does to it: see `functions_of`."""
    *_, epilog, _, _ = given
    return words_of_matmul(*given), *functions_of(epilog)


def layer_product(x: Any, weight: Any, distributions: Any) -> Any:
    """The product x @ weight.T. The distributions are those of x, of the weight and of the result.

    Unlike that of `matmul(x, weight.T)`, the gradient of the weight lies in memory as the weight
    does, so that torch keeps it as it is, without a copy.
    """
    text = _said("matmul", None, words_of_layer, distributions)
    return _operated("matmul", [*narrowed(x, weight)], text)


def _bias_of(product: Any, bias: Any, distributions: Any) -> Any:
    """This rank's bias as a column; other ranks that add the same have a part in its gradient."""
    bias, split = bias.reshape(-1), distributions[2]
    if split not in (Slab.X, Replicated()):
        text = words_of(distribution=split)
        bias = _operated("shared_rows", [bias], text, list(product.shape))
    return bias.reshape(-1, 1)


def finished(y: Any, bias: Any, activation: str | None) -> Any:
    """The activation of y + bias: what an epilog does, and what ends a layer."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    if activation == "relu":
        return torch.relu(y)
    return torch.nn.functional.gelu(y, approximate="tanh") if activation else y


def narrowed(*xs: Any) -> Sequence[Any]:
    """Operands of a product in the type that autocast gives them, if that is on."""
    device = xs[0].device.type
    if not torch.is_autocast_enabled(device):
        return xs
    dtype = torch.get_autocast_dtype(device)
    narrows = [x.is_floating_point() and x.dtype != torch.float64 for x in xs]
    return [x.to(dtype) if narrow else x for x, narrow in zip(xs, narrows, strict=True)]


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
        _refuse("redistribute", None, "stream= is for calls without gradients: leave it out")
    given = words_of_redistribute, input_distribution, output_distribution
    return _operated("redistribute", [operand], _said("redistribute", None, *given), out=out)


def redistribute_of_shape(x: Any, source: Any, target: Any, global_shape: Sequence[Any]) -> Any:
    """See `redistribute`. The distributions are not bound: the global shape may have symbols."""
    text = _said("redistribute", None, words_of_redistribute, source, target)
    return _operated("redistribute", [x], text, [*global_shape])


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
            _refuse(name, None, "stream= is for calls without gradients: leave it out")
        given = words_of_fft, operand.ndim, distribution, axes, norm, options
        return _operated(name, [operand], _said(name, None, *given), out=out)

    return fft


def _trigonometric(name: str) -> Callable[..., Any]:
    kind, is_inverse = name.removeprefix("i").removesuffix("n"), name.startswith("i")

    def call(
        operand: Any,
        number: Any,
        extents: Any,
        axes: Any,
        norm: Any,
        *,
        orthogonalize: Any = None,
        distribution: Any = None,
        options: Any = None,
        stream: Any = None,
        out: Any = None,
    ) -> Any:
        if stream is not None:
            _refuse(name, None, "stream= is for calls without gradients: leave it out")
        given = operand.ndim, distribution, axes, norm, options, number, orthogonalize, extents
        text = _said(name, None, words_of_trigonometric, *given, is_inverse)
        return _operated(kind, [operand], text, out=out)

    def along_one(
        x: Any, type: Any = 2, n: Any = None, axis: Any = -1, norm: Any = None, **named: Any
    ) -> Any:
        """See `shardmath.fft`."""
        return call(x, type, n, [axis], norm, **named)

    def along_several(
        x: Any, type: Any = 2, s: Any = None, axes: Any = None, norm: Any = None, **named: Any
    ) -> Any:
        """See `shardmath.fft`."""
        return call(x, type, s, axes, norm, **named)

    return along_several if name.endswith("n") else along_one


def _collected(
    name: str, x: Any, out: Any, context: Any, async_op: Any, counts: Any = None, **words: Any
) -> Any:
    """The result of a collective, whose arguments besides its counts are `words`."""
    if async_op:
        why = "async_op=True is for calls without gradients, outside of torch.compile: leave it out"
        _refuse(name, context, why, async_op=True)
    text = _said(name, context, _named, tuple(words), *words.values())
    return _operated(name, [x], text, counts, context, out)


def _named(names: Sequence[str], *values: Any) -> str:
    return words_of(**dict(zip(names, values, strict=True)))


def _axis(x: Any, axis: Any) -> Any:
    return axis + x.ndim if isinstance(axis, int) and -x.ndim <= axis < 0 else axis


def all_gather(
    x: Any, *, axis: int = 0, out: Any = None, context: Any = None, async_op: bool = False
) -> Any:
    """See `shardmath.collectives`."""
    return _collected("all_gather", x, out, context, async_op, axis=_axis(x, axis), op="sum")


def reduce_scatter(
    x: Any,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Any = None,
    out: Any = None,
    context: Any = None,
    async_op: bool = False,
) -> Any:
    """See `shardmath.collectives`."""
    given = out, context, async_op, counts
    return _collected("reduce_scatter", x, *given, axis=_axis(x, axis), op=op)


def all_to_all(
    x: Any,
    *,
    axis: int = 0,
    send_counts: Any = None,
    receive_counts: Any = None,
    out: Any = None,
    context: Any = None,
    async_op: bool = False,
) -> Any:
    """See `shardmath.collectives`."""
    counts = None if send_counts is None else [*send_counts, *(receive_counts or ())]
    return _collected("all_to_all", x, out, context, async_op, counts, axis=_axis(x, axis))


def broadcast(
    x: Any, *, root: int = 0, out: Any = None, context: Any = None, async_op: bool = False
) -> Any:
    """See `shardmath.collectives`. A tensor is given on all ranks."""
    return _collected("broadcast", x, out, context, async_op, root=root)


def all_reduce(
    x: Any, *, op: str = "sum", out: Any = None, context: Any = None, async_op: bool = False
) -> Any:
    """See `shardmath.collectives`."""
    return _collected("all_reduce", x, out, context, async_op, op=op)


def copies(x: T, *, context: DistributedContext | None = None) -> T:
    """`x`, a tensor that all ranks have, as each rank's own: gradients of all copies are summed.

        y = norm(tokens, autograd.copies(weight))     # each rank has tokens of its own

    For what every rank has, and uses on data of its own: without it the gradient on a rank is the
    share of that rank. The call is local, and its backward pass an `all_reduce`. Whether `x`
    requires grad the ranks compare in the next call that records or computes a gradient.
    """
    return cast(T, _collected("copies", x, None, context, False, op="sum"))


def certain(condition: Any) -> Any:
    """Whether it holds; False in code that is compiled where only a running program can tell."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def between_graphs(name: str, *arguments: Any) -> None:
    """Have torch's compiler end the graph before a call with DTensors, which then runs as it is."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and hasattr(x, "device_mesh"):
            torch._dynamo.graph_break(
                msg=f"{name} of DTensors is called between graphs: within one, pass x.to_local()"
            )


_TRIGONOMETRIC = ("dct", "dctn", "idct", "idctn", "dst", "dstn", "idst", "idstn")
_OTHERS = (
    *(matmul, redistribute, all_gather, reduce_scatter, all_to_all, broadcast, all_reduce),
    *(between_graphs, certain, copies, finished, layer_product, narrowed, redistribute_of_shape),
)

operators.update({function.__name__: function for function in _OTHERS})
operators.update({name: _fft(name) for name in ("fft", "ifft", "rfft", "irfft")})
operators.update({name: _trigonometric(name) for name in _TRIGONOMETRIC})
