"""`torch.ops.symm_mem` on tensors of GPUs, by our kernels, beside one process; torch's pools."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from shardmath import symmetric_memory as symm_mem
from shardmath.errors import BackendUnavailable, OpTimeout, RankFailure

DTYPES = ["float32", "bfloat16", "complex128", "int8", "float8_e4m3fn"]


def ready(context):
    """torch on this rank's GPU; the operators, for which the ranks are the group "g"."""
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(context.device_id)
    symm_mem.register()
    if "g" not in context.cache("group names", dict):
        symm_mem.set_group_info("g", context.rank, context.size)
    return torch, torch.ops.symm_mem


def on_heap(x):
    """A symmetric copy of a tensor, on this rank's GPU."""
    made = symm_mem.empty(*x.shape, dtype=x.dtype, device="cuda")
    return made.copy_(x)


# -- rows that tensors count -----------------------------------------------------------------------


def exchanges(context, kind, experts, shape, align):
    """What exchanges rows there and back; whether that is wrong, given how it is run and the counts
    of all ranks; and several such counts.
    """
    from test_rows_of_torch import rows_of, same, tables, to_experts

    torch, ops = ready(context)
    rank, size = context.rank, context.size
    every = list(tables(size, experts))
    most = max(int(table.sum()) for table in every) + align * experts
    x, back = (on_heap(rows_of(n, most, shape, kind)) for n in (rank, 98))
    out = on_heap(rows_of(99, most, shape, kind))
    counts = torch.zeros(size * experts, dtype=torch.int64, device="cuda")
    there, home = (torch.zeros(2, size * experts, dtype=torch.int64, device="cuda") for _ in "ab")

    def step():
        ops.all_to_all_vdev_2d(x, out, counts, there, "g", align)
        ops.all_to_all_vdev_2d_offset(out, back, there, home, "g")

    def is_wrong(run, table):
        inputs = [rows_of(n, most, shape, kind) for n in range(size)]
        chunks, arrived, offsets = to_experts(inputs, table, rank, align)
        torch.cuda.synchronize()
        context.barrier()
        counts.copy_(table[rank])
        out.copy_(rows_of(99, most, shape, kind))
        back.copy_(rows_of(98, most, shape, kind))
        run()
        torch.cuda.synchronize()
        wanted, returned = (rows_of(n, most, shape, kind) for n in (99, 98))
        for chunk, start in zip(chunks, offsets, strict=True):
            wanted[start : start + len(chunk)] = chunk
        sent = int(table[rank].sum())
        returned[:sent] = inputs[rank][:sent]
        told = there.tolist() == [arrived, offsets], home[0].tolist() == table[rank].tolist()
        return not (same(out.cpu(), wanted) and same(back.cpu(), returned) and all(told))

    return step, is_wrong, every


def there_and_back(context, dtype, captured):
    """Exchanges, eager or each replayed with several counts, that are wrong."""
    with context:
        torch, _ = ready(context)
        side, found, earlier = torch.cuda.Stream(), [], []

        def beside(step):
            """On another stream."""
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)

        for case in [(1, (3,), 1), (3, (8,), 4), (40, (5,), 2), (2, (1 << 12,), 1)]:
            step, is_wrong, every = exchanges(context, getattr(torch, dtype), *case)
            step()
            replay = step
            if captured:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                replay = graph.replay
            found += [(case, number) for number, t in enumerate(every) if is_wrong(replay, t)]
            earlier.append((case, is_wrong, every[0], (step, replay, partial(beside, step))))
        for case, is_wrong, table, runs in earlier:  # later calls had more chunks, and more memory
            found += [(case, "again") for run in runs if is_wrong(run, table)]
        context.team.check()
        return found


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_to_experts_and_back(gpus, size, dtype, captured):
    assert gpus.run(there_and_back, dtype, captured, ranks=size) == [[]] * size


def check_misfits(context, wrong):
    """What is raised, and what was written, where the last rank's first count is `wrong`."""
    own, said = context.split(0, context.rank), []  # it ends with the error
    with own:
        torch, ops = ready(own)
        rank, size = own.rank, own.size
        x, out = on_heap(torch.ones(2 * size, 4)), on_heap(torch.zeros(2 * size, 4))
        told = torch.zeros(2, size, dtype=torch.int64, device="cuda")
        counts = torch.full((size,), 2, dtype=torch.int64, device="cuda")
        ops.all_to_all_vdev(x, out, counts, told, "g")
        said.append(float(out.sum()) / size)
        out.zero_()
        if rank == size - 1:
            counts[0] = wrong
        torch.cuda.synchronize()
        own.barrier()
        ops.all_to_all_vdev(x, out, counts, told, "g")
        for call in (torch.cuda.synchronize, own.barrier, own.barrier):
            try:
                call()
            except (ValueError, RankFailure) as error:
                said += [type(error).__name__, str(error).partition("\n")[0].partition("GPUs ")[2]]
        said.append(float(out.sum()))
    context.barrier()
    return said


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_counts_that_do_not_fit(gpus, size, wrong):
    for first, *errors, last in gpus.run(check_misfits, wrong, ranks=size):
        assert (first, last) == (8, 0)
        assert errors[0] == "ValueError"
        assert errors[1].startswith(f"chunk 0 of rank {size - 1} is not within the {2 * size} rows")


# -- sums, memory of peers, signals ----------------------------------------------------------------


