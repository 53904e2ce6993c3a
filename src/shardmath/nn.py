"""Layers of models: products over leading axes, and the exchange of tokens and heads.

    q, k, v = nn.linear(x, [wq, wk, wv], distributions=[Slab(1), Slab(0), Slab(2)])

Arrays are this rank's parts: x (batch, tokens, features), of any leading axes. The functions call
`matmul`, `redistribute` and the collectives, which bring their gradients; `torch.compile` traces
them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, overload

from shardmath.arrays import Array, library_of
from shardmath.base.collective_call import composed
from shardmath.base.untraced import constant, is_compiling, operator_of, operators, wants_operator
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives import all_gather, reduce_scatter
from shardmath.context.context import require_context
from shardmath.geometry import Distribution, Replicated, Slab, unbound
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.matmul.forms import matmul
from shardmath.operators.redistribute.api import redistribute

__all__ = ["heads_to_tokens", "linear", "tokens_to_heads"]


def __dir__() -> list[str]:
    return sorted(__all__)


@overload
def linear(
    x: Array,
    weight: Sequence[Array],
    bias: Sequence[Array | None] | None = None,
    *,
    distributions: Sequence[Distribution],
    activation: str | None = None,
) -> tuple[Array, ...]: ...


@overload
def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    distributions: Sequence[Distribution],
    activation: str | None = None,
) -> Array: ...


@composed
def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    distributions: Sequence[Distribution],
    activation: str | None = None,
) -> Any:
    """activation(x @ weight.T + bias), of a layer that is split over the ranks. Collective.

        h = nn.linear(x, w1, b1, distributions=[Slab(1), Slab(0), Slab(2)], activation="gelu")
        y = nn.linear(h, w2, distributions=[Slab(2), Slab(1), Slab(1)])

    x (..., k), weight (n, k) and bias (n,), as torch.nn.functional.linear takes them, are this
    rank's parts; the result is (..., n). `distributions` are those of x, of the weight and of the
    result: a Slab or Replicated(), where the axes of a Slab are numbered as the array has them.
    Tokens that are split are gathered for features that are (above, the first line), and sums are
    scattered by tokens the other way round. The bias is split as the features of the result, and
    whole where those are. `activation` is None, "relu" or "gelu", which is the one by tanh.

    With a list of weights, and of biases if there are any, the result is a tuple: tokens are
    gathered once for all of them, and of their gradients one sum is scattered.

    Tokens are gathered while they are multiplied, if the rows of all leading axes together are
    split as by Slab.X: where all leading axes but the split one are of extent 1, or where the
    number of ranks divides the split one, as far as this rank knows (of x, a distribution that is
    bound, `Slab(1).bind(shape)`, says it). Else the product begins when all are there.

    Raises on all ranks ValueError for arrays and distributions that do not fit, TypeError for what
    is not an array or a distribution, RuntimeError before `initialize`.
    """
    return _linear(x, weight, bias, distributions=distributions, activation=activation)


class _Way(NamedTuple):
    """How a layer is computed as a product of matrices. `x`, `weight` and `y` are split by "rows"
    or "columns", or replicated (""). `front` is the leading axis that is split, and moved to the
    front; `extent`, its global extent, is -1 if no distribution is bound. `split` are the
    distributions of the matrices x, weight and y, bound where those of the arrays are.
    """

    front: int
    extent: int
    x: str
    weight: str
    y: str
    split: tuple[Distribution, Distribution, Distribution]

    @property
    def gathers(self) -> bool:
        """Whether the tokens of x are gathered."""
        return self.x == "rows" and self.y != "rows"


_SPLIT: dict[str, Distribution] = {"rows": Slab.X, "columns": Slab.Y, "": Replicated()}
_TURNED = {"rows": "columns", "columns": "rows", "": ""}
_EPILOGS = {
    (None, True): MatmulEpilog.BIAS,
    ("relu", False): MatmulEpilog.RELU,
    ("relu", True): MatmulEpilog.RELU_BIAS,
    ("gelu", False): MatmulEpilog.GELU,
    ("gelu", True): MatmulEpilog.GELU_BIAS,
}


def _linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    distributions: Sequence[Distribution],
    activation: str | None = None,
) -> Any:
    several = isinstance(weight, list | tuple)
    weights = tuple(weight) if several else (weight,)
    biases = tuple(bias) if isinstance(bias, list | tuple) else (bias,)
    biases = (None,) * len(weights) if bias is None else biases
    try:
        shapes = [_shape_of_part(array) for array in (x, *weights)]
        way = _Way(*_way(tuple([len(shape) for shape in shapes]), distributions, activation))
        _check(way, shapes, biases)
    except (AttributeError, TypeError, ValueError) as error:
        _refuse(error, "all_gather" if several else "matmul")
    is_matrix = len(shapes[0]) == 2
    rows, others = (x, ()) if is_matrix else _rows(x, way.front)
    if 0 in others:
        return _of_no_tokens(x, weight, bias, distributions, activation, way.front)
    exact = _is_exact(way, rows, others)
    recorded = _is_recorded(rows, *weights, *biases)
    if way.gathers and (several or not exact):
        rows = all_gather(operator_of("narrowed")(rows)[0] if recorded else rows)
        made = [_local(rows, *pair, activation) for pair in zip(weights, biases, strict=True)]
    elif exact:
        pairs = zip(weights, biases, strict=True)
        made = [_fused(rows, *pair, activation, way, recorded) for pair in pairs]
    else:
        pairs = zip(weights, biases, strict=True)
        made = [_apart(rows, others, *pair, activation, way, recorded) for pair in pairs]
    if not is_matrix:
        made = [_shaped(y, others, way.front) for y in made]
    return tuple(made) if several else made[0]


operators["linear"] = _linear


def _shape_of_part(array: Any) -> tuple[int, ...]:
    """The shape of this rank's part. Raises TypeError for an array that knows how it is split."""
    if hasattr(array, "device_mesh"):
        raise TypeError("layers take parts, not DTensors: pass x.to_local()")
    if hasattr(array, "__shardmath_functions__"):
        raise TypeError("layers take parts, not arrays that know how they are split: pass x.local")
    if not hasattr(array, "shape"):
        raise TypeError(f"layers take arrays, this rank's parts: not {type(array).__name__}")
    return tuple(array.shape)


