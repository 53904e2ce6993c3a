import sys, time

sys.path.insert(0, "tests")
from ranks import Pool
from shardmath.startup import new_context


def mk(g):
    return new_context(g.rank, g)


def timings(context):
    import torch, numpy as np
    import shardmath as sm
    from shardmath.distribution import Slab, Replicated
    from shardmath.linalg.advanced import Matmul
    from shardmath.local.gpu import Matrix
    from shardmath.local.gpu.epilog import finish

    torch.cuda.set_device(context.device_id)
    out = []
    dev = context.team.device

    def mx(t):
        return Matrix(
            t.data_ptr(), t.shape[0], t.shape[1], t.stride(0), t.stride(1), str(t.dtype)[6:]
        )

    def timed(f, n=20):
        for _ in range(3):
            f()
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        t0 = time.perf_counter()
        a.record()
        for _ in range(n):
            f()
        t1 = time.perf_counter()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) / n * 1e3, (t1 - t0) / n * 1e6

    for order in "CF":
        W = torch.randn(8192, 4096, device="cuda")
        D = torch.empty(8192, 4096, device="cuda", dtype=torch.bfloat16)
        if order == "F":
            W = W.t().contiguous().t()
            D = D.t().contiguous().t()
        s = torch.cuda.current_stream().cuda_stream
        out.append(
            f"finish {order} 8192x4096 f32->bf16 gpu us, host us: {timed(lambda: finish(dev, s, mx(D), [mx(W)]))}"
        )
    with context:
        for n in (256, 8192):
            a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
            b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
            size = context.size
            la = a[: n // size].contiguous()
            mm = Matmul(la, b, distributions=[Slab.X, Replicated(), Slab.X])
            mm.plan()
            out.append(
                f"local strategy n={n}: {timed(mm.execute)} torch {timed(lambda: torch.matmul(la, b))}"
            )
            lb = b[: n // size].contiguous()
            mm = Matmul(la, lb, distributions=[Slab.X, Slab.X, Slab.X])
            mm.plan()
            out.append(f"gather strategy n={n}: {timed(mm.execute)} {mm.explain().splitlines()[1]}")
            lk = a[:, : n // size].contiguous()
            mm = Matmul(lk, lb, distributions=[Slab.Y, Slab.X, Slab.X])
            mm.plan()
            out.append(f"reduce n={n}: {timed(mm.execute)} {mm.explain().splitlines()[1]}")
        if context.rank == 0:
            import cProfile, pstats, io
        pr = None
        mm = Matmul(la, lb, distributions=[Slab.X, Slab.X, Slab.X])
        mm.plan()
        mm.execute()
        import cProfile, pstats, io

        pr = cProfile.Profile()
        pr.enable()
        for _ in range(50):
            mm.execute()
        pr.disable()
        st = io.StringIO()
        pstats.Stats(pr, stream=st).sort_stats("tottime").print_stats(22)
        out.append(st.getvalue())
    context.team.synchronize(0)
    context.barrier()
    return out


if __name__ == "__main__":
    with Pool(2, mk) as p:
        for r in p.run(timings, timeout=60)[:1]:
            print("\n".join(r), flush=True)
