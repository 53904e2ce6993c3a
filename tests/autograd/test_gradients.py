"""Gradients of distributed operations are those that torch finds in one process."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import numpy as np
import pytest
import torch

from arrangements import chosen_distribution, part_of
from counted import calls_before
from shardmath import autograd, collectives, fft, nn
from shardmath.base.compiled import extension
from shardmath.distribution import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    ProcessGrid,
    Replicated,
    Slab,
    redistribute,
)
from shardmath.geometry import decode
from shardmath.linalg.advanced import Matmul, MatmulEpilog, matmul, matrix_qualifiers_dtype
from shardmath.traced.words import CURRENT, words_of

SHAPES = [(13, 7, 11), (2, 9, 1), (5, 1, 6)]  # m, n, k: on more than 2 ranks some parts are empty


def distributions(context):
    grid = ProcessGrid(shape=(context.size, 1), layout=ProcessGrid.Layout.ROW_MAJOR)
    return (Slab.X, Slab.Y, Replicated(), BlockCyclic(grid, (2, 3)))


def tensor(shape, dtype, device):
    random = np.random.default_rng(shape)
    values = random.standard_normal(shape)
    if dtype.is_complex:
        values = values + 1j * random.standard_normal(shape)
    return torch.tensor(values, dtype=dtype, device=device, requires_grad=True)


def loss_of(y):
    return (y * y.conj()).real.sum() + (y * (2 - 1j if y.is_complex() else 3)).real.sum()


def of_one_process(shape, dtype, device):
    """The factors of a product of m x k by k x n, and what their gradients are, on the host."""
    m, n, k = shape
    whole = tensor((m, k), dtype, device), tensor((k, n), dtype, device)
    (loss_of(whole[0] @ whole[1]) / 2).backward()
    return [
        x.resolve_conj().cpu().numpy()
        for x in (*(x.detach() for x in whole), *(x.grad for x in whole))
    ]


def check_products(context, dtype, device="cpu", shapes=SHAPES, kinds=4, halves=(0, 1)):
    """Every combination of distributions, of one shape each; results are redistributed.

    Each half of the combinations has every pair of distributions.
    """
    wrong = []
    dtype = getattr(torch, dtype)
    known = {shape: of_one_process(shape, dtype, device) for shape in shapes}

    def part(x, distribution):
        mine = part_of(x, distribution, context.rank, context.size)
        return torch.tensor(mine, device=device)

    # Backward passes run in another thread, as torch's do where tensors are on a GPU.
    with context, ThreadPoolExecutor(1) as another:
        numbered = itertools.product(enumerate(distributions(context)[:kinds]), repeat=3)
        combinations = [
            [distribution for _, distribution in each]
            for each in numbered
            if sum(number for number, _ in each) % 2 in halves
        ]
        for shape, (of_a, of_b, of_d) in zip(itertools.cycle(shapes), combinations, strict=False):
            *whole, of_first, of_second = known[shape]
            own = [part(x, of).requires_grad_() for x, of in zip(whole, (of_a, of_b), strict=True)]
            y = matmul(*own, distributions=[of_a, of_b, of_d])
            loss = collectives.all_reduce(loss_of(redistribute(y, of_d, Slab.X))) / 2
            another.submit(loss.backward).result()
            wanted = part(of_first, of_a), part(of_second, of_b)
            for x, expected in zip(own, wanted, strict=True):
                if x.grad.shape != x.shape or not torch.allclose(x.grad, expected):
                    wrong.append((shape, repr((of_a, of_b, of_d))))
    return wrong


@pytest.mark.parametrize(
    ("size", "dtype", "halves"),
    [(1, "float64", (0, 1)), (3, "float64", (1,)), (4, "complex128", (0,))],
)
def test_products(contexts, size, dtype, halves):
    given = (dtype, "cpu", SHAPES, 4, halves)
    assert contexts.run(check_products, *given, ranks=size) == [[]] * size


def check_partial(context):
    """Gradients of one factor only, of nothing, and of a mean."""
    with context:
        a, b = tensor((3, 4), torch.float64, "cpu"), tensor((4, 5), torch.float64, "cpu")
        everywhere = [Replicated()] * 3
        matmul(a, b.detach(), distributions=everywhere).sum().backward()
        assert torch.allclose(a.grad, b.detach().sum(1).expand(3, 4)) and b.grad is None
        assert not matmul(a.detach(), b.detach(), distributions=everywhere).requires_grad
        with torch.no_grad():
            assert not matmul(a, b, distributions=everywhere).requires_grad
        collectives.all_reduce(b, op="mean").sum().backward()
        return float(b.grad.sum()) == pytest.approx(20 / context.size)


def test_one_factor_none_and_a_mean(contexts):
    assert contexts.run(check_partial, ranks=3) == [True] * 3


WRITTEN = {
    "all_reduce": lambda g, x: collectives.all_reduce(g, out=x),
    "broadcast, under way": lambda g, x: collectives.broadcast(g, out=x, async_op=True).wait(),
    "redistribute": lambda g, x: redistribute(g, Slab.X, Slab.X, out=x),
    "fft": lambda g, x: fft.fft(g, distribution=Slab.X, out=x),
    "fft in place": lambda g, x: fft.fft(x, distribution=Slab.X, options={"inplace": True}),
    "fft of another shape": lambda g, x: fft.fft(
        x, distribution=Slab.X, options={"inplace": True, "redistribute": False}
    ),
    "matmul in place": lambda g, x: matmul(
        g, g, x, beta=1.0, distributions=[Replicated()] * 3, options={"inplace": True}
    ),
}


def check_written(context):
    """The calls that write a tensor which a backward pass has saved, and of which that hears no
    word: the first ones, and those that come again.
    """
    silent = []
    with context:
        g, x = torch.ones(2, 4, 4, dtype=torch.complex64)
        inplace = {"inplace": True}
        transform = fft.FFT(x, distribution=Slab.X, options={**inplace, "redistribute": False})
        product = Matmul(g, g, x, beta=1.0, distributions=[Replicated()] * 3, options=inplace)
        objects = {"FFT": transform, "Matmul": product}
        for made in objects.values():
            made.plan()
        executed = {name: lambda _, __, made=made: made.execute() for name, made in objects.items()}
        for name, call in (WRITTEN | executed).items():
            for number in range(5):
                recorded = x * torch.ones(4, 4, requires_grad=True)
                call(g, x)
                try:
                    recorded.abs().sum().backward()
                    silent.append((name, number))
                except RuntimeError as error:
                    assert "inplace" in str(error)
        factors = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
        made = matmul(*factors, distributions=[Replicated()] * 3)
        with torch.no_grad():
            factors[1].mul_(2 if context.rank else 1).mul_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            made.sum().backward()
        with torch.inference_mode():  # such tensors count no versions
            collectives.all_reduce(torch.ones(2), out=torch.ones(2))
    return silent


def test_a_saved_tensor_that_is_written(contexts):
    assert contexts.run(check_written, ranks=2) == [[]] * 2


def check_bias(context):
    """The distributions of D with which the gradient of a bias is another than of one process."""
    m, n, k = 7, 5, 3
    whole = [tensor(shape, torch.float64, "cpu") for shape in [(m, k), (k, n), (m, 1)]]
    a, b, bias = whole
    expected = torch.autograd.grad((torch.relu(a @ b + bias) ** 3).sum(), bias)[0].numpy()
    grid = ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.COL_MAJOR)
    box = Box(*zip((0, m), ((0, 2), (2, 3), (3, 4), (4, n))[context.rank], strict=True))
    wrong = []
    with context:
        everywhere = Replicated()
        of_d = Slab.X, Slab.Y, everywhere, BlockCyclic(grid, (2, 1)), BlockNonCyclic(grid), box
        for split in of_d:
            rows = np.broadcast_to(bias.detach().numpy(), (m, n))
            own = part_of(rows, split, context.rank, context.size)
            mine = torch.tensor(own[:, 0], requires_grad=True)
            words = {"epilog": MatmulEpilog.RELU_BIAS, "epilog_inputs": {"bias": mine}}
            y = matmul(
                a.detach(), b.detach(), distributions=[everywhere, everywhere, split], **words
            )
            loss = (y**3).sum() if split == everywhere else collectives.all_reduce((y**3).sum())
            loss.backward()
            rows = np.broadcast_to(expected, (m, n))
            right = part_of(rows, split, context.rank, context.size)
            if not np.allclose(mine.grad, right[:, 0]):
                wrong.append(repr(split))
    return wrong


def test_a_bias_that_several_ranks_add(contexts):
    assert contexts.run(check_bias, ranks=4) == [[]] * 4


# -- gradients along a random direction, and their gradients ---------------------------------------

OWN = "own"  # the space of arrays that each rank has for itself
KINDS = ("slab", "replicated", "cyclic", "box")


def drawn(rng, context, shape, kinds=KINDS):
    """This rank's distribution, one of those that all ranks draw."""
    encoded = chosen_distribution(rng, rng.choice(kinds), shape, context.size)
    return decode(encoded[context.rank])