def _of_no_tokens(
    x: Any,
    weight: Any,
    bias: Any,
    distributions: Sequence[Distribution],
    activation: str | None,
    front: int,
) -> Any:
    """The layer where leading axes other than `front` are empty, such as that of the batch. It is
    that of zeros, one for each such axis, none of which is kept: the extents of the result, and
    gradients that are zeros, are found as those of any other.
    """
    last = len(x.shape) - 1
    empty = tuple([axis for axis in range(last) if axis != front and x.shape[axis] == 0])
    of_x, of_weight, of_y = distributions
    split = [_with_one(of_x, empty), of_weight, _with_one(of_y, empty)]
    zeros = x.sum(axis=empty, keepdims=True, dtype=x.dtype)
    made = _linear(zeros, weight, bias, distributions=split, activation=activation)
    kept = tuple([slice(0 if axis in empty else None) for axis in range(last + 1)])
    return tuple([y[kept] for y in made]) if isinstance(made, tuple) else made[kept]


@constant
def _with_one(distribution: Distribution, axes: Sequence[int]) -> Distribution:
    """The distribution where these axes, if it is bound, have one index instead of none."""
    if distribution.binding is None:
        return distribution
    shape = enumerate(distribution.binding.global_shape)
    return unbound(distribution).bind([1 if axis in axes else extent for axis, extent in shape])


@constant
def _way(axes: tuple[int, ...], distributions: Any, activation: Any) -> tuple[Any, ...]:
    """The fields of `_Way`, for x and weights of so many axes. Raises ValueError or TypeError."""
    given = tuple(distributions)
    try:
        return _known_way(axes, given, activation)
    except TypeError:  # something has no hash, or is wrong
        return _known_way.__wrapped__(axes, given, activation)


