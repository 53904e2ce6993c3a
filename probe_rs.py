import json, os, statistics, sys, tempfile, time, traceback
from shardmath import startup
from shardmath.launch.function import spawn
from shardmath.operators.matmul.gpu.sending import SendingProduct, Shape
from shardmath.operators.matmul.gpu.sharded import Factor, ShardedProduct
from shardmath.operators.matmul.gpu.reduce_scatter import GemmReduceScatter

VARIANTS = sys.argv[3].split(",") if len(sys.argv) > 3 else []
T0 = time.time()


def say(*a):
    print(f"[{time.time() - T0:5.1f}]", *a, flush=True)


class R:
    def __init__(self, store, size):
        import torch, torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank = int(os.environ["SHARDMATH_RANK"])
        torch.cuda.set_device(self.rank)
        self.ctx = startup.initialize(self.rank)
        self.size = size
        self.dev = torch.device("cuda", self.rank)
        if size > 1:
            dist.init_process_group(
                "nccl",
                init_method=f"file://{store}",
                rank=self.rank,
                world_size=size,
                device_id=self.dev,
            )
            self.group = dist.group.WORLD.group_name

    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def time(self, call, calls=4, repeats=7):
        torch = self.torch
        for i in range(2):
            call(i)
        torch.cuda.synchronize()
        self.ctx.team.check()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for i in range(calls):
                call(i)
        g.replay()
        ts = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            self.ctx.barrier()
            s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            s.record()
            g.replay()
            e.record()
            torch.cuda.synchronize()
            ts.append(s.elapsed_time(e) / calls)
        self.ctx.team.check()
        m = statistics.median(ts)
        return max(self.ctx.agree("time", lambda: m, lambda x: x))

    def say(self, *a):
        if self.rank == 0:
            say(*a)

    def operands(self, m, n, k, ao, bo, dt, seed=0):
        torch = self.torch
        g = torch.Generator(self.dev).manual_seed(seed * 100 + self.rank)

        def mat(r, c, o):
            pad = lambda x: -(-x // 8) * 8
            if o == "C":
                return torch.randn(r, pad(c), device=self.dev, generator=g).to(dt)[:, :c], Factor(
                    "C", pad(c)
                )
            return torch.randn(c, pad(r), device=self.dev, generator=g).to(dt)[:, :r].T, Factor(
                "F", pad(r)
            )

        return *mat(m, k, ao), *mat(k, n, bo)


def check(r, rows, n, k, ao, bo, dt, shape, launches=2):
    torch = r.torch
    m = sum(rows)
    a, fa, b, fb = r.operands(m, n, k, ao, bo, dt)
    name = str(dt).split(".")[1]
    prob = ShardedProduct(tuple(rows), n, k, name, fa, fb)
    mine = rows[r.rank]
    out = torch.full((mine + 1, n), 7.0, device=r.dev, dtype=dt)
    plan = GemmReduceScatter.together(r.ctx, prob, shape)
    for _ in range(launches):
        plan.launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), r.stream())
    r.ctx.team.synchronize(r.stream())
    ref = a.double() @ b.double()
    if r.size > 1:
        ref = ref.float()
        r.dist.all_reduce(ref)
        ref = ref.double()
    lo = sum(rows[: r.rank])
    ref = ref[lo : lo + mine]
    err = (out[:mine].double() - ref).abs()
    scale = (k * r.size) ** 0.5 or 1
    worst = float(err.max() / scale) if mine and n else 0.0
    bad = int((err > 0.03 * scale).sum()) if mine else 0
    tail = bool((out[mine:] == 7).all())
    got = r.ctx.agree("err", lambda: [worst, bad, tail], lambda x: x)
    r.say(
        "check",
        rows,
        n,
        k,
        ao,
        bo,
        name,
        shape,
        "worst",
        [f"{g[0]:.2e}" for g in got],
        "bad",
        [g[1] for g in got],
        "tail",
        all(g[2] for g in got),
    )
    if any(g[1] for g in got) and r.rank == 0 and bad:
        idx = (err > 0.03 * scale).nonzero()[:8].tolist()
        say("  bad at", idx, [(float(out[i, j]), float(ref[i, j])) for i, j in idx])
        e = err > 0.03 * scale
        say(
            "  rows bad",
            e.any(1).nonzero().flatten()[:40].tolist(),
            "cols bad",
            e.any(0).nonzero().flatten()[:40].tolist(),
        )
    plan.free()
    r.ctx.barrier()


