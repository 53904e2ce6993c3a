"""Atoms: every index once, with the spans that hold it."""

from geometry_cases import elements, spans
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn
from shardmath.geometry import Spans
from shardmath.geometry.coverage import atoms, owner_sets


@drawn(150)
@given(
    st.integers(0, 80).flatmap(
        lambda extent: st.tuples(
            st.just(extent),
            st.lists(spans(extent), max_size=3),
            # Short periods, so that the pattern repeats and is cut within the extent.
            st.lists(
                st.builds(
                    Spans, st.integers(0, 30), st.integers(1, 3), st.just(4), st.just(extent)
                ),
                max_size=2,
            ),
        )
    )
)
def test_atoms(drawn):
    extent, some, periodic = drawn
    held = [elements(s) for s in some + periodic]
    masks = {}
    for atom in atoms(some + periodic, extent):
        assert atom.count > 0 and atom.length > 0 and (atom.count > 1) == (atom.step > 0)
        for i in range(atom.count):
            for at in range(atom.start + i * atom.step, atom.start + i * atom.step + atom.length):
                assert at not in masks
                masks[at] = atom.mask
    assert masks == {i: sum(1 << j for j, h in enumerate(held) if i in h) for i in range(extent)}


def test_owner_sets():
    rows = [Spans.interval(0, 2), Spans.interval(1, 4)]
    whole = Spans.interval(0, 3)
    found = owner_sets((5, 3), [(row, whole) for row in rows])
    assert found == {0b01: (0, 0), 0b11: (1, 0), 0b10: (2, 0), 0: (4, 0)}
    assert owner_sets((5, 0), [(rows[0], Spans.interval(0, 0))]) == {}


def test_atoms_of_long_axes_follow_the_pattern():
    extent = 10**9
    dealt = [Spans.cyclic(extent, 1, 6, k) for k in range(6)]
    halves = [Spans.interval(0, extent // 2 + 1), Spans.interval(extent // 2 + 1, extent)]
    assert len(list(atoms(dealt + halves, extent))) <= 6 * 4