def of(space, shape, dtype, rng, context):
    """This rank's part of a random array."""
    whole = np.random.default_rng(rng.randrange(1 << 30))
    if space is OWN:
        whole = np.random.default_rng(whole.integers(1 << 30) + context.rank)
    values = whole.standard_normal(shape) + 1j * whole.standard_normal(shape) * dtype.is_complex
    if space is not OWN:
        values = part_of(values, space, context.rank, context.size)
    return torch.tensor(values if dtype.is_complex else values.real, dtype=dtype)


def inner(x, y, space):
    """The real inner product of global arrays, or of what all ranks have for themselves."""
    dot = (x * y.conj()).real.sum()
    return dot if space == Replicated() else collectives.all_reduce(dot)


def drawn_call(name, rng, context):  # noqa: PLR0911
    """(function, spaces of its operands and result, shape, dtype) of a call that is drawn."""
    shape = tuple(rng.randint(2, 5) for _ in range(2))
    real, complex_ = torch.float64, torch.complex128
    axis = rng.choice([0, 1, -1])
    if name == "redistribute":
        given, wanted = (drawn(rng, context, shape) for _ in range(2))
        return lambda x: redistribute(x, given, wanted), [given], wanted, [shape], real
    if name in ("fft", "ifft", "rfft", "irfft"):
        axes = rng.choice([None, 0, (1,), (1, 0), (-2, -1)])
        last = 1 if axes is None else (axes if isinstance(axes, int) else axes[-1]) % 2
        dtype = real if name == "rfft" else complex_
        made = list(shape)
        parity = rng.choice(["odd", "even"])
        if name == "rfft":
            made[last] = shape[last] // 2 + 1
        elif name == "irfft":
            made[last] = 2 * (shape[last] - 1) + (parity == "odd")
        pair = [drawn(rng, context, extents) for extents in (shape, tuple(made))]
        norm = rng.choice([None, "backward", "ortho", "forward"])
        options = {"last_axis_parity": parity}
        call = partial(getattr(fft, name), distribution=pair, axes=axes, norm=norm, options=options)
        return call, pair[:1], pair[1], [shape], dtype
    if name in ("dct", "idct", "dst", "idst"):
        shape = tuple(n + 1 for n in shape)  # a cosine transform of type 1 takes two elements
        pair = [drawn(rng, context, shape) for _ in range(2)]
        words = {"type": rng.randint(1, 4), "norm": rng.choice([None, "ortho", "forward"])}
        words["orthogonalize"] = rng.choice([None, None, True, False])
        axes = rng.choice([None, (0,), (1, 0)])
        words |= {"axis": axis} if rng.random() < 0.5 else {"axes": axes}
        function = getattr(fft, name if "axis" in words else f"{name}n")
        call = partial(function, distribution=pair, **words)
        return call, pair[:1], pair[1], [shape], rng.choice([real, complex_])
    if name == "matmul":
        return product_of(rng, context)
    dtype = rng.choice([real, complex_])
    if name == "all_gather":
        own = [n + (axis % 2 == at) * context.rank for at, n in enumerate(shape)]
        return partial(collectives.all_gather, axis=axis), [OWN], OWN, [tuple(own)], dtype
    if name == "reduce_scatter":
        counts = rng.choice([None, [0] * (context.size - 1) + [shape[axis]]])
        op = rng.choice(["sum", "mean", "max", "min", "product"])
        dtype = real if op in ("min", "max") else dtype
        call = partial(collectives.reduce_scatter, axis=axis, counts=counts, op=op)
        return call, [OWN], OWN, [shape], dtype
    if name == "all_to_all":
        counts = [rng.randrange(3) for _ in range(context.size)]
        own = [sum(counts) if axis % 2 == at else n for at, n in enumerate(shape)]
        given = rng.choice([None, counts[context.rank :] + counts[: context.rank]])
        call = partial(collectives.all_to_all, axis=axis, send_counts=given)
        return call, [OWN], OWN, [tuple(own)], dtype
    if name == "broadcast":
        root = rng.randrange(context.size)
        return lambda x: collectives.broadcast(x, root=root), [OWN], OWN, [shape], dtype
    if name == "copies":
        return autograd.copies, [Replicated()], OWN, [shape], dtype
    op = name.removeprefix("all_reduce ")
    dtype = real if op in ("min", "max") else dtype
    return partial(collectives.all_reduce, op=op), [OWN], Replicated(), [shape], dtype