def run(store, size, what):
    r = R(store, size)
    torch = r.torch
    bf, fp = torch.bfloat16, torch.float16

    def attempt(f, *a, **k):
        try:
            f(r, *a, **k)
        except Exception as e:
            say(f"rank {r.rank} FAILED", a, "".join(traceback.format_exception(e))[-1500:])
            raise

    if "check" in what:
        rows = [256] + [128] * (size - 1)
        attempt(check, rows, 512, 256, "C", "F", bf, Shape(1, 4))
        attempt(check, rows, 512, 256, "C", "C", bf, Shape(1, 4))
        attempt(check, rows, 512, 256, "F", "C", bf, Shape(1, 4))
        attempt(check, rows, 512, 256, "F", "F", fp, Shape(1, 4))
        attempt(check, [1024] * size, 2048, 3584, "C", "C", bf, Shape(8, 4), launches=5)
    if "gemm" in what:
        for m, n, k in ((8192, 8192, 3584), (4096, 12288, 6144), (16384, 16384, 6656)):
            ops = [r.operands(m, n, k, "C", "C", bf, s) for s in range(2)]
            y = torch.empty(m, n, device=r.dev, dtype=bf)
            cal = lambda i: torch.mm(ops[i % 2][0], ops[i % 2][2], out=y)
            calls = 4 if m < 16384 else 2
            base = r.time(cal, calls)
            r.say("cublas", m, n, k, f"{base:.4f} ms {2e-9 * m * n * k / base:.0f} TF")
            for v in VARIANTS:
                sh = Shape(*map(int, v.split(".")))
                prob = ShardedProduct(
                    tuple([m // size] * size), n, k, "bfloat16", ops[0][1], ops[0][3]
                )
                p = GemmReduceScatter.together(r.ctx, prob, sh)
                out = torch.empty(m // size, n, device=r.dev, dtype=bf)
                ptrs = [(o[0].data_ptr(), o[2].data_ptr()) for o in ops]
                t = r.time(lambda i: p.launch(*ptrs[i % 2], out.data_ptr(), r.stream()), calls)
                t1 = r.time(
                    lambda i: p._sending.multiply(*ptrs[i % 2], out.data_ptr(), 2 * n, r.stream()),
                    calls,
                )
                after = r.time(cal, calls)
                mid = (base + after) / 2
                r.say(
                    "   RS",
                    v,
                    f"{t:.4f} ms  {mid / t:.3f}   product kernel alone {t1:.4f}  cublas {base:.4f} {after:.4f}",
                )
                base = after
                p.free()
                r.ctx.barrier()
            base = r.time(cal, calls)
            r.say("cublas again", f"{base:.4f}")
            if size > 1:
                out = torch.empty(m // size, n, device=r.dev, dtype=bf)

                def nccl(i):
                    cal(i)
                    r.dist.reduce_scatter_tensor(out, y)

                r.say("nccl + cublas", f"{r.time(nccl, calls):.4f}")
            del ops, y
    if "ar" in what.split(","):
        from shardmath.operators.matmul.gpu.all_reduce import GemmAllReduce, even_rows
        from shardmath.collectives.device import DeviceCollectives
        from shardmath.arrays import dtypes

        dc = DeviceCollectives.together(r.ctx)
        for m, n, k in ((1024, 8192, 3584), (2048, 8192, 3584), (8192, 8192, 3584)):
            ops = [r.operands(m, n, k, "C", "C", bf, s) for s in range(2)]
            y = torch.empty(m, n, device=r.dev, dtype=bf)
            z = torch.empty(m, n, device=r.dev, dtype=bf)
            cal = lambda i: torch.mm(ops[i % 2][0], ops[i % 2][2], out=y)
            base = r.time(cal)
            r.say("cublas", m, n, k, f"{base:.4f} ms")

            def two(i):
                cal(i)
                dc.all_reduce(
                    y.data_ptr(), z.data_ptr(), m * n, dtypes.of("bfloat16"), "sum", r.stream()
                )

            r.say("   cublas + our all_reduce", f"{r.time(two):.4f}")
            two(0)
            for v in (
                sys.argv[4].split(",")
                if m > 4000
                else ("1.2", "1.4", "2.4.1.0", "2.4.1.1", "2.8.1.1")
            ):
                sh = Shape(*map(int, v.split(".")))
                if sh.chunks > 2 and m < 4096:
                    continue
                prob = ShardedProduct(even_rows(m, size), n, k, "bfloat16", ops[0][1], ops[0][3])
                p = GemmAllReduce.together(r.ctx, prob, sh)
                out = torch.empty(m, n, device=r.dev, dtype=bf)
                f = lambda i: p.launch(
                    ops[i % 2][0].data_ptr(), ops[i % 2][2].data_ptr(), out.data_ptr(), r.stream()
                )
                f(0)
                r.ctx.team.synchronize(r.stream())
                worst = float((out.float() - z.float()).abs().max())
                r.say("   AR", v, f"{r.time(f):.4f} ms", "against two steps", worst)
                p.free()
                r.ctx.barrier()

            def nccl(i):
                cal(i)
                r.dist.all_reduce(y)

            if size > 1:
                r.say("   nccl + cublas", f"{r.time(nccl):.4f}")
    torch.cuda.synchronize()
    if size > 1:
        r.dist.destroy_process_group()
    startup.finalize()
    return 0


if __name__ == "__main__":
    size, what = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as f:
        spawn(run, size, f"{f}/store", size, what)
