"""Sphinx: Markdown pages with formulas, notebooks that run, and the API from the docstrings."""

import os
import re
import shutil
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx

project = "pyro_dropout"
author = "The pyro_dropout developers"
project_copyright = author
version = release = installed_version("pyro-dropout")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build", "benchmarks/*.md", "*.py"]  # parts of pages, and scripts
html_theme = "furo"
html_title = f"pyro_dropout {version}"
SMALL_CODE = {"code-font-size": "0.72rem"}  # lines of 120 characters are long for a column of text
html_theme_options = {"light_css_variables": SMALL_CODE, "dark_css_variables": SMALL_CODE}

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# scikit-learn writes these into its estimators, with links into its own manual.
autodoc_default_options = {"exclude-members": "set_fit_request, set_predict_request, set_score_request"}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# --- formulas: MathJax and its fonts lie beside the pages, so that they need no network -------------------------------

mathjax_path = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full"
# Of version 2, which is the one that comes as a Python package; MyST would write the settings of version 3.
myst_update_mathjax = False
mathjax2_config = {
    "showProcessingMessages": False,
    "tex2jax": {"processClass": "math|output_area"},
    "HTML-CSS": {"availableFonts": [], "imageFont": None, "preferredFont": None, "webFont": "STIX-Web"},
}
html_static_path = ["_build/static", "static"]
html_css_files = ["pages.css"]


def copy_mathjax(here: Path = Path(__file__).parent) -> None:
    """Bring MathJax from its package below this folder; the package itself, a server, is not imported."""
    spec = find_spec("jupyter_server_mathjax")
    if spec is None or spec.origin is None:
        raise RuntimeError("the pages need jupyter-server-mathjax, which is in the extra: pip install -e '.[docs]'")
    shutil.copytree(Path(spec.origin).parent / "static", here / html_static_path[0] / "mathjax", dirs_exist_ok=True)


copy_mathjax()

# --- notebooks: as `make notebooks` wrote them; others run in short form while the pages are built --------------------

os.environ.setdefault("PYRO_DROPOUT_SHORT", "1")  # PYRO_DROPOUT_SHORT=0 shows the long runs
os.environ.setdefault("OMP_NUM_THREADS", "1")
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_excludepatterns = ["notebooks/*.ipynb"]
nb_execution_cache_path = str(Path(__file__).parent / "_build" / f"notebooks_{os.environ['PYRO_DROPOUT_SHORT']}")
nb_execution_raise_on_error = True  # a claim that does not hold is a page that does not build
nb_execution_timeout = 300
nb_output_stderr = "remove"  # warnings of the machine that builds; an error stops the build anyway


def copy_notebooks(here: Path = Path(__file__).parent) -> None:
    """Bring the notebooks below this folder, where Sphinx reads: as ``make notebooks`` wrote them, or their scripts."""
    folder = here / "notebooks"
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n", "utf-8")
    sources = []
    for script in sorted((here.parent / "notebooks").glob("*.py")):
        written = script.with_suffix(".ipynb")
        fresh = written.exists() and written.stat().st_mtime > script.stat().st_mtime
        sources.append(written if fresh else script)
    for copy in [*folder.glob("*.py"), *folder.glob("*.ipynb")]:
        if copy.name not in {source.name for source in sources}:
            copy.unlink()
    for source in sources:
        copy = folder / source.name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():  # an untouched file is not read again
            shutil.copyfile(source, copy)


copy_notebooks()

# --- docstrings -------------------------------------------------------------------------------------------------------

SHAPE_ASTERISK = re.compile(r"``.*?``|(?<=\()\*(?=\w+[,) ])|(?<= )\*(?=\w+[,)])")


def escape_shapes(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Let a docstring write a shape as ``(L, *shape)``: outside code, its asterisk is no emphasis."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = SHAPE_ASTERISK.sub(lambda found: r"\*" if found[0] == "*" else found[0], line)


def link_copies(app: Sphinx, page: str, source: list[str]) -> None:
    """Fit links that are right on GitHub: notebooks are the copies that Sphinx reads, and included tables are below."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")
    source[0] = re.sub(r"\[(\w+\.md)\]\(benchmarks/\w+\.md\)", r"`\1`", source[0])


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the side bar from the lists of links in index.md: a toctree would show as raw text on GitHub."""
    if page == "index":
        for title, items in re.findall(r"^## (.+)\n\n((?:- .+\n)+)", source[0], re.MULTILINE):
            pages = "\n".join(re.findall(r"\]\(([^)]+)\.(?:md|py)\)", items))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def include_tables(app: Sphinx, page: str, source: list[str]) -> None:
    """Show a file of tables where a paragraph is only a link to it: on GitHub, an include would show as raw text."""
    alone = re.compile(r"^\[[^]\n]+\]\((benchmarks/\w+\.md)\)$", re.MULTILINE)
    source[0] = alone.sub(r"```{include} \1\n:relative-images:\n```", source[0])


def link_written(app: Sphinx, page: str, source: list[str]) -> None:
    """Link the notebooks that ``make notebooks`` wrote: their scripts are not among the copies."""
    for copy in (Path(__file__).parent / "notebooks").glob("*.ipynb"):
        source[0] = source[0].replace(f"](notebooks/{copy.stem}.py)", f"](notebooks/{copy.name})")


def setup(app: Sphinx) -> None:
    """Hook the functions above into autodoc and into the reading of pages."""
    app.connect("autodoc-process-docstring", escape_shapes)
    app.connect("source-read", include_tables)
    app.connect("source-read", link_written, priority=600)  # after the others
    app.connect("source-read", link_copies)
    app.connect("source-read", add_contents)
