"""What calls with mistakes say: the same error on all ranks."""

from __future__ import annotations

import builtins
import logging
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from shardmath.errors import HeapExhausted


def heard(action):
    """What a call raised: (the built-in type that it is, text)."""
    try:
        action()
    except Exception as error:
        builtin = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return builtin[0], str(error)
    return "nothing", ""


def misses(everywhere, expected):
    """The cases of which not all ranks heard the same, or not what is expected.

    `everywhere` has what each rank heard, by case. `expected(case)`: an exception type, and what
    words the text must have.
    """
    found = []
    for case, said in everywhere[0].items():
        kind, *words = expected(case)
        fits = (
            all(rank[case] == said for rank in everywhere)
            and issubclass(getattr(builtins, said[0], int), kind)
            and all(word in said[1] for word in words)
        )
        if not fits:
            found.append((case, [rank[case] for rank in everywhere]))
    return found


@contextmanager
def no_memory(context, on=1):
    """Within, rank `on` gets none of its heap, and none of its GPU's ordinary memory."""
    refusal = HeapExhausted("no memory today", need=1)
    with ExitStack() as patches:
        if context.rank == on:
            patches.enter_context(patch.object(context.heap, "allocate", side_effect=refusal))
        if context.rank == on and context.team is not None:
            ordinary = "shardmath.cuda.allocation.Allocation.__init__"
            patches.enter_context(patch(ordinary, side_effect=refusal))
        yield


@contextmanager
def listening(name="told"):
    """A logger, and the lines that it is told within."""
    logger, lines, handler = logging.getLogger(name), [], logging.Handler()
    logger.setLevel(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield logger, lines
    finally:
        logger.removeHandler(handler)
