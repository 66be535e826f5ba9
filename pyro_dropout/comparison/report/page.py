"""A comparison as one self-contained page: findings, table, figures, diagnostics, and how to reproduce it.

Every value in the templates of the page is escaped, except what another template made.
"""

import base64
import hashlib
import math
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pyro_dropout.comparison.exams import off_level
from pyro_dropout.comparison.figure import COLOURS, GREY
from pyro_dropout.comparison.findings import PAPER, REFERENCE, Findings, Row, Score
from pyro_dropout.comparison.report.figures import (
    band_pictures,
    calibration_picture,
    minus,
    rejection_picture,
)
from pyro_dropout.prediction.tails import is_whole
from pyro_dropout.protocols import Record
from pyro_dropout.registry import scores

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


_GROUPS: dict[str, tuple[str, ...]] = {
    "Uncertainty away from the data": ("between", "outside"),
    "Distance to the reference": ("d_mean", "d_std", "d_w1"),
    "Cost": ("parameters", "us", "seconds"),
}
_CALIBRATION = ("coverage", "interval", "crps", "ece", "brier")


@dataclass(frozen=True)
class Cell:
    """One cell: its text, standard error, and what it is: "first" of its group, "none", "best"."""

    text: str
    kinds: list[str]
    error: str = ""


def score_table(comparison: Findings, groups: list[tuple[str, list[str]]]) -> dict[str, object]:
    """Return what the template of a table needs: the columns by group, and the cells by posterior."""
    groups = [(title, keys) for title, keys in groups if keys]
    return {
        "seeds": comparison.settings.get("seeds", 1),
        "groups": [(title, [comparison.columns[key] for key in keys]) for title, keys in groups],
        "rows": {
            row.name: [_cell(comparison, row, key, key == keys[0]) for _, keys in groups for key in keys]
            for row in comparison.rows
        },
    }


def swatches(comparison: Findings) -> dict[str, str]:
    """Return the class of the dot in front of every posterior's name, which has its figure colour."""
    guides = [row.name for row in comparison.rows if row.name != REFERENCE]
    return {REFERENCE: "reference"} | {name: f"c{k % len(COLOURS)}" for k, name in enumerate(guides)}


def _grouped(comparison: Findings) -> list[tuple[str, list[str]]]:
    """Return the columns by group, but for those of the paper; columns without a group come last."""
    left = [key for key in comparison.columns if key not in PAPER]
    found = []
    for title, keys in {"Predictions of held-back data": tuple(scores()), **_GROUPS}.items():
        found.append((title, [key for key in keys if key in left]))
        left = [key for key in left if key not in keys]
    return [*found, ("Other", left)]


def _some(comparison: Findings, title: str, keys: Sequence[str]) -> dict[str, object]:
    """Return what the template needs for a table of some columns."""
    return score_table(comparison, [(title, [key for key in comparison.columns if key in keys])])


def _cell(comparison: Findings, row: Row, key: str, first: bool) -> Cell:
    score = row.scores.get(key)
    kinds = ["first"] if first else []
    if score is None or not score.values:
        return Cell(comparison.cell(row, key), [*kinds, "none"])
    if row.name in comparison.leaders(key):
        kinds.append("best")
    value, _, error = comparison.cell(row, key).partition(" ± ")
    return Cell(minus(value), kinds, error)


_PRAISE = {"log_lik": "best test log-likelihood", "rmse": "smallest error of the mean", "accuracy": "highest accuracy"}
_CLOSE, _USABLE = 0.5, 0.7  # limits of k̂
# Nats of a KL: a hundredth is negligible in an ELBO; a whole one, a factor e in the evidence, is not.
_NEGLIGIBLE, _MUCH = 0.01, 1.0


