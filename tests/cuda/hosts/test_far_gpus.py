"""GPUs of one machine as two pretended hosts: the test bodies of one host, by put and get alone.

Through NVSHMEM, and through mapped memory that the transport keeps to itself.
"""

from __future__ import annotations

import importlib
from unittest.mock import patch

import numpy as np
import pytest
import test_host_bodies as bodies
import test_redistribution as on_gpus
import test_symmetric_bodies as symmetric
from hypothesis import given
from visible import RANKS, gpu_of

from arrangements import part_of
from draws import drawn
from heap_use import settled_use
from ranks import Pool
from shardmath.base import config
from shardmath.collectives import all_gather, all_reduce
from shardmath.context.startup import new_context
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.errors import HeapExhausted, OpTimeout
from shardmath.fft import fft
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg.advanced import Matmul
from shardmath.transport import mesh

ALL = max(RANKS, 1)


def test_the_table(far_gpus):
    for rank, (name, addresses) in enumerate(far_gpus.run(describe)):
        assert name in ("cuda", "nvshmem")
        near = [r for r in range(RANKS) if r * 2 // RANKS == rank * 2 // RANKS]
        assert [r for r, address in enumerate(addresses) if address] == near


def describe(context):
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    with context:
        array = allocate_symmetric_memory(5, torch, dtype="float32")
        handle = rendezvous(array)
    assert type(handle).__name__ == "DeviceSymmetricMemory"
    return context.heap.transport.name, handle.buffer_ptrs


def check_handle(context, package):
    module = importlib.import_module(package)
    if package == "torch":
        module.cuda.set_device(context.device_id)
        device = {"device": f"cuda:{context.device_id}"}
    else:
        module.cuda.Device(context.device_id).use()
        device = {}
    rank, size = context.rank, context.size
    with context:
        array = allocate_symmetric_memory(
            (rank + 1, 5), module, dtype="float32", skip_symmetric_check=True
        )
        array[...] = rank
        handle = rendezvous(array)
    handle.barrier()
    for peer in range(size):
        found = module.zeros(4, dtype=module.float32, **device)
        handle.get(found, peer, 1)
        assert found.tolist() == [peer] * 4
    handle.barrier(1)
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(20):
        if turn:
            handle.wait_signal(after, 3)
        handle.put(module.zeros(2, dtype=module.float32, **device) + (10 * turn + rank), after)
        handle.put_signal(after)
        handle.wait_signal(before)
        assert array.reshape(-1)[:2].tolist() == [10 * turn + before] * 2
        handle.put_signal(before, 3)
    handle.wait_signal(after, 3)
    # Ordinary and symmetric memory, larger than what a transport may pass it through.
    count = 9 << 20
    with context:
        large = allocate_symmetric_memory(count, module, dtype="float32")
        reach = rendezvous(large)
    large[...] = rank
    reach.barrier()
    found = module.zeros(count, dtype=module.float32, **device)
    reach.get(found, after)
    assert bool((found == after).all())
    reach.barrier()
    reach.put(found, before, 0)  # `before` gets its own successor's successor
    reach.barrier()
    assert bool((large == (rank + 2) % size).all())
    handle.wait_signal(after, 2, timeout_ms=20)
    with pytest.raises(OpTimeout) as caught:
        handle.synchronize()
    assert caught.value.ranks == (after,)
    handle.barrier()
    context.barrier()
    return True


@pytest.mark.parametrize("package", ["torch", "cupy"])
def test_a_handle_reaches_every_rank(far_gpus, package):
    assert all(far_gpus.run(check_handle, package))


@pytest.mark.parametrize("package", ["torch", "cupy"])
@pytest.mark.parametrize(("ranks", "name", "args"), symmetric.FAR_BODIES)
def test_symmetric_memory(far_gpus, package, ranks, name, args):
    if ranks > RANKS:
        pytest.skip(f"there are {RANKS} ranks with GPUs")
    assert far_gpus.run(symmetric.check, ranks, name, package, args) == [""] * RANKS


CASES = [
    ("test_reducing", "check_types", "plain", [["float32", "bfloat16"]]),
    ("test_reducing", "check_lengths", "plain", [[511, 513, 16385, 262145], "float32", "sum"]),
    ("test_reducing", "check_lengths", "plain", [[511, 16385], "int16", "mean"]),
    ("test_moving", "check_broadcast", "plain", [0, ["float32", "bfloat16"]]),
    ("test_moving", "check_gather_in_place", "plain", []),
    ("test_moving", "check_alternation", "plain", []),
    *[
        ("test_reducing", "check_forms", form, [(600, 701), dtype])
        for form in ("cupy", "cupy_heap", "torch", "torch_strided", "torch_heap", "torch_cpu")
        for dtype in ("float32", "complex64")
    ],
    *[
        ("test_moving", "check_gather", form, case)
        for form in ("cupy_strided", "torch", "torch_heap")
        for case in ([(7, 3), 1, "complex64"], [(0, 9), 1, "float32"], [(3, 2_000_000), 0, "int8"])
    ],
    *[
        ("test_moving", "check_exchange", form, [(shape, axis, "float32"), uneven])
        for form in ("cupy", "torch_heap")
        for shape, axis in (((9, 7), 1), ((24, 300_000), 0))
        for uneven in (False, True)
    ],
]


@pytest.mark.parametrize(("module", "body", "form", "args"), CASES)
def test_collectives(far_gpus, module, body, form, args):
    found = far_gpus.run(bodies.check, module, body, form, args)
    assert found in ([[]] * RANKS, [0] * RANKS)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "int64"])
