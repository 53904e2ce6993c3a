"""The door `shardmath.symmetric_memory`: torch's names, forms and rules."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mortal import on_ranks
from shardmath import finalize, get_context
from shardmath import symmetric_memory as symm_mem
from shardmath.errors import BackendUnavailable, CollectiveMismatch
from shardmath.handles.allocation import block_of, free_symmetric_memory
from shardmath.launch.function import spawn
from shardmath.symmetric_memory import _SymmetricMemory


def fails(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_forms_of_empty():
    cases = [
        (lambda: symm_mem.empty(2, 3), np.ndarray, "float64", (2, 3)),
        (lambda: symm_mem.empty((2, 3)), np.ndarray, "float64", (2, 3)),
        (lambda: symm_mem.empty([2, 3], dtype="int8"), np.ndarray, "int8", (2, 3)),
        (lambda: symm_mem.empty(2, 3, dtype=np.float32), np.ndarray, "float32", (2, 3)),
        (lambda: symm_mem.empty(5, dtype=torch.bfloat16), torch.Tensor, "torch.bfloat16", (5,)),
        (lambda: symm_mem.empty(torch.Size((2, 0)), package=torch), torch.Tensor, "32", (2, 0)),
        (lambda: symm_mem.empty(5, device=torch.device("cpu")), torch.Tensor, "float32", (5,)),
        (lambda: symm_mem.empty(5, device="cpu"), torch.Tensor, "float32", (5,)),
        (lambda: symm_mem.empty(5, dtype="int8", device="cpu"), torch.Tensor, "int8", (5,)),
        (lambda: symm_mem.empty(5, dtype=np.int8, device="cpu"), np.ndarray, "int8", (5,)),
        (lambda: symm_mem.empty(5, dtype=np.dtype("i2"), device="cpu"), np.ndarray, "int16", (5,)),
        (lambda: symm_mem.empty(5, device="cpu", package=np), np.ndarray, "float64", (5,)),
        (symm_mem.empty, np.ndarray, "float64", ()),
    ]

    def body(context):
        for call, kind, dtype, shape in cases:
            array = call()
            assert isinstance(array, kind) and str(array.dtype).endswith(dtype)
            assert tuple(array.shape) == shape and symm_mem.is_symm_mem_tensor(array)
        assert not symm_mem.is_symm_mem_tensor(torch.empty(3))
        for call in (symm_mem.is_symm_mem_tensor, symm_mem.rendezvous):
            assert "tensor: expected an array" in fails(partial(call, [1.0]), ValueError)
        fails(lambda: symm_mem.empty(-1), ValueError)
        fails(lambda: symm_mem.empty(2.5), TypeError)
        fails(lambda: symm_mem.empty(3, device="cuda"), BackendUnavailable)
        fails(lambda: symm_mem.empty(3, device=torch.device("cuda", 1)), BackendUnavailable)
        for call in (symm_mem.get_mem_pool, symm_mem.get_mempool_allocator):
            assert "on cores" in fails(partial(call, "cuda"), BackendUnavailable)

    on_ranks(1, body)
    assert "initialize" in fails(lambda: symm_mem.empty(3), RuntimeError)


def test_strides_are_kept():
    def body(context):
        t = symm_mem.empty_strided_p2p((3, 4), (1, 5), torch.float64, torch.device("cpu"))
        assert t.stride() == (1, 5) and block_of(context, t)[0].nbytes == (1 + 2 + 15) * 8
        t.fill_(3)
        a = symm_mem.empty_strided_p2p((3, 4), (8, 2), np.int16)
        assert a.strides == (16, 4) and block_of(context, a)[0].nbytes == (1 + 16 + 6) * 2
        assert symm_mem.empty_strided_p2p((3, 0), (1, 1), "f4", "cpu").shape == (3, 0)
        fails(lambda: symm_mem.empty_strided_p2p((3,), (-1,), np.int8), ValueError)
        fails(lambda: symm_mem.empty_strided_p2p((3,), (1, 1), np.int8), ValueError)

    on_ranks(1, body)


@pytest.mark.parametrize("dtype", [np.float32, torch.float32])
def test_alloc_id(dtype):
    def body(context):
        def make(n=100, number=7):
            return symm_mem.empty_strided_p2p((n,), (1,), dtype, alloc_id=number)

        def address(t):
            block, offset = block_of(context, t)
            return block.address + offset

        t = make()
        first, other = address(t), address(make(number=8))
        assert first != other
        assert "alive" in fails(make, RuntimeError)
        view = t[3:]
        del t
        fails(make, RuntimeError)  # the view keeps it
        del view
        assert "400 bytes" in fails(lambda: make(200), RuntimeError)
        t = make()
        assert address(t) == first
        handle = symm_mem.rendezvous(t)
        t[:] = context.rank
        handle.barrier()
        peer = handle.get_buffer(1 - context.rank, (100,), dtype)
        assert float(peer[99]) == 1 - context.rank
        handle.barrier()  # before overwriting what the peer reads
        del t
        t = make()
        assert symm_mem.rendezvous(t) is handle
        free_symmetric_memory(t)
        fails(lambda: block_of(context, t), RuntimeError)
        again = make()  # a freed one can be asked for again, though `t` is still there
        assert address(again) == first
        again[:] = 5
        assert symm_mem.rendezvous(again) is not handle

    on_ranks(2, body)


EXAMPLE = """
def program(rank, world_size, group_name, store):
    from shardmath.symmetric_memory import _SymmetricMemory

    _SymmetricMemory.set_group_info(group_name, rank, world_size, store)
    t = _SymmetricMemory.empty_strided_p2p((64, 64), (64, 1), torch.float32, group_name)
    symm_mem = _SymmetricMemory.rendezvous(t)
    buf = symm_mem.get_buffer(0, (64, 64), torch.float32)
    if symm_mem.rank == 0:
        symm_mem.wait_signal(src_rank=1)
        assert buf.eq(42).all()
    else:
        buf.fill_(42)
        symm_mem.put_signal(dst_rank=0)
    symm_mem.barrier()
    if symm_mem.rank == 0:
        symm_mem.barrier()
        assert buf.eq(43).all()
    else:
        new_val = torch.empty_like(buf)
        new_val.fill_(43)
        buf.copy_(new_val)
        symm_mem.barrier()
    return float(t.sum()) if rank == 0 else float(buf.sum())
