"""Functions of arrays that know how they are split, called with each rank's parts.

q, r = qr(x)                                                   of an array
q, r = qr(part, distributions=[Slab.X, Slab.X, Replicated()])  of parts: operand, results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from shardmath.base.collective_call import collective_call
from shardmath.call.agreement import raising_on_all_ranks
from shardmath.context.context import require_context
from shardmath.distributed import parts
from shardmath.distributed.creation import array
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution
from shardmath.operators.layouts import distributions_of, distributions_of_results


def of_parts_too(
    function: Callable[..., Any], operands: Sequence[str] = ("a",), *, results: int = 1
) -> Any:
    """`function`, which takes arrays, made to take parts as well. Its first arguments are the
    arrays, named `operands`; it has at most so many `results`.

    The function gains an argument `distributions`. With parts it gives those of the operands,
    followed by those of the results where they are to be split otherwise than they come; with
    arrays those of the results alone. A single one need not be in a list, and None leaves a result
    as it comes. With parts the results are parts.
    """
    name, count = function.__name__, len(operands)

    def read(distributions: Any, operands: Sequence[str]) -> Any:
        split, wanted = distributions_of(distributions, operands)
        distributions_of_results(wanted, results)
        return split, wanted

    @collective_call
    @wraps(function)
    def called(
        *given: Any,
        distributions: Distribution | Sequence[Distribution | None] | None = None,
        **words: Any,
    ) -> Any:
        arrays, rest = given[:count], given[count:]
        if arrays and all(isinstance(x, Distributed) for x in arrays):
            context = arrays[0].context
            _, wanted = raising_on_all_ranks(context, name, lambda: read(distributions, ()))
            return _split(function(*given, **words), wanted, context)
        context = require_context()

        def described() -> Any:
            if len(arrays) < count or not all(parts.is_array(x) for x in arrays):
                raise TypeError(f"{name} takes {count} array(s): DistributedArrays, or parts")
            return read(distributions, operands)

        split, wanted = raising_on_all_ranks(context, "array", described)
        made = function(*map(array, arrays, split), *rest, **words)
        return _parts(_split(made, wanted, context))

    return called


def _split(results: Any, wanted: Sequence[Distribution | None], context: Any) -> Any:
    """The results, brought to the distributions in which they are wanted. Collective."""
    several = isinstance(results, tuple)
    ones = list(results) if several else [results]

    def counted() -> list[Distribution | None]:
        return distributions_of_results(wanted, len(ones))

    each = raising_on_all_ranks(context, "redistribute", counted)
    for place, how in enumerate(each):
        if how is not None and isinstance(ones[place], Distributed):
            ones[place] = ones[place].to(how)
    return _as(results, ones) if several else ones[0]


def _parts(results: Any) -> Any:
    """This rank's parts of the results."""
    if isinstance(results, tuple):
        return _as(results, [_parts(x) for x in results])
    return results.local if isinstance(results, Distributed) else results


def _as(results: Any, ones: list[Any]) -> Any:
    """A tuple of the same kind as the results."""
    kind = type(results)
    return kind(*ones) if hasattr(kind, "_fields") else tuple(ones)