def test_reduce_scatter(far_gpus, op, dtype):
    for shape, axis in (((7,), 0), ((5, 8), 1), ((0, 4), 0), ((9, 40_000), 0)):
        args = [(shape, axis, None), dtype, op]
        found = far_gpus.run(bodies.check, "test_reducing", "check_scatter", "plain", args)
        assert found == [True] * RANKS, shape


@drawn(40, shrunk=False)
@given(case=on_gpus.cases.cases(least=ALL, most=ALL, libraries=("cupy", "torch")))
def test_any_distribution_to_any_other(far_gpus, case):
    far_gpus.run(on_gpus.check, "run_case", case[4], [case])


@drawn(20, shrunk=False)
@given(case=on_gpus.cases.cases(least=ALL, most=ALL, stores=on_gpus.ORDINARY))
def test_any_distribution_to_any_other_from_host_memory(far_gpus, case):
    far_gpus.run(on_gpus.check_host, "test_redistribute_any", "run_case", [case])


@drawn(8, shrunk=False)
@given(case=on_gpus.cases.cases(least=ALL, most=ALL))
def test_a_plan_serves_any_operand_of_its_shape(far_gpus, case):
    assert all(far_gpus.run(on_gpus.check, "keep_planned", "cupy", [case]))


@pytest.mark.parametrize("store", ["heap C", "C", "heap strided"])
def test_operands_may_be_overwritten_after_each_execution(far_gpus, store):
    assert far_gpus.run(on_gpus.check, "overwrite", "cupy", [store, 20]) == [0] * RANKS


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_captured_redistribution(far_gpus, library):
    assert far_gpus.run(on_gpus.check_capture, library, (False, False)) == [[]] * RANKS


def count_meetings(context):
    """By operation, of a call that is made again: how often the processes meet in an exchange, or
    in a barrier, and how often one waits for its GPU."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    rank = context.rank
    with context:
        x = torch.ones(Slab.X.shape(rank, (64, 64)), device="cuda", dtype=torch.complex64)
        y = torch.empty(Slab.Y.shape(rank, (64, 64)), device="cuda", dtype=torch.complex64)
        product = Matmul(x, x, distributions=[Slab.X] * 3)
        product.plan()
        redistribution = Redistribute(x, Slab.X, Slab.Y)
        redistribution.plan()
        calls = {
            "all_reduce": lambda: all_reduce(x.real.contiguous()),
            "product": product.execute,
            "transform": lambda: fft(x, distribution=(Slab.X, Slab.Y), out=y),
            "redistribution": lambda: redistribution.execute(out=y),
        }
        found = {}
        for name, call in calls.items():
            for _ in range(3):
                call()
            board, team = type(context.board), type(context.team)
            with (
                patch.object(
                    board, "exchange_raw", autospec=True, side_effect=board.exchange_raw
                ) as meet,
                patch.object(board, "barrier", autospec=True, side_effect=board.barrier) as wait,
                patch.object(team, "synchronize", autospec=True) as synchronize,
            ):
                call()
            found[name] = (meet.call_count, wait.call_count, synchronize.call_count)
        context.barrier()
        context.team.synchronize(0)
    return found


def test_processes_meet_once_and_never_wait_for_the_gpu(far_gpus):
    once = (1, 0, 0)
    wanted = dict.fromkeys(("all_reduce", "product", "transform", "redistribution"), once)
    assert far_gpus.run(count_meetings) == [wanted] * RANKS


def check_ring(context):
    """Signals on the stream alone: a ring that the host only puts there, captured, and replayed."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    rank, size = context.rank, context.size
    after, before = (rank + 1) % size, (rank - 1) % size
    with context:
        array = allocate_symmetric_memory(1 << 16, torch, dtype="float32")
        array.fill_(-1)
        handle = rendezvous(array)
        value, seen = torch.zeros_like(array), torch.zeros(4, device="cuda")
        handle.barrier()

        def turn(number):
            handle.put(value, after)
            handle.put_signal(after)
            handle.wait_signal(before)
            seen[number] = array[-1]
            handle.put_signal(before, 1)
            handle.wait_signal(after, 1)  # it has read what was put

        with patch.object(type(context.team), "synchronize", autospec=True) as waited:
            for number in range(4):
                value.fill_(10 * number + rank)
                turn(number)
        found = [waited.call_count, seen.tolist()]
        handle.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn(0)
        for number in range(3):
            value.fill_(number + 0.5 * rank)
            graph.replay()
            found.append(seen[0].item())
        handle.synchronize()
        context.barrier()
    want = [0, [10.0 * number + before for number in range(4)]]
    return found == [*want, *(number + 0.5 * before for number in range(3))]