def check_others(context):
    """What is wrong of the other operators."""
    from torch_operators import of_rank, slab, summed

    with context:
        torch, ops = ready(context)
        rank, size, wrong = context.rank, context.size, []

        def expect(name, found, wanted):
            if not torch.equal(found.cpu(), wanted):
                wrong.append(name)

        x, whole = on_heap(of_rank(rank, (6, 4))), summed((6, 4), size)
        expect("one shot", ops.one_shot_all_reduce(x, "sum", "g"), whole)
        expect("copy", ops.one_shot_all_reduce_copy(torch.empty_like(x), x, "sum", "g"), whole)
        expect("average", ops.one_shot_all_reduce(x, "avg", "g"), whole / size)
        tile, root = torch.zeros(6, 4, dtype=x.dtype, device="cuda"), size - 1
        ops.tile_reduce(x, tile, root, "g")
        expect("tile", tile, whole if rank == root else torch.zeros_like(whole))
        part = torch.empty_like(slab(whole, 0, rank, size), device="cuda")
        if hasattr(ops, "nccl_reduce_scatter_offset"):  # torch 2.11 has none
            ops.nccl_reduce_scatter_offset(x, [part], "g", 0)
            expect("blocks", part, slab(whole, 0, rank, size))
        y = on_heap(of_rank(rank, (size, 3)))
        expect("broadcast", ops.nvshmem_broadcast(y.clone(), root, "g"), of_rank(root, (size, 3)))
        moved = ops.nvshmem_all_to_all(y, torch.empty_like(y), "g")
        expect("all to all", moved, torch.stack([of_rank(n, (size, 3))[rank] for n in range(size)]))
        expect("two shots", ops.two_shot_all_reduce_(x, "sum", "g"), whole)
        words = torch.zeros(5, dtype=torch.int32, device="cuda").view(torch.uint32)
        ops.memset32_(words, 1, 7, 2)
        ops.stream_write_value32_(words, 4, 2**32 - 1)
        expect("words", words.view(torch.int32), torch.tensor([0, 7, 7, 0, -1], dtype=torch.int32))
        return wrong


def test_sums_and_moves(gpus, size):
    assert gpus.run(check_others, ranks=size) == [[]] * size


def check_signals(context, captured):
    """What came with each signal, from rank 0 to rank 1, in a graph or not; and without one."""
    with context:
        torch, ops = ready(context)
        t = symm_mem.empty(1000, dtype=torch.float32, device="cuda")
        word = symm_mem.empty(2, dtype=torch.int64, device="cuda").zero_()
        handle, _ = symm_mem.rendezvous(t), symm_mem.rendezvous(word)
        pad, seen = handle.get_signal_pad(context.rank), []
        for sigpad, value in itertools.product((pad, word[1:]), (5, 2**40 + 1)):
            t.fill_(value % 100 if context.rank == 0 else -1)
            handle.barrier()

            def send(sigpad=sigpad, value=value):
                if context.rank == 0:
                    ops.nvshmem_put_with_signal(t, sigpad, value, 1)
                else:
                    ops.nvshmem_wait_for_signal(sigpad, value, 0)

            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    send()
                graph.replay()
            else:
                send()
            seen.append(float(t.sum()))
            handle.barrier()
        text = ""
        if context.rank == 1:
            handle._team.timeout = 0.2
            ops.nccl_wait_for_signal(t, 2**50)
            try:
                handle.synchronize()
            except OpTimeout as error:
                text = str(error.ranks)
        torch.cuda.synchronize()
        context.barrier()
        return seen, text


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_signals_have_values(gpus, captured):
    if gpus.size < 2:
        pytest.skip("one rank has no peer")
    (_, _), (seen, text) = gpus.run(check_signals, captured, ranks=2)
    assert seen == [1000.0 * (value % 100) for value in (5, 2**40 + 1)] * 2
    assert text == "(0,)"


# -- torch's pools ---------------------------------------------------------------------------------


def check_pool(context):
    """Tensors made in the pool are symmetric, reach the peers, and give their memory back."""
    with context:
        torch, ops = ready(context)
        pool = symm_mem.get_mem_pool("cuda")
        assert symm_mem.get_mem_pool("cuda") is pool
        found = []
        for step in range(3):
            with torch.cuda.use_mem_pool(pool):
                x = torch.full((1000,), float(context.rank + step), device="cuda")
                y = torch.zeros(3, device="cuda")
            handle = symm_mem.rendezvous(x)
            handle.barrier()
            peer = (context.rank + 1) % context.size
            found.append(float(handle.get_remote_tensor(peer, (1000,), x.dtype).sum()))
            handle.barrier()
            total = ops.one_shot_all_reduce(x, "sum", "g")
            found.append(float(total[0]))
            found.append(symm_mem.is_symm_mem_tensor(x) and symm_mem.is_symm_mem_tensor(y))
            torch.cuda.synchronize()
        found.append(symm_mem.is_symm_mem_tensor(torch.zeros(3, device="cuda")))
        for device in (f"cuda:{context.device_id + 1}", torch.device("cpu")):
            with pytest.raises(BackendUnavailable):
                symm_mem.get_mem_pool(device)
        return found


def test_torchs_pool_on_the_heap(gpus, size):
    for rank, found in enumerate(gpus.run(check_pool, ranks=size)):
        peer, ranks = (rank + 1) % size, size * (size - 1) / 2
        steps = [(1000.0 * (peer + step), ranks + step * size, True) for step in range(3)]
        assert found == [*itertools.chain(*steps), False]
