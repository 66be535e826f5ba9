"""The texts of the page: main findings, verdicts on the large-K form and on q, and how to reproduce the run."""

import math
import platform
import re
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from markupsafe import Markup

from pyro_dropout.comparison.columns import REFERENCE, Score
from pyro_dropout.comparison.layer_gaps import SHORT, WORDS, LayerGap, overall
from pyro_dropout.comparison.report.rendering import render, sentence
from pyro_dropout.comparison.report.table import minus, swatches
from pyro_dropout.comparison.scores import off_level
from pyro_dropout.protocols import Record

if TYPE_CHECKING:
    from pyro_dropout.comparison.findings import Comparison

_PRAISE = {"log_lik": "best test log-likelihood", "rmse": "smallest error of the mean", "accuracy": "highest accuracy"}
_CLOSE, _USABLE = 0.5, 0.7  # limits of k̂


def findings(comparison: "Comparison") -> list[Markup]:
    """Return the main results as sentences."""
    found = []
    for key, praise in _PRAISE.items():
        name = comparison.best(key)
        if name is not None:
            row = next(row for row in comparison.rows if row.name == name)
            others = [other for other in comparison.rows if other is not row and key in other.scores]
            near = [other.name for other in others if _close(row.scores[key], other.scores[key])]
            value = minus(comparison.cell(row, key))
            found.append(sentence("leader", name=name, praise=praise, value=value, near=near))
    if any("d_w1" in row.scores for row in comparison.rows):
        found.append(sentence("ranking", names=comparison.ranking))
    found += _coverage(comparison)
    ratios = {row.name: row.scores["between"].mean for row in comparison.rows if "between" in row.scores}
    sure = [(name, f"{ratio:.2f}") for name, ratio in ratios.items() if ratio < 1]
    if sure:
        found.append(sentence("sure_in_gaps", ratios=sure))
    undefined = [row.name for row in comparison.rows if "elbo" in row.scores and _undefined(row.scores["elbo"])]
    if undefined:
        found.append(sentence("no_density", names=undefined))
    return found + [sentence("failed", name=row.name, note=row.note) for row in comparison.rows if row.note]


def plain_findings(comparison: "Comparison") -> list[str]:
    """Return the main results as sentences without markup, for a terminal."""
    return [Markup(re.sub(r"</?(b|span)\b[^>]*>", "", said)).unescape() for said in findings(comparison)]


def _coverage(comparison: "Comparison") -> list[Markup]:
    """Say for each posterior whether its coverage agrees with the level, given the number of points."""
    count = comparison.test[1].numel()
    drift = 0.79 / count**0.5  # calibrated intervals exceed this calibration error once in a hundred times
    found = []
    for row in comparison.rows:
        cover, ece = row.scores.get("coverage", Score()), row.scores.get("ece", Score())
        if cover.values:
            off = off_level(cover.mean, count)
            points = f"{100 * ece.mean:.0f}" if not off and ece.mean > drift else ""
            found.append(sentence("coverage", name=row.name, percent=f"{100 * cover.mean:.0f}", off=off, points=points))
    return found


def _undefined(score: Score) -> bool:
    return score.note.startswith("undefined")


def _close(one: Score, other: Score) -> bool:
    """Whether two scores differ by less than twice the error of their difference."""
    if one.error is None or other.error is None:
        return False
    return bool(abs(one.mean - other.mean) < 2 * (one.error**2 + other.error**2) ** 0.5)


# --- may it be trusted? -----------------------------------------------------------------------------------------------


def gap_table(comparison: "Comparison", layers: dict[str, list[LayerGap]]) -> Markup:
    """Return the verdict on the large-K form for each guide, and the numbers of each layer that drops rows."""
    totals = {
        name: (WORDS[overall(each)], math.fsum(layer.entropy for layer in each), math.fsum(layer.gap for layer in each))
        for name, each in layers.items()
    }
    numbers = {"totals": totals, "nats": _nats, "sigmas": _sigmas}
    return render("gap_table.html.jinja", layers=layers, short=SHORT, swatches=swatches(comparison), **numbers)


def _nats(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{value:.2f}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e−")


def _sigmas(value: float) -> str:
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.1f}"


def khat_lines(comparison: "Comparison") -> list[Markup]:
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


def facts(comparison: "Comparison") -> dict[str, str]:
    """Return the settings of the run by name."""
    s = comparison.settings
    found = {"data": f"{len(comparison.train[0])} training points, {len(comparison.test[0])} held back"}
    if "steps" in s:
        falling = f" with the schedule {s['schedule']}" if s.get("schedule") else ""
        batch = "all points" if s["batch_size"] is None else f"{s['batch_size']} points"
        found |= {
            "training": f"Adam, learning rate {s['lr']:g}{falling}, {s['steps']} steps of {batch} for each guide",
            "objective": "ELBO(), with the large-K form" if s["loss"] is None else repr(s["loss"]),
            "seeds": ", ".join(str(seed) for seed in s.get("which_seeds", range(s["seeds"]))),
            "predictions": f"{s['samples']} draws of the weights for each, from seed 0"
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


def again(comparison: "Comparison") -> str:
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
        "import pyro_dropout as pd\n\n# model, guides, train and test as in the script that made this page\n"
        f"guides = {{{guides}}}\n"
        f"found = pd.compare(model, guides, train, test, {given}{reference})\n"
        'found.to_html("comparison.html")'
    )


def _device(name: str) -> str:
    if name.startswith("cuda") and torch.cuda.is_available():
        return f"{name}, {torch.cuda.get_device_name(name)}"
    return f"{name}, {torch.get_num_threads()} thread(s)" if name == "cpu" else name
