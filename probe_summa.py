import sys, time
sys.path.insert(0,'tests'); sys.path.insert(0,'benchmarks')
from ranks import Pool
from shardmath.startup import new_context
def mk(g): return new_context(g.rank, g)
def timed(torch, context, f, n=6):
    for _ in range(2): f()
    torch.cuda.synchronize(); context.barrier()
    a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
    t0=time.perf_counter(); a.record()
    for _ in range(n): f()
    t1=time.perf_counter(); b.record(); b.synchronize()
    v=[a.elapsed_time(b)/n, (t1-t0)/n*1e3]
    return max(context.agree("t", lambda: v[0], lambda f: f)), v[1]
def body(context, n, dtype, order, profile):
    import torch, numpy as np
    from unittest.mock import patch
    from shardmath.distribution import BlockCyclic, ProcessGrid, Slab
    from shardmath.linalg.advanced import Matmul
    from shardmath.symmetric.allocation import allocate_symmetric_memory
    from shardmath.operators.matmul.gpu import arriving, paneled
    from shardmath.operators.matmul.gpu.engines import EngineCopies
    from shardmath.redistribution.device import BoxCopies
    torch.cuda.set_device(context.device_id)
    size=context.size; out=[]
    rows=2 if size%2==0 else 1
    grid=ProcessGrid(shape=(rows,size//rows),layout=ProcessGrid.Layout.COL_MAJOR)
    blocks=BlockCyclic(grid,(512,512))
    shape=tuple(s.length for s in blocks.part(context.rank,(n,n),size=size))
    kind=getattr(torch,dtype)
    def made():
        x=allocate_symmetric_memory(shape,torch,dtype=kind,axis_order=order,skip_symmetric_check=True)
        x.copy_(torch.randn(shape,device='cuda',dtype=torch.float32).to(kind)); return x
    with context:
        a,b=made(),made()
        A=torch.randn(shape[0],n,device='cuda',dtype=torch.float32).to(kind); B=torch.randn(n,shape[1],device='cuda',dtype=torch.float32).to(kind)
        out.append(f"== {dtype} {n} {order} local cublas {timed(torch,context,lambda: torch.matmul(A,B))}")
        mm=Matmul(a,b,distributions=[blocks]*3); mm.plan(); mm.execute()
        out.append(f"full gpu ms, host ms {timed(torch,context,mm.execute)}")
        def graphed(call, times=3):
            torch.cuda.synchronize(); context.barrier()
            g=torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for _ in range(times): d=call()
            g.d=d; g.times=times
            return g
        want=mm.execute()
        g=graphed(mm.execute)
        out.append(f"graph {timed(torch,context,g.replay,3)[0]/3:.4f} ms; same bits {bool((g.d==want).all())}")
        del g
        if dtype=="bfloat16":
            for parts,pieces in ((4,2),):
                mm2=Matmul(a,b,distributions=[blocks]*3)
                with patch.multiple(paneled,_MOST_PARTS=parts,_PIECES=pieces):
                    mm2.plan(); mm2._plan.share.kept.clear(); mm2.execute()
                    p=[v for k,v in mm2._plan.share.kept.items() if k[0]=="arriving"]
                    g=graphed(mm2.execute)
                    out.append(f"  parts {parts} pieces {pieces}: eager {timed(torch,context,mm2.execute,4)} graph {timed(torch,context,g.replay,3)[0]/3:.4f} fetches {len(p[0].fetches) if p and p[0] else None} copies {sum(len(c._copies) for _,c,_ in p[0].fetches if c) if p and p[0] else None}")
                    del g
            mm._plan.share.kept.clear(); mm.execute()
            with patch.object(arriving.Arriving,"_launch",lambda self,*x: None):
                g=graphed(mm.execute); out.append(f"  graph of all but the product {timed(torch,context,g.replay,3)[0]/3:.4f}")
                with patch.object(BoxCopies,"launch",lambda self,*x,**k: None):
                    g=graphed(mm.execute); out.append(f"  graph of engines only {timed(torch,context,g.replay,3)[0]/3:.4f}")
                with patch.object(EngineCopies,"launch",lambda self,*x: None):
                    g=graphed(mm.execute); out.append(f"  graph of own copies and words only {timed(torch,context,g.replay,3)[0]/3:.4f}")
            with patch.object(EngineCopies,"launch",lambda self,*x: None):
                with patch.object(BoxCopies,"launch",lambda self,*x,**k: None):
                    g=graphed(mm.execute); out.append(f"  graph of the product, nothing copied {timed(torch,context,g.replay,3)[0]/3:.4f}")
            del g
        if dtype!="bfloat16":
            from shardmath.operators.matmul.gpu import execution, gathering
            with patch.object(execution,"multiply",lambda *x,**k: None):
                g=graphed(mm.execute); out.append(f"  graph of all but products {timed(torch,context,g.replay,3)[0]/3:.4f}")
            with patch.object(gathering.Gathering,"copy",lambda self,*x,**k: None):
                g=graphed(mm.execute); out.append(f"  graph of products only {timed(torch,context,g.replay,3)[0]/3:.4f}; {[(v.lo,v.hi) for v in mm._plan.share.schedule[0]]}")
            del g
        out.append(f"full again {timed(torch,context,mm.execute)}")
        if profile:
            import cProfile,pstats,io
            pr=cProfile.Profile(); pr.enable()
            for _ in range(20): mm.execute()
            pr.disable(); torch.cuda.synchronize(); st=io.StringIO(); pstats.Stats(pr,stream=st).sort_stats("tottime").print_stats(18)
            out.append("\n".join(l[:150] for l in st.getvalue().splitlines()))
        mm.free()
        torch.cuda.synchronize(); context.barrier()
    return out
def small(context):
    import torch
    from shardmath.distribution import Slab, Replicated
    from shardmath.linalg.advanced import Matmul
    torch.cuda.set_device(context.device_id); out=[]; size=context.size
    with context:
        for name,da,db,dd,(m,n,k) in [("AG",Slab.X,Slab.Y,Slab.Y,(8192,28672*size//8,8192)),("RS",Slab.Y,Slab.X,Slab.X,(8192,8192,28672*size//8)),("AR",Slab.Y,Slab.X,Replicated(),(1024,8192,28672*size//8)),("AG small",Slab.X,Slab.Y,Slab.Y,(256,1024,1024)),("local",Slab.X,Replicated(),Slab.X,(4096,1024,1024))]:
            a=torch.randn(da.shape(context.rank,(m,k)),device='cuda',dtype=torch.bfloat16); b=torch.randn(db.shape(context.rank,(k,n)),device='cuda',dtype=torch.bfloat16)
            mm=Matmul(a,b,distributions=[da,db,dd]); mm.plan(); mm.execute()
            t=timed(torch,context,mm.execute,20)
            g=torch.cuda.CUDAGraph()
            torch.cuda.synchronize(); context.barrier()
            with torch.cuda.graph(g):
                for _ in range(4): mm.execute()
            out.append(f"{name}: eager {t}, graph {timed(torch,context,g.replay,5)[0]/4:.4f} ms; {[l for l in mm.explain().splitlines() if 'kernel' in l or 'chosen' in l]}")
            mm.free()
        torch.cuda.synchronize(); context.barrier()
    return out
if __name__=="__main__":
    N=int(sys.argv[1])
    with Pool(N, mk) as p:
        for c in sys.argv[2:]:
            if c=="small": r=p.run(small, timeout=40)
            else:
                n,dt,o,pr=c.split(":"); r=p.run(body,int(n),dt,o,pr=="p",timeout=50)
            print("\n".join(r[0]), flush=True)