@lru_cache(maxsize=1024)
def _known_way(axes: tuple[int, ...], given: tuple[Any, ...], activation: Any) -> tuple[Any, ...]:
    """See `_way`."""
    if activation not in (None, "relu", "gelu"):
        raise ValueError(f'activation is None, "relu" or "gelu", not {activation!r}')
    if len(given) != 3 or not all(isinstance(one, Slab | Replicated) for one in given):
        raise TypeError(
            f"distributions are three, a Slab or Replicated() each, of x, weight and result: not "
            f"{given!r}"
        )
    if axes[0] < 2 or any(count != 2 for count in axes[1:]):
        raise ValueError(f"x has two axes or more, and a weight two; these have {axes}")
    last, extent = axes[0] - 1, -1
    kinds: list[str] = []
    fronts: set[int] = set()
    split: list[Distribution] = []
    for distribution, end in zip(given, (last, 1, last), strict=True):
        axis = distribution.partition_dim if isinstance(distribution, Slab) else None
        if axis is not None and axis > end:
            raise ValueError(f"{distribution!r} splits axis {axis}, and there are {end + 1}")
        is_weight = len(kinds) == 1
        kinds.append("" if axis is None else "columns" if axis == end else "rows")
        whole: tuple[int, ...] = ()
        if distribution.binding is not None:
            whole = distribution.binding.global_shape
        of_matrix = _SPLIT[kinds[-1]]
        if whole and not is_weight:
            of_matrix = of_matrix.bind((prod(whole[:-1]), whole[-1]))
        split.append(of_matrix)
        if axis is not None and kinds[-1] == "rows" and not is_weight:
            fronts.add(axis)
            extent = whole[axis] if whole else extent
    if len(fronts) == 2:
        raise ValueError(f"x and result are split along other leading axes: {sorted(fronts)}")
    return fronts.pop() if fronts else 0, extent, *kinds, tuple(split)


def _check(way: _Way, shapes: Sequence[tuple[int, ...]], biases: Sequence[Any]) -> None:
    """Raise ValueError if this rank's arrays do not fit together."""
    (*_, depth), *weights = shapes
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weight(s) have {len(biases)} biases: None is none")
    same = (way.x == "columns") == (way.weight == "columns")  # both split, or neither
    for (outputs, inputs), bias in zip(weights, biases, strict=True):
        if same and inputs != depth:
            raise ValueError(f"x has {depth} features, and a weight ({outputs}, {inputs})")
        if (
            bias is not None
            and (way.y == "columns") == (way.weight == "rows")
            and tuple(bias.shape) != (outputs,)
        ):
            raise ValueError(f"a weight ({outputs}, {inputs}) has a bias {tuple(bias.shape)}")


def _refuse(error: Exception, operation: str) -> None:
    """Raise the error; on all ranks, but in code that is being compiled. Collective.

    Ranks without a mistake have entered `operation`, and raise it there.
    """
    if is_compiling():
        raise error
    kind = type(error) if isinstance(error, TypeError | ValueError) else TypeError
    raise_on_all_ranks(require_context(), operation, kind(str(error)))


def _rows(x: Any, front: int) -> tuple[Any, tuple[int, ...]]:
    """`x` as a matrix with the axis `front` first, and the extents of the other leading axes."""
    turned = x.swapaxes(0, front) if front else x
    *lead, depth = turned.shape
    return turned.reshape(prod(lead), depth), tuple(lead[1:])


