"""Conversions from torch's `DTensor` and `jax.Array`, and back: every rank keeps its part.

Neither library is imported for the user: whoever has such an array, or a mesh, has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import permutations, product
from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays.spec import packed_strides
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.context.context import DistributedContext, require_context
from shardmath.distributed import parts
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.layouts import distribution_of
from shardmath.geometry import Box, Layout, Slab, Spans


def from_dtensor(x: Any) -> DistributedArray:
    """The array whose parts are those of torch's `DTensor`, and share their memory. Local.

        x = shardmath.from_dtensor(distribute_tensor(weights, mesh, [Shard(0)]))

    The mesh has exactly the ranks of the current context. For one axis of a larger mesh, that is
    the context of `initialize(device, mesh["tp"])`, or one that was split. Where some mesh axes
    shard the tensor and others replicate it, a rank's part is its share of what it has, a view.
    `Partial` placements are summed by torch first, and scattered along the first axis; only then is
    the call collective. Raises ValueError for other meshes and placements.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    context, mesh = require_context(), x.device_mesh
    shape = tuple(x.shape)
    if any(place.is_partial() for place in x.placements):
        _layout(context, shape, mesh, ())  # raises for other meshes before any rank waits
        summed = Shard(0) if shape else Replicate()
        x = x.redistribute(placements=[summed if p.is_partial() else p for p in x.placements])
    placements = tuple(x.placements)
    if not all(place.is_shard() or place.is_replicate() for place in placements):
        raise ValueError(
            f"{placements}: expected Shard, Replicate and Partial; call "
            "x.redistribute(placements=[...]) first"
        )
    layout = _layout(context, shape, mesh, placements)
    distribution = distribution_of(layout, context.rank)
    if distribution is not None:
        return DistributedArray.of(x.to_local(), distribution, layout, context)
    own, kept = layout.parts[context.rank], _layout(context, shape, mesh, placements, shares=True)
    distribution = distribution_of(kept, context.rank)
    assert distribution is not None, "every index has one owner"
    # Each rank has the gradient of its share alone. On their way back through a redistribution that
    # moves nothing, torch adds the gradients of ranks that have the same elements.
    grads = [Partial() if place.is_replicate() else place for place in placements]
    part = x.redistribute(placements=placements).to_local(grad_placements=grads)
    for axis, (mine, whole) in enumerate(zip(kept.parts[context.rank], own, strict=True)):
        part = part.narrow(axis, mine.start - whole.start if mine.length else 0, mine.length)
    return DistributedArray.of(part, distribution, kept, context)


def to_dtensor(x: DistributedArray, mesh: Any) -> Any:
    """The `DTensor` on torch's mesh whose parts are those of `x`, and share their memory. Local.

    The placements follow from how `x` is split. torch shards n indices over p ranks in parts of
    ceil(n / p); the last ones may be short or empty. Raises ValueError where no placements
    describe how `x` is split, or the mesh has other ranks than the context; TypeError for parts
    that are not torch's.
    """
    if x.library.name != "torch":
        raise TypeError(f"a DTensor has parts of torch, not of {x.library.name}")
    from torch.distributed.tensor import DTensor

    placements = _placements(x.layout, x.context, mesh)
    if placements is None:
        raise ValueError(
            f"no placements on a mesh of {tuple(mesh.shape)} are like {x.layout}: bring the array "
            "into boxes of torch's parts by x.to(Box(...)), or pass another mesh"
        )
    strides = packed_strides(x.shape)
    return DTensor.from_local(
        x.local, mesh, placements, run_check=False, shape=x.shape, stride=strides
    )


def _placements(layout: Layout, context: DistributedContext, mesh: Any) -> tuple[Any, ...] | None:
    """Placements on the mesh that split an array like the layout; None where there are none."""
    shape = layout.global_shape
    choices = _choices(len(shape), mesh)
    return next((c for c in choices if _layout(context, shape, mesh, c) == layout), None)


