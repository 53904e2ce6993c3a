"""Distributions from plain data, so that ranks can tell each other what they hold.

Plain data is tuples, strings, integers and None. `decode` makes only distributions, from data that
has exactly the form that `Distribution.encode` gives; everything else is a ValueError.
"""

from __future__ import annotations

from typing import Any

from shardmath.geometry.distribution import Distribution
from shardmath.geometry.distributions import BlockCyclic, BlockNonCyclic, Box, Replicated, Slab
from shardmath.geometry.grid import ProcessGrid

__all__ = ["decode"]


def decode(data: Any) -> Distribution:
    """The distribution that was encoded. Raises ValueError for data of another form."""
    try:
        made = _decode(data)
        plain = made.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"malformed distribution: {error}") from None
    # What decodes to a value that encodes otherwise was not written by a rank of ours.
    if plain != data or not _plain(data):
        raise ValueError(f"malformed distribution: {data!r}")
    return made


def _decode(data: Any) -> Distribution:
    if not isinstance(data, tuple) or len(data) < 2:
        raise ValueError(f"{data!r}")
    name, *fields, binding = data
    made: Distribution
    match name, fields:
        case "Slab", [dim, ndim]:
            made = Slab(dim, ndim)
        case "Box", [lower, upper]:
            made = Box(lower, upper)
        case "BlockCyclic", [grid, blocks, first]:
            made = BlockCyclic(_decode_grid(grid), blocks, first_process=first)
        case "BlockNonCyclic", [grid, first]:
            made = BlockNonCyclic(_decode_grid(grid), first_process=first)
        case "Replicated", [ndim]:
            made = Replicated(ndim)
        case _:
            raise ValueError(f"unknown kind {name!r} with {len(fields)} fields")
    if binding is None:
        return made
    shape, size, rank = binding
    return made.bind(shape, size=size, rank=rank)


def _decode_grid(data: Any) -> ProcessGrid:
    shape, layout, array = data
    order = None if layout is None else ProcessGrid.Layout(layout)
    return ProcessGrid(shape=shape, layout=order, process_array=array)


def _plain(data: Any) -> bool:
    """True when nothing but tuples, strings, integers and None is inside: 1.0 and True equal 1."""
    if type(data) is tuple:
        return all(_plain(item) for item in data)
    return data is None or type(data) in (int, str)
