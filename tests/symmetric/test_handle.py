"""SymmetricMemory: its table of properties and methods, on NumPy arrays and torch tensors."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from mortal import on_ranks
from shardmath.arrays import library_of, library_of_package
from shardmath.errors import OpTimeout
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory
from shardmath.handles.handle import SymmetricMemory
from shardmath.handles.rendezvous import rendezvous

PACKAGES = [np, torch]
TABLE = """
    rank world_size device buffer_ptrs buffer_ptrs_dev signal_pad_ptrs signal_pad_ptrs_dev
    buffer_size signal_pad_size offset multicast_ptr get_buffer get_remote_tensor get_signal_pad
    barrier put_signal wait_signal
"""


def outcome(call):
    """The name of the type that `call` raises, and the ranks it names; or what it returns."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, list(getattr(error, "ranks", ()))


def raised(call):
    found = outcome(call)
    return found[0] if isinstance(found, tuple) else None


def uneven(context, package, dtype="float32"):
    """An array of rank + 1 rows of 5, filled with the rank."""
    array = allocate((context.rank + 1, 5), package, dtype=dtype, skip_symmetric_check=True)
    array[...] = context.rank
    return array


def test_the_table_of_the_reference_is_there():
    assert [name for name in TABLE.split() if not hasattr(SymmetricMemory, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_properties(package, size):
    def body(context):
        array = uneven(context, package)
        handle = rendezvous(array)
        assert (handle.rank, handle.world_size) == (context.rank, size)
        assert str(handle.device) == "cpu"
        assert isinstance(handle.device, torch.device) == (package is torch)
        assert handle.buffer_sizes == [20 * (rank + 1) for rank in range(size)]
        assert handle.buffer_size == 20 * (context.rank + 1)
        assert handle.signal_pad_size == SymmetricMemory.signal_pad_size == 9216
        assert handle.offset == 0 and handle.multicast_ptr == 0
        library = library_of_package(package)
        assert handle.buffer_ptrs[context.rank] == library.pointer(array)
        for rank in range(size):
            view = handle.get_buffer(rank, (1,), array.dtype)
            assert library.pointer(view) == handle.buffer_ptrs[rank]
            pad = handle.get_signal_pad(rank)
            assert library.pointer(pad) == handle.signal_pad_ptrs[rank]
        for table, pointers in (
            (handle.buffer_ptrs_dev, handle.buffer_ptrs),
            (handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs),
        ):
            import ctypes

            assert list((ctypes.c_uint64 * size).from_address(table)) == pointers
        assert repr(handle).startswith(f"SymmetricMemory(rank {context.rank} of {size}, ")

    on_ranks(size, body)


@pytest.mark.parametrize("package", PACKAGES)
def test_views_are_the_peers_memory(package):
    def body(context):
        rank, size = context.rank, context.size
        array = uneven(context, package)
        handle = rendezvous(array)
        handle.barrier()
        for peer in range(size):
            view = handle.get_buffer(peer, (peer + 1, 5), array.dtype)
            assert library_of(view) is library_of(array)
            assert tuple(view.shape) == (peer + 1, 5) and float(view.min()) == float(peer)
            tail = handle.get_buffer(peer, [5], np.float32, storage_offset=5 * peer)
            assert float(tail.max()) == float(peer)
            same = handle.get_remote_tensor(peer, (5 * (peer + 1),), torch.float32)
            assert float(same.sum()) == 5.0 * peer * (peer + 1)
            assert tuple(handle.get_buffer(peer, (0, 3), "float64").shape) == (0, 3)
        handle.barrier()
        neighbour = (rank + 1) % size
        handle.get_buffer(neighbour, (5,), "float32")[...] = 100 + rank
        handle.barrier()
        return array.reshape(-1)[:5].tolist()

    assert on_ranks(3, body) == [[100.0 + (rank - 1) % 3] * 5 for rank in range(3)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_view_of_an_array_has_its_own_offset_by_rank(package):
    def body(context):
        whole = allocate(40, package, dtype="int32", skip_symmetric_check=True)
        for at in range(40):
            whole[at] = 1000 * context.rank + at
        mine = whole[10 * (context.rank + 1) :]
        handle = rendezvous(mine)
        assert handle.offset == 40 * (context.rank + 1)
        assert handle is not rendezvous(whole) and handle is rendezvous(mine[:3])
        handle.barrier()
        for peer in range(context.size):
            start = 1000 * peer + 10 * (peer + 1)
            assert handle.get_remote_tensor(peer, (2,), mine.dtype).tolist() == [start, start + 1]
            assert handle.get_buffer(peer, (1,), mine.dtype, 3).tolist() == [1000 * peer + 3]
            reach = 40 - 10 * (peer + 1)
            assert tuple(handle.get_remote_tensor(peer, (reach,), mine.dtype).shape) == (reach,)
            beyond = raised(lambda p=peer, n=reach + 1: handle.get_remote_tensor(p, (n,), "int32"))
            assert beyond == "RuntimeError"

    on_ranks(2, body)


MISTAKES = {
    "rank 1: rank 2 does not exist; there are 2 ranks": lambda h, x: h.get_buffer(2, (1,), "f4"),
    "rank 1: peer 2 does not exist": lambda h, x: h.get_remote_tensor(2, (1,), "f4"),
    "rank 1: dst_rank 2 does not exist": lambda h, x: h.put_signal(2),
    "rank 1: src_rank -1 does not exist": lambda h, x: h.wait_signal(-1),
    "rank 1: src_rank 3 does not exist": lambda h, x: h.get(x, 3),
    "rank 1: dst_rank 3 does not exist": lambda h, x: h.put(x, 3),
    "rank 1: src is a contiguous array, not": lambda h, x: h.put(x.T[::2], 0),
    "dst: expected an array": lambda h, x: h.get([1.0], 0),
    "rank 1: elements 99 to 105 of float32: rank 0 has": lambda h, x: h.put(x, 0, 99),
    "rank 1: float32 (99,) from byte 0 on ends": lambda h, x: h.get_buffer(0, (99,), "f4"),
    "rank 1: channel 1152 does not exist": lambda h, x: h.barrier(1152),
    "rank 1: timeout_ms is 0": lambda h, x: h.barrier(0, -1),
    "dtype 'f99' is not a data type": lambda h, x: h.get_buffer(0, (1,), "f99"),
}


def test_mistakes_name_the_rank_and_the_argument():
    def body(context):
        handle = rendezvous(uneven(context, np))
        x = np.zeros((2, 3), np.float32)
        said = []
        for call in MISTAKES.values() if context.rank == 1 else ():
            with pytest.raises((ValueError, RuntimeError)) as error:
                call(handle, x)
            said.append(str(error.value))
        return said

    said = on_ranks(2, body)[1]
    assert not [words for words, text in zip(MISTAKES, said, strict=True) if words not in text]


def test_what_is_out_of_reach_raises():
    def body(context):
        handle = rendezvous(uneven(context, np))
        peer = 1 - context.rank
        calls = [
            lambda: handle.get_buffer(peer, (peer + 1, 6), "float32"),
            lambda: handle.get_buffer(peer, (5 * (peer + 1),), "float32", 1),
            lambda: handle.get_buffer(peer, (1 << 62, 1 << 62), "float32"),
            lambda: handle.get_signal_pad(peer, (2305,)),
            lambda: handle.get_buffer(2, (1,), "float32"),
            lambda: handle.get_buffer(-1, (1,), "float32"),
            lambda: handle.get_remote_tensor(2, (1,), "float32"),
            lambda: handle.get_signal_pad(2),
            lambda: handle.put_signal(2),
            lambda: handle.wait_signal(-1),
            lambda: handle.get_buffer(peer, (-1,), "float32"),
            lambda: handle.get_buffer(peer, (1,), "float32", -1),
            lambda: handle.get_buffer(peer, (1,), "float33"),
            lambda: handle.barrier(1152),
            lambda: handle.barrier(-1),
            lambda: handle.put_signal(peer, 1152),
            lambda: handle.barrier(0, -1),
            lambda: handle.get_buffer(peer, (1,), ["f4"]),
            lambda: handle.get_buffer("0", (1,), "f4"),
            lambda: handle.get_buffer(peer, 1.0, "f4"),
            lambda: handle.get_buffer(peer, (1.0,), "f4"),
            lambda: handle.get_buffer(peer, (1,), "f4", 1.0),
            lambda: handle.get_buffer(peer, (1,), "f4", np.zeros(2)),
            lambda: handle.get_signal_pad(peer, (), None, 0.5),
            lambda: handle.barrier("0"),
            lambda: handle.barrier(0, 1.5),
            lambda: handle.wait_signal(peer, 0, float("nan")),  # no wait without an end
        ]
        return [raised(call) for call in calls]

    expected = ["RuntimeError"] * 4 + ["ValueError"] * 14 + ["TypeError"] * 9
    assert on_ranks(2, body) == [expected] * 2


@pytest.mark.parametrize("package", PACKAGES)
def test_signal_pads(package):
    def body(context):
        handle = rendezvous(uneven(context, package))
        rank, size = context.rank, context.size
        pad = handle.get_signal_pad(rank)
        assert str(pad.dtype).endswith("uint32") and tuple(pad.shape) == (2304,)
        assert tuple(handle.get_signal_pad(rank, dtype="uint8", storage_offset=6).shape) == (9210,)
        assert tuple(handle.get_signal_pad(rank, (3, 2), storage_offset=1).shape) == (3, 2)
        assert not np.asarray(pad).any(), "a new pad is zero"
        peer, source, channel = (rank + 1) % size, (rank - 1) % size, 7
        handle.barrier()
        handle.put_signal(peer, channel)
        handle.barrier(channel)
        found = np.flatnonzero(np.asarray(pad)).tolist()
        assert found == [size * channel + source] and int(pad[found[0]]) == 1
        handle.wait_signal(source, channel)
        handle.barrier()
        return np.asarray(pad).any()

    assert on_ranks(3, body) == [False] * 3


def test_signals_order_a_stream_of_messages():
    def body(context):
        array = allocate(64, np, dtype="int64")
        handle = rendezvous(array)
        other = 1 - context.rank
        inbox = handle.get_buffer(other, (64,), "int64")
        total = 0
        for number in range(300):
            if context.rank == 0:
                inbox[:] = number
                handle.put_signal(other, 3)
                handle.wait_signal(other, 4)
            else:
                handle.wait_signal(other, 3)
                assert array.min() == array.max() == number
                total += int(array[0])
                handle.put_signal(other, 4)
        handle.put_signal(context.rank)
        handle.wait_signal(context.rank)  # to oneself
        return total

    assert on_ranks(2, body) == [0, 300 * 299 // 2]


def test_a_timeout_names_the_ranks_and_leaves_everything_usable():
    def body(context):
        handle = rendezvous(uneven(context, np))
        rank = context.rank
        context.barrier()
        seen = []
        if rank == 0:
            for call in (
                lambda: handle.wait_signal(1, timeout_ms=40),
                lambda: handle.barrier(5, timeout_ms=40),
                lambda: (handle.put_signal(2, 9), handle.put_signal(2, 9, timeout_ms=40)),
            ):
                seen.append(outcome(call))
            with pytest.raises(OpTimeout, match=r"waited \d+\.\d+ s for rank 1 \(pid \d+ on .*;"):
                handle.wait_signal(1, timeout_ms=40)
        context.barrier()
        handle.barrier(5)  # completes the one that rank 0 gave up
        handle.barrier(5)
        if rank == 2:
            handle.wait_signal(0, 9)
        handle.put_signal((rank + 1) % 3)
        handle.wait_signal((rank - 1) % 3)
        assert handle is rendezvous(handle_array(handle))
        return seen

    def handle_array(handle):
        return handle.get_buffer(handle.rank, (1,), "float32")

    timeouts = [("OpTimeout", [1]), ("OpTimeout", [1, 2]), ("OpTimeout", [2])]
    assert on_ranks(3, body) == [timeouts, [], []]
    assert issubclass(OpTimeout, TimeoutError)


@pytest.mark.parametrize("package", PACKAGES)
def test_life_times(package):
    """Memory is reused after array, handle and views are gone on all ranks, in whatever order."""

    def body(context):
        array = uneven(context, package)
        handle = rendezvous(array)
        view = handle.get_buffer(1 - context.rank, (1, 5), array.dtype)
        witness = weakref.ref(handle)
        handle.barrier()
        del array, handle
        assert witness() is not None, "the view keeps the handle"
        mine, used = float(view.sum()), []
        context.barrier()
        used.append(context.heap.used > 0)
        if context.rank == 0:
            view = None
        context.barrier()
        used.append(context.heap.used > 0)
        assert view is None or float(view.sum()) == mine
        view = None
        assert witness() is None
        context.barrier()
        return [*used, context.heap.used]

    assert on_ranks(2, body) == [[True, True, 0]] * 2


def test_the_handle_of_the_same_arrays_is_the_same_and_new_arrays_get_new_ones():
    def body(context):
        array = uneven(context, np)
        first = rendezvous(array)
        assert rendezvous(array) is first and rendezvous(array[:1]) is first
        tensor_handle = rendezvous(torch.from_numpy(array))
        assert tensor_handle is not first and isinstance(tensor_handle.device, torch.device)
        first.barrier(1)
        del first
        again = rendezvous(array)
        again.barrier(1)  # counts on from where the dropped handle was
        del array, again, tensor_handle
        gc.collect()
        context.barrier()
        return context.heap.used

    assert on_ranks(2, body) == [0, 0]


def test_the_handle_of_a_known_array_is_had_without_the_peers():
    def body(context):
        array = uneven(context, np)
        handle = rendezvous(array)
        if context.rank == 0:  # alone
            assert rendezvous(array) is handle and rendezvous(array, context) is handle
        context.barrier()
        # Rank 1 has dropped its array, and brings another: its peers have their handles.
        other = uneven(context, np)
        brought = other if context.rank == 1 else array
        found = outcome(partial(rendezvous, brought))
        if context.rank != 1:
            assert found is handle
            found = outcome(context.barrier)
        return found[0]

    assert on_ranks(3, body) == ["CollectiveMismatch"] * 3


def test_a_freed_array_cannot_be_used_and_its_memory_stays_for_views_of_peers():
    def body(context):
        array = uneven(context, np)
        handle = rendezvous(array)
        view = handle.get_buffer(1, (2, 5), "float32")
        handle.barrier()
        if context.rank == 1:
            free_symmetric_memory(array)
            for _ in range(20):
                allocate((2, 5), np, skip_symmetric_check=True)[:] = -1
            calls = [
                lambda: handle.get_buffer(0, (1,), "float32"),
                lambda: handle.get_remote_tensor(0, (1,), "float32"),
            ]
            assert [raised(call) for call in calls] == ["UseAfterFree"] * 2
        handle.barrier()
        assert view.min() == view.max() == 1
        failure = raised(lambda: rendezvous(array))  # heard by the rank that has freed its own
        array = handle = view = None
        context.barrier()
        return failure, context.heap.used

    assert on_ranks(2, body) == [(None, 0), ("UseAfterFree", 0)]


def test_ordinary_memory_on_one_rank_is_an_error_on_all():
    def body(context):
        cases = [np.zeros(3), [1, 2, 3], None]
        texts = []
        for case in cases:
            brought = case if context.rank == 1 else uneven(context, np)
            try:
                rendezvous(brought)
            except ValueError as error:
                texts.append(str(error))
        assert all(text.startswith("rank 1: ") for text in texts)
        assert "allocate_symmetric_memory" in texts[0]
        return len(texts)

    assert on_ranks(3, body) == [3] * 3
