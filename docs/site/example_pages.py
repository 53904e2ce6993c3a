"""Each example is a page: its first sentence, and its source."""

from __future__ import annotations

import ast
from pathlib import Path

from docutils import nodes
from docutils.parsers import Parser
from sphinx.application import Sphinx


class ExampleParser(Parser):  # type: ignore[misc]
    """Turns a Python file into a page."""

    supported = ("example",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the page with the example's title, first sentence and source."""
        said = ast.get_docstring(ast.parse(inputstring)) or ""
        first = said.partition("\n\n")[0].replace("\n", " ")
        name = Path(document["source"]).stem
        page = nodes.section(ids=[name])
        page += nodes.title(name, name.replace("_", " ").capitalize())
        page += nodes.paragraph(first, first)
        page += nodes.literal_block(inputstring, inputstring, language="python")
        document += page


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.add_source_parser(ExampleParser)
    return {"parallel_read_safe": True}
