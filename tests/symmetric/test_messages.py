"""Messages of ranks that have gone different ways: who called what."""

from __future__ import annotations

import pytest

from shardmath.errors import CollectiveMismatch
from shardmath.symmetric.messages import NAME_BYTES, bodies, header


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        (["a", "b"], "rank 0 called a; rank 1 called b"),
        (["fft", "barrier", "fft", "fft"], "ranks 0, 2, 3 called fft; rank 1 called barrier"),
        (["a", "b", "c", "b"], "rank 0 called a; ranks 1, 3 called b; rank 2 called c"),
        (["a", "ab"], "rank 0 called a; rank 1 called ab"),
    ],
)
def test_who_called_what(operations: list[str], said: str) -> None:
    texts = [header(operation) + b"x" for operation in operations]
    for operation in operations:
        with pytest.raises(CollectiveMismatch) as error:
            bodies(texts, operation)
        assert str(error.value) == f"the ranks called different operations: {said}"


@pytest.mark.parametrize("operation", ["a", "é" * NAME_BYTES, "x" * 200])
def test_messages_of_one_operation(operation: str) -> None:
    messages = [b"", b"\0", b"a\0b"]
    assert bodies([header(operation) + each for each in messages], operation) == messages
