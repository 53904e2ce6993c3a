"""torch's DTensors as our arrays, and back, and JAX's: the same parts, where they lie."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
import socket
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_arrays import agree, elements, placed, shapes, splits

import shardmath
from draws import drawn
from ranks import Pool, with_context
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Replicated, Slab, redistribute
from shardmath.fft import rfft
from shardmath.group import as_process_group
from shardmath.linalg.advanced import matmul

CASES = (  # mesh, shape, the axes that each axis of the mesh shards, None for replicas
    ((4,), (8, 3), (0,), Slab(0)),
    ((4,), (9, 5), (0,), Box),  # in parts of 3, 3, 3 and none
    ((4,), (3, 9), (1,), Box),
    ((4,), (5,), (None,), Replicated()),
    ((2, 2), (6, 4), (0, 1), Box),
    ((2, 2), (7, 5), (1, 0), Box),
    ((2, 2), (9, 2), (0, 0), Slab(0)),  # 9 in 5 and 4, these in 3, 2, 2 and 2
    ((2, 2), (6, 4), (None, None), Replicated()),
)


@pytest.fixture(scope="module")
def distributed_torch():
    """Four ranks, forked when torch's DTensor was loaded, and its compiler."""
    importlib.import_module("torch.distributed.tensor")
    importlib.import_module("torch._dynamo")
    with Pool(4, with_context) as ranks:
        yield ranks


@contextmanager
def torch_world(context, store):
    """torch, its DTensors, and what makes its meshes, in a world of the context's ranks."""
    torch = importlib.import_module("torch")
    world = importlib.import_module("torch.distributed")
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh_of = importlib.import_module("torch.distributed.device_mesh").init_device_mesh
    world.init_process_group(
        "gloo", init_method=f"file://{store}", rank=context.rank, world_size=context.size
    )
    try:
        torch.set_num_threads(1)
        with context:
            yield torch, tensors, mesh_of
    finally:
        world.destroy_process_group()


def converted(context, store):
    with torch_world(context, store) as (torch, tensors, mesh_of):
        meshes = {places: mesh_of("cpu", places) for places in ((4,), (2, 2))}
        for places, shape, axes, kind in CASES:
            mesh = meshes[places]
            a = np.arange(float(np.prod(shape))).reshape(shape)
            placements = [
                tensors.Replicate() if axis is None else tensors.Shard(axis) for axis in axes
            ]
            given = tensors.distribute_tensor(torch.from_numpy(a), mesh, placements)
            x = shardmath.from_dtensor(given)
            assert x.distribution == kind if kind is not Box else type(x.distribution) is Box
            agree(x, a)
            assert x.local.data_ptr() == given.to_local().data_ptr()
            back = shardmath.to_dtensor(x, mesh)
            assert back.to_local().data_ptr() == x.local.data_ptr()
            assert back.shape == given.shape and back.stride() == given.stride()
            assert back.placements == given.placements
        refused(mesh, torch, tensors)
        shared(context, mesh, torch, tensors)
        for mesh in meshes.values():
            summed(mesh, torch, tensors)
        groups(context, mesh_of, torch, tensors)
        for mesh in meshes.values():
            computed(mesh, torch, tensors)