def product_of(rng, context):
    """A product of any factors, whose epilog is drawn."""
    m, n, k = (rng.randint(1, 5) for _ in range(3))
    dtype = rng.choice([torch.float64, torch.complex128])
    qualifiers = np.zeros(3, dtype=matrix_qualifiers_dtype)
    shapes = [(m, k), (k, n), (m, n)]
    for number in range(2):
        qualifiers[number]["is_transpose"] = transposed = rng.random() < 0.5
        qualifiers[number]["is_conjugate"] = dtype.is_complex and rng.random() < 0.5
        shapes[number] = shapes[number][::-1] if transposed else shapes[number]
    spaces = [drawn(rng, context, shape, KINDS[:3]) for shape in shapes]
    epilogs = (
        ["DEFAULT", "BIAS"] if dtype.is_complex else ["RELU", "GELU_BIAS", "RELU_BIAS", "GELU"]
    )
    epilog = MatmulEpilog[rng.choice(epilogs)]
    rows = part_of(np.zeros((m, n)), spaces[2], context.rank, context.size).shape[0]
    bias = {"bias": torch.linspace(-1, 1, rows, dtype=dtype)} if epilog.has_bias else None
    words = {"alpha": 1.5 - 0.5j if dtype.is_complex else 0.5, "beta": 2.0, "epilog": epilog}

    def call(*operands):
        return matmul(
            *operands, distributions=spaces, qualifiers=qualifiers, epilog_inputs=bias, **words
        )

    return call, spaces, spaces[2], shapes, dtype