def _choices(ndim: int, mesh: Any) -> Iterator[tuple[Any, ...]]:
    """All placements of arrays of `ndim` axes."""
    from torch.distributed.tensor import Replicate, Shard

    return product([Replicate(), *map(Shard, range(ndim))], repeat=mesh.ndim)


def of_dtensors(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """`function` of this package, for DTensors, which returns DTensors; None where there is no such
    function of arrays that know how they are split.
    """
    ours = DistributedArray.__shardmath_functions__.get(function)
    return None if ours is None else partial(_call_with_dtensors, function.__name__, ours)


def _call_with_dtensors(
    name: str, ours: Callable[..., Any], *given: Any, out: Any = None, **words: Any
) -> Any:
    """Results are on the mesh of the first DTensor, placed as the function splits them."""
    meshes: list[Any] = []

    def ours_of(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: ours_of(value) for key, value in x.items()}
        if not hasattr(x, "device_mesh"):
            return x
        meshes.append(x.device_mesh)
        return from_dtensor(x)

    try:
        operands = [ours_of(x) for x in given]
        named = {key: ours_of(x) for key, x in words.items()}
        if out is not None:
            named["out"] = ours_of(out)
    except (ValueError, NotImplementedError) as error:
        raise_on_all_ranks(require_context(), name, ValueError(f"{error}; or pass x.to_local()"))
    if any(parts.is_array(x) for x in (*operands, *named.values())):
        mixed = TypeError(
            f"{name} of DTensors and of other arrays: pass DTensors alone, "
            "distribute_tensor(x, mesh, placements), or parts alone, x.to_local()"
        )
        raise_on_all_ranks(require_context(), name, mixed)
    made = ours(*operands, **named)
    if out is not None:
        return out
    if isinstance(made, tuple):
        return tuple(_placed(x, meshes[0]) for x in made)
    return _placed(made, meshes[0])


def _placed(x: Any, mesh: Any) -> Any:
    """`x` as a DTensor; slabs are moved to the parts that torch has."""
    if not isinstance(x, DistributedArray):
        return x
    if not isinstance(x.distribution, Slab | Box) or _placements(x.layout, x.context, mesh):
        return to_dtensor(x, mesh)
    for placements in _choices(x.ndim, mesh):
        layout = _layout(x.context, x.shape, mesh, placements)
        distribution = distribution_of(layout, x.context.rank)
        if distribution is not None and layout.partitioned_axes == x.layout.partitioned_axes:
            return to_dtensor(x.to(distribution), mesh)
    return to_dtensor(x, mesh)


def from_jax(x: Any, package: ModuleType | None = None) -> DistributedArray:
    """The array whose parts are the addressable shards of a `jax.Array`, and share their memory.
    Local.

        x = shardmath.from_jax(jax.make_array_from_callback(shape, sharding, f))

    Rank r is JAX's process r, with one device. `package` is the library of the parts: the module
    numpy, the default, or torch or cupy. JAX assumes that its arrays never change, so do not write
    to this one: x.copy() has elements of its own. Raises ValueError where the processes are not the
    ranks of the current context, or have several devices; NotImplementedError where some but not
    all ranks have the same shard, which no distribution describes.
    """
    context = require_context()
    layout = _sharded(context, tuple(x.shape), x.sharding)
    distribution = distribution_of(layout, context.rank)
    if distribution is None:
        raise NotImplementedError(f"{x.sharding}: give every process a shard of its own, or all")
    part = x.addressable_shards[0].data
    local = np.asarray(part) if package is None else package.from_dlpack(part)
    return DistributedArray.of(local, distribution, layout, context)


def to_jax(x: DistributedArray, mesh: Any) -> Any:
    """The `jax.Array` on a mesh of JAX's whose shards are the parts of `x`. Local.

        y = shardmath.to_jax(x, jax.sharding.Mesh(jax.devices(), ("rows",)))

    The mesh has one device of each rank; rank r is JAX's process r. The sharding follows from how
    `x` is split. The shard shares memory with this rank's part if that is in C order and begins at
    a multiple of 64 bytes, as JAX requires, and is a copy otherwise. JAX assumes that it never
    changes, so do not write to `x` afterwards. Raises ValueError where no sharding describes how
    `x` is split (JAX splits an axis into even parts only), where the mesh has other devices, and
    for a type that JAX narrows (float64, without jax_enable_x64).
    """
    from shardmath.interchange.calls import of_jax

    jax = import_module("jax")
    context = x.context
    where = mesh.devices.flat[0].platform
    if (where == "cpu") != (x.device == "cpu"):
        raise ValueError(f"the parts are on {x.device}, and the mesh is of devices of {where}")
    axes = product([None, *range(x.ndim)], repeat=len(mesh.axis_names))
    for choice, names in product(axes, permutations(mesh.axis_names)):
        along = [
            tuple(name for name, axis in zip(names, choice, strict=True) if axis == number)
            for number in range(x.ndim)
        ]
        counts = [math.prod(mesh.shape[name] for name in split) for split in along]
        if any(extent % count for extent, count in zip(x.shape, counts, strict=True)):
            continue
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*along))
        if _sharded(context, x.shape, sharding) == x.layout:
            break
    else:
        raise ValueError(
            f"no sharding on a mesh of {dict(mesh.shape)} is like {x.layout}: bring the array to "
            "even parts in the order of the ranks, such as those of Slab.X, or to Replicated()"
        )
    part = x.local if x.library.name == "numpy" else x.library.contiguous(x.local)
    shard = of_jax(part, mesh.local_devices[0])
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard])


