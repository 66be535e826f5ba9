"""The texts of the page: main findings, verdicts on the large-K form and on q, and how to reproduce the run."""

import html
import math
import platform
import re
from importlib.metadata import version
from typing import Any

import torch

from pyro_dropout.comparison.columns import REFERENCE, Score
from pyro_dropout.comparison.layer_gaps import SHORT, WORDS, LayerGap, overall
from pyro_dropout.comparison.report.table import minus, name_cell
from pyro_dropout.comparison.scores import off_level

_PRAISE = {
    "log_lik": "best test log-likelihood",
    "rmse": "smallest error of the mean",
    "accuracy": "highest accuracy",
}
_CLOSE, _USABLE = 0.5, 0.7  # limits of k̂


def findings(comparison: Any) -> list[str]:
    """Return the main results as sentences."""
    found = []
    for key, what in _PRAISE.items():
        name = comparison.best(key)
        if name is not None:
            row = next(row for row in comparison.rows if row.name == name)
            others = [other for other in comparison.rows if other is not row and key in other.scores]
            near = [_said(other.name) for other in others if _close(row.scores[key], other.scores[key])]
            also = f" Within error of it: {', '.join(near)}." if near else ""
            found.append(f"{_said(name)} has the {what}: {minus(comparison.cell(row, key))}.{also}")
    if any("d_w1" in row.scores for row in comparison.rows):
        order = " · ".join(_said(name) for name in comparison.ranking)
        found.append(f"From nearest to farthest from the reference's predictive distribution: {order}.")
    found += _intervals(comparison) + _holes(comparison)
    undefined = [_said(row.name) for row in comparison.rows if _without_density(row)]
    if undefined:
        found.append(
            f"{', '.join(undefined)}: no ELBO and no k̂, because q has no density (σ = 0, or a point-mass weight);"
            " compare such guides by their predictions."
        )
    found += [
        f'<span class="failed">{_said(row.name)} {html.escape(row.note)}</span>' for row in comparison.rows if row.note
    ]
    return found


def plain_findings(comparison: Any) -> list[str]:
    """Return the main results as sentences without markup, for a terminal."""
    return [html.unescape(re.sub(r"</?(b|span)\b[^>]*>", "", sentence)) for sentence in findings(comparison)]


def _intervals(comparison: Any) -> list[str]:
    """Say for each posterior whether its coverage agrees with the level, given the number of points."""
    count = comparison.test[1].numel()
    drift = 0.79 / count**0.5  # calibrated intervals exceed this calibration error once in a hundred times
    found = []
    for row in comparison.rows:
        cover = row.scores.get("coverage")
        if cover is not None and cover.values:
            wrong = off_level(cover.mean, count)
            verdict = {"": "consistent with 95 %", "narrow": "overconfident", "wide": "underconfident"}[wrong]
            if not wrong and "ece" in row.scores and row.scores["ece"].mean > drift:
                apart = f"{100 * row.scores['ece'].mean:.0f} points"
                verdict += f", but over all levels the coverage is off by {apart} on average, more than by chance"
            share = f"{100 * cover.mean:.0f} % of the held-back targets"
            found.append(f"{_said(row.name)}: its 95 % intervals contain {share}: {verdict}.")
    return found


def _holes(comparison: Any) -> list[str]:
    """Name the posteriors that are more certain in gaps of the data than at the data."""
    sure = [row for row in comparison.rows if "between" in row.scores and row.scores["between"].values]
    told = [f"{_said(row.name)} ({row.scores['between'].mean:.2f})" for row in sure if row.scores["between"].mean < 1]
    if not told:
        return []
    return [
        "In the widest gaps of the data these are more certain about the mean than at the data itself, so do not"
        f" trust their intervals there: {', '.join(told)}. The numbers are the ratios, which should be above 1."
    ]


def _said(name: str) -> str:
    return f"<b>{html.escape(name)}</b>"


def _without_density(row: Any) -> bool:
    return "elbo" in row.scores and row.scores["elbo"].note.startswith("undefined")


def _close(one: Score, other: Score) -> bool:
    """Whether two scores differ by less than twice the error of their difference."""
    if one.error is None or other.error is None:
        return False
    return bool(abs(one.mean - other.mean) < 2 * (one.error**2 + other.error**2) ** 0.5)


# --- may it be trusted? -----------------------------------------------------------------------------------------------


