"""The table of operators: how each is performed, and which operator computes its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from shardmath import collectives
from shardmath.base.collective_call import collective_call
from shardmath.base.immutable import Immutable
from shardmath.call.driver import call as run
from shardmath.collectives.moving import all_to_all_by_received
from shardmath.collectives.operand import slab_counts
from shardmath.collectives.reducing import reduce_scatter_by_own
from shardmath.context.context import require_context
from shardmath.geometry import Distribution
from shardmath.operators.fft import api, trigonometric
from shardmath.operators.fft.operation import OPERATIONS
from shardmath.operators.fft.options import FFTOptions
from shardmath.operators.layouts import infer_layout
from shardmath.operators.matmul.description import arguments_of
from shardmath.operators.matmul.operation import MATMUL, given_results
from shardmath.operators.matmul.options import MatmulOptions, matrix_qualifiers_dtype
from shardmath.operators.redistribute.api import redistribute
from shardmath.program.performing import Arguments
from shardmath.traced import shapes
from shardmath.traced.arguments import SWAPPED
from shardmath.traced.shapes import Shape, Tensors
from shardmath.traced.words import Words, words_of

Call = Callable[..., Any]


class Operator(Immutable, eq=False):
    """An operator of torch's: all ranks together compute one tensor from several.

    `perform(xs, words, counts, shape)` calls the public function on tensors without gradients.
    `shape(xs, words, counts)` is the shape of this rank's result, with None for an extent that only
    the peers know.

    A linear operator has an `adjoint(words)`: the name and the words of the operator that computes
    its gradient, with the same counts. Any other has `gradients(saved, words, grad, wanted, call)`,
    the gradients of its operands, and `tangent(saved, words, result, tangents, counts, call)`, the
    derivative of its result, which has this (shape, dtype), along tangents of them. `saved` are the
    operands and, where it `saves_result`, the result. An operator that `is_local` asks no other
    rank.
    """

    perform: Callable[[Tensors, Words, Any, Any], Any]
    shape: Callable[[Tensors, Words, Any], Shape]
    adjoint: Callable[[Words], tuple[str, Words] | None] = lambda words: None
    gradients: Callable[..., list[Any]] | None = None
    tangent: Callable[..., Any] | None = None
    saves_result: bool = True
    is_local: bool = False


def _perform_transform(name: str, xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    several = "type" in words  # by cosines or sines, along several axes
    function = getattr(trigonometric, f"{name}n") if several else getattr(api, name)
    return function(xs[0], **_arguments_of_transform(name, words))


@lru_cache(maxsize=1024)
def _arguments_of_transform(name: str, words: Words) -> dict[str, Any]:
    """The arguments of a transform: objects by which a call that comes again is recognised."""
    pair, axes = (words["source"], words["target"]), tuple(words["axes"])
    given = {"distribution": pair, "axes": axes, "norm": words["norm"]}
    if "type" in words:  # cosines or sines
        return given | {"type": words["type"], "orthogonalize": words["orthogonalize"]}
    options = FFTOptions(last_axis_parity=words["parity"]) if name == "irfft" else None
    return given | {"options": options}


_ADJOINT = {
    "fft": "ifft",
    **{name: f"{name}_adjoint" for name in ("rfft", "irfft", "dct", "dst")},
}
_ADJOINT |= {adjoint: name for name, adjoint in _ADJOINT.items()}


def _adjoint_of_transform(name: str, words: Words) -> tuple[str, Words]:
    norm = words["norm"] if "type" in words else SWAPPED[words["norm"]]
    return _ADJOINT[name], dict(_turned(words), norm=norm)


def _turned(words: Words) -> Words:
    """Words of a call in the other direction."""
    return dict(words, source=words["target"], target=words["source"])


@lru_cache(maxsize=1024)
def _bound_pair(words: Words, shape: tuple[int, ...] | None) -> tuple[Distribution, Distribution]:
    """The distributions of a redistribution, bound where the call says the global shape."""
    source, target = words["source"], words["target"]
    return (source, target) if shape is None else (source.bind(shape), target.bind(shape))


def _performed_adjoint(name: str) -> Call:
    """How the adjoint of a transform, which has no public function, is performed."""

    @collective_call
    def adjoint(x: Any, words: tuple[Any, ...]) -> Any:
        return run(OPERATIONS[name], Arguments((x,), (None,), words))

    adjoint.__name__ = name  # as peers and traces name it
    return lambda xs, words, counts, shape: adjoint(xs[0], _words_of_adjoint(words, tuple(shape)))


@lru_cache(maxsize=1024)
def _words_of_adjoint(words: Words, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The words of an adjoint, whose result has this shape on this rank."""
    pair, axes = (words["source"], words["target"]), tuple(words["axes"])
    if "type" in words:
        return pair, axes, words["norm"], words["type"], words["orthogonalize"], None
    return pair, axes, words["norm"], tuple(map(int, shape))


