"""What pyproject.toml has no words for: the description, which a package index shows.

It is README.md, whose links are relative to the repository. Who reads it on an index has none, so a
link to a file becomes the file's path in the source distribution; once there is a public host,
`Source` among the project's URLs, it becomes an address there.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
WHERE = "Paths such as `docs/tutorial.md` are those of the source distribution.\n"


def described(text: str, source: str = "") -> str:
    """README's text without relative links; `source` is the address of the repository's files."""

    def absolute(link: re.Match[str]) -> str:
        words, path, place = link[1], link[2], link[3] or ""
        if not path:  # an index gives headings no names
            return words
        return f"[{words}]({source}/{path}{place})" if source else f"{words} (`{path}`)"

    made = LINK.sub(absolute, text)
    if source:
        return made
    title, _, rest = made.partition("\n\n")
    first, _, rest = rest.partition("\n\n")
    return "\n\n".join([title, first, WHERE + "\n" + rest])


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    setup(
        long_description=described(
            (ROOT / "README.md").read_text(), project.get("urls", {}).get("Source", "")
        ),
        long_description_content_type="text/markdown",
    )
