"""Functions of arrays that know how they are split, called with each rank's parts.

q, r = qr(x)                                                   of an array
q, r = qr(part, distributions=[Slab.X, Slab.X, Replicated()])  of parts: operand, results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from shardmath.base.collective_call import collective_call
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.context.context import require_context
from shardmath.distributed import parts
from shardmath.distributed.creation import array
from shardmath.distributed.layouts import listed
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution


def of_parts_too(function: Callable[..., Any], operands: int = 1) -> Callable[..., Any]:
    """`function`, whose first arguments are so many `operands`, of arrays and of parts.

    It takes `distributions` besides: of parts those of the operands, and then, where results are
    to be split otherwise than they come, those of the results; of arrays those of the results
    alone; one need not be in a list. None leaves a result as it comes. Of parts the results are
    parts.
    """
    name = function.__name__

    @collective_call
    @wraps(function)
    def called(
        *given: Any,
        distributions: Distribution | Sequence[Distribution | None] | None = None,
        **words: Any,
    ) -> Any:
        arrays, rest = given[:operands], given[operands:]
        wanted = listed(distributions)
        if arrays and all(isinstance(x, Distributed) for x in arrays):
            return _split(function(*given, **words), wanted, name, arrays[0].context)
        context = require_context()
        if len(arrays) < operands or not all(parts.is_array(x) for x in arrays):
            mistake = TypeError(f"{name} takes {operands} array(s): DistributedArrays, or parts")
            raise_on_all_ranks(context, "array", mistake)
        if len(wanted) < operands:
            mistake = TypeError(
                f"{name} of parts takes distributions=[...] of its {operands} operand(s), and of "
                f"results; it was given {len(wanted)}"
            )
            raise_on_all_ranks(context, "array", mistake)
        split = [array(x, how) for x, how in zip(arrays, wanted, strict=False)]
        results = function(*split, *rest, **words)
        return _parts(_split(results, wanted[operands:], name, context))

    return called


def _split(results: Any, wanted: Sequence[Distribution | None], name: str, context: Any) -> Any:
    """The results, in the distributions that are wanted of them. Collective."""
    several = isinstance(results, tuple)
    ones = list(results) if several else [results]
    if len(wanted) > len(ones):
        mistake = TypeError(f"{name} has {len(ones)} result(s), not {len(wanted)} to distribute")
        raise_on_all_ranks(context, "redistribute", mistake)
    for place, how in enumerate(wanted):
        if how is not None and isinstance(ones[place], Distributed):
            ones[place] = ones[place].to(how)
    return _as(results, ones) if several else ones[0]


def _parts(results: Any) -> Any:
    """This rank's parts of the results."""
    if isinstance(results, tuple):
        return _as(results, [_parts(x) for x in results])
    return results.local if isinstance(results, Distributed) else results


def _as(results: Any, ones: list[Any]) -> Any:
    """A tuple of the results' kind."""
    kind = type(results)
    return kind(*ones) if hasattr(kind, "_fields") else tuple(ones)
