"""Distributions as plain data and back, so that ranks can tell each other what they hold.

Plain data is tuples, strings, integers and None. `decode` makes only distributions, from data that
has exactly the form that `encode` gives; everything else is a ValueError.
"""

from __future__ import annotations

from typing import Any

from shardmath.geometry.distribution import Distribution
from shardmath.geometry.distributions import BlockCyclic, BlockNonCyclic, Box, Replicated, Slab
from shardmath.geometry.grid import ProcessGrid

__all__ = ["decode", "encode"]


def encode(distribution: Distribution) -> tuple[Any, ...]:
    """Plain data from which `decode` makes an equal distribution. TypeError for other classes."""
    if type(distribution) not in (Slab, Box, BlockCyclic, BlockNonCyclic, Replicated):
        raise TypeError(f"{type(distribution).__name__} cannot be sent between ranks")
    held = distribution.binding
    binding = None if held is None else (held.global_shape, held.size, held.rank)
    fields: tuple[Any, ...]
    match distribution:
        case Slab():
            fields = (distribution.partition_dim, distribution.ndim)
        case Box():
            fields = (distribution.lower, distribution.upper)
        case BlockNonCyclic():
            fields = (_encode_grid(distribution.process_grid), distribution.first_process)
        case BlockCyclic():
            grid = _encode_grid(distribution.process_grid)
            fields = (grid, distribution.block_sizes, distribution.first_process)
        case Replicated():
            fields = (distribution.ndim,)
        case _:
            raise AssertionError(distribution)
    return (type(distribution).__name__, *fields, binding)


def decode(data: Any) -> Distribution:
    """The distribution that `encode` was given. Raises ValueError for data of another form."""
    try:
        made = _decode(data)
        plain = encode(made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"malformed distribution: {error}") from None
    # What decodes to a value that encodes otherwise was not written by `encode`.
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


def _encode_grid(grid: ProcessGrid) -> tuple[Any, ...]:
    if grid.layout is None:
        return (grid.shape, None, grid.process_array)
    return (grid.shape, int(grid.layout), None)


def _decode_grid(data: Any) -> ProcessGrid:
    shape, layout, array = data
    order = None if layout is None else ProcessGrid.Layout(layout)
    return ProcessGrid(shape=shape, layout=order, process_array=array)


def _plain(data: Any) -> bool:
    """True when nothing but tuples, strings, integers and None is inside: 1.0 and True equal 1."""
    if type(data) is tuple:
        return all(_plain(item) for item in data)
    return data is None or type(data) in (int, str)
