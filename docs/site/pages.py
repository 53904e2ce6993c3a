"""What the site does with a page of Markdown: the pages below it, and names of places in it.

Pages come in the order of navigation.md and, those of a folder, in that of its README's list.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

ITEM = re.compile(r"^(?:\*|\d+\.) .*?\]\(([\w-]+)\.(?:md|py)\)", re.MULTILINE)
PLACE = re.compile(r'^<a id="([\w-]+)"></a>$', re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("source-read", _changed)
    return {"parallel_read_safe": True}


def _changed(app: Sphinx, page: str, source: list[str]) -> None:
    text = PLACE.sub(r"(\1)=", source[0])
    if page == app.config.root_doc:
        text += (app.confdir / "navigation.md").read_text()
    elif page.endswith("/README"):
        pages = "\n".join(ITEM.findall(text))
        text += f"\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    source[0] = text