@st.composite
def meshes(draw, size):
    """The places of a mesh of so many ranks, along one axis or two."""
    return draw(st.sampled_from([(size,), *((n, size // n) for n in (1, 2, 4) if size % n == 0)]))


@st.composite
def tensors_and_arrays(draw, size):
    """A mesh, a shape, a type, which axis each axis of the mesh shards, and another split."""
    mesh, shape = draw(meshes(size)), draw(shapes())
    axes = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    dtype = draw(st.sampled_from(("int64", "float32", "complex128")))
    return mesh, shape, dtype, [draw(axes) for _ in mesh], draw(splits(shape, size))


def convert_dtensors(context, cases, store):
    with torch_world(context, store) as (torch, tensors, mesh_of):
        for places, shape, dtype, axes, split in cases:
            mesh, a = mesh_of("cpu", places), elements(shape, dtype)
            placements = [
                tensors.Replicate() if axis is None else tensors.Shard(axis) for axis in axes
            ]
            given_ = tensors.distribute_tensor(torch.from_numpy(a), mesh, placements)
            memory = given_.to_local().untyped_storage().data_ptr()
            x, y = shardmath.from_dtensor(given_), placed(context, a, split, "torch")
            agree(x, a)
            assert x.local.untyped_storage().data_ptr() == memory
            for z in (x, y):
                try:
                    back = shardmath.to_dtensor(z, mesh)
                except ValueError as error:
                    assert "no placements on a mesh" in str(error)
                    assert z is y or len({*axes}) > 1  # ranks that have the same have shares of it
                    continue
                assert back.to_local().data_ptr() == z.local.data_ptr()
                assert torch.equal(back.full_tensor(), torch.from_numpy(a))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_dtensor(distributed_torch, tmp_path, size):
    stores = itertools.count()

    @drawn(2)
    @given(cases=st.lists(tensors_and_arrays(size), min_size=8, max_size=15))
    def check(cases):
        store = tmp_path / f"store{next(stores)}"
        distributed_torch.run(convert_dtensors, cases, str(store), ranks=size)

    check()


def groups(context, mesh_of, torch, tensors):
    """Which ranks a mesh means, where a group is asked for, and where it places a tensor."""
    rank, size = context.rank, context.size
    square = mesh_of("cpu", (2, 2), mesh_dim_names=("high", "wide"))
    for mesh, ranks in (
        (mesh_of("cpu", (size,)), range(size)),
        (square, range(size)),
        (square["wide"], (rank - rank % 2, rank - rank % 2 + 1)),
        (square["high"], (rank % 2, rank % 2 + 2)),
    ):
        group = as_process_group(mesh)
        assert (group.rank, group.nranks) == (ranks.index(rank), len(ranks))
        assert [*group.job_ranks] == [*ranks]
        with context.split(ranks[0]):
            a = torch.arange(15.0).reshape(5, 3)
            x = tensors.distribute_tensor(a, mesh, [tensors.Shard(0)] * mesh.ndim)
            y = redistribute(x, Slab.Y)
            assert y.device_mesh is mesh and torch.equal(y.full_tensor(), a)


def computed(mesh, torch, tensors):
    """Functions of DTensors return DTensors, of uneven parts, too, through which torch has
    gradients as through its own.
    """
    a, b = torch.linspace(-1, 1, 63).reshape(9, 7), torch.linspace(0, 1, 35).reshape(7, 5)
    for place in (tensors.Shard(0), tensors.Shard(1), tensors.Replicate()):
        x, w, slope = (
            tensors.distribute_tensor(y, mesh, [place] * mesh.ndim)
            for y in (a, b, torch.ones(9, 5))
        )
        x.requires_grad_(), w.requires_grad_()
        y = matmul(x, w)
        assert type(y) is tensors.DTensor and y.device_mesh is mesh and y.placements == x.placements
        assert torch.allclose(y.full_tensor(), a @ b, atol=1e-5)
        y.backward(slope)
        assert torch.allclose(x.grad.full_tensor(), b.sum(1).expand(9, 7), atol=1e-5)
        assert torch.allclose(w.grad.full_tensor(), a.sum(0)[:, None].expand(7, 5), atol=1e-5)
        z = redistribute(x.detach(), Slab.Y)
        assert (z.full_tensor() == a).all() and tensors.Shard(1) in z.placements
        waves = rfft(x.detach(), distribution=Slab.X)
        assert torch.allclose(waves.full_tensor(), torch.fft.rfft2(a), atol=1e-4)
    compiled = torch.compile(lambda x, w: 2 * matmul(x, w), backend="eager")
    y = compiled(x.detach(), w.detach())  # called between graphs
    assert type(y) is tensors.DTensor and torch.allclose(y.full_tensor(), 2 * a @ b, atol=1e-5)
    with pytest.raises(TypeError, match="pass DTensors alone"):
        matmul(w.detach(), torch.ones(5, 2))


def shared(context, mesh, torch, tensors):
    """Where some ranks have the same, each takes its share, where that lies; and torch adds
    the gradients of all shares.
    """
    every, rows, columns = tensors.Replicate(), tensors.Shard(0), tensors.Shard(1)
    for shape in ((6, 4), (5, 3), (1, 2)):
        a = torch.arange(float(np.prod(shape))).reshape(shape)
        for placements in ([every, rows], [rows, every], [every, columns], [columns, every]):
            given = tensors.distribute_tensor(a, mesh, placements)
            x = shardmath.from_dtensor(given)
            agree(x, a.numpy())
            memory = given.to_local().untyped_storage().data_ptr()
            assert x.local.untyped_storage().data_ptr() == memory
            given.requires_grad_()
            y = redistribute(given, Slab.X)
            assert torch.equal(y.full_tensor(), a)
            (y * y).sum().backward()
            assert given.grad.placements == tuple(placements)
            assert torch.equal(given.grad.full_tensor(), 2 * a)


def summed(mesh, torch, tensors):
    """Partial sums are summed first."""
    for shape in ((6, 4), (5, 3), (1,), ()):
        a = torch.arange(float(np.prod(shape))).reshape(shape)
        for others in (tensors.Partial(), tensors.Shard(0))[: 1 + bool(shape)]:
            placements = [others] * (mesh.ndim - 1) + [tensors.Partial()]
            whole = (
                tensors.distribute_tensor(a, mesh, [*placements[:-1], tensors.Replicate()])
                if others.is_shard()
                else None
            )
            local = a if whole is None else whole.to_local()
            part = tensors.DTensor.from_local(
                local, mesh, placements, run_check=False, shape=a.shape, stride=a.stride()
            )
            agree(shardmath.from_dtensor(part), part.full_tensor().numpy())
    x = tensors.DTensor.from_local(torch.ones(5, 3), mesh, [tensors.Partial()] * mesh.ndim)
    w = tensors.distribute_tensor(torch.ones(3, 2), mesh, [tensors.Shard(0)] * mesh.ndim)
    assert (matmul(x, w).full_tensor() == 3 * mesh.size()).all()


def refused(mesh, torch, tensors):
    with pytest.raises(TypeError, match="parts of torch, not of numpy"):
        shardmath.to_dtensor(shardmath.zeros(8, distribution=Slab.X), mesh)
    cyclic = BlockCyclic(ProcessGrid(shape=(4,)), (1,))
    with pytest.raises(ValueError, match=r"no placements on a mesh of \(2, 2\) .*cyclic"):
        shardmath.to_dtensor(shardmath.zeros(8, distribution=cyclic, package=torch), mesh)
    pair = shardmath.get_context().split(shardmath.get_context().rank % 2)
    with pair, pytest.raises(ValueError, match="the mesh has ranks"):
        shardmath.from_dtensor(
            tensors.distribute_tensor(torch.ones(4), mesh, [tensors.Shard(0)] * 2)
        )


def test_dtensors(distributed_torch, tmp_path):
    distributed_torch.run(converted, str(tmp_path / "store"), ranks=4)


def jax_of(context, port):
    """JAX, whose processes are the ranks."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = importlib.import_module("jax")
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(f"127.0.0.1:{port}", context.size, context.rank)
    return jax


def of_jax(context, port):
    jax = jax_of(context, port)
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    a = np.arange(24, dtype="f4").reshape(6, 4)

    def made(*axes):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])

    with context:
        for axes, expected in ((("x",), Slab.X), ((None, "x"), Slab.Y), ((), Replicated())):
            given = made(*axes)
            x = shardmath.from_jax(given)
            assert x.distribution == expected
            agree(x, a)
            agree(x.to(Slab.Y), a)
            data = given.addressable_shards[0].data
            assert x.local.ctypes.data == data.unsafe_buffer_pointer()
            back = shardmath.to_jax(x, mesh)
            assert back.sharding.is_equivalent_to(given.sharding, 2)
            assert (np.asarray(back.addressable_shards[0].data) == x.local).all()
            assert back.addressable_shards[0].data.unsafe_buffer_pointer() == x.local.ctypes.data
        agree(shardmath.from_jax(jax.numpy.sin(shardmath.to_jax(x, mesh))), np.sin(a), close=True)
        to_jax_of_any_part(mesh)
        torch = importlib.import_module("torch")
        given = made("x")
        tensor = shardmath.from_jax(given, torch).local
        assert tensor.data_ptr() == given.addressable_shards[0].data.unsafe_buffer_pointer()
        back = shardmath.to_jax(shardmath.array(tensor, Slab.X), mesh)
        assert back.sharding.is_equivalent_to(given.sharding, 2)
        agree(shardmath.from_jax(back), a)
    alone = context.split(context.rank)
    with alone, pytest.raises(ValueError, match="the array is on processes"):
        shardmath.from_jax(made("x"))


def to_jax_of_any_part(mesh):
    """Parts that JAX copies, as they begin anywhere or lie otherwise, and what it refuses."""
    a = np.arange(40, dtype="i4").reshape(8, 5)
    for x in (
        shardmath.from_global(a, Slab.X)[:, 1:],
        shardmath.from_global(a, Slab.X)[:, ::2],
        shardmath.from_global(a, Slab.X).T,
        shardmath.from_global(a > 7, Replicated()),
        shardmath.from_global(a[:0], Slab.X),
        shardmath.from_global(a[0, 0], Replicated()),
    ):
        agree(shardmath.from_jax(shardmath.to_jax(x, mesh)), x.numpy())
    with pytest.raises(ValueError, match=r"no sharding on a mesh of \{'x': 2\} is like"):
        shardmath.to_jax(shardmath.ones(7, "f4", distribution=Slab.X), mesh)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        shardmath.to_jax(shardmath.ones(8, distribution=Slab.X), mesh)


@st.composite
def jax_arrays(draw, size):
    """A mesh, a shape that JAX splits evenly, which names of the mesh split each axis, a type, and
    another split.
    """
    mesh = draw(meshes(size))
    order = draw(st.permutations(range(len(mesh))))
    ndim = draw(st.integers(0, 3))
    axes = [draw(st.none() | st.integers(0, ndim - 1)) if ndim else None for _ in mesh]
    names = [[number for number in order if axes[number] == axis] for axis in range(ndim)]
    counts = [math.prod(mesh[number] for number in split) for split in names]
    shape = tuple(count * draw(st.sampled_from([0, 1, 2, 3])) for count in counts)
    dtype = draw(st.sampled_from(("bool", "int32", "float32", "complex64")))
    return mesh, shape, names, dtype, draw(splits(shape, size))


def convert_jax_arrays(context, cases, port):
    jax = jax_of(context, port)
    devices = np.array(jax.devices())
    with context:
        for places, shape, split_names, dtype, split in cases:
            letters = "xy"[: len(places)]
            mesh = jax.sharding.Mesh(devices.reshape(places), tuple(letters))
            names = [tuple(letters[number] for number in axis) for axis in split_names]
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
            a = elements(shape, dtype)
            given_ = jax.make_array_from_callback(shape, sharding, lambda index, a=a: a[index])
            try:
                x = shardmath.from_jax(given_)
            except NotImplementedError:  # some processes have the same shard, and others do not
                unused = [n for number, n in enumerate(places)
                          if not any(number in axis for axis in split_names)]  # fmt: skip
                assert max(unused, default=1) > 1 and any(split_names)
                continue
            agree(x, a)
            agree(shardmath.from_jax(shardmath.to_jax(x, mesh)), a)
            try:
                back = shardmath.to_jax(placed(context, a, split), mesh)
            except ValueError as error:
                assert "no sharding on a mesh" in str(error)
                continue
            agree(shardmath.from_jax(back), a)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_jax_arrays(size):
    with socket.socket() as held:  # its port, which JAX's server shares, is no one else's
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with Pool(size, with_context) as ranks:

            @drawn(3, shrunk=False)
            @given(cases=st.lists(jax_arrays(size), min_size=8, max_size=20))
            def check(cases):
                ranks.run(convert_jax_arrays, cases, port)

            check()
            if size == 2:
                ranks.run(of_jax, port)
            ranks.run(leave_jax)


def leave_jax(context):
    importlib.import_module("jax").distributed.shutdown()
