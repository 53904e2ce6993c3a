"""One ride: bodies within a time, then figures within a time."""
import sys, time, traceback, importlib
from pathlib import Path
for d in ("tests", "tests/cuda", "tests/matmul"): sys.path.insert(0, str(Path(d).absolute()))
T0=time.time(); N=int(sys.argv[1]); BODIES=float(sys.argv[2]); ALL=float(sys.argv[3])
from ranks import Pool
from shardmath.startup import new_context
def mk(g):
    c=new_context(g.rank, g)
    import torch, cupy
    torch.cuda.set_device(g.rank); cupy.cuda.Device(g.rank).use()
    return c
import test_matmul_bodies as tb, matmul_cases
import probe_summa
from hypothesis import given, settings, HealthCheck, Phase
eps=importlib.import_module("test_matmul_epilogs").EPILOGS
def left(limit): return limit-(time.time()-T0)
def say(*x): print(f"[{time.time()-T0:5.1f}]", *x, flush=True)
def warm(context): return 0
good=bad=0
def one(pool, name, fn, *args, ranks=N, timeout=12):
    global good,bad
    try:
        found=pool.run(fn,*args,ranks=ranks,timeout=timeout); ok=True
        if fn in (tb.large, tb.graphs): ok=all(f==[] for f in found)
        if fn in (tb.arriving, tb.fused): ok=all(w==[] for w,_ in found)
        if fn is tb.mistakes:
            import test_matmul_bad_input as bi
            found=[(n,k,x) for n,(k,x) in found[0].items() if k not in (bi.MISTAKES[n][1] if args[0] is not None else bi.MISTAKES[n][2]).split(" or ")]
            ok=not found
    except BaseException as e:
        ok=False; found=str(type(e).__name__)+": "+str(e)[:500]+"\n".join(getattr(e,"__notes__",[]))[-1500:]
    good+=ok; bad+=not ok
    say("ok " if ok else "BAD", name, "" if ok else str(found)[:2300].replace("\\n","\n"))
    return ok
def anyp(pool, where, most, seconds):
    global good,bad
    errors=[]; count=[0]; stop=time.time()+seconds
    @settings(max_examples=400, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=matmul_cases.cases(most=most))
    def check(case):
        if time.time()>stop or len(errors)>1: return
        try: pool.run(tb.body, "test_matmul_any", "run_case", where, [case.plain()], ranks=case.size, timeout=12); count[0]+=1
        except BaseException as e: errors.append((type(e).__name__, str(e)[:600], "\n".join(getattr(e,"__notes__",[]))[-900:], str(case)[:900]))
    check()
    good+=not errors; bad+=bool(errors)
    say("ok " if not errors else "BAD", f"any {where}: {count[0]} cases passed", *[str(e).replace("\\n","\n") for e in errors])
with Pool(N, mk) as pool:
    for r in sorted({1,2,3,N}): pool.run(warm, ranks=r, timeout=40)
    say("started")
    one(pool, "arriving", tb.arriving, "bfloat16", "C", (2048,2048,2048), 256)
    if left(BODIES)>0: anyp(pool, "gpu", N, min(11,left(BODIES)))
    if left(BODIES)>0: anyp(pool, "host", N, min(7,left(BODIES)))
    one(pool, "fused rs", tb.fused, "bfloat16", "C", (2048,2048,1024), "reduce-scatter")
    rest=[(f"behaviour {f} {a}", tb.body, "test_matmul_behaviour", f, "host", a) for f,a in tb.BEHAVIOUR]
    rest+=[(f"class {f}", tb.body, "test_matmul_class", f, "host", []) for f in tb.CLASS]
    rest+=[("allreduce", tb.body, "test_matmul_epilogs","run_allreduce","host",[True,True]),("qualified", tb.body, "test_matmul_epilogs","run_qualified_gradients","host",[]),("mistakes", tb.mistakes, 1, "make"),("every", tb.body,"test_matmul_behaviour","every_strategy","host",[(33,20,700),"float16"])]
    rest+=[(f"epilogs host {k}", tb.body,"test_matmul_epilogs","run_epilogs","host",[k,"numpy","float16",eps]) for k in ("blocks","boxes","whole")]
    for name,fn,*args in rest:
        if left(BODIES)<0: say("left out:", name); continue
        one(pool, name, fn, *args, ranks=3 if fn is tb.mistakes else N)
    say(good,"good",bad,"bad")
    for c in sys.argv[4:]:
        if left(ALL)<3: say("no time for", c); continue
        try:
            if c=="small": r=pool.run(probe_summa.small, timeout=max(3,left(ALL)))
            else:
                n,dt,o,pr=c.split(":"); r=pool.run(probe_summa.body,int(n),dt,o,pr=="p",timeout=max(3,left(ALL)))
            say("\n"+"\n".join(r[0]))
        except BaseException as e: say("BAD", c, type(e).__name__, str(e)[:300], "\n".join(getattr(e,"__notes__",[]))[-1200:])