def _global_shape(distribution: Distribution, part: Sequence[Any]) -> tuple[int, ...]:
    """The global shape of an array, given the shape of this rank's part. Collective unless the
    distribution is bound.
    """
    if distribution.binding is not None:
        return distribution.binding.global_shape
    shape = tuple(map(int, part))

    def check(specs: list[Any]) -> tuple[int, ...]:
        encoded, shapes = zip(*specs, strict=True)
        return infer_layout("the operand", encoded, shapes).global_shape

    return require_context().agree(
        "the shape of a global array", lambda: (distribution.encode(), shape), check
    )


def _perform_reduce_scatter(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    op, axis = words["op"], words["axis"]
    if counts is None and shape is not None:  # a gradient, of this rank's part
        return reduce_scatter_by_own(xs[0], op=op, axis=axis, own=int(shape[axis]))
    return collectives.reduce_scatter(xs[0], op=op, axis=axis, counts=counts)


def _perform_all_to_all(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    context, axis = require_context(), words["axis"]
    sent = None if counts is None else counts[: context.size]
    received = None if counts is None else counts[context.size :] or None
    return collectives.all_to_all(xs[0], axis=axis, send_counts=sent, receive_counts=received)


def _perform_all_to_all_adjoint(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """Each rank returns what it received to the rank that sent it."""
    size, axis = require_context().size, words["axis"]
    sent = slab_counts(int(shape[axis]), size) if counts is None else tuple(counts[:size])
    return all_to_all_by_received(xs[0], axis=axis, received=sent)


def _perform_reduce(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """The sum of all ranks' tensors on the root; zeros elsewhere."""
    context, flat = require_context(), xs[0].reshape(-1)
    counts = [flat.numel() * (rank == words["root"]) for rank in range(context.size)]
    made = collectives.reduce_scatter(flat, counts=counts)
    return made.reshape(xs[0].shape) if made.numel() else torch.zeros_like(xs[0])


def _scaled_copies(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    return xs[0] / require_context().size if words["op"] == "mean" else xs[0].clone()


def _same(name: str) -> Callable[[Words], tuple[str, Words]]:
    """The adjoint of that name, with the same words."""
    return lambda words: (name, words)


@collective_call
def multiply(words: Words, *xs: Any) -> Any:
    """The product of these factors, or with C. Collective. It is recognised by the words, where
    `matmul` would have to read its qualifiers each time.
    """
    arguments = _arguments_of_product(words, len(xs))
    operands = (*xs, *arguments.operands[len(xs) :])
    return given_results(run(MATMUL, arguments._replace(operands=operands)))


multiply.__name__ = "matmul"  # as peers and traces name it


@lru_cache(maxsize=1024)
def _arguments_of_product(words: Words, operands: int) -> Arguments:
    """The arguments of a product, without its operands."""
    flags = np.zeros(3, dtype=matrix_qualifiers_dtype)
    flags["is_transpose"][:2], flags["is_conjugate"][:2] = words["transpose"], words["conjugate"]
    return arguments_of(
        None,
        None,
        distributions=words["distributions"],
        alpha=words["alpha"],
        beta=words["beta"] if operands == 3 else None,
        qualifiers=flags,
        options=MatmulOptions(**words["options"]) if words["options"] else None,
    )


@lru_cache(maxsize=1024)
def _products_of_gradients(words: Words, is_complex: bool) -> list[tuple[int, int, str]]:
    """The gradients of A and B as products: two of (A, B, the gradient of D), by their numbers, and
    the words.
    """
    of_a, of_b, of_d = words["distributions"]
    (ta, tb), (ca, cb) = words["transpose"], words["conjugate"]
    a, b, d = range(3)
    products = [
        (b, d, (of_b, of_d, of_a), (tb, True), (cb ^ (not ca), ca), ca)
        if ta
        else (d, b, (of_d, of_b, of_a), (False, not tb), (ca, ca ^ (not cb)), ca),
        (d, a, (of_d, of_a, of_b), (True, ta), (cb, ca ^ (not cb)), cb)
        if tb
        else (a, d, (of_a, of_d, of_b), (not ta, False), (cb ^ (not ca), cb), cb),
    ]
    made = []
    for one, other, split, transpose, conjugate, keeps in products:
        alpha = words["alpha"]
        text = words_of(
            distributions=split,
            alpha=alpha.conjugate() if isinstance(alpha, complex) and not keeps else alpha,
            beta=None,
            transpose=transpose,
            conjugate=[bool(flag) and is_complex for flag in conjugate],
            options={},
        )
        made.append((one, other, text))
    return made


def _matmul_gradients(
    xs: Tensors, words: Words, grad: Any, wanted: Sequence[bool], call: Call
) -> list[Any]:
    """The gradients of D = alpha op(A) op(B) + beta C, split as the operands are. Those of A and B
    are products again.
    """
    a, b, *c = xs
    factors = a, b, grad if grad.dtype == a.dtype else grad.to(a.dtype)
    products = _products_of_gradients(words, a.is_complex())
    grads: list[Any] = [None] * len(xs)
    for number, (one, other, text) in enumerate(products):
        if wanted[number]:
            pair = [factors[one], factors[other]]
            grads[number] = call("matmul", pair, text, shape=xs[number].shape)
    if c and wanted[2]:
        beta = words["beta"]
        grads[2] = grad * (beta.conjugate() if isinstance(beta, complex) else beta)
    return grads


@collective_call
def _sum_shared_rows(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    """For each row of this rank's part, of shape `counts`, the sum over all ranks that have it."""
    distribution, context = words["distribution"], require_context()
    whole = _global_shape(distribution, counts)
    ranges = distribution.index_ranges(context.rank, whole, size=context.size)[0]
    own = torch.cat([torch.arange(*ends) for ends in ranges] or [torch.arange(0)])
    own = own.to(xs[0].device)
    rows, values = collectives.all_gather(own), collectives.all_gather(xs[0])
    return values.new_zeros(whole[0]).index_add(0, rows, values)[own]


def _tangent_of_matmul(
    xs: Tensors, words: Words, result: tuple[Any, Any], tangents: Tensors, counts: Any, call: Call
) -> Any:
    """The sum over the factors of products in which one factor is replaced by its tangent."""
    (a, b, *_), (shape, dtype) = xs, result
    text = words_of(**dict(words, beta=None))
    pairs = (tangents[0], b), (a, tangents[1])
    terms = [
        call("matmul", list(pair), text, shape=shape)
        for pair, tangent in zip(pairs, tangents, strict=False)
        if tangent is not None
    ]
    if len(tangents) == 3 and tangents[2] is not None:
        terms.append(words["beta"] * tangents[2])
    return sum(terms[1:], terms[0]).to(dtype)


def _perform_all_gather(xs: Tensors, words: Words, counts: Any, shape: Any) -> Any:
    made = collectives.all_gather(xs[0], axis=words["axis"])
    return made / require_context().size if words["op"] == "mean" else made


def _linear(name: str) -> Callable[[Words], tuple[str, Words] | None]:
    """The adjoint of a sum or a mean, with the same words; of other reductions there is none."""
    return lambda words: (name, words) if words["op"] in ("sum", "mean") else None


def _gradients_of_reduction(
    xs: Tensors, words: Words, grad: Any, wanted: Sequence[bool], call: Call
) -> list[Any]:
    """The gradient of a min, max or product; what was scattered is gathered first."""
    x, made = xs
    if "axis" in words:
        text = words_of(axis=words["axis"], op="sum")
        made, grad = (call("all_gather", [y], text, shape=list(x.shape)) for y in (made, grad))
    else:
        grad = call("copies", [grad], words_of(op="sum"))
    return [grad * _slopes(x, made, words, call).conj()]


def _tangent_of_reduction(
    xs: Tensors, words: Words, result: tuple[Any, Any], tangents: Tensors, counts: Any, call: Call
) -> Any:
    x, made = xs
    name, text = "all_reduce", words_of(op="sum")
    if "axis" in words:
        name, text = "reduce_scatter", words_of(axis=words["axis"], op="sum")
        made = call("all_gather", [made], text, shape=list(x.shape))
    return call(name, [tangents[0] * _slopes(x, made, words, call)], text, counts)


def _slopes(x: Any, made: Any, words: Words, call: Call) -> Any:
    """The derivative of a reduction by this rank's elements. Ranks whose elements are the min or
    max share it equally; that of a product is the product of the other ranks' elements.
    """
    if words["op"] in ("min", "max"):
        holds = (x == made).to(x.dtype)
        return holds / call("all_reduce", [holds], words_of(op="sum"))
    if words["op"] != "product":
        raise NotImplementedError(f"a reduction by {words['op']!r} has no gradient")
    rows = words_of(axis=0, op="sum")
    all_ = call("all_gather", [x.unsqueeze(0)], rows, shape=[require_context().size, *x.shape])
    own = torch.arange(len(all_), device=x.device) == require_context().rank
    return all_.where(~own.reshape(-1, *[1] * x.ndim), 1).prod(0)


def _transform(name: str) -> Operator:
    perform: Call = partial(_perform_transform, name)
    if name.endswith("adjoint"):  # a caller passes the shape of its result
        perform = _performed_adjoint(name)
    shape, adjoint = partial(shapes.of_transform, name), partial(_adjoint_of_transform, name)
    return Operator(perform, shape, adjoint)


TABLE = {
    "matmul": Operator(
        lambda xs, words, counts, shape: multiply(words, *xs),
        shapes.of_product,
        gradients=_matmul_gradients,
        tangent=_tangent_of_matmul,
        saves_result=False,
    ),
    "redistribute": Operator(
        lambda xs, words, counts, shape: redistribute(xs[0], *_bound_pair(words, counts)),
        shapes.of_redistribution,
        lambda words: ("redistribute", _turned(words)),
    ),
    **{name: _transform(name) for name in _ADJOINT},
    "all_gather": Operator(
        _perform_all_gather,
        lambda xs, words, counts: shapes.with_extent(xs, words, None),
        _linear("reduce_scatter"),
    ),
    "reduce_scatter": Operator(
        _perform_reduce_scatter,
        shapes.of_scattering,
        _linear("all_gather"),
        _gradients_of_reduction,
        _tangent_of_reduction,
    ),
    "all_to_all": Operator(_perform_all_to_all, shapes.of_exchange, _same("all_to_all_adjoint")),
    "all_to_all_adjoint": Operator(_perform_all_to_all_adjoint, shapes.alike, _same("all_to_all")),
    "broadcast": Operator(
        lambda xs, words, counts, shape: collectives.broadcast(xs[0], root=words["root"]),
        shapes.alike,
        _same("reduce"),
    ),
    "reduce": Operator(_perform_reduce, shapes.alike, _same("broadcast")),
    "all_reduce": Operator(
        lambda xs, words, counts, shape: collectives.all_reduce(xs[0], op=words["op"]),
        shapes.alike,
        _linear("copies"),
        _gradients_of_reduction,
        _tangent_of_reduction,
    ),
    "shared_rows": Operator(
        lambda xs, words, counts, shape: xs[0].clone(),
        shapes.alike,
        _same("shared_rows_adjoint"),
        is_local=True,
    ),
    "shared_rows_adjoint": Operator(_sum_shared_rows, shapes.alike, _same("shared_rows")),
    "copies": Operator(_scaled_copies, shapes.alike, _same("all_reduce"), is_local=True),
}
