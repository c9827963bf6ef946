"""How docs/ becomes a site: `make docs`. A dead link, and a page that no other page lists, is an error."""

import re
import sys
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import list_errors  # noqa: E402

project = "partc"
release = metadata.version("partc")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may skip a level of headings
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "partc"
html_show_sphinx = False
html_show_copyright = False

(HERE / "errors.md").write_text(list_errors.page())  # of the source as it is: nothing that could grow old


def _keep_tables(app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Show paragraphs of docstrings that are tables, a name and what it is on each line, as they stand."""
    paragraphs = [paragraph.split("\n") for paragraph in "\n".join(lines).split("\n\n")]
    kept = (
        ["::", "", *(f"    {line}" for line in paragraph)]
        if any(re.match(r"\s*\w+  +\S", line) for line in paragraph)
        else paragraph
        for paragraph in paragraphs
    )
    lines[:] = [line for paragraph in kept for line in (*paragraph, "")]


def setup(app: Sphinx) -> None:
    """Take part in how Sphinx reads docstrings."""
    app.connect("autodoc-process-docstring", _keep_tables)
