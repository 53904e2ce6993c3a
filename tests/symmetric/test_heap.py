"""The heap of one rank: blocks, marks, growth; what fails leaves it as it was."""

import gc
from unittest.mock import patch

import numpy as np
import pytest

from shardmath.errors import HeapExhausted
from shardmath.group.base import SoloProcessGroup
from shardmath.symmetric import heap as heap_module
from shardmath.symmetric.heap import Heap
from shardmath.transport.base import Fence
from shardmath.transport.cores.host import HostTransport
from shardmath.transport.mesh import Mesh

MIB = 1 << 20


@pytest.fixture
def heap():
    mesh = Mesh(SoloProcessGroup(), 10.0)
    transport = HostTransport(mesh)
    yield Heap(transport, rank=0, segment_bytes=4 * MIB)
    transport.close()
    mesh.close()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 255, 256, 257, 5 * MIB])
def test_a_block_is_writable_found_and_returned(heap, nbytes):
    buffer = heap.allocate(nbytes)
    array = np.asarray(buffer)
    array[:] = 7
    block = buffer.block
    assert array.shape == (nbytes,) and block.nbytes == nbytes
    assert block.address % 256 == 0 and block.buffer() is buffer
    assert heap.find(block.address) is block
    assert heap.find(block.address + block.reserved - 1) is block
    assert heap.find(block.address + block.reserved) is None
    assert heap.find(block.address - 1) is None
    assert heap.used == block.reserved
    del buffer, array
    assert heap.used == 0 and heap.find(block.address) is None