NAMES = (
    *("redistribute", "fft", "ifft", "rfft", "irfft", "matmul", "all_gather", "reduce_scatter"),
    *("dct", "idct", "dst", "idst"),
    *("all_to_all", "broadcast", "copies", "all_reduce sum", "all_reduce mean", "all_reduce max"),
    *("all_reduce min", "all_reduce product"),
)


def check_directions(context, name, seeds):
    """Gradients, and gradients of those, that differ from quotients of differences."""
    step, wrong = 1e-6, []
    with context:
        for seed in seeds:
            rng = Random(f"{name} {seed}")
            call, spaces, target, shapes, dtype = drawn_call(name, rng, context)
            pairs = list(zip(spaces, shapes, strict=True))
            xs = [of(*pair, dtype, rng, context).requires_grad_() for pair in pairs]
            vs = [of(*pair, dtype, rng, context) for pair in pairs]
            made = call(*xs)
            weights = torch.linspace(1, 2, made.numel(), dtype=made.dtype).reshape(made.shape)

            def along(xs, grads, vs=vs, spaces=spaces):
                return sum(inner(g, v, s) for g, v, s in zip(grads, vs, spaces, strict=True))

            def loss(xs, call=call, weights=weights, target=target):
                y = call(*xs)
                return inner(y * y, weights, target)

            def slope(xs, graph=False):
                return along(xs, torch.autograd.grad(loss(xs), xs, create_graph=graph))

            def moved(by, xs=xs, vs=vs):
                return [(x.detach() + by * v).requires_grad_() for x, v in zip(xs, vs, strict=True)]

            with torch.no_grad():
                expected = (loss(moved(step)) - loss(moved(-step))) / (2 * step)
            first = slope(xs, graph=True)
            second = along(xs, torch.autograd.grad(first, xs))
            change = (slope(moved(step)) - slope(moved(-step))) / (2 * step)
            given = tuple(x.detach() for x in xs), tuple(vs)

            def pushed(*xs, loss=loss, vs=vs):
                return torch.func.jvp(lambda *xs: loss(xs), xs, tuple(vs))[1]

            compared = [(first, expected), (second, change), (pushed(*given[0]), expected)]
            if seed == seeds[0]:
                compared.append((torch.func.jvp(pushed, *given)[1], change))
            for number, (found, right) in enumerate(compared):
                if not torch.allclose(found, right, rtol=1e-4, atol=1e-5):
                    wrong.append((name, seed, number, float(found), float(right)))
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_gradients_along_random_directions(contexts, name):
    assert contexts.run(check_directions, name, list(range(5)), ranks=3) == [[]] * 3


