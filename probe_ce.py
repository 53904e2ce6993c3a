import sys
import time

sys.path.insert(0, "tests")
from ranks import Pool
from shardmath.startup import new_context


def mk(g):
    return new_context(g.rank, g)


def body(context):
    from shardmath.cuda.driver import bindings, call
    from shardmath.symmetric.heap import Location

    dr = bindings()
    dev = context.team.device
    dev.activate()
    N = 512 << 20
    buf = context.heap.allocate(N)
    context.announce(buf.block)
    loc = (buf.block.location.segment, buf.block.location.offset)
    places = context.agree("x", lambda: loc, lambda f: f)
    peer = (context.rank + 1) % context.size
    src = context.peer_address(peer, Location(*places[peer]), N)
    dst = call("cuMemAlloc", N)
    s = call("cuStreamCreate", 1)
    e0 = call("cuEventCreate", 0)
    e1 = call("cuEventCreate", 0)
    out = []

    def timed(f, n=5):
        f()
        call("cuStreamSynchronize", s)
        context.barrier()
        call("cuEventRecord", e0, s)
        for _ in range(n):
            f()
        call("cuEventRecord", e1, s)
        call("cuEventSynchronize", e1)
        return call("cuEventElapsedTime", e0, e1) / n

    def copy2d(dst, dp, src, sp, w, h, dx=0, sx=0):
        c = dr.CUDA_MEMCPY2D()
        c.srcMemoryType = dr.CUmemorytype.CU_MEMORYTYPE_DEVICE
        c.dstMemoryType = dr.CUmemorytype.CU_MEMORYTYPE_DEVICE
        c.srcDevice = src
        c.dstDevice = dst
        c.srcPitch = sp
        c.dstPitch = dp
        c.WidthInBytes = w
        c.Height = h

        def f():
            call("cuMemcpy2DAsync", c, s)

        return f

    for w, pitch_s, pitch_d, h in [
        (256, 8192, 2048, 8192),
        (512, 8192, 2048, 8192),
        (1024, 8192, 2048, 8192),
        (1024, 8192, 4096, 8192),
        (1024, 8192, 1024, 8192),
        (2048, 8192, 2048, 8192),
        (4096, 8192, 4096, 8192),
        (8192, 16384, 8192, 8192),
        (8192, 8192, 8192, 8192),
        (512, 8192, 2048, 16384),
        (1024, 16384, 16384, 16384),
    ]:
        t = timed(copy2d(dst, pitch_d, src, pitch_s, w, h))
        out.append(
            f"pull 2d w={w} h={h} sp={pitch_s} dp={pitch_d}: {t * 1e3:.1f} us {w * h / t / 1e6:.0f} GB/s"
        )
    for w, h in [(1024, 8192), (4096, 8192)]:
        t = timed(copy2d(src, 8192, dst, 8192, w, h))
        out.append(f"push 2d w={w} h={h}: {t * 1e3:.1f} us {w * h / t / 1e6:.0f} GB/s")
        t = timed(copy2d(dst, 8192, buf.block.address, 8192, w, h))
        out.append(f"local 2d w={w} h={h}: {t * 1e3:.1f} us {w * h / t / 1e6:.0f} GB/s")
    for n in (1 << 20, 8 << 20, 64 << 20):
        t = timed(lambda: call("cuMemcpyDtoDAsync", dst, src, n, s))
        out.append(f"pull 1d {n >> 20}M: {t * 1e3:.1f} us {n / t / 1e6:.0f} GB/s")
    # 3D: h x d boxes
    c = dr.CUDA_MEMCPY3D()
    c.srcMemoryType = dr.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.dstMemoryType = dr.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.srcDevice = src
    c.dstDevice = dst
    c.srcPitch = 4096
    c.srcHeight = 8192
    c.dstPitch = 4096
    c.dstHeight = 8192
    c.WidthInBytes = 1024
    c.Height = 2048
    c.Depth = 4
    t = timed(lambda: call("cuMemcpy3DAsync", c, s))
    out.append(f"pull 3d 1024x2048x4: {t * 1e3:.1f} us {1024 * 2048 * 4 / t / 1e6:.0f} GB/s")
    context.team.synchronize(s)
    return out


