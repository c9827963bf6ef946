"""How docs/ becomes a site: `make docs`. A dead link, and a page that no other page lists, is an error."""

import sys
from importlib import metadata
from pathlib import Path

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
