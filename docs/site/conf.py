"""The documentation's site: `make docs` builds it with Sphinx, and a warning is an error.

Pages are the repository's Markdown files, as they are, so that their links lead to the same places
here and there. The examples are pages too. The reference is made of the docstrings.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import shardmath

project = "shardmath"
author = "the authors of shardmath"
project_copyright = author
version = release = shardmath.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "docstrings",
    "example_pages",
    "pages",
    "coverage",
]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "examples/*.md", "examples/*.py",
    "benchmarks/navier_stokes_peers.py"]  # fmt: skip
exclude_patterns = ["docs/site"]
source_suffix = {".md": "markdown", ".py": "example"}
highlight_language = "none"  # indented blocks are drawings

myst_heading_anchors = 4

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
autodoc_mock_imports = ["triton"]

html_theme = "furo"
html_title = f"shardmath {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
