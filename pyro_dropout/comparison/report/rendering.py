"""The templates of the page, filled in: every value is escaped, except what another template made."""

import base64
import hashlib
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_PACKAGE = "pyro_dropout.comparison.report"


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader(_PACKAGE), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = environment.keep_trailing_newline = True
    environment.filters["sha256"] = _sha256
    return environment


def render(template: str, **values: object) -> Markup:
    """Return a template with these values filled in; another template may include the result as it is."""
    return Markup(_environment().get_template(template).render(values))


def sentence(kind: str, **values: object) -> Markup:
    """Return a sentence of the page: a macro of ``sentences.html.jinja`` with these values filled in."""
    return Markup(getattr(_environment().get_template("sentences.html.jinja").module, kind)(**values))


def verbatim(name: str) -> Markup:
    """Return a file of the templates as it is, such as the style sheet."""
    return Markup(resources.files(_PACKAGE).joinpath("templates", name).read_text("utf-8"))
