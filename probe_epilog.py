import sys, time

sys.path.insert(0, "tests")
from ranks import Pool
from shardmath.startup import new_context


def mk(g):
    return new_context(g.rank, g)


def body(context):
    import torch, numpy as np
    from shardmath.local.gpu import Matrix
    from shardmath.local.gpu.gemm import multiply
    from shardmath.local.gpu.blaslt import WORKSPACE, Extras

    torch.cuda.set_device(context.device_id)
    dev = context.team.device
    dev.activate()
    out = []
    ws = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    s = torch.cuda.current_stream().cuda_stream

    def mx(t):
        return Matrix(
            t.data_ptr(), t.shape[0], t.shape[1], t.stride(0), t.stride(1), str(t.dtype)[6:]
        )

    def gelu(x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    for dt in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for order in "FC":
            m, n, k = 256, 192, 64
            A = torch.randn(m, k, device="cuda", dtype=torch.float32).to(dt)
            B = torch.randn(k, n, device="cuda", dtype=torch.float32).to(dt)
            A[5] = float("nan")
            A[7] = 0
            A[9] = float("inf")
            D = torch.empty(m, n, device="cuda", dtype=dt)
            bias = torch.randn(m, device="cuda").to(dt)
            bias[7] = 0
            if order == "F":
                D = D.t().contiguous().t()
            D = torch.empty(n, m, device="cuda", dtype=dt).t() if order == "F" else D
            for epi in (2, 4, 6, 32, 36, 130, 134, 160, 164):
                aux = torch.zeros(
                    n,
                    256 // 8 if epi in (130, 134) else 256,
                    device="cuda",
                    dtype=torch.uint8 if epi in (130, 134) else dt,
                )
                ex = Extras(
                    epi,
                    aux_leading=(256 if epi & 128 else 0),
                    bias_type=str(dt)[6:] if epi & 4 else "",
                )
                try:
                    multiply(
                        dev,
                        mx(A),
                        mx(B),
                        mx(D),
                        stream=s,
                        workspace=ws.data_ptr(),
                        extras=ex,
                        bias=bias.data_ptr() if epi & 4 else 0,
                        aux=aux.data_ptr() if epi & 128 else 0,
                    )
                    torch.cuda.synchronize()
                    x = A.double() @ B.double()
                    if epi & 4:
                        x = x + bias.double()[:, None]
                    w = torch.relu(x) if epi & 2 else gelu(x) if epi & 32 else x
                    fin = torch.isfinite(w)
                    err = (D.double() - w)[fin].abs().max().item()
                    o = f"{dt} {order} epi {epi}: err {err:.2e} nanrow-all-nan {bool(torch.isnan(D[5]).all())} nan {D[5, :2].tolist()} inf {D[9, :3].tolist()} zero {D[7, :2].tolist()}"
                    if epi in (130, 134):
                        o += f" aux zero-row bit {(int(aux[0, 0]) >> 7) & 1} nan bit {(int(aux[0, 0]) >> 5) & 1}"
                    out.append(o)
                except Exception as e:
                    out.append(f"{dt} {order} epi {epi}: {type(e).__name__} {str(e)[:90]}")
    return out


if __name__ == "__main__":
    with Pool(1, mk) as p:
        for r in p.run(body, ranks=1, timeout=60)[:1]:
            print("\n".join(r), flush=True)
