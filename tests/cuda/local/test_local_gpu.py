"""One GPU's product and epilogs, on addresses, against those of the host."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardmath.arrays import dtypes
from shardmath.local import epilog as host
from shardmath.local.epilog import MatmulEpilog, requirements

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20, "complex64": 2.0**-20}
NOTHING_AROUND = 0x5A


class OnDevice:
    """A NumPy array's copy on the GPU, with sentinels around; `matrix` is its address and form."""

    def __init__(self, context, array, store="C"):
        from shardmath.cuda.driver import call
        from shardmath.local.gpu import Matrix

        rows, columns = array.shape
        shape = {"C": (rows, columns), "F": (columns, rows)}.get(store)
        if store == "padded":
            shape = (rows, columns + 3)
        elif store == "padded F":
            shape = (columns, rows + 5)
        elif shape is None:  # strided, reversed
            shape = (2 * rows + 1, 2 * columns + 1)
        self.host = np.full((*shape, array.itemsize), NOTHING_AROUND, "u1")
        self.host = self.host.reshape(-1).view(array.dtype).reshape(shape)
        self.view = self._view(self.host, store, rows, columns)
        self.view[...] = array
        self._store, self._given = store, array.copy()
        self.before = self.host.tobytes()
        self._buffer = context.heap.allocate(self.host.nbytes)
        self._call, self._context = call, context
        address = self._buffer.block.address
        context.team.device.activate()
        if self.host.nbytes:
            call("cuMemcpyHtoD", address, self.host.ctypes.data, self.host.nbytes)
        start = self.view.ctypes.data - self.host.ctypes.data if self.view.size else 0
        steps = [stride // array.itemsize for stride in self.view.strides]
        self.matrix = Matrix(address + start, rows, columns, *steps, dtypes.of(array.dtype).name)

    @staticmethod
    def _view(x, store, rows, columns):
        if store == "F":
            return x.T
        if store == "padded F":
            return x[:, 2 : 2 + rows].T
        if store == "padded":
            return x[:, 1 : 1 + columns]
        if store == "strided":
            return x[1::2, 1::2]
        if store == "reversed":
            return x[1::2, 1::2][::-1, ::-1]
        return x

    def get(self):
        """The elements now; what is around them must be as it was."""
        self._context.team.synchronize(0)
        if self.host.nbytes:
            address = self._buffer.block.address
            self._call("cuMemcpyDtoH", self.host.ctypes.data, address, self.host.nbytes)
        found = self.view.copy()
        around = self.host.copy()
        self._view(around, self._store, *found.shape)[...] = self._given
        assert around.tobytes() == self.before, "written outside the matrix"
        return found


def sample(rng, shape, dtype):
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtypes.to_numpy(dtype))


def wide(x):
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


STORES = ("C", "F", "padded", "padded F", "strided", "reversed")
SHAPES = [(7, 9, 8), (1, 5, 3), (64, 1, 17), (130, 257, 65), (8, 8, 1), (256, 128, 512)]