def _sharded(context: DistributedContext, shape: tuple[int, ...], sharding: Any) -> Layout:
    """The layout of a `jax.Array`. Raises ValueError where its processes are not the ranks."""
    by_rank: dict[int, tuple[Spans, ...]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        if device.process_index in by_rank:
            raise ValueError(f"process {device.process_index} has several shards: give it 1 device")
        ranges = (along.indices(extent) for along, extent in zip(index, shape, strict=True))
        by_rank[device.process_index] = tuple(Spans.interval(*ends[:2]) for ends in ranges)
    own = [device.process_index for device in sharding.addressable_devices]
    if sorted(by_rank) != list(range(context.size)) or own != [context.rank]:
        raise ValueError(
            f"the array is on processes {sorted(by_rank)}, of which this is {own}; the context has "
            f"{context.size} ranks, and this is {context.rank}"
        )
    return Layout(shape, tuple(by_rank[rank] for rank in range(context.size)))


def _layout(
    context: DistributedContext,
    shape: tuple[int, ...],
    mesh: Any,
    placements: Sequence[Any],
    *,
    shares: bool = False,
) -> Layout:
    """The layout of a tensor that torch has placed on a mesh of all ranks. With `shares`, what
    several ranks have is divided among them, along the first axis that is sharded.
    """
    numbers = {number: rank for rank, number in enumerate(context.job_ranks)}
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) != sorted(numbers) or numbers[mesh.get_rank()] != context.rank:
        raise ValueError(
            f"the mesh has ranks {ranks} (here {mesh.get_rank()}), and the current context has "
            f"{[*numbers]} (here {context.job_ranks[context.rank]}): pass the mesh to initialize, "
            "or call within a context of its ranks"
        )
    by_rank: dict[int, tuple[Spans, ...]] = {}
    for number, place in zip(ranks, product(*map(range, mesh.shape)), strict=True):
        low, high = [0] * len(shape), list(shape)
        along = list(zip(placements, place, mesh.shape, strict=False))
        splits = [(p.dim, index, count) for p, index, count in along if p.is_shard()]
        if shares:
            first = min(axis for axis, *_ in splits)
            splits += [(first, index, count) for p, index, count in along if p.is_replicate()]
        for axis, index, count in splits:
            wide = -(-(high[axis] - low[axis]) // count)
            low[axis] = min(high[axis], low[axis] + index * wide)
            high[axis] = min(high[axis], low[axis] + wide)
        by_rank[numbers[number]] = tuple(map(Spans.interval, low, high))
    return Layout(shape, tuple(by_rank[rank] for rank in range(context.size)))
