"""The merged output, byte by byte."""

from __future__ import annotations

import pytest

from shardmath.launch.output import LINE_LIMIT, Prefixer

CASES = [
    # what arrives, in order (None: the moment of a prompt); what is written in the end
    ([(0, b"a\n"), (1, b"b\n")], b"[0] a\n[1] b\n"),
    ([(0, b"a"), (1, b"b\n"), (0, b"c\n")], b"[1] b\n[0] ac\n"),
    ([(0, b"a\nb\nc")], b"[0] a\n[0] b\n[0] c\n"),
    ([(0, b"1%\r2%\r"), (0, b"3%\n")], b"[0] 1%\r[0] 2%\r[0] 3%\n"),
    ([(0, b"dos\r"), (0, b"\nline\r\n")], b"[0] dos\r\n[0] line\r\n"),
    ([(0, b"\n\n")], b"[0] \n[0] \n"),
    ([(0, b"x\r")], b"[0] x\n"),
    ([(0, b"")], b""),
    ([(0, b"? "), None, (0, b"yes\n")], b"[0] ? yes\n"),
    ([(0, b"? "), None, (1, b"b\n"), (0, b"yes\n")], b"[0] ? \n[1] b\n[0] yes\n"),
    ([(0, b"? "), None], b"[0] ? \n"),
    ([(0, b"x" * (LINE_LIMIT + 1))], b"[0] " + b"x" * (LINE_LIMIT + 1) + b"\n"),
]


@pytest.mark.parametrize(("events", "expected"), CASES)
def test_lines(events: list[tuple[int, bytes] | None], expected: bytes) -> None:
    written: list[bytes] = []
    prefixer = Prefixer(written.append)
    for event in events:
        if event is None:
            prefixer.show_partial(0)
        else:
            prefixer.feed(*event)
    prefixer.finish()
    assert b"".join(written) == expected
