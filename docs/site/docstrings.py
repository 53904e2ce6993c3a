"""Docstrings as they are written here, turned into reStructuredText.

They are plain text: paragraphs, and indented blocks that are code or drawings. A word between
single backquotes is code; where it is the name of something documented, it becomes a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
SPECIAL = re.compile(r"([\\*|]|_\b|\b_|(?<=\w)_(?=\W|$))")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("autodoc-process-docstring", _convert)
    return {"parallel_read_safe": True}


def _convert(*given: Any) -> None:
    """Change the lines of a docstring, which come last."""
    lines = given[-1]
    lines[:] = converted(lines)


def converted(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring as reStructuredText."""
    blocks = [list(block) for filled, block in groupby(lines, lambda line: bool(line.strip()))
              if filled]  # fmt: skip
    in_code = False
    for block in blocks:
        if all(line.startswith("    ") for line in block):
            yield from ([""] if in_code else ["::", ""])
            yield from block
            in_code = True
        else:
            if in_code:
                yield from ("", "..", "")  # ends the block above
            yield from _paragraphs(block)
            in_code = False
        yield ""


def _paragraphs(block: list[str]) -> Iterator[str]:
    """A paragraph, without the indent of a line that goes on; "Source:" begins one of its own."""
    text = "\n".join(line.strip() for line in block)
    text = re.sub(r"(?<=[\n ])Source: ", "\n\nSource: ", text)
    at = 0
    parts = []
    for found in CODE.finditer(text):
        parts += [_escaped(text[at : found.start()]), _code(found, text)]
        at = found.end()
    yield from "".join([*parts, _escaped(text[at:])]).split("\n")


def _code(found: re.Match[str], text: str) -> str:
    what = " ".join(found[1].split())
    role = f":py:obj:`{what}`" if NAME.fullmatch(what) else f"``{what}``"
    before, after = text[: found.start()][-1:], text[found.end() :][:1]
    return ("\\ " if before.isalnum() else "") + role + ("\\ " if after.isalnum() else "")


def _escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\1", text)
