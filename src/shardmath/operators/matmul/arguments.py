"""One rank's arguments of a product, as given, and what they say in plain terms.

Whatever cannot be read raises here, on this rank, inside the agreement that the call begins with.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardmath.agreement import require_equal
from shardmath.arrays import ArraySpec, library_and_spec
from shardmath.geometry import Distribution
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.lifecycle import check_stream, options_of
from shardmath.operators.matmul.options import MatmulOptions, MatmulPlanPreferences
from shardmath.operators.matmul.problem import Call
from shardmath.operators.matmul.scaling import Scaling, given_scales, known_numbers

__all__ = [
    "Arguments",
    "agreed_scalars",
    "packed_scalars",
    "read_distributions",
    "read_epilog",
    "read_qualifiers",
    "scalar",
]

_SCALARS = struct.Struct("<dddd")
_SCALE = struct.Struct("<?d")


class Arguments(NamedTuple):
    """One rank's arguments as they were given, read once into what the layers below understand.

    Raises ValueError or TypeError, on this rank, for what cannot be read.
    """

    a: Any
    b: Any
    c: Any
    distributions: Any
    alpha: Any = None
    beta: Any = None
    qualifiers: Any = None
    scales: Any = None
    options: Any = None
    epilog: Any = None
    inputs: Any = None
    preferences: Any = None
    stream: Any = None

    def scalars(self) -> tuple[complex, complex]:
        """The numbers alpha, 1 by default, and beta, 0 by default."""
        return (
            1.0 if self.alpha is None else scalar("alpha", self.alpha),
            0.0 if self.beta is None else scalar("beta", self.beta),
        )

    def call(self) -> Call:
        """The call with specs in place of arrays."""
        operands = tuple(
            None if x is None else library_and_spec(x, name)[1]
            for name, x in (("a", self.a), ("b", self.b), ("c", self.c))
        )
        if operands[0] is None or operands[1] is None:
            raise ValueError("matmul needs both a and b")
        transpose, conjugate = read_qualifiers(self.qualifiers)
        check_stream(self.stream)
        options_of(MatmulPlanPreferences, self.preferences, "preferences").check()
        options = options_of(MatmulOptions, self.options)
        alpha, beta = self.scalars()
        return Call(
            operands=operands,
            distributions=read_distributions(self.distributions),
            complex_scalars=(isinstance(alpha, complex), isinstance(beta, complex)),
            has_beta=self.beta is not None,
            transpose=transpose,
            conjugate=conjugate,
            options=options,
            epilog=read_epilog(self.epilog),
            inputs=_input_specs(self.inputs),
            scales=given_scales(self.scales),
        )

    def numbers(self, scaling: Scaling) -> tuple[float | None, ...]:
        """The scales of a, b, c and d that are numbers for whole matrices, None for all others."""
        return known_numbers(self.scales, scaling)


def scalar(name: str, value: Any) -> float | complex:
    """Alpha or beta as a Python number. Raises ValueError for what is none."""
    is_complex = isinstance(value, complex) or "complex" in str(getattr(value, "dtype", ""))
    try:
        if not isinstance(value, (str, bytes)):
            return complex(value) if is_complex else float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is a number, not {value!r}")


def packed_scalars(scalars: tuple[complex, complex], scales: Sequence[float | None] = ()) -> bytes:
    """Alpha and beta, and the scales of whole matrices, to be told before anything else."""
    alpha, beta = scalars
    told = _SCALARS.pack(alpha.real, alpha.imag, beta.real, beta.imag) + bytes([len(scales)])
    return told + b"".join(_SCALE.pack(x is not None, x or 0.0) for x in scales)


def agreed_scalars(notes: Sequence[bytes]) -> list[bytes]:
    """What each rank has told after its scalars and scales.

    Raises CollectiveMismatch where those differ. A scale that lies on a GPU is not compared.
    """
    ends = [_SCALARS.size + 1 + _SCALE.size * note[_SCALARS.size] for note in notes]
    heads = [note[:end] for note, end in zip(notes, ends, strict=True)]
    if any(head != heads[0] for head in heads):
        numbers = [_SCALARS.unpack_from(head) for head in heads]
        told = [(_plain(*each[:2]), _plain(*each[2:])) for each in numbers]
        require_equal("(alpha, beta)", told)
        scales = [list(_SCALE.iter_unpack(head[_SCALARS.size + 1 :])) for head in heads]
        for name, each in zip("abcd", zip(*scales, strict=True), strict=False):
            known = [value for is_known, value in each if is_known]
            values = [value if is_known else known[0] for is_known, value in each if known]
            if values:
                require_equal(f"the scale of {name}", values)
    return [note[end:] for note, end in zip(notes, ends, strict=True)]


def _plain(real: float, imaginary: float) -> complex:
    """A number as it is best shown."""
    return complex(real, imaginary) if imaginary else real


def read_qualifiers(
    given: Any,
) -> tuple[tuple[bool, bool, bool], tuple[bool, bool, bool]]:
    """Which of a, b and c are transposed, and which conjugated. Raises ValueError."""
    if given is None:
        return (False, False, False), (False, False, False)
    entries = np.asarray(given)
    names = entries.dtype.names or ()
    if entries.shape not in ((2,), (3,)) or not {"is_transpose", "is_conjugate"} <= set(names):
        raise ValueError(
            "qualifiers is an array of two or three entries of matrix_qualifiers_dtype, for a, b "
            f"and c, not {given!r}"
        )
    flags = [(bool(e["is_transpose"]), bool(e["is_conjugate"])) for e in entries]
    flags += [(False, False)] * (3 - len(flags))
    (ta, ca), (tb, cb), (tc, cc) = flags
    return (ta, tb, tc), (ca, cb, cc)


def read_distributions(given: Any) -> tuple[Distribution, ...]:
    """Those of a, b and the result. Raises ValueError."""
    found = tuple(given) if isinstance(given, (list, tuple, Sequence)) else ()
    known = len(found) == 3
    for each in found:
        known = known and isinstance(each, Distribution)
    if not known:
        raise ValueError(
            "distributions holds three Distribution objects, for a, b and the result, not "
            f"{given!r}"
        )
    return found


def read_epilog(given: Any) -> MatmulEpilog:
    """The epilog, the default for None. Raises ValueError."""
    if given is None:
        return MatmulEpilog.DEFAULT
    try:
        return MatmulEpilog(given)
    except ValueError:
        raise ValueError(f"epilog is a MatmulEpilog, not {given!r}") from None


def _input_specs(inputs: Any) -> tuple[tuple[str, ArraySpec], ...]:
    if inputs is None:
        return ()
    if not isinstance(inputs, Mapping):
        raise TypeError(f"epilog_inputs is a dictionary of arrays, not {type(inputs).__name__}")
    unnamed = [name for name in inputs if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"the names of epilog_inputs are strings, not {unnamed[0]!r}")
    return tuple((name, library_and_spec(x, name)[1]) for name, x in sorted(inputs.items()))