def gemms(context):
    import torch

    from shardmath.local.gpu import Matrix
    from shardmath.local.gpu.blaslt import WORKSPACE
    from shardmath.local.gpu.epilog import finish
    from shardmath.local.gpu.gemm import multiply

    torch.cuda.set_device(context.device_id)
    dev = context.team.device
    dev.activate()
    out = []
    ws = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    s = torch.cuda.current_stream().cuda_stream

    def timed(f, n=10):
        for _ in range(3):
            f()
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) / n

    for order in "CF":
        m, n, K = 8192, 4096, 16384
        A = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        B = torch.randn(K, n, device="cuda", dtype=torch.bfloat16)
        D = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        W = torch.empty(m, n, device="cuda")
        if order == "F":
            A = A.t().contiguous().t()
            B = B.t().contiguous().t()
            D = D.t().contiguous().t()
            W = W.t().contiguous().t()

        def mx(t):
            return Matrix(
                t.data_ptr(), t.shape[0], t.shape[1], t.stride(0), t.stride(1), str(t.dtype)[6:]
            )

        out.append(f"{order} torch {timed(lambda: torch.matmul(A, B)):.3f} ms")
        out.append(
            f"{order} lt bf16 out {timed(lambda: multiply(dev, mx(A), mx(B), mx(D), stream=s, workspace=ws.data_ptr())):.3f}"
        )
        out.append(
            f"{order} lt f32 out {timed(lambda: multiply(dev, mx(A), mx(B), mx(W), stream=s, workspace=ws.data_ptr())):.3f}"
        )
        for sizes in (
            [2048] * 8,
            [4096] * 4,
            [1024, 2048, 4096, 9216],
            [1024, 3072, 12288],
            [8192, 8192],
            [512, 1024, 2048, 4096, 8704],
        ):

            def f():
                at = 0
                for i, k in enumerate(sizes):
                    multiply(
                        dev,
                        mx(A[:, at : at + k]),
                        mx(B[at : at + k]),
                        mx(W),
                        stream=s,
                        workspace=ws.data_ptr(),
                        beta=float(i > 0),
                    )
                    at += k

            t = timed(f)

            def g():
                f()
                finish(dev, s, mx(D), [mx(W)])

            out.append(f"{order} panels {sizes}: {t:.3f} ms, with finish {timed(g):.3f}")
        out.append(f"{order} finish {timed(lambda: finish(dev, s, mx(D), [mx(W)])):.4f} ms")
        for proc in (128, 124, 116):
            out.append(
                f"{order} lt sms={proc} {timed(lambda: multiply(dev, mx(A), mx(B), mx(D), stream=s, workspace=ws.data_ptr(), processors=proc)):.3f}"
            )
        multiply(dev, mx(A), mx(B), mx(D), stream=s, workspace=ws.data_ptr(), tune=True)
        out.append(
            f"{order} lt tuned {timed(lambda: multiply(dev, mx(A), mx(B), mx(D), stream=s, workspace=ws.data_ptr())):.3f}"
        )
        del A, B, D, W
    m, n, K = 4096, 2048, 8192
    A = torch.randn(m, K, device="cuda", dtype=torch.float64)
    B = torch.randn(K, n, device="cuda", dtype=torch.float64)
    D = torch.empty(m, n, device="cuda", dtype=torch.float64)
    out.append(f"f64 torch {timed(lambda: torch.matmul(A, B)):.3f} ms")
    out.append(
        f"f64 lt {timed(lambda: multiply(dev, mx(A), mx(B), mx(D), stream=s, workspace=ws.data_ptr())):.3f}"
    )

    def f():
        at = 0
        for i, k in enumerate([512, 1024, 2048, 4608]):
            multiply(
                dev,
                mx(A[:, at : at + k]),
                mx(B[at : at + k]),
                mx(D),
                stream=s,
                workspace=ws.data_ptr(),
                beta=float(i > 0),
            )
            at += k

    out.append(f"f64 panels {timed(f):.3f}")
    t0 = time.perf_counter()
    for _ in range(200):
        multiply(
            dev,
            mx(A[:64, :64]),
            mx(B[:64, :64]),
            mx(D[:64, :64]),
            stream=s,
            workspace=ws.data_ptr(),
        )
    t1 = time.perf_counter()
    torch.cuda.synchronize()
    out.append(f"host us per multiply {(t1 - t0) / 200 * 1e6:.1f}")
    W = torch.empty(64, 64, device="cuda")
    t0 = time.perf_counter()
    for _ in range(200):
        finish(dev, s, mx(D[:64, :64]), [mx(D[:64, :64])])
    t1 = time.perf_counter()
    torch.cuda.synchronize()
    out.append(f"host us per finish {(t1 - t0) / 200 * 1e6:.1f}")
    return out


if __name__ == "__main__":
    with Pool(2, mk) as p:
        for r in p.run(body, timeout=60)[:1]:
            print("\n".join(r), flush=True)
        for r in p.run(gemms, ranks=1, timeout=60):
            print("\n".join(r), flush=True)
