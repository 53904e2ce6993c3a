"""Spans of what a traced process copies and computes, by compiled code and by Python."""

from __future__ import annotations

import mmap
from functools import partial

import pytest

from shardmath.base import spans
from shardmath.base.compiled import CompiledStep, is_built
from shardmath.base.recorder import Site, spanned, this_process, waited
from shardmath.base.spans import Spans, spans_in

KEPT = 8


@pytest.fixture(params=["compiled", "Python"])
def writing(request, monkeypatch):
    """This process's spans: their memory, and the sites that were told."""
    if request.param == "Python":
        monkeypatch.setattr(spans, "extension", lambda _: None)
    elif not is_built("shardmath.base._record"):
        pytest.skip("no compiled parts here")
    memory, sites = mmap.mmap(-1, spans.bytes_for(KEPT)), []
    monkeypatch.setattr(this_process, "spans", Spans(memory, sites.append))
    yield memory, sites
    this_process.spans.stop()


def test_a_call_is_within_its_span(writing):
    memory, sites = writing
    divide = spanned(divmod, "divide", read={2: 16, 1: 8}, written={1: 4})
    again = spanned(CompiledStep(divmod, 9), "divide", read={1: 8, 2: 16}, written={1: 4})
    begins, call, ends = waited(list, "barrier")
    assert (divide(7, 2), again(2), call) == ((3, 1), (4, 1), list)
    with pytest.raises(ZeroDivisionError):
        divide(7, 0)
    begins()
    inner = spanned(partial(int), "copy", "copy", 3)
    assert inner() == 0
    ends()
    found, lost = spans_in(memory[:])
    assert lost == 0
    first = Site("divide", "compute", read=((1, 8), (2, 16)), written=((1, 4),))
    assert sites == [first, Site("barrier", "wait"), Site("copy", "copy", 3)]
    assert [each.site for each in found] == [0, 0, 1, 2]
    one, two, outer, within = found
    assert one.begun <= one.ended <= two.begun <= two.ended <= outer.begun
    assert outer.begun <= within.begun <= within.ended <= outer.ended
    assert len({each.thread for each in found}) == 1


def test_the_last_spans_are_kept(writing):
    memory, _ = writing
    for number in range(KEPT + 3):
        spanned(int, str(number))()
    found, lost = spans_in(memory[:])
    assert ([each.site for each in found], lost) == (list(range(3, KEPT + 3)), 3)
    call = spanned(int, "later")
    this_process.spans.stop()  # as a forked child does
    assert call() == 0
    assert spans_in(memory[:]) == (found, lost)


def test_an_untraced_call_stays_as_it_is():
    assert this_process.spans is None
    call = partial(int)
    assert spanned(call, "copy", "copy", 8, read={1: 8}) is call
    assert [*waited(call, "barrier")] == [call]
