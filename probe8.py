"""Sweeps and checks in one run of 8 GPUs."""
import os, sys, tempfile, time, traceback
sys.path[:0] = ["benchmarks", "tests", "tests/cuda"]
import gpu_matmul_reduce as bench
from shardmath import startup
from shardmath.launch.function import spawn
from shardmath.operators.matmul.gpu.all_reduce import GemmAllReduce, even_rows
from shardmath.operators.matmul.gpu.reduce_scatter import GemmReduceScatter
from shardmath.operators.matmul.gpu.sending import Shape
from shardmath.operators.matmul.gpu.sharded import Factor, ShardedProduct

T0 = time.time()
bench.REPEATS = 5
SWEEPS = [
    (bench.Case("GEMM+RS", 8192, 8192, 28672), "8.4.1 8.4.2 8.4.3 8.6.1 4.4.1 4.4.2 8.2.3 2.4.1 1.2.1"),
    (bench.Case("GEMM+AR", 8192, 8192, 28672), "8.4.1.0 8.4.1.3 8.4.1.5 8.6.1.5 8.8.1.7 8.4.2.4 4.4.1.2 1.2.1.0"),
    (bench.Case("GEMM+AR", 1024, 8192, 28672), "1.2 2.4.1.0 2.4.1.1"),
    (bench.Case("GEMM+RS", 4096, 12288, 49152), "4.4.1 2.4.1 4.4.2 1.2.1"),
    (bench.Case("GEMM+RS", 16384, 16384, 53248), "8.4.1 16.4.1 4.4.1 16.2.3"),
    (bench.Case("GEMM+AR", 2048, 8192, 28672), "1.2 2.4.1.1 2.4.1.0"),
    (bench.Case("GEMM+AR", 4096, 8192, 28672), "1.2 4.4.1.2 4.6.1.3"),
]

def run(store, size):
    ranks = bench.Ranks(store, size)
    def say(*a):
        if ranks.rank == 0:
            print(f"[{time.time()-T0:5.1f}]", *a, flush=True)
    say("started")
    def late():
        return max(ranks.context.agree("t", lambda: time.time() - T0, lambda x: x)) > 26.5
    for case, variants in SWEEPS:
        if late(): say("skipped", case); continue
        product = bench.Product(ranks, case)
        ar = case.what == "GEMM+AR"
        kind = GemmAllReduce if ar else GemmReduceScatter
        rows = even_rows(case.m, size) if ar else (product.rows,) * size
        problem = ShardedProduct(rows, case.n, product.depth, "bfloat16", Factor("C", product.depth), Factor("C", case.n))
        before = ranks.time(product.local, case.calls)
        for v in variants.split():
            plan = kind.together(ranks.context, problem, Shape(*map(int, v.split("."))))
            def call(i):
                a, b = product.sets[i % 2]
                plan.launch(a.data_ptr(), b.data_ptr(), product.result.data_ptr(), ranks.stream())
            t = ranks.time(call, case.calls)
            after = ranks.time(product.local, case.calls)
            say(f"{case.what} {case.m} {v:9s} {t:.4f} ms  of local {(before + after) / 2 / t:.3f}   local {before:.4f} {after:.4f}")
            before = after
            plan.free(); ranks.context.barrier()
        del product
    if not late():
        import test_sent_products as tests
        group = ranks.context.subset((ranks.rank,))
        group.team.timeout = 2.0
        for case in tests.CASES[2:4]:
            for kind in ("scatter", "all"):
                try:
                    found = tests.check_case(group, kind, *case)
                except Exception as e:
                    found = "".join(traceback.format_exception(e))[-600:]
                outcome = str(found)
                found = ranks.context.agree("c", lambda: outcome, lambda x: x)
                say("alone", case, kind, set(found))
        for case in tests.CASES[:2]:
            if late(): break
            outcome = str(tests.check_case(ranks.context, "all", *case))
            found = ranks.context.agree("c", lambda: outcome, lambda x: x)
            say("eight", case, set(found))
    for case in (bench.CASES[3], bench.CASES[2]):
        if not late(): say(bench.measured(ranks, case))
    say("end")
    os._exit(0)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, 8, f"{folder}/store", 8)