def test_it_grows_and_neighbours_keep_their_contents(heap):
    arrays = [np.asarray(heap.allocate(n)) for n in (100, 3 * MIB, 3 * MIB, 9 * MIB, 1)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [int(a.min()) for a in arrays] == [int(a.max()) for a in arrays] == [0, 1, 2, 3, 4]
    del arrays[1], array
    again = np.asarray(heap.allocate(3 * MIB))
    again[:] = 9
    assert [int(a.max()) for a in arrays] == [0, 2, 3, 4]


def test_a_shared_block_waits_for_all_marks(heap):
    buffer = heap.allocate(100)
    block = buffer.block
    block.shared |= {(1, 5), (2, 6)}
    assert heap.marks(1) == []
    del buffer
    assert heap.marks(1) == [5] and heap.marks(2) == [6]
    heap.apply_marks(1, [[5], []])
    assert heap.marks(1) == [5], "the other rank has not marked it"
    heap.apply_marks(1, [[5, 9], [5]])
    assert heap.marks(1) == [] and heap.used == block.reserved
    heap.apply_marks(2, [[6], [6]])
    assert heap.used == 0


def test_a_group_that_was_left_is_forgotten_once_it_has_ended(heap):
    ended = []
    buffer = heap.allocate(100)
    buffer.block.shared |= {(1, 5), (2, 5)}
    heap.groups.leave(1, lambda: bool(ended))
    del buffer
    assert heap.marks(1) == [5] and heap.used > 0
    ended.append(True)
    assert heap.marks(1) == [] and heap.marks(2) == [5]
    heap.groups.leave(2, lambda: True)
    assert heap.used == 0


def test_a_freed_block_is_not_marked_while_a_handle_lives(heap):
    class Handle:
        pass

    import weakref

    handle = Handle()
    buffer = heap.allocate(100)
    buffer.block.shared.add((1, 5))
    buffer.block.handles = [weakref.ref(handle)]
    heap.free(buffer.block)
    assert heap.marks(1) == []
    del handle
    assert heap.marks(1) == [5]


def test_a_freed_block_gives_its_memory_back_and_keeps_its_address(heap):
    buffer = heap.allocate(8 * MIB)
    block, array = buffer.block, np.asarray(buffer)
    array[:] = 1
    heap.free(block)
    assert int(array.max()) == 0, "pages are gone"
    assert heap.used == block.reserved and heap.find(block.address) is block
    heap.restore(block)
    array[:] = 2
    assert not block.freed and heap.used == block.reserved
    del buffer, array
    assert heap.used == 0


def test_what_a_late_peer_may_write_is_reused_when_the_group_has_ended(heap):
    failed = []
    heap.groups.watch(1, lambda: bool(failed))
    heap.groups.watch(2, lambda: False)
    kept, other, before = (heap.allocate(100) for _ in range(3))
    kept.block.announced_to |= {1, 2}
    other.block.announced_to.add(2)
    before.block.announced_to.add(1)
    blocks = kept.block, other.block
    place = before.block.address
    del before
    heap.recycle()
    assert heap.find(place) is None, "group 1 has not failed so far"
    failed.append(True)
    del kept, other
    heap.recycle()
    assert [heap.find(block.address) for block in blocks] == [blocks[0], None]
    ended = []
    heap.groups.leave(1, lambda: bool(ended))
    heap.groups.leave(2, lambda: True)
    assert heap.used == blocks[0].reserved
    later = heap.allocate(100)
    later.block.announced_to.add(1)
    del later
    assert heap.used > blocks[0].reserved, "its ranks may still be at work"
    ended.append(True)
    assert heap.used == 0


def test_reference_cycles_are_collected(heap):
    buffer = heap.allocate(100)
    ring = [np.asarray(buffer)]
    ring.append(ring)
    del buffer, ring
    gc.collect()
    assert heap.used == 0


@pytest.mark.parametrize("nbytes", [1 << 44, 1 << 62, 1 << 70])
def test_too_large_a_request_leaves_the_heap_as_it_was(heap, nbytes):
    small = heap.allocate(100)
    before = (heap.used, len(heap._segments))
    with pytest.raises(HeapExhausted) as caught:
        heap.allocate(nbytes)
    assert caught.value.need >= nbytes
    assert (heap.used, len(heap._segments)) == before
    assert len(np.asarray(heap.allocate(100))) == 100
    assert small.block.nbytes == 100


def test_more_than_is_available_is_refused(heap, monkeypatch):
    monkeypatch.setattr("shardmath.transport.cores.host.available_memory", lambda: 3 * MIB)
    kept = heap.allocate(MIB)
    with pytest.raises(HeapExhausted) as caught:
        heap.allocate(64 * MIB)
    assert caught.value.have == 3 * MIB and caught.value.need >= 62 * MIB
    assert len(heap._segments) == 1 and heap.used == kept.block.reserved
    assert heap_module.GRANULE == 2 * MIB


class Pending(Fence):
    """Work that a device has not done yet."""

    done = False

    def passed(self):
        return self.done


def test_what_the_device_still_uses_is_neither_reused_nor_marked(heap):
    fences = []

    def fence():
        fences.append(Pending())
        return fences[-1]

    with patch.object(heap.transport, "fence", fence):
        buffer, shared = heap.allocate(MIB), heap.allocate(100)
        first, block = buffer.block, shared.block
        block.shared.add((1, 5))
        del buffer
        assert heap.used == first.reserved + block.reserved and len(fences) == 1
        assert heap.allocate(MIB).block.address != first.address
        del shared
        assert heap.marks(1) == [] and len(fences) == 2, "a later drop stands behind a later one"
        fences[0].done = True
        assert heap.allocate(MIB).block.address == first.address
        fences[1].done = True
        assert heap.marks(1) == [5]
        heap.apply_marks(1, [[5], [5]])
        assert heap.find(block.address) is None


@pytest.mark.parametrize("small", [True, False])
def test_what_was_dropped_before_its_group_failed_waits_too(heap, small):
    """Among blocks of one size that take turns, and among those that share fences."""
    failed, ended = [], []
    heap.groups.watch(1, lambda: bool(failed))
    heap.groups.leave(1, lambda: bool(ended))
    nbytes = 100 if small else 64 * MIB
    with patch.object(heap.transport, "drops_at_once", 2):
        told = [heap.allocate(nbytes) for _ in range(6)]
        blocks = [each.block for each in told]
        for block in blocks:
            block.announced_to.add(1)
        failed.append(True)
        del told
        others = [heap.allocate(nbytes) for _ in range(12)]
        assert not {each.block.address for each in others} & {each.address for each in blocks}
        ended.append(True)
        del others
        assert heap.used == 0


def test_what_is_kept_for_kernels_comes_back_when_their_group_has_ended(heap):
    fence, ended = Pending(), []
    for group in (1, 2):
        heap.groups.watch(group, lambda: False)
        heap.groups.keep(group, heap.allocate(100))
    assert heap.used == 512
    heap.groups.leave(1, lambda: bool(ended))
    assert heap.used == 512
    ended.append(True)
    with patch.object(heap.transport, "fence", lambda: fence):
        assert heap.used == 512, "kernels of this rank's own may use it"
        fence.done = True
        assert heap.used == 256
    heap.groups.keep(1, heap.allocate(100))
    assert heap.used == 256, "nobody writes to it any more"
    heap.groups.forget_all()
    assert heap.used == 0


@pytest.mark.parametrize(
    ("meets", "fences", "count"), [(False, 5, 4), (True, 11, 3)], ids=["alone", "barriers"]
)
def test_small_blocks_of_a_loop_take_turns_where_a_fence_is_dear(heap, meets, fences, count):
    made = []

    def fence():
        for each in made:  # the device is as fast as the host
            each.done = True
        made.append(Pending())
        return made[-1]

    def turn(nbytes):
        address = heap.allocate(nbytes).block.address  # and dropped
        return address, heap.marks(1) if meets else []

    def wait(_):
        raise AssertionError("the host waits for the device")

    with (
        patch.object(heap.transport, "fence", fence),
        patch.object(type(heap.transport), "drops_at_once", 2),
        patch.object(heap_module, "_SMALL", MIB),
        patch("time.sleep", wait),
    ):
        places = [turn(100)[0] for _ in range(12)]
        assert places == places[:count] * (12 // count) and len(set(places)) == count
        assert len(made) == fences + meets
        before = len(made)
        turn(MIB + 1)
        turn(MIB + 1)
        assert len(made) > before, "large ones are used again at once"
        with patch.object(Pending, "done", True):
            whole = heap.allocate(4 * MIB - 256)  # there is room when all that was dropped is free
        assert whole.block.location.segment == 0


def test_a_device_that_is_behind_is_not_waited_for_until_much_memory_waits(heap):
    made = []

    def fence():
        made.append(Pending())
        return made[-1]

    def pass_the_first(_):
        next(each for each in made if not each.done).done = True

    def turn(nbytes=100):
        return heap.allocate(nbytes).block.address

    with (
        patch.object(heap.transport, "fence", fence),
        patch.object(type(heap.transport), "drops_at_once", 2),
        patch.object(heap_module, "_SMALL", 1000),
    ):
        with patch("time.sleep", pass_the_first):
            places = [turn() for _ in range(20)]
            assert len(set(places)) == 20 and not any(each.done for each in made)
            with patch.object(heap_module, "_MOST_WAITING", 0):
                version = heap.version
                assert [turn() for _ in range(18)] == places[:18]
                assert heap.version == version, "what was found out about the heap still holds"
            with patch.object(heap_module, "_MOST_IN_TURN", 5):
                assert len({turn(200) for _ in range(40)}) <= 5 + 2 * 2, "the host waits for these"
            with patch.object(Pending, "done", True):
                large = [turn(2000) for _ in range(12)]
            assert len(set(large)) == 1, "large ones are used again at once"
            kept = [heap.allocate(3000) for _ in range(9)]
            places = [each.block.address for each in kept]
            while kept:
                del kept[0]
            later = [turn(3000) for _ in range(20)]
            assert later == places[4:] * 4, "large ones follow each other in few places"
        heap.changing = True  # an exception has left a method half way
        held = [heap.allocate(100) for _ in range(5)]
        assert len({each.block.address for each in held}) == 5
        assert all(heap.find(each.block.address) is each.block for each in held)


def test_an_allocation_waits_for_a_fence_before_the_heap_grows(heap):
    fence = Pending()
    with patch.object(heap.transport, "fence", lambda: fence):
        buffer = heap.allocate(3 * MIB)
        first = buffer.block
        del buffer
        assert heap.allocate(3 * MIB).block.location.segment == 1, "but not for ever"
        with patch("time.sleep", lambda _: setattr(fence, "done", True)):
            assert heap.allocate(4 * MIB - 256).block.location.segment == 0
        assert heap.find(first.address) is not first


def test_the_version_rises_where_what_was_found_out_may_not_hold(heap):
    def rises(change, *given):
        before = heap.version
        result = change(*given)
        return heap.version > before, result

    grown, first = rises(heap.allocate, MIB)
    come, other = rises(heap.allocate, MIB)
    assert grown and not come, "the heap has grown for the first"
    assert rises(heap.free, first.block)[0] and rises(heap.restore, first.block)[0]
    del other
    assert not rises(heap.allocate, MIB)[0], "it lies where the last one did"
    assert rises(heap.recycle)[0] and not rises(heap.recycle)[0]
    assert rises(heap.allocate, 9 * MIB)[0]
    heap.restore_order()
    assert heap.find(first.block.address) is first.block


def test_the_heap_grows_rather_than_wait_while_little_waits_for_the_device(heap):
    def wait(_):
        raise AssertionError("the host waits for the device")

    with (
        patch.object(heap.transport, "fence", Pending),
        patch.object(type(heap.transport), "runs_ahead_by", 9 * MIB),
    ):
        with patch("time.sleep", wait):
            segments = [heap.allocate(3 * MIB).block.location.segment for _ in range(3)]
        assert len(set(segments)) == len(heap._segments) == 3
        with patch("time.sleep", lambda _: setattr(Pending, "done", True)):
            assert heap.allocate(3 * MIB).block.location.segment in segments
        Pending.done = False


def test_a_heap_that_cannot_grow_says_what_it_has(heap):
    with (
        patch.object(type(heap.transport), "grows", False),
        patch.object(heap_module, "_LAST_FENCE_WAIT", 0),
    ):
        kept = [heap.allocate(MIB) for _ in range(4)]
        del kept[0], kept[1]  # two pieces, apart
        used = heap.used
        words = (
            r"rank 0: .* needs 1,572,864 .* of its 4,194,304 .* 2,097,152 are free, 1,048,576 in"
        )
        with pytest.raises(
            HeapExhausted, match=words + ".*GPU_HEAP_BYTES larger by 2097152"
        ) as caught:
            heap.allocate(3 * MIB // 2)
        assert (caught.value.need, caught.value.have) == (3 * MIB // 2, MIB)
        assert heap.used == used and heap.allocate(MIB).block.location.segment == 0


def test_nothing_is_reused_while_no_fence_can_be_set(heap):
    with patch.object(heap.transport, "fence", lambda: None):
        buffer = heap.allocate(100)
        block = buffer.block
        del buffer
        assert heap.used == block.reserved and heap.find(block.address) is block
    assert heap.used == 0