def findings(comparison: Findings) -> list[Markup]:
    """Return the main results as sentences."""
    found = []
    for key, praise in _PRAISE.items():
        name = comparison.best(key)
        if name is not None:
            row = next(row for row in comparison.rows if row.name == name)
            near = comparison.leaders(key)[1:]
            value = minus(comparison.cell(row, key))
            found.append(sentence("leader", name=name, praise=praise, value=value, near=near))
    if any("d_w1" in row.scores for row in comparison.rows):
        found.append(sentence("ranking", names=comparison.ranking))
    found += _coverage(comparison)
    ratios = {row.name: row.scores["between"].mean for row in comparison.rows if "between" in row.scores}
    sure = [(name, f"{ratio:.2f}") for name, ratio in ratios.items() if ratio < 1]
    if sure:
        found.append(sentence("sure_in_gaps", ratios=sure))
    return found + [sentence("failed", name=row.name, note=row.note) for row in comparison.rows if row.note]


def plain_findings(comparison: Findings) -> list[str]:
    """Return the main results as sentences without markup, for a terminal."""
    return [Markup(re.sub(r"</?(b|span)\b[^>]*>", "", said)).unescape() for said in findings(comparison)]


def _coverage(comparison: Findings) -> list[Markup]:
    """Say for each posterior whether its coverage agrees with the level, given the number of points."""
    count = comparison.test[1].numel()
    drift = 0.79 / count**0.5  # calibrated intervals exceed this calibration error once in a hundred times
    found = []
    for row in comparison.rows:
        cover, ece = row.scores.get("coverage", Score()), row.scores.get("ece", Score())
        if cover.values:
            off = off_level(cover.mean, count)
            if off == "wide" and row.answer is not None and is_whole(row.answer.target_distribution):
                off = ""  # intervals of whole numbers hold at least their level
            points = f"{100 * ece.mean:.0f}" if not off and ece.mean > drift else ""
            found.append(sentence("coverage", name=row.name, percent=f"{100 * cover.mean:.0f}", off=off, points=points))
    return found


def _undefined(score: Score) -> bool:
    return score.note.startswith("undefined")


# --- may it be trusted? -----------------------------------------------------------------------------------------------


def gap_lines(comparison: Findings) -> list[Markup]:
    """Return a sentence about each guide: whether the large-K form of its KL can be used."""
    found = []
    for row in comparison.rows:
        score = row.scores.get("gap")
        if row.name == REFERENCE or score is None or not (score.values or _undefined(score)):
            continue
        gap = score.mean
        verdict = (
            "singular" if math.isnan(gap) else "exact" if gap == 0 else "yes" if gap <= _NEGLIGIBLE else "training"
        )
        verdict = "no" if gap > _MUCH else verdict
        found.append(sentence("gap", name=row.name, value=minus(score.text(2)), verdict=verdict))
    return found


def khat_lines(comparison: Findings) -> list[Markup]:
    """Return a sentence about each guide's k̂."""
    found = []
    for row in comparison.rows:
        score = row.scores.get("khat")
        if row.name == REFERENCE or score is None:
            continue
        if score.values:
            verdict = "close" if score.mean <= _CLOSE else "usable" if score.mean <= _USABLE else "far"
            found.append(sentence("khat", name=row.name, value=minus(score.text(2)), verdict=verdict))
        else:
            reason = "q has no density" if _undefined(score) else score.note or "it was not computed"
            found.append(sentence("no_khat", name=row.name, reason=reason))
    return found


# --- how it was made --------------------------------------------------------------------------------------------------


def facts(comparison: Findings) -> dict[str, str]:
    """Return the settings of the run by name."""
    s = comparison.settings
    found = {"data": f"{len(comparison.train[0])} training points, {len(comparison.test[0])} held back"}
    found |= {f"recipe of {name}": told for name, told in s.get("recipes", {}).items()}
    if "steps" in s:
        falling = f" with the schedule {s['schedule']}" if s.get("schedule") else ""
        batch = "all points" if s["batch_size"] is None else f"{s['batch_size']} points"
        found |= {
            "training": f"Adam, learning rate {s['lr']:g}{falling}, {s['steps']} steps of {batch} for each guide",
            "objective": "ELBO(), with the large-K form and the temperature of the prior"
            if s["loss"] is None
            else repr(s["loss"]),
        }
    if "samples" in s:
        found |= {
            "seeds": ", ".join(str(seed) for seed in s.get("which_seeds", range(s["seeds"]))),
            "predictions": f"{s['samples']} draws of the weights for each"
            + (f"; linearised: {', '.join(s['method'])}" if s.get("method") else ""),
            "reference": str(s["reference"]),
        }
    kinds = {
        row.name: type(row.trained[0][1]).__name__ if row.trained else "nothing trained" for row in comparison.rows
    }
    found["guides"] = "; ".join(f"{name} ({kind})" for name, kind in kinds.items() if name != REFERENCE)
    if "device" in s:
        found["device"] = _device(str(s["device"]))
    found["time"] = f"{comparison.seconds:.0f} s in total" + (f", finished {s['when']}" if "when" in s else "")
    versions = [f"{name} {version(name)}" for name in ("pyro-dropout", "torch", "pyro-ppl", "arviz", "numpy")]
    found["versions"] = ", ".join([*versions, f"Python {platform.python_version()}", platform.system()])
    return found