def _shaped(y: Any, others: tuple[int, ...], front: int) -> Any:
    y = y.reshape(y.shape[0] // prod(others), *others, y.shape[-1])
    return y.swapaxes(0, front) if front else y


def _is_exact(way: _Way, rows: Any, others: tuple[int, ...]) -> bool:
    """Whether the rows are split as by Slab.X, as far as this rank knows."""
    count = prod(others)
    if "rows" not in (way.x, way.y) or count == 1:
        return True
    if way.extent >= 0:
        return way.extent % _ranks() == 0
    if way.x == "rows":
        return False
    divides = rows.shape[0] // count % _ranks() == 0
    return bool(operator_of("certain")(divides)) if is_compiling() else divides


@constant
def _ranks() -> int:
    return require_context().size


def _fused(
    rows: Any, weight: Any, bias: Any, activation: str | None, way: _Way, recorded: bool
) -> Any:
    """The layer by one product and its epilog; where torch records it, by a product and torch's own
    functions.
    """
    if recorded:
        y = operator_of("layer_product")(rows, weight, way.split)
        return _finished(y, _of_all_ranks(bias, way), activation)
    if bias is None and activation is None:
        split = [way.split[0], _SPLIT[_TURNED[way.weight]], way.split[2]]
        return matmul(rows, weight.T, distributions=split)
    split = [_SPLIT[way.weight], _SPLIT[_TURNED[way.x]], _SPLIT[_TURNED[way.y]]]
    epilog = _EPILOGS[activation, bias is not None]
    inputs = {} if bias is None else {"epilog_inputs": {"bias": bias}}
    return matmul(weight, rows.T, distributions=split, epilog=epilog, **inputs).T


def _apart(
    rows: Any,
    others: tuple[int, ...],
    weight: Any,
    bias: Any,
    activation: str | None,
    way: _Way,
    recorded: bool,
) -> Any:
    """The layer by a local product; sums are scattered where the weight's columns are split."""
    bias = _of_all_ranks(bias, way) if recorded else bias
    if way.x == "rows" and not way.weight:
        weight = operator_of("copies")(weight) if recorded else weight
        return _local(rows, weight, bias, activation)
    if (way.x, way.weight) != ("columns", "columns"):
        _refuse(
            ValueError(
                "leading axes of several extents, of which one is split unevenly, want the weight "
                "split along the features that x or the result has in parts: call redistribute "
                "first"
            ),
            "linear",
        )
    sums = _local(rows, weight, None, None)
    sums = sums.reshape(rows.shape[0] // prod(others), *others, sums.shape[-1])
    made = reduce_scatter(sums)
    return _finished(made.reshape(prod(made.shape[:-1]), made.shape[-1]), bias, activation)


def _of_all_ranks(bias: Any, way: _Way) -> Any:
    """A bias that all ranks have and add to tokens of their own: its gradients are summed."""
    if bias is not None and way.y == "rows":
        return operator_of("copies")(bias)
    return bias


def _local(rows: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    return _finished(rows @ weight.T, bias, activation)


def _finished(y: Any, bias: Any, activation: str | None) -> Any:
    if bias is None and activation is None:
        return y
    if hasattr(y, "requires_grad"):
        return operator_of("finished")(y, bias, activation)
    y = y if bias is None else y + bias  # NumPy's or CuPy's
    library: Any = sys.modules[library_of(y).name]
    if activation == "relu":
        return library.maximum(y, 0)
    if activation == "gelu":
        inner = (2 / library.pi) ** 0.5 * (y + 0.044715 * y**3)
        return (0.5 * y * (1 + library.tanh(inner))).astype(y.dtype)
    return y


def _is_recorded(*arrays: Any) -> bool:
    """Whether torch has to see what is computed with these arrays."""
    if is_compiling():
        return True
    return any(hasattr(x, "requires_grad") and wants_operator(x, "matmul") for x in arrays)


def tokens_to_heads(
    x: Array,
    *,
    token_axis: int = -3,
    head_axis: int = -2,
    global_shape: Sequence[int] | None = None,
) -> Array:
    """From some tokens of all heads to all tokens of some heads. Collective.

        q = nn.tokens_to_heads(q)  # (batch, tokens, heads, features)

    `x` is this rank's part of an array that is split along `token_axis` as Slab splits it, and the
    result is split along `head_axis`, evenly or not. Negative axes count from the end.
    `global_shape`, the shape of the whole array, lets `torch.compile` know the number of tokens
    while it traces, also where it is a symbol, as of a sequence of any length. Without it the
    number is known when the program runs.

    This is the exchange around attention of DeepSpeed's Ulysses: each head is then computed on one
    rank. It is `redistribute`, whose errors and gradients it has; `heads_to_tokens` leads back.
    """
    made: Array = _exchanged(x, token_axis, head_axis, global_shape)
    return made


def heads_to_tokens(
    x: Array,
    *,
    token_axis: int = -3,
    head_axis: int = -2,
    global_shape: Sequence[int] | None = None,
) -> Array:
    """From all tokens of some heads to some tokens of all heads. Collective.

        y = nn.heads_to_tokens(softmax(q @ k.mT) @ v, token_axis=-2, head_axis=-3)

    The inverse of `tokens_to_heads`, with its arguments.
    """
    made: Array = _exchanged(x, head_axis, token_axis, global_shape)
    return made


def _exchanged(x: Any, source: int, target: int, global_shape: Sequence[int] | None) -> Any:
    try:
        axes = len(_shape_of_part(x))
        if not all(-axes <= axis < axes for axis in (source, target)):
            raise ValueError(f"x has {axes} axes, and tokens and heads are axes {source}, {target}")
        split = [Slab(axis + axes if axis < 0 else axis) for axis in (source, target)]
        if global_shape is not None and not is_compiling():
            split = [one.bind(global_shape) for one in split]
    except (AttributeError, TypeError, ValueError) as error:
        _refuse(error, "redistribute")
    if global_shape is not None and is_compiling():  # distributions are bound to numbers alone
        return operator_of("redistribute_of_shape")(x, *split, global_shape)
    return redistribute(x, *split)
