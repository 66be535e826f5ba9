"""Sphinx: Markdown pages with formulas, and the API from the docstrings."""

import re
from importlib.metadata import version as installed_version

from sphinx.application import Sphinx

project = "pyro_dropout"
author = "The pyro_dropout developers"
project_copyright = author
version = release = installed_version("pyro-dropout")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build", "benchmarks/*.md"]  # the tables are part of benchmarks.md
html_theme = "furo"
html_title = f"pyro_dropout {version}"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

SHAPE_ASTERISK = re.compile(r"``.*?``|(?<=\()\*(?=\w+[,) ])|(?<= )\*(?=\w+[,)])")


def escape_shapes(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Let a docstring write a shape as ``(L, *shape)``: outside code, its asterisk is no emphasis."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = SHAPE_ASTERISK.sub(lambda found: r"\*" if found[0] == "*" else found[0], line)


def setup(app: Sphinx) -> None:
    """Hook the function above into autodoc."""
    app.connect("autodoc-process-docstring", escape_shapes)