def again(comparison: Findings) -> str:
    """Return how to reproduce the comparison: the command line if there was one, else the call in Python."""
    s = comparison.settings
    if s.get("command"):
        return str(s["command"])
    options: Record = {"seeds": list(s.get("which_seeds", range(s.get("seeds", 1))))}
    options |= {key: s[key] for key in ("steps", "lr", "batch_size", "samples", "loss", "compile") if key in s}
    options["method"] = s.get("method") or None
    given = ", ".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
    reference = "" if s.get("reference", "none") == "none" else f", reference={s['reference']!r}"
    guides = ", ".join(f"{row.name!r}: ..." for row in comparison.rows if row.name != REFERENCE)
    return (
        "import pyro_dropout as pdrop\n\n# model, guides, train and test as in the script that made this page\n"
        f"guides = {{{guides}}}\n"
        f"found = pdrop.compare(model, guides, train, test, {given}{reference})\n"
        'found.to_html("comparison.html")'
    )


def _device(name: str) -> str:
    if name.startswith("cuda") and torch.cuda.is_available():
        return f"{name}, {torch.cuda.get_device_name(name)}"
    return f"{name}, {torch.get_num_threads()} thread(s)" if name == "cpu" else name


_TITLE = "Posterior approximations compared"


def page(comparison: Findings) -> str:
    """Return the whole page, which is self-contained."""
    settings = comparison.settings
    drawn = {"Reliability": calibration_picture(comparison), "Rejection": rejection_picture(comparison)}
    pictures = {name: picture for name, picture in drawn.items() if picture is not None}
    keys = _CALIBRATION if "accuracy" not in comparison.columns else ("log_lik", *_CALIBRATION)
    calibration = _some(comparison, "At the held-back points", keys)
    content = {  # by section; a section without content is left out
        "found": findings(comparison),
        "scores": score_table(comparison, _grouped(comparison)),
        "predictions": band_pictures(comparison),
        "doubt": {"table": calibration, "pictures": pictures} if pictures or calibration["groups"] else {},
        "paper": _paper(comparison),
        "run": {"facts": facts(comparison), "again": again(comparison), "model": str(settings.get("model", ""))},
    }
    return render(
        "page.html.jinja",
        title=str(settings.get("title", _TITLE)),
        note=str(settings.get("note") or ""),
        style=verbatim("style.css") + render("swatches.css.jinja", colours=COLOURS, grey=GREY),
        swatches=swatches(comparison),
        content=content,
    )


def _paper(comparison: Findings) -> dict[str, object]:
    """Return what only those need who compare q(w) with p(w|y); {} if there is nothing of it."""
    scored = {row.name: row.scores["elbo"] for row in comparison.rows if "elbo" in row.scores}
    undefined = [name for name, score in scored.items() if _undefined(score)]
    gaps, khat = gap_lines(comparison), khat_lines(comparison)
    if not scored and not gaps and not khat:
        return {}
    return {
        "table": _some(comparison, "As an approximation of p(w|y)", PAPER),
        "undefined": [sentence("no_density", names=undefined)] if undefined else [],
        "own_models": "recipes" in comparison.settings,
        "gaps": gaps,
        "negligible": _NEGLIGIBLE,
        "much": _MUCH,
        "khat": khat,
    }