"""


def example(rank, store):
    names = {"torch": torch}
    exec(compile(EXAMPLE, "example", "exec"), names)
    return names["program"](rank, 2, "example", store)


def test_the_example_of_torchs_proposal_runs_after_its_import_line_is_changed(tmp_path):
    def body(context):
        return example(context.rank, dist.FileStore(str(tmp_path / "store"), 2))

    assert on_ranks(2, body) == [43.0 * 64 * 64] * 2


def test_it_makes_its_context_through_the_store_when_there_is_none(tmp_path):
    from shardmath.base.config import environment

    def alone():
        rank = int(environment()["SHARDMATH_RANK"])
        assert get_context() is None
        result = example(rank, dist.FileStore(str(tmp_path / "store"), 2))
        assert (get_context().rank, get_context().size) == (rank, 2)
        return result

    assert spawn(alone, 2) == [43.0 * 64 * 64] * 2


def test_group_names_are_taken_once_and_need_a_store_for_other_ranks():
    fails(lambda: symm_mem.set_group_info("all", 0, 1), RuntimeError)

    def body(context):
        symm_mem.set_group_info("all", context.rank, 2)
        fails(lambda: symm_mem.set_group_info("all", context.rank, 2), RuntimeError)
        fails(lambda: symm_mem.set_group_info("part", 0, 1), ValueError)
        fails(lambda: symm_mem.set_group_info("part", 2, 2, store=object()), ValueError)
        handle = symm_mem.rendezvous(symm_mem.empty(3), "all")
        return handle.world_size

    assert on_ranks(2, body) == [2, 2]


def test_the_signal_pad_size_is_a_setting_of_class_and_module():
    def body(context):
        handle = symm_mem.rendezvous(symm_mem.empty(3))
        assert symm_mem.get_signal_pad_size() == _SymmetricMemory.signal_pad_size == 9216
        symm_mem.set_signal_pad_size(64)
        assert _SymmetricMemory.signal_pad_size == 64 and handle.signal_pad_size == 9216
        small = symm_mem.rendezvous(symm_mem.empty(3))
        assert small.signal_pad_size == 64 and small.get_signal_pad(0).shape == (16,)
        small.barrier(7)
        assert "8 channels" in fails(lambda: small.barrier(8), ValueError)
        _SymmetricMemory.signal_pad_size = 4 * 3  # odd: 1 channel and a word to spare
        tiny = symm_mem.rendezvous(symm_mem.empty(3))
        tiny.barrier(0)
        for bad in (0, -4, 6):
            fails(lambda b=bad: symm_mem.set_signal_pad_size(b), ValueError)
        symm_mem.set_signal_pad_size(64 if context.rank else 128)
        text = fails(lambda: symm_mem.rendezvous(symm_mem.empty(3)), CollectiveMismatch)
        assert "rank 0 has 128" in text
        context.barrier()

    on_ranks(2, body)


def test_the_workspace_of_a_group_grows():
    def body(context):
        symm_mem.set_group_info("all", context.rank, 2)
        first = symm_mem.get_symm_mem_workspace("all", 100)
        assert first is symm_mem.get_symm_mem_workspace("all", 40)
        assert first.buffer_size == 100
        larger = symm_mem.get_symm_mem_workspace("all", 1000)
        assert larger.buffer_sizes == [1000, 1000] and larger is not first
        mixed = symm_mem.get_symm_mem_workspace("all", 2000 if context.rank else 10)
        assert mixed.buffer_sizes == [1000, 2000]
        assert isinstance(mixed.get_buffer(0, (3,), torch.uint8), torch.Tensor)

    on_ranks(2, body)


@pytest.mark.parametrize("package", [np, torch])
def test_writes_of_32_bits(package):
    def body(context):
        words = symm_mem.empty(8, dtype=package.uint32)
        words[:] = 1
        assert symm_mem.memset32(words, 2, 0xFFFFFFFF, 3) is words
        assert symm_mem.stream_write_value32(words, 7, 9) is words
        assert words.tolist() == [1, 1, *[0xFFFFFFFF] * 3, 1, 1, 9]
        bad = [
            lambda: symm_mem.memset32(words, 6, 0, 3),
            lambda: symm_mem.memset32(words, -1, 0),
            lambda: symm_mem.memset32(words, 0, 1 << 32),
            lambda: symm_mem.memset32(words, 0, 0, 0),
            lambda: symm_mem.memset32(words[::2], 0, 0),
            lambda: symm_mem.memset32(words.reshape(2, 4), 0, 0),
            lambda: symm_mem.stream_write_value32(symm_mem.empty(3), 0, 1),
        ]
        for call in bad:
            fails(call, ValueError)
        fails(lambda: symm_mem.memset32(words, "0", 0), TypeError)
        fails(lambda: symm_mem.memset32(words, 0, 1.5), TypeError)
        fails(lambda: symm_mem.empty_strided_p2p((2,), (1,), "f4", alloc_id=1.5), TypeError)
        fails(lambda: symm_mem.set_group_info(["all"], 0, 1), TypeError)
        return words.tolist()[0]

    assert on_ranks(1, body) == [1]


def test_backends():
    assert symm_mem.get_backend("cpu") == symm_mem.get_backend(torch.device("cpu")) == "HOST"
    assert symm_mem.get_backend("cuda:1") is None
    for name in ("HOST", "CUDA", "nvshmem", "NCCL"):  # torch's programs ask for one first
        symm_mem.set_backend(name)
    fails(lambda: symm_mem.set_backend("MPI"), ValueError)
    assert symm_mem.has_multicast_support("cpu", 0) is False
    assert symm_mem.is_nvshmem_available() is False


def test_a_group_is_enabled_if_rendezvous_finds_it(tmp_path):
    enabled = symm_mem.is_symm_mem_enabled_for_group
    assert symm_mem.enable_symm_mem_for_group("nope") is None and not enabled("nope")

    def body(context):
        symm_mem.set_group_info("all", context.rank, 2)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=2)
        name = dist.group.WORLD.group_name
        found = [enabled("all"), enabled(name), enabled("nope")]
        for known in ("all", name):
            assert symm_mem.rendezvous(symm_mem.empty(3), known).world_size == 2
        for begin in (symm_mem.register, lambda: symm_mem.enable_symm_mem_for_group(name)):
            finalize()
            begin()  # or the operator does
            x = torch.ops.symm_mem.one_shot_all_reduce(torch.ones(2), "sum", name)
            assert (x.tolist(), get_context().size) == ([2, 2], 2)
        dist.destroy_process_group()
        return [*found, enabled(name)]

    assert on_ranks(2, body) == [[True, True, False, False]] * 2


def test_the_class_has_the_static_functions_of_torchs():
    names = """
        set_group_info empty_strided_p2p rendezvous has_multicast_support set_backend get_backend
        is_symm_mem_tensor memset32 stream_write_value32
    """
    for name in names.split():
        assert inspect.isfunction(getattr(_SymmetricMemory, name))