# Forms that have no gradient, or whose gradient is not computed.
REFUSED = {
    "Matmul": lambda a: Matmul(a, a, distributions=[Slab.X] * 3),
    "FFT": lambda a: fft.FFT(a, distribution=Slab.X),
    "out": lambda a: collectives.all_reduce(a.detach(), out=a),
    "out of its own": lambda a: collectives.all_gather(a, out=a),
    "matmul, by hand": lambda a: matmul(
        a, a, distributions=[Slab.X] * 3, epilog=MatmulEpilog.RELU_AUX
    ),
}


def say(context, call, differing):
    x = torch.ones((2 * context.size,) * 2, requires_grad=context.rank in differing)
    with context:
        try:
            call(x)
        except ValueError as error:
            return str(error)
        return "nothing"


def refuse(context):
    """What is said where one rank's tensor, and where all ranks', require grad."""
    everywhere = range(context.size)
    said = {
        name: [say(context, call, who) for who in ([1], everywhere)]
        for name, call in REFUSED.items()
    }
    with torch.no_grad():
        assert say(context, collectives.all_reduce, [1]) == "nothing"
    return said


def test_a_gradient_is_never_lost_without_a_word(contexts):
    one, *others = contexts.run(refuse, ranks=3)
    assert others == [one] * 2
    for name, (on_one, on_all) in one.items():
        assert "nothing" not in (on_one, on_all), name
        assert "rank 1" in on_one, name