def gap_table(comparison: Any, layers: dict[str, list[LayerGap]]) -> str:
    """Return the verdict on the large-K form for each guide, and the numbers of each layer that drops rows."""
    lines = []
    for name, each in layers.items():
        head = f'<th scope="row">{name_cell(comparison, name)}</th>'
        if not each:
            words = "Not a mixture over rows; training does not use the large-K form."
            lines.append(f'<tr class="guide">{head}<td class="words">{words}</td><td colspan="5"></td></tr>')
            continue
        total = math.fsum(layer.gap for layer in each)
        most = math.fsum(layer.entropy for layer in each)
        verdict = html.escape(WORDS[overall(each)])
        numbers = f"<td></td><td></td><td></td><td>{_nats(most)}</td><td>{_nats(total)}</td>"
        lines.append(f'<tr class="guide">{head}<td class="words">{verdict}</td>{numbers}</tr>')
        for layer in (layer for layer in each if layer.entropy > 0):
            apart = "–" if math.isnan(layer.separation) else "∞" if math.isinf(layer.separation) else None
            lines.append(
                f'<tr class="layer"><th scope="row">{html.escape(layer.site)}</th>'
                f'<td class="words">{SHORT[layer.verdict]}</td><td>{layer.rows}</td><td>{layer.weights}</td>'
                f"<td>{apart or f'{layer.separation:.1f}'}</td><td>{_nats(layer.entropy)}</td>"
                f"<td>{_nats(layer.gap)}</td></tr>"
            )
    headings = ("rows", "weights in a row", "separation d", "H(z), nats", "gap, nats")
    head = "".join(f'<th scope="col">{text}</th>' for text in headings)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of the gap by layer"><table class="layers">'
        '<thead><tr><th class="name" scope="col">guide and layer</th><th class="words" scope="col">Can it be used?'
        f"</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _nats(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{value:.2f}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e−")


def khat_lines(comparison: Any) -> list[str]:
    """Return a sentence about each guide's k̂."""
    found = []
    for row in comparison.rows:
        score = row.scores.get("khat")
        if row.name == REFERENCE or score is None:
            continue
        if not score.values:
            reason = "q has no density" if score.note.startswith("undefined") else score.note or "it was not computed"
            found.append(f"{_said(row.name)}: no k̂: {html.escape(reason)}.")
            continue
        if score.mean <= _CLOSE:
            words = "q is close to the posterior over weights."
        elif score.mean <= _USABLE:
            words = "q misses some of the posterior; its draws can be used when reweighted by importance ratios."
        else:
            words = "q misses so much of the posterior over weights that importance ratios cannot correct it."
        found.append(f"{_said(row.name)}: k̂ = {minus(score.text(2))}. {words}")
    return found


# --- how it was made --------------------------------------------------------------------------------------------------


def facts(comparison: Any) -> list[tuple[str, str]]:
    """Return the settings of the run as (name, value)."""
    s = comparison.settings
    found = [("data", f"{len(comparison.train[0])} training points, {len(comparison.test[0])} held back")]
    if "steps" in s:
        batch = "all points" if s["batch_size"] is None else f"{s['batch_size']} points"
        found.append(("training", f"Adam, learning rate {s['lr']:g}, {s['steps']} steps of {batch} for each guide"))
        found.append(("objective", "ELBO(), with the large-K form" if s["loss"] is None else repr(s["loss"])))
        found.append(("seeds", ", ".join(str(seed) for seed in s.get("which_seeds", range(s["seeds"])))))
        found.append(("predictions", f"{s['samples']} draws of the weights for each, from seed 0"))
        found.append(("reference", str(s["reference"])))
    found.append(("guides", "; ".join(_kind(row) for row in comparison.rows if row.name != REFERENCE)))
    if "device" in s:
        found.append(("device", _device(str(s["device"]))))
    found.append(("time", f"{comparison.seconds:.0f} s in total" + (f", finished {s['when']}" if "when" in s else "")))
    names = ("pyro-dropout", "torch", "pyro-ppl", "arviz", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return [*found, ("versions", f"{versions}, Python {platform.python_version()}, {platform.system()}")]


def again(comparison: Any) -> str:
    """Return how to reproduce the comparison: the command line if there was one, else the call in Python."""
    s = comparison.settings
    if s.get("command"):
        return str(s["command"])
    seeds = list(s.get("which_seeds", range(s.get("seeds", 1))))
    options = {key: s[key] for key in ("steps", "lr", "batch_size", "samples", "loss", "compile") if key in s}
    given = ", ".join(f"{key}={value!r}" for key, value in {"seeds": seeds, **options}.items() if value is not None)
    reference = "" if s.get("reference", "none") == "none" else f", reference={s['reference']!r}"
    guides = ", ".join(f"{row.name!r}: ..." for row in comparison.rows if row.name != REFERENCE)
    return (
        "import pyro_dropout as pd\n\n# model, guides, train and test as in the script that made this page\n"
        f"guides = {{{guides}}}\n"
        f"found = pd.compare(model, guides, train, test, {given}{reference})\n"
        'found.to_html("comparison.html")'
    )


def _kind(row: Any) -> str:
    if not row.trained:
        return f"{row.name} (nothing trained)"
    return f"{row.name} ({type(row.trained[0][1]).__name__})"


def _device(name: str) -> str:
    if name.startswith("cuda") and torch.cuda.is_available():
        return f"{name}, {torch.cuda.get_device_name(name)}"
    return f"{name}, {torch.get_num_threads()} thread(s)" if name == "cpu" else name
