import sys, time, traceback, importlib, os
from pathlib import Path

for d in ("tests", "tests/cuda", "tests/matmul"):
    sys.path.insert(0, str(Path(d).absolute()))
T0 = time.time()
LIMIT = float(sys.argv[1])
N = int(sys.argv[2])
only = sys.argv[3:]
from ranks import Pool
from shardmath.startup import new_context


def mk(g):
    return new_context(g.rank, g)


import test_matmul_bodies as tb, matmul_cases
from hypothesis import given, settings, HealthCheck, Phase

bodies = importlib.import_module("test_matmul_epilogs")
jobs = []
for size in sorted({1, 2, N}):
    for where in ("gpu", "host"):
        jobs.append((f"any {where} {size}", "any", where, size))


def add(name, fn, *args, size=N):
    jobs.append((name, fn, args, size))


for dt, shape, block in [
    ("bfloat16", (2048, 2048, 2048), 256),
    ("float16", (1500, 2300, 3000), 256),
    ("bfloat16", (4096, 3072, 5000), 512),
]:
    for order in "CF":
        add(f"arriving {dt} {shape} {order}", tb.arriving, dt, order, shape, block)
for kd in ["all-gather, rows", "all-gather, columns", "reduce-scatter", "all-reduce"]:
    for order in "CF":
        for dt, shape in [
            ("bfloat16", (2048, 2048, 1024)),
            ("float16", (1504, 1000, 264)),
            ("bfloat16", (70, 90, 33)),
        ]:
            add(f"fused {dt} {shape} {order} {kd}", tb.fused, dt, order, shape, kd)
add("graphs", tb.graphs, "torch")
add("graphs 2", tb.graphs, "torch", size=2)
for kind in ["cyclic", "gather", "columns", "reduce", "everywhere"]:
    for dt in ("bfloat16", "float64"):
        for order in "CF":
            add(f"large {kind} {dt} {order}", tb.large, dt, kind, order)
for fn, args in tb.BEHAVIOUR:
    add(f"behaviour {fn} {args}", tb.body, "test_matmul_behaviour", fn, "host", args)
for shape in [(33, 20, 700), (9, 8, 7)]:
    add(
        f"every strategy {shape}",
        tb.body,
        "test_matmul_behaviour",
        "every_strategy",
        "host",
        [shape, "float16"],
    )
for fn in tb.CLASS:
    add(f"class {fn}", tb.body, "test_matmul_class", fn, "host", [])
for where in ("gpu", "host"):
    for kind in ["rows", "columns", "blocks", "whole", "boxes"]:
        for lib, dt in [
            ("numpy", "float64"),
            ("torch", "float32"),
            ("numpy", "float16"),
            ("torch", "bfloat16"),
        ]:
            add(
                f"epilogs {where} {kind} {lib} {dt}",
                tb.body,
                "test_matmul_epilogs",
                "run_epilogs",
                where,
                [kind, lib, dt, bodies.EPILOGS],
            )
for a in [[False, False], [True, False], [True, True]]:
    add(f"allreduce {a}", tb.body, "test_matmul_epilogs", "run_allreduce", "host", a)
add("qualified gradients", tb.body, "test_matmul_epilogs", "run_qualified_gradients", "host", [])
add("mistakes make 1", tb.mistakes, 1, "make", size=min(N, 3))
add("mistakes plan all", tb.mistakes, None, "plan", size=min(N, 3))
if only:
    jobs = [j for j in jobs if any(o in j[0] for o in only)]
good = bad = 0
with Pool(N, mk) as pool:
    for job in jobs:
        if time.time() - T0 > LIMIT:
            print("out of time at", job[0], flush=True)
            break
        name, fn, args, size = job
        t = time.time()
        try:
            if fn == "any":
                errors = []
                count = [0]
                stop = min(T0 + LIMIT, t + 12)

                @settings(
                    max_examples=40,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate],
                )
                @given(case=matmul_cases.cases(most=size))
                def check(case):
                    if time.time() > stop or len(errors) > 2:
                        return
                    count[0] += 1
                    try:
                        pool.run(
                            tb.body,
                            "test_matmul_any",
                            "run_case",
                            args,
                            [case.plain()],
                            ranks=case.size,
                            timeout=20,
                        )
                    except BaseException as e:
                        errors.append((type(e).__name__, str(e)[:1200], str(case)[:900]))

                check()
                found = errors
                ok = not errors
                name += f" ({count[0]} cases)"
            else:
                found = pool.run(fn, *args, ranks=size, timeout=30)
                ok = True
                if fn in (tb.large, tb.graphs):
                    ok = all(f == [] for f in found)
                if fn in (tb.arriving, tb.fused):
                    ok = all(w == [] for w, _ in found)
                if fn is tb.mistakes:
                    import test_matmul_bad_input as bi

                    wrong = [
                        (n, k, x)
                        for n, (k, x) in found[0].items()
                        if k
                        not in (
                            bi.MISTAKES[n][1] if args[0] is not None else bi.MISTAKES[n][2]
                        ).split(" or ")
                    ]
                    ok = not wrong
                    found = wrong
        except BaseException as e:
            ok = False
            found = (
                type(e).__name__,
                str(e)[:300],
                "".join(traceback.format_exception(e))[-1500:]
                + "\n".join(getattr(e, "__notes__", []))[-1800:],
            )
        good += ok
        bad += not ok
        print(
            f"{'ok ' if ok else 'BAD'} {name} {time.time() - t:.1f}s",
            ""
            if ok and not (fn in (tb.arriving, tb.fused))
            else str(found)[:2600].replace("\\n", "\n"),
            flush=True,
        )
print(good, "good", bad, "bad", f"{time.time() - T0:.0f} s")
