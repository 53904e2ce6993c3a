"""Mistakes with scales and eight-bit floats: the same error on all ranks, and what to do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from shardmath.arrays import library_named
from shardmath.distribution import Slab
from shardmath.linalg.advanced import Matmul, matmul

M, N, K = 6, 20, 260  # of one rank: a is (M, 3 K) and b is (K, N)
E4, E5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


class Call:
    """One rank's arguments of a good call, to be spoilt."""

    def __init__(self, context, library="numpy"):
        self.make_array = library_named(library).from_host
        self.a = self.make_array(np.ones((M, K * context.size), E4))
        self.b = self.make_array(np.ones((K, N), E4))
        self.c = None
        self.scales = {"a": 2.0, "b": np.float32(0.5), "d": 1.0}
        self.options = {"result_amax": True}
        self.named = {}

    def scale(self, **scales):
        changed = {**self.scales, **scales}
        self.scales = {name: value for name, value in changed.items() if value is not None}

    def array(self, name, *shape, dtype="f4"):
        self.scales[name] = self.make_array(np.ones(shape, dtype))

    def cast(self, names, dtype):
        for name in names:
            setattr(self, name, np.ones(getattr(self, name).shape, dtype))

    def add(self, dtype, **scales):
        self.c = self.make_array(np.ones((M, N), dtype))
        self.named["beta"] = 1.0
        self.scale(**scales)

    def option(self, **options):
        self.options = {**self.options, **options}

    def arguments(self):
        operands = [self.a, self.b] + ([] if self.c is None else [self.c])
        named = {"distributions": [Slab.X] * 3, "options": self.options, **self.named}
        return operands, {**named, "quantization_scales": self.scales}

    def make(self):
        operands, named = self.arguments()
        return matmul(*operands, **named)

    def plan(self):
        operands, named = self.arguments()
        with Matmul(*operands, **named) as mm:
            mm.plan()
            return mm.execute()


V, T, MISMATCH, N_I = "ValueError", "TypeError", "CollectiveMismatch", "NotImplementedError"

# What is spoilt, what one rank's mistake raises, what all ranks' raises ("": none), its words.
MISTAKES = {
    "no scales": (lambda s: setattr(s, "scales", None), V, V, "has no a; pass its scale"),
    "a missing": (lambda s: s.scale(a=None), V, V, "quantization_scales has no a"),
    "b missing": (lambda s: s.scale(b=None), V, V, "has no b"),
    "d missing": (lambda s: s.scale(d=None), V, V, "the result is of an eight-bit type"),
    "c too many": (lambda s: s.scale(c=1.0), V, V, "leave it out"),
    "d too many": (
        lambda s: s.option(result_type=0, result_amax=False), f"{V} or {MISMATCH}", V, "has d",
    ),
    "a scale of another name": (lambda s: s.scale(e=1.0), T, T, "no field 'e'"),
    "scales are a pair": (
        lambda s: setattr(s, "scales", (1.0, 1.0)), T, T, "quantization_scales is",
    ),
    "scales are a number": (lambda s: setattr(s, "scales", 1.0), T, T, "quantization_scales is"),
    "a is text": (lambda s: s.scale(a="1"), V, V, "a number or a float32 array"),
    "a is a list": (lambda s: s.scale(a=[1.0]), V, V, "a number or a float32 array"),
    "a is complex": (lambda s: s.scale(a=1j), V, V, "a number or a float32 array"),
    "a is a bool": (lambda s: s.scale(a=True), V, V, "a number or a float32 array"),
    "a in double": (lambda s: s.array("a", M, 1, dtype="f8"), V, V, "scales must be float32"),
    "a in torch": (lambda s: s.scale(a=torch.ones(1)), T, T, "is a torch array"),
    "a of another number": (lambda s: s.scale(a=3.0), MISMATCH, "", "the scale of a must be equal"),
    "d of another number": (lambda s: s.scale(d=3), MISMATCH, "", "the scale of d must be equal"),
    "a by row": (lambda s: s.array("a", M, 1), MISMATCH, "", "of one kind on all ranks"),
    "a short": (lambda s: s.array("a", M - 1), V, V, "outer: (6, 1)"),
    "a of blocks of 64": (lambda s: s.array("a", M, 13), V, V, "1 x 128: (6, 7)"),
    "a lies as if turned": (lambda s: s.array("a", 7, M), V, V, "128 x 128: (1, 7)"),
    "a has three axes": (lambda s: s.array("a", 1, M, 1), V, V, "two axes at most"),
    "b short": (lambda s: s.array("b", N - 1), V, V, "outer: (1, 20)"),
    "b lies as if turned": (lambda s: s.array("b", N, 3), V, V, "1 x 128: (3, 20)"),
    "d is a vector": (lambda s: s.array("d", N), V, V, "one number for the whole matrix"),
    "two of e5m2": (lambda s: s.cast("ab", E5), V, V, "both float8_e5m2"),
    "a of e5m2": (lambda s: s.cast("a", E5), MISMATCH, "", "dtype of a must be equal"),
    "b in half": (lambda s: s.cast("b", "f2"), V, V, "a has dtype float8_e4m3fn and b has float16"),
    "all in half": (lambda s: s.cast("ab", "f2"), V, V, "want float8 operands"),
    "c in double": (lambda s: s.add("f8"), V, V, "c has dtype float64"),
    "c in eight bits": (lambda s: s.add(E4), V, V, "quantization_scales has no c"),
    "c with a scale": (
        lambda s: (s.add("f2", c=1.0, d=None), s.option(result_amax=False)), V, V, "leave it out",
    ),
    "result_amax of a wide result": (
        lambda s: (s.option(result_type=2), s.scale(d=None)), V, V, "wants a float8 result",
    ),
    "result_type": (lambda s: s.option(result_type=1), V, V, "not float64"),
    "compute_type": (lambda s: s.option(compute_type=64), V, V, "COMPUTE_32F"),
    "scale_type": (lambda s: s.option(scale_type=2), V, V, "use float32"),
    "block_scaling": (lambda s: s.option(block_scaling=True), N_I, N_I, "MX formats"),
    "alpha is complex": (lambda s: s.named.update(alpha=1j), V, V, "alpha is complex"),
}  # fmt: skip


def make_mistakes(context, culprit, through):
    said = {}
    with context:
        for name, (spoil, *_) in MISTAKES.items():
            call = Call(context)
            if culprit in (None, context.rank):
                spoil(call)
            try:
                getattr(call, through)()
                said[name] = ("", "")
            except Exception as error:
                said[name] = type(error).__name__, str(error)
            result, aux = Call(context).make()  # the context is as good as before
            rounded = 448 if context.size > 1 else 256  # 260, or too much for the type
            assert (result.astype(float) == rounded).all(), name
            assert aux["result_amax"][0] == K * context.size
    return said


@pytest.mark.parametrize("through", ["make", "plan"])
@pytest.mark.parametrize("culprit", [0, 2, None])
def test_mistakes(contexts, culprit, through):
    first, *others = contexts.run(make_mistakes, culprit, through, ranks=3)
    assert all(other == first for other in others)
    for name, (_, on_one, on_all, words) in MISTAKES.items():
        kind, text = first[name]
        wanted = on_all if culprit is None else on_one
        assert kind in wanted.split(" or "), (name, kind, text)
        if kind and kind == on_one:
            assert words in text, (name, text)
            assert culprit is None or f"rank {culprit}" in text, (name, text)
