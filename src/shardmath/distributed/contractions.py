"""`einsum`: sums of products of arrays whose axes have letters.

    "ij,jk->ik"       a shared letter that is summed: a product of matrices
    "bij,bjk->bik"    a shared letter that stays: a stack of products
    "ij,ij->i"        no other letters: elements are multiplied, and summed
    "ii->i"           a letter twice: the diagonal

Operands are combined two at a time, in the order that numpy.einsum_path finds; each step is the
function that says how its result is split and what moves: `matmul`, `sum`, `x * y`, `x[i, i]`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from shardmath.distributed import index_arrays, reductions
from shardmath.distributed.elementwise import all_distributed
from shardmath.distributed.manipulation import of_one_type, permute_dims, reshape, squeeze
from shardmath.distributed.products import matmul, tensordot

Letters = tuple[str, ...]  # one for each axis; those of an ellipsis are numbers, from the right
Term = tuple[Letters, Any]

_ELLIPSIS = "..."


def einsum(subscripts: str, *operands: Any, optimize: Any = True) -> Any:
    """The sum of products of elements that `subscripts` names, as numpy.einsum. Collective where
    the products and sums that it consists of are.

        einsum("ij,jk->ik", x, y)    einsum("bij,bjk->bik", x, y)    einsum("ii", x)

    At least one operand is distributed; others may be the same on all ranks. Integers are
    multiplied element by element, which takes memory for all products; floating numbers are
    multiplied as matrices where that saves it. `optimize` has no effect: a good order is always
    looked for. Raises ValueError for subscripts that do not fit the operands, NotImplementedError
    for lists of axes in place of subscripts.
    """
    if not isinstance(subscripts, str):
        raise NotImplementedError("einsum with lists of axes: name them, einsum('ij,jk->ik', x, y)")
    arrays = of_one_type(all_distributed(operands))
    terms, result = _read(subscripts, [x.ndim for x in arrays])
    extents = _extents(terms, [x.shape for x in arrays])
    left: list[Term] = []
    for number, (letters, x) in enumerate(zip(terms, arrays, strict=True)):
        others = {*result}.union(*terms[:number], *terms[number + 1 :])
        left.append(_summed(*_distinct(letters, x, extents), others))
    for numbers in _order(left, result, extents):
        together = [left.pop(number) for number in sorted(numbers, reverse=True)][::-1]
        made = together[0]
        for place, other in enumerate(together[1:], 2):
            needed = {*result}.union(*(letters for letters, _ in (*left, *together[place:])))
            made = _combined(made, other, needed)
        left.append(made)
    ((letters, x),) = left
    for letter in result:  # a letter that is left has one element in all operands
        if letter not in letters:
            letters, x = (*letters, letter), x[..., None]
    return permute_dims(x, [letters.index(letter) for letter in result])


# -- what the subscripts say -----------------------------------------------------------------------


def _read(subscripts: str, axes: Sequence[int]) -> tuple[list[Letters], Letters]:
    """The letters of each operand and of the result. `axes` are the operands' numbers of axes."""
    given, arrow, said = subscripts.replace(" ", "").partition("->")
    texts = given.split(",")
    if len(texts) != len(axes):
        raise ValueError(f"{subscripts!r} names {len(texts)} operands, and {len(axes)} are given")
    terms = [_spelled(text, count, subscripts) for text, count in zip(texts, axes, strict=True)]
    every = [letter for term in terms for letter in term]
    hidden = tuple(sorted({letter for letter in every if letter.isdigit()}, key=int, reverse=True))
    if not arrow:
        once = sorted(one for one in {*every} if every.count(one) == 1 and one not in hidden)
        return terms, (*hidden, *once)
    before, dots, behind = said.partition(_ELLIPSIS)
    result = (*before, *(hidden if dots else ()), *behind)
    if hidden and not dots:
        raise ValueError(f"{subscripts!r}: the result leaves out the axes of the ellipsis")
    if wrong := [letter for letter in result if letter not in every]:
        raise ValueError(f"{subscripts!r}: no operand has {wrong[0]!r}, which the result has")
    if len({*result}) < len(result):
        raise ValueError(f"{subscripts!r}: the result has a letter twice")
    return terms, result


def _spelled(text: str, axes: int, subscripts: str) -> Letters:
    """The letters of one operand of so many axes; the axes of an ellipsis have numbers."""
    before, dots, behind = text.partition(_ELLIPSIS)
    if not all(letter.isalpha() and letter.isascii() for letter in before + behind):
        raise ValueError(f"{subscripts!r}: axes have letters from a to z and A to Z")
    count = axes - len(before) - len(behind)
    if count < 0 or (count and not dots):
        raise ValueError(f"{subscripts!r}: {text!r} does not fit an operand of {axes} axes")
    return (*before, *(str(number) for number in reversed(range(count))), *behind)