def check_products(context, dtype):
    """(what, greatest error in units of what is allowed) of products that are wrong."""
    from shardmath.local.gpu.blaslt import WORKSPACE
    from shardmath.local.gpu.gemm import fits, multiply, takes_result

    rng = np.random.default_rng(1)
    room = context.heap.allocate(WORKSPACE)
    wrong, done = [], 0
    conjugates = (False, True) if dtype.startswith("complex") else (False,)
    results = [dtype, "float32"] if dtype in ("float16", "bfloat16") else [dtype]
    for m, n, k in SHAPES:
        a, b, c = (sample(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        for sa, sb, sd in itertools.product(
            STORES[:4], STORES[:4], ("C", "F", "padded", "padded F")
        ):
            for conj_a, conj_b, result in itertools.product(conjugates, conjugates, results):
                x, y = OnDevice(context, a, sa), OnDevice(context, b, sb)
                d = OnDevice(context, c.astype(dtypes.to_numpy(result)), sd)
                assert takes_result(d.matrix)
                if not fits(x.matrix, d.matrix, conjugate=conj_a):
                    continue
                if not fits(y.matrix, d.matrix, conjugate=conj_b):
                    continue
                multiply(
                    context.team.device,
                    x.matrix,
                    y.matrix,
                    d.matrix,
                    stream=0,
                    workspace=room.block.address,
                    alpha=0.5,
                    beta=2.0,
                    conj_a=conj_a,
                    conj_b=conj_b,
                )
                got = d.get()
                u = wide(a).conj() if conj_a else wide(a)
                v = wide(b).conj() if conj_b else wide(b)
                want = 0.5 * u @ v + 2 * wide(c.astype(dtypes.to_numpy(result)))
                unit = EPSILON.get(result, 2.0**-48) * (abs(u) @ abs(v) + abs(want))
                bad = float((abs(wide(got) - want) / (unit + 1e-300)).max())
                done += 1
                if not bad <= 1:
                    wrong.append((m, n, k, sa, sb, sd, conj_a, conj_b, result, bad))
    assert done > 50
    return wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(gpus, dtype):
    assert gpus.run(check_products, dtype, ranks=1) == [[]]


def inputs_of(epilog, rng, m, n, dtype):
    made = {}
    for extra in requirements(epilog, m, n, dtype).inputs:
        if extra.dtype == "uint8":
            x = rng.integers(0, 256, extra.shape).astype(np.uint8)
        else:
            x = sample(rng, extra.shape, dtype)
        made[extra.name] = np.asfortranarray(x)
    return made


def check_epilogs(context, dtype):
    """Names of epilogs and forms for which the kernel and the host differ."""
    from shardmath.local.gpu.epilog import combine

    rng = np.random.default_rng(2)
    accumulator = dtypes.accumulator(dtype).name
    tolerance = EPSILON.get(dtype, 2.0**-48)
    device, wrong = context.team.device, []
    for epilog in MatmulEpilog:
        real = dtypes.of(dtype).kind == "f"
        if (epilog.activation or epilog.gradient) and not real:
            continue
        for m, n in ((1, 1), (7, 9), (8, 1), (300, 17), (33, 600), (264, 40)):
            for sd, sp, count in (
                ("C", "C", 1),
                ("F", "F", 2),
                ("strided", "F", 3),
                ("reversed", "C", 0),
            ):
                parts = [sample(rng, (m, n), accumulator) for _ in range(count)]
                c = sample(rng, (m, n), dtype)
                inputs = inputs_of(epilog, rng, m, n, dtype)
                total = np.zeros((m, n), dtypes.to_numpy(accumulator))
                for part in parts:
                    total = total + part
                total = np.asarray(0.5, total.dtype) * total + np.asarray(2, total.dtype) * c
                want, aux = host.apply(epilog, total, inputs, dtype=dtypes.to_numpy(dtype))
                held = [OnDevice(context, part, sp) for part in parts]
                d, added = OnDevice(context, c, sd), OnDevice(context, c, sp)
                unrounded = OnDevice(context, total, sp) if epilog.makes_bgrad else None
                bias, other = None, None
                if epilog.has_bias:
                    bias = OnDevice(context, inputs["bias"].reshape(m, 1))
                name = epilog.needs_aux or epilog.makes_aux
                if name:
                    given = inputs.get(name)
                    given = np.zeros_like(aux[name]) if given is None else given
                    other = OnDevice(context, given, "F")
                combine(
                    device,
                    0,
                    d.matrix,
                    [x.matrix for x in held],
                    alpha=0.5,
                    beta=2.0,
                    c=added.matrix,
                    epilog=epilog,
                    bias=(bias.matrix.address, 1) if bias else None,
                    aux=other.matrix if other else None,
                    unrounded=unrounded.matrix if unrounded else None,
                )
                got = wide(d.get())
                bound = tolerance * (8 + 4 * abs(wide(total)) + 4 * abs(wide(want)))
                case = (epilog.name, m, n, sd, count)
                if not (abs(got - wide(want)) <= bound).all():
                    wrong.append((*case, float(abs(got - wide(want)).max())))
                if epilog.makes_aux:
                    made = other.get()
                    same = (
                        made == aux[name]
                        if made.dtype == np.uint8
                        else (
                            abs(wide(made) - wide(aux[name]))
                            <= tolerance * (8 + 4 * abs(wide(aux[name])))
                        )
                    )
                    if not same.all():
                        wrong.append((*case, "aux", int((~same).sum())))
                if epilog.makes_bgrad and name:
                    found = unrounded.get().sum(1)
                    if not np.allclose(found, aux[epilog.makes_bgrad], rtol=1e-4, atol=1e-3):
                        wrong.append((*case, "kept"))
    return wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogs(gpus, dtype):
    assert gpus.run(check_epilogs, dtype, ranks=1) == [[]]


def check_epilogs_within(context, dtype):
    """Products with their epilogs, or the first part, in cuBLASLt, by each of its algorithms, that
    differ from the host's; how many there were.
    """
    from shardmath.cuda.driver import call
    from shardmath.local.gpu.blaslt import WORKSPACE
    from shardmath.local.gpu.epilog import combine
    from shardmath.local.gpu.fused_epilog import fused_epilog, split
    from shardmath.local.gpu.gemm import Algorithms, has_algorithm, multiply

    rng = np.random.default_rng(4)
    room = context.heap.allocate(WORKSPACE)
    tolerance, device = EPSILON.get(dtype, 2.0**-48), context.team.device
    wrong, done = [], 0
    for epilog, (m, n, k) in itertools.product(
        MatmulEpilog, ((300, 17, 65), (33, 600, 24), (256, 128, 512))
    ):
        for sa, sb, sd in (("C", "F", "F"), ("F", "C", "padded F"), ("C", "C", "C")):
            a, b, c = (sample(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
            a[5], b[:, 3] = 0, 0  # ReLU and its mask at 0
            a[7, 2], a[9, 3] = np.nan, np.inf
            inputs = inputs_of(epilog, rng, m, n, dtype)
            if epilog.has_bias:
                inputs["bias"][5] = 0
            with np.errstate(invalid="ignore", over="ignore"):
                size = np.nan_to_num(0.5 * abs(wide(a)) @ abs(wide(b)))  # the product's own error
                total = 0.5 * (wide(a) @ wide(b)) + 2 * wide(c)
                want, aux = host.apply(epilog, total.copy(), inputs, dtype="float64")
            bias = OnDevice(context, inputs["bias"].reshape(m, 1)) if epilog.has_bias else None
            matrix = None
            name = epilog.needs_aux or epilog.makes_aux
            if name:
                given = inputs[name] if name in inputs else np.zeros(aux[name].shape, c.dtype)
                matrix = (other := OnDevice(context, given, "F")).matrix
            x, y, d = OnDevice(context, a, sa), OnDevice(context, b, sb), OnDevice(context, c, sd)
            first, rest = split(epilog, dtype)
            found = fused_epilog(
                first,
                d.matrix,
                bias=(bias.matrix.address, 1) if bias else None,
                aux=matrix if first is epilog else None,
            )
            factors = x.matrix, y.matrix, d.matrix
            if found is None or not has_algorithm(device, *factors, extras=found.extras):
                continue
            done += 1

            def run(algorithms, factors=factors, found=found, d=d, rest=rest, matrix=matrix):
                call("cuMemcpyHtoD", d._buffer.block.address, d.host.ctypes.data, d.host.nbytes)
                multiply(
                    device,
                    *factors,
                    stream=0,
                    workspace=room.block.address,
                    alpha=0.5,
                    beta=2.0,
                    extras=found.extras,
                    bias=found.bias,
                    aux=found.aux,
                    algorithms=algorithms,
                )
                if rest:
                    combine(device, 0, d.matrix, [d.matrix], epilog=rest, aux=matrix)

            timed = Algorithms(timings={})
            run(timed)
            ((signature, times),) = timed.timings.items()
            before = d.host.copy()
            for number in range(len(times)):
                d.host[...] = before
                run(Algorithms({signature: number}))
                case = (epilog.name, m, n, sd, number)
                slack = (2.0**-48 if dtype == "float64" else 2.0**-20) * size
                faults = differing(wide(d.get()), want, total, tolerance, slack)
                if epilog.makes_aux:
                    faults += differing(wide(other.get()), aux[name], total, tolerance, slack)
                wrong += [(*case, *each) for each in faults]
    return [wrong, done]


def differing(got, want, total, tolerance, slack):
    """The greatest difference, if it is too large, or an element that is not finite as wanted."""
    finite = np.isfinite(want)
    strange = (np.isnan(got) != np.isnan(want)) | (np.isinf(want) & (got != want))
    if strange.any():
        at = tuple(int(i) for i in np.argwhere(strange)[0])
        return [(at, float(got[at]), float(want[at]), int(strange.sum()))]
    if len(want) > len(total):  # GELU's inputs are padded
        padding = np.zeros((len(want) - len(total), total.shape[1]))
        total, slack = np.vstack([total, padding]), np.vstack([slack, padding])
    with np.errstate(invalid="ignore"):
        bound = tolerance * (8 + 4 * np.nan_to_num(abs(total)) + 4 * abs(want)) + slack
        off = np.where(finite, abs(got - want), 0)
    return [] if (off <= np.where(finite, bound, 1)).all() else [(float(off.max()),)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_epilogs_within_products(gpus, dtype):
    ((wrong, done),) = gpus.run(check_epilogs_within, dtype, ranks=1)
    assert wrong == []
    assert done >= (15 if dtype in ("float16", "bfloat16") else 3)


def check_row_sums(context, dtype):
    from shardmath.local.gpu.epilog import row_sums

    rng = np.random.default_rng(3)
    wrong = []
    for shape in ((1, 1), (7, 500), (33, 65), (700, 3), (4, 0)):
        for store in STORES:
            for conjugate in (False, True) if dtype.startswith("complex") else (False,):
                x = sample(rng, shape, dtype)
                held = OnDevice(context, x, store)
                out = OnDevice(
                    context, np.zeros((shape[0], 1), dtypes.to_numpy(dtypes.accumulator(dtype)))
                )
                row_sums(
                    context.team.device, 0, held.matrix, out.matrix.address, conjugate=conjugate
                )
                want = wide(x).sum(1)
                want = want.conj() if conjugate else want
                if not np.allclose(wide(out.get())[:, 0], want, rtol=1e-5, atol=1e-4):
                    wrong.append((shape, store, conjugate))
    return wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_sums(gpus, dtype):
    assert gpus.run(check_row_sums, dtype, ranks=1) == [[]]
