"""A comparison as one page of HTML: what was found, the figures, the table, how to read it, how it was made."""

import base64
import html
import io
import platform
from importlib.metadata import version
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.note { color: #555; } img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
tbody th { text-align: left; font-weight: 600; } thead th { border-bottom: 2px solid #888; }
td.best { font-weight: 700; color: #00517d; } td.none { color: #777; font-style: italic; }
td.meaning { text-align: left; white-space: normal; min-width: 18rem; color: #555; font-size: 0.8rem; }
.failed { color: #a33; }
"""


_PRAISE = {
    "log_lik": "best test log-likelihood",
    "rmse": "smallest error of the mean",
    "accuracy": "highest accuracy",
}


def page(comparison: Any) -> str:
    """Return the whole page; it refers to nothing outside itself."""
    settings = comparison.settings
    title = html.escape(str(settings.get("title", "Posterior approximations compared")))
    parts = [
        f"<h1>{title}</h1>",
        f"<p class='note'>{html.escape(str(settings.get('note', '')))}</p>" if settings.get("note") else "",
        "<h2>What was found</h2>",
        "<ul>" + "".join(f"<li>{sentence}</li>" for sentence in findings(comparison)) + "</ul>",
        *_figures(comparison),
        "<h2>All scores</h2>",
        "<p class='note'>Each cell is the mean over seeds, ± its standard error over seeds (the choice of test points"
        " is not in it). The best guide of a line is bold where there is a better and a worse; a difference smaller"
        " than its errors is no difference.</p>",
        f"<div class='scroll'>{_table(comparison)}</div>",
        "<h2>How it was made</h2>",
        f"<p>{html.escape(_made(comparison))}</p>",
        f"<details><summary>The model</summary><pre>{html.escape(str(settings.get('model', '')))}</pre></details>",
    ]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{title}</title>"
    return (
        f"<!doctype html><html lang='en'><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def findings(comparison: Any) -> list[str]:
    """Return the main results in sentences, for those who read no table."""

    def said(name: str) -> str:
        return f"<b>{html.escape(name)}</b>"

    found = []
    for key, what in _PRAISE.items():
        name = comparison.best(key)
        if name is not None:
            row = next(row for row in comparison.rows if row.name == name)
            others = [other for other in comparison.rows if other is not row and key in other.scores]
            near = [said(other.name) for other in others if _close(row.scores[key], other.scores[key])]
            also = f" Within the errors of that: {', '.join(near)}." if near else ""
            found.append(f"{said(name)} has the {what}: {comparison.cell(row, key)}.{also}")
    if any("d_w1" in row.scores for row in comparison.rows):
        order = " · ".join(said(name) for name in comparison.ranking)
        found.append(f"From nearest to farthest from the reference's predictive distribution: {order}.")
    # what honest intervals would miss 95 % by, in one case of a hundred
    chance = 2.6 * (0.95 * 0.05 / comparison.test[1].numel()) ** 0.5
    for row in comparison.rows:
        cover = row.scores.get("coverage")
        if cover is not None and cover.values:
            verdict = "which fits 95 %"
            if abs(cover.mean - 0.95) > chance:
                verdict = "too sure of itself" if cover.mean < 0.95 else "too unsure"
            share = f"{100 * cover.mean:.0f} % of the held-back targets"
            found.append(f"{said(row.name)}: its 95 % intervals hold {share}, {verdict}.")
    far = [row for row in comparison.rows if "khat" in row.scores and row.scores["khat"].values]
    if far and all(row.scores["khat"].mean > 0.7 for row in far):
        found.append(
            "No guide is close to the posterior over weights: every k̂ is above 0.7. Networks have many equivalent"
            " weights, so predictions may be good all the same."
        )
    undefined = [said(row.name) for row in comparison.rows if _without_density(row)]
    if undefined:
        found.append(
            f"{', '.join(undefined)}: no ELBO and no k̂, for q has no density (σ = 0, or a weight that is a point);"
            " compare such guides by their predictions."
        )
    found += [
        f"<span class='failed'>{said(row.name)} {html.escape(row.note)}</span>" for row in comparison.rows if row.note
    ]
    return found


def _without_density(row: Any) -> bool:
    return "elbo" in row.scores and row.scores["elbo"].note.startswith("undefined")


def _close(one: Any, other: Any) -> bool:
    """Whether two scores differ by less than twice the error of their difference."""
    if one.error is None or other.error is None:
        return False
    return bool(abs(one.mean - other.mean) < 2 * (one.error**2 + other.error**2) ** 0.5)


def _figures(comparison: Any) -> list[str]:
    import matplotlib.pyplot as plt

    drawn = []
    if any(row.curve is not None for row in comparison.rows):
        drawn.append(("Predictions", "Predictive bands of every posterior along the input", comparison.plot()))
    if any(row.answer is not None for row in comparison.rows):
        drawn.append(("Calibration and scores", "Calibration curves and scores", comparison.plot_scores()))
    parts = []
    for heading, words, figure in drawn:
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=130, format="png")
        plt.close(figure)
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append(f"<h2>{heading}</h2><img alt='{words}' src='data:image/png;base64,{data}'>")
    return parts


def _table(comparison: Any) -> str:
    """Return the table with a line for each score, what it says beside it: guides are few and scores are many."""
    head = "".join(f"<th>{html.escape(row.name)}</th>" for row in comparison.rows)
    lines = []
    for key, column in comparison.columns.items():
        winner = comparison.best(key)
        cells = []
        for row in comparison.rows:
            score = row.scores.get(key)
            empty = score is None or not score.values
            kind = "none" if empty else "best" if winner == row.name else ""
            cells.append(f"<td class='{kind}'>{html.escape(comparison.cell(row, key))}</td>")
        meaning = f"<td class='meaning'>{html.escape(column.meaning)}</td>"
        lines.append(f"<tr><th>{html.escape(column.heading)}</th>{''.join(cells)}{meaning}</tr>")
    return f"<table><thead><tr><th></th>{head}<th></th></tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _made(comparison: Any) -> str:
    s = comparison.settings
    batch = "all points" if s["batch_size"] is None else f"{s['batch_size']} points"
    versions = ", ".join(f"{name} {version(name)}" for name in ("pyro-dropout", "torch", "pyro-ppl", "arviz"))
    return (
        f"Adam with learning rate {s['lr']:g}, {s['steps']} steps of {batch}, {s['seeds']} seed(s) for each guide,"
        f" {s['samples']} draws for each answer, reference: {s['reference']}. {len(comparison.train[0])} points to"
        f" train on and {len(comparison.test[0])} held back. {comparison.seconds:.0f} seconds in all, with {versions},"
        f" Python {platform.python_version()}."
    )