def _extents(terms: Sequence[Letters], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The extent of each letter's axis; axes of one element are broadcast."""
    extents: dict[str, int] = {}
    for letters, shape in zip(terms, shapes, strict=True):
        for letter, extent in zip(letters, shape, strict=True):
            known = extents.setdefault(letter, extent)
            if known == 1:
                extents[letter] = extent
            elif extent not in (1, known):
                raise ValueError(
                    f"einsum: {letter!r} has {known} elements in one operand and {extent} in "
                    f"another; they have shapes {', '.join(map(str, shapes))}"
                )
    return extents


def _order(left: Sequence[Term], result: Letters, extents: dict[str, int]) -> list[tuple[int, ...]]:
    """The numbers of the operands that each step combines."""
    if len(left) < 3 or 0 in extents.values():
        return [tuple(range(len(left)))]
    short = {letter: chr(ord("a") + number) for number, letter in enumerate(extents)}
    texts = ["".join(short[letter] for letter in letters) for letters, _ in left]
    text = f"{','.join(texts)}->{''.join(short[letter] for letter in result)}"
    shapes = [np.broadcast_to(np.zeros(()), x.shape) for _, x in left]  # which take no memory
    path, _ = np.einsum_path(text, *shapes, optimize="greedy")
    return path[1:]


# -- one operand, and two --------------------------------------------------------------------------


def _distinct(letters: Letters, x: Any, extents: dict[str, int]) -> Term:
    """The operand with each letter once, and without axes that are broadcast."""
    broadcast = [axis for axis, one in enumerate(letters) if x.shape[axis] != extents[one]]
    if broadcast:
        x = squeeze(x, broadcast)
        letters = tuple(one for axis, one in enumerate(letters) if axis not in broadcast)
    for letter in dict.fromkeys(letters):
        same = [axis for axis, one in enumerate(letters) if one == letter]
        if len(same) > 1:
            rest = [axis for axis in range(x.ndim) if axis not in same]
            line = np.arange(extents[letter])
            x = index_arrays.get(permute_dims(x, [*same, *rest]), (line,) * len(same))
            letters = (letter, *(letters[axis] for axis in rest))
    return letters, x


def _summed(letters: Letters, x: Any, needed: Collection[str]) -> Term:
    """The operand, summed over the letters that nothing else needs."""
    gone = tuple(axis for axis, letter in enumerate(letters) if letter not in needed)
    if not gone:
        return letters, x
    own = x.element_type  # in place of the wider type of sums of short integers
    return tuple(letter for letter in letters if letter in needed), reductions.sum(x, gone, own)


def _combined(one: Term, two: Term, needed: Collection[str]) -> Term:
    """The product of two operands, summed over the letters that nothing else needs."""
    one, two = _summed(*one, {*needed, *two[0]}), _summed(*two, {*needed, *one[0]})
    (letters, x), (others, y) = one, two
    both = [letter for letter in letters if letter in others]
    stacked = [letter for letter in both if letter in needed]
    gone = [letter for letter in both if letter not in needed]
    rows = [letter for letter in letters if letter not in both]
    columns = [letter for letter in others if letter not in both]
    if not gone or not (rows or columns) or x.element_type.kind not in "fc":
        every = (*stacked, *rows, *columns, *gone)
        product = _spread(letters, x, every) * _spread(others, y, every)
        return _summed(every, product, needed)
    if not stacked:
        axes = [[z.index(letter) for letter in gone] for z in (letters, others)]
        return (*rows, *columns), tensordot(x, y, axes)
    extents = {
        **dict(zip(letters, x.shape, strict=True)),
        **dict(zip(others, y.shape, strict=True)),
    }

    def matrices(term: Letters, z: Any, *groups: Sequence[str]) -> Any:
        order = [term.index(letter) for letter in (*stacked, *groups[0], *groups[1])]
        sides = [math.prod(extents[letter] for letter in group) for group in groups]
        return reshape(permute_dims(z, order), [*(extents[one] for one in stacked), *sides])

    product = matmul(matrices(letters, x, rows, gone), matrices(others, y, gone, columns))
    result = (*stacked, *rows, *columns)
    return result, reshape(product, [extents[letter] for letter in result])


def _spread(letters: Letters, x: Any, every: Letters) -> Any:
    """The operand with an axis for every letter; those that it lacked have one element."""
    ordered = permute_dims(x, [letters.index(letter) for letter in every if letter in letters])
    return ordered[tuple(slice(None) if letter in letters else None for letter in every)]