def test_signals_are_on_the_stream(far_gpus):
    assert all(far_gpus.run(check_ring))


def check_captured(context):
    """Collectives in one CUDA graph, replayed on operands that change; larger ones in between."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    rank, size, wrong = context.rank, context.size, []
    with context:
        x = torch.full((1000,), float(rank), device="cuda")
        all_gather(all_reduce(x))
        torch.cuda.synchronize()
        context.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = all_reduce(x)
            whole = all_gather(x)
        for turn in range(4):
            x.fill_(rank + turn)
            graph.replay()
            if turn == 2:  # outboxes grow
                large = all_reduce(torch.ones(3_000_000, device="cuda"))
                torch.cuda.synchronize()
                wrong += [] if bool((large == size).all()) else ["large"]
                context.barrier()
            torch.cuda.synchronize()
            if total.unique().tolist() != [sum(range(size)) + size * turn]:
                wrong.append(("sum", turn, total[:3].tolist()))
            if whole.view(size, -1)[:, 0].tolist() != [each + turn for each in range(size)]:
                wrong.append(("all", turn))
        context.barrier()
    return wrong


def test_captured_collectives(far_gpus):
    assert far_gpus.run(check_captured) == [[]] * RANKS


def check_large(context):
    """Rows to columns and back, where whole rows are fetched one by one."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    shape, rank, size = (37, 3, 40_003), context.rank, context.size
    whole = np.arange(37 * 3 * 40_003, dtype=np.float64).reshape(shape)
    rows, columns = (np.ascontiguousarray(part_of(whole, s, rank, size)) for s in (Slab.X, Slab.Y))
    with context:
        found = redistribute(torch.from_numpy(rows).cuda(), Slab.X, Slab.Y)
        back = redistribute(found, Slab.Y, Slab.X)
    return [bool((one.cpu().numpy() == two).all()) for one, two in ((found, columns), (back, rows))]


def test_long_rows(far_gpus):
    assert far_gpus.run(check_large) == [[True, True]] * RANKS


def check_exhaustion(context):
    """A heap that cannot grow says so on all ranks, and stays as it was."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    if context.heap.transport.name != "nvshmem":
        return True
    with context:
        used = settled_use(context)
        with pytest.raises(HeapExhausted) as caught:
            allocate_symmetric_memory(1 << 30, torch, dtype="uint8")
        assert caught.value.need >= 1 << 30 > caught.value.have and context.heap.used == used
        assert "SHARDMATH_GPU_HEAP_BYTES larger by" in str(caught.value)
        assert allocate_symmetric_memory(1000, torch).shape == (1000,)
    return True


def test_a_heap_that_cannot_grow(far_gpus):
    assert all(far_gpus.run(check_exhaustion))


def check_again(context):
    """Another context of the same ranks, after which the memory of the first is used again."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    for turn in range(2):
        second = new_context(context.device_id, context.process_group)
        with second:
            array = allocate_symmetric_memory(7, torch, dtype="float32")
            array[...] = turn + second.rank
            handle = rendezvous(array)
            handle.barrier()
            found = torch.zeros(7, device="cuda")
            handle.get(found, (second.rank + 1) % second.size)
            assert found.tolist() == [turn + (second.rank + 1) % second.size] * 7
            handle.barrier()
            half = second.split(second.rank * 2 // second.size)
            total = all_reduce(torch.ones(3, device="cuda"), context=half)
            assert total.tolist() == [half.size] * 3
            half.barrier()
            second.barrier()
        second.close()
        del array, handle, second, half
    context.barrier()
    return True


def test_another_context_of_the_same_ranks(far_gpus):
    assert all(far_gpus.run(check_again))


def make_apart(group):
    """As if every second rank were on another machine: NVSHMEM is chosen."""
    mesh.host_identity = lambda: f"machine {group.rank % 2}"
    config.export({"SHARDMATH_GPU_HEAP_BYTES": str(256 << 20)})
    return new_context(gpu_of(group.rank), group)


def test_nvshmem_is_chosen_between_machines():
    if RANKS < 2:
        pytest.skip("two machines take two GPUs")
    with Pool(2, make_apart) as ranks:
        assert [name for name, _ in ranks.run(describe)] == ["nvshmem"] * 2
        assert all(ranks.run(check_handle, "torch"))


def check_late(context):
    """A barrier that a rank does not come to is a timeout that names it; then all is usable."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    with context:
        handle = rendezvous(allocate_symmetric_memory(4, torch, dtype="float32"))
    last = context.size - 1
    handle.barrier()
    handle.synchronize()
    if context.rank != last:
        handle.barrier(1, timeout_ms=50)
        with pytest.raises(OpTimeout) as caught:
            handle.synchronize()
        assert caught.value.ranks == (last,)
    context.barrier()
    handle.barrier(1)  # those that waited in vain wait for the same barrier again
    handle.barrier(1)
    handle.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3
    with pytest.raises(NotImplementedError):
        handle.kernel_argument()
    context.barrier()
    return True


def test_a_barrier_that_a_rank_does_not_come_to(far_gpus):
    assert all(far_gpus.run(check_late))