MISTAKES = {
    "requires grad on one rank": (
        lambda a: redistribute(a, Slab.X, Slab.Y),
        "rank 1 called redistribute (operand requires grad)",
    ),
    "no array": (lambda a: collectives.all_reduce([1.0]), "got list"),
    "one of two": (
        lambda a: matmul(a, a.detach().clone().requires_grad_(), distributions=[Slab.X] * 3),
        "rank 0 called matmul (b requires grad); rank 1 called matmul (a requires grad, b requires",
    ),
    "copies on one rank": (
        lambda a: collectives.all_reduce(autograd.copies(a).sum()),
        "rank 1 called all_reduce (x requires grad) after copies (grad: 1)",
    ),
    "one of three, at length": (
        lambda a: matmul(
            *[x.clone().requires_grad_() for x in (a, a)],
            a.detach().requires_grad_(a.requires_grad),
            beta=autograd.copies(torch.ones(1, requires_grad=True)).item(),
            distributions=[Slab.X] * 3,
        ),
        "rank 1 called matmul (a requires grad, b requires grad, c requires... ",
    ),
    "op": (lambda a: collectives.all_reduce(a, op="middle"), "'middle'"),
    "shape": (
        lambda a: matmul(a.detach(), a.detach()[:1], distributions=[Slab.X] * 3),
        "inner extents",
    ),
}


def mistake(context, name):
    return say(context, MISTAKES[name][0], [0, 1] if name == "op" else [1])


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_raised_on_all_ranks(contexts, name):
    (said,) = set(contexts.run(mistake, name, ranks=2))
    assert MISTAKES[name][1] in said


def say_where(context):
    """Where this rank was, as the error of a backward pass that rank 1 does not make says it, and
    the line of the call whose gradient it is.
    """
    with context:
        y = collectives.all_gather(torch.ones(2, requires_grad=True))
        try:
            y.sum().backward() if context.rank == 0 else collectives.all_reduce(torch.ones(1))
        except ValueError as error:
            return error.__notes__, say_where.__code__.co_firstlineno + 5


def test_the_error_of_a_backward_pass_says_where_the_program_was(contexts):
    told = contexts.run(say_where, ranks=2)
    assert all("test_gradients.py:" in notes[0] for notes, _ in told)
    ((_, called), line), (others, _) = told
    assert called == f"It is in the gradient of all_gather, test_gradients.py:{line}."
    assert len(others) == 1


FORWARD = {
    "all_reduce": collectives.all_reduce,
    "all_reduce, max": lambda x: collectives.all_reduce(x, op="max"),
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "redistribute": lambda x: redistribute(x, Slab.X, Slab.Y),
    "fft": lambda x: fft.fft(x + 0j, distribution=Slab.X),
    "matmul": lambda x: matmul(x, x.T.contiguous(), distributions=[Slab.X, Slab.Y, Slab.X]),
    "matmul of one": lambda x: matmul(
        x, torch.ones(4, 2).double(), distributions=[Slab.X, Replicated(), Slab.X]
    ),
    "matmul with c": lambda x: matmul(
        x, torch.eye(4).double(), x, beta=2.0, distributions=[Slab.X, Replicated(), Slab.X]
    ),
}


def push_tangents(context):
    """The names of calls whose tangents, of dual numbers, differ from those of torch.func.jvp; and
    what is said where a tangent has no way, or only rank 1 has one.
    """
    forward_ad = torch.autograd.forward_ad
    x = torch.linspace(-1, 1, 8 + 4 * context.rank, dtype=torch.float64).reshape(-1, 4)
    x, tangent = x[:2], (x * x - 0.3)[:2].contiguous()
    wrong = []
    with context:
        for name, call in FORWARD.items():
            primal, expected = torch.func.jvp(call, (x,), (tangent,))
            for _ in range(3):  # such calls have come before, without a tangent
                call(x)
            with forward_ad.dual_level():
                for _ in range(3):
                    made = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
                    if not (
                        torch.equal(made.primal, primal) and torch.equal(made.tangent, expected)
                    ):
                        wrong.append(name)
                assert forward_ad.unpack_dual(call(x)).tangent is None
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            one = say_of(lambda: collectives.all_reduce(dual if context.rank == 1 else x))
            planned = say_of(lambda: Matmul(dual, x.T, distributions=[Slab.X, Slab.Y, Slab.X]))
            product = Matmul(x, x.T, distributions=[Slab.X, Slab.Y, Slab.X])
            product.plan()
            product.execute()
            again = say_of(lambda: product.reset_operands(a=dual))
            product.free()
    return wrong, one, planned, again


def say_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def test_dual_numbers_outside_of_torch_func(contexts):
    for wrong, one, planned, again in contexts.run(push_tangents, ranks=2):
        assert not wrong
        assert "rank 1 called all_reduce (x has a tangent)" in one
        assert "has a tangent" in planned and "has a tangent" in again


# Calls that come again, and how many exchanges the gradient takes: one for each call that it makes.
COUNTED = {
    **FORWARD,
    "all_to_all": collectives.all_to_all,
    "all_to_all, counts": lambda x: collectives.all_to_all(x, send_counts=[2, 0]),
    "broadcast": collectives.broadcast,
    "copies": autograd.copies,
    "rfft": lambda x: fft.rfft(x, distribution=Slab.X),
    "rfft along one": lambda x: fft.rfft(x, distribution=(Slab.X, Slab.Y), axes=0),
    "rfft, bound": lambda x: fft.rfft(x, distribution=Slab.X.bind((4, 4))),
    "irfft": lambda x: fft.irfft(x + 0j, distribution=Slab.X),
    "irfft along one": lambda x: fft.irfft(x + 0j, distribution=(Slab.X, Slab.Y), axes=0),
    "dct": lambda x: fft.dctn(x, 2, distribution=Slab.X),
    "dst": lambda x: fft.dst(x, 3, axis=0, distribution=Slab.X),
    "layer": lambda x: nn.linear(x, x, distributions=[Slab(0), Slab(0), Slab(1)]),
}
OF_GRADIENTS = {"all_reduce": 0, "matmul": 2, "layer": 2}
LYING_STILL = ("all_reduce", "all_gather", "redistribute", "layer")  # their operands
# Python functions that a call enters where a gradient is recorded, and those of a layer and of its
# gradient, which is two products; torch.autograd.grad itself enters 20.
MOST_CALLS, OF_LAYERS, OF_OPERATOR = 40, 75, 20


def count_work(context):
    """Exchanges of calls that come again: of plain tensors, with gradients and of these. And how
    many Python functions such a call enters, where compiled code makes the rest.
    """
    counted, entered = {}, {}
    with context:
        for name, call in COUNTED.items():
            x = torch.ones(2, 4, dtype=torch.float64)
            recorded = x.clone().requires_grad_()
            made, seed = call(recorded), torch.ones_like(call(x))

            def backward(made=made, recorded=recorded, seed=seed):
                return torch.autograd.grad(made, recorded, seed, retain_graph=True)

            counts = []
            for again in (partial(call, x), partial(call, recorded), backward):
                for _ in range(6):
                    again()
                before = context.board.rounds
                for _ in range(5):
                    again()
                counts.append((context.board.rounds - before) / 5)
            counted[name] = counts
            if name in LYING_STILL:
                for kind, again in (("", partial(call, recorded)), (" gradient", backward)):
                    found = [calls_before("", again) for _ in range(25)]
                    entered[name + kind] = min(found, key=len)
        given = [torch.ones(2, 4)], words_of(op="sum"), None, None, CURRENT, ""
        operator = partial(torch.ops.shardmath.all_reduce.default, *given)  # as compiled code calls
        entered["operator"] = min((calls_before("", operator) for _ in range(9)), key=len)
    return counted, entered


def test_what_gradients_cost(contexts):
    """Which operands require grad travels in the agreement of the call, or of the next one."""
    (counted, entered), (others, _) = contexts.run(count_work, ranks=2)
    assert counted == others
    for name, (plain, recorded, gradient) in counted.items():
        assert plain == recorded == (name != "copies"), name
        assert gradient == OF_GRADIENTS.get(name, 1), name
    if extension("shardmath.call._direct") is not None:
        for name, names in entered.items():
            most = OF_LAYERS if name.startswith("layer") else MOST_CALLS
            most = OF_OPERATOR if name == "operator" else most
            assert len(names) <= most, "\n".join([name, *names])
