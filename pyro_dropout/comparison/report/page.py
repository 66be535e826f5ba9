"""A comparison as one self-contained page: findings, table, figures, diagnostics, and how to reproduce it.

Every value in the templates of the page is escaped, except what another template made.
"""

import io
import platform
import re
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from hashlib import sha256
from importlib import resources
from importlib.metadata import version
from itertools import product

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pyro_dropout.comparison.exams import off_level
from pyro_dropout.comparison.figure import COLOURS, GREY, draw_bands, draw_scores
from pyro_dropout.comparison.findings import PAPER, REFERENCE, Findings, Score
from pyro_dropout.generative.likelihoods.moments import is_class
from pyro_dropout.prediction.tails import is_whole
from pyro_dropout.protocols import Figure
from pyro_dropout.registry import scores


@cache
def environment() -> Environment:
    """Return what makes pages from the templates of this folder."""
    found = Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined)
    found.trim_blocks = found.lstrip_blocks = found.keep_trailing_newline = True
    found.filters["sha256"] = lambda text: b64encode(sha256(text.encode()).digest()).decode()
    return found


def sentence(kind: str, **values: object) -> Markup:
    """Return a sentence of the page: a macro of ``sentences.html.jinja`` with these values filled in."""
    return Markup(getattr(environment().get_template("sentences.html.jinja").module, kind)(**values))


def minus(number: str) -> str:
    """Return a number with a typographic minus sign, which is as wide as a plus."""
    return f"−{number[1:]}" if number.startswith("-") else number


_FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"  # inside a quoted attribute


def picture(draw: Callable[[], Figure]) -> str:
    """Return a drawing as a small SVG in base64: fonts are the reader's, coordinates hundredths of a point."""
    import matplotlib.pyplot as plt

    # Text stays text, and the same comparison gives the same page.
    look = {"svg.fonttype": "none", "svg.hashsalt": "pyro_dropout", "savefig.dpi": 160}
    buffer = io.StringIO()
    with plt.style.context(["default", look]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font.*")  # the reader's font may have them
        figure = draw()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<text\b[^>]*>", lambda tag: re.sub(r"(font: [\d.]+px) [^;\"]*", rf"\1 {_FONT}", tag[0]), text)
    text = re.sub(r"<(?:path|use)\b[^>]*>", lambda tag: re.sub(r"(-?\d+\.\d\d)\d+", r"\1", tag[0]), text)
    return b64encode(text.encode()).decode()


_GROUPS: dict[str, tuple[str, ...]] = {
    "Uncertainty away from the data": ("between", "outside"),
    "Distance to the reference": ("d_mean", "d_std", "d_w1"),
    "Cost": ("parameters", "us", "seconds"),
}
_CALIBRATION = ("coverage", "interval", "crps", "ece", "brier")


def table_of(comparison: Findings, groups: Mapping[str, Iterable[str]]) -> dict[str, object]:
    """Return what the template of a table needs: the columns by group, and the cells by posterior."""
    known = {title: [key for key in comparison.columns if key in keys] for title, keys in groups.items()}
    known = {title: keys for title, keys in known.items() if keys}
    best = {key: comparison.leaders(key) for keys in known.values() for key in keys}
    rows: dict[str, list[dict[str, object]]] = {row.name: [] for row in comparison.rows}
    for row, (key, first) in product(comparison.rows, [(k, k == keys[0]) for keys in known.values() for k in keys]):
        score, (value, _, error) = row.scores.get(key, Score()), comparison.cell(row, key).partition(" ± ")
        kinds = {"first": first, "none": not score.values, "best": row.name in best[key]}
        text = minus(value) if score.values else value
        rows[row.name].append({"text": text, "error": error, "kinds": [kind for kind, is_so in kinds.items() if is_so]})
    columns = [(title, [comparison.columns[key] for key in keys]) for title, keys in known.items()]
    return {"seeds": comparison.settings.get("seeds", 1), "groups": columns, "rows": rows}


_PRAISE = {"log_lik": "best test log-likelihood", "rmse": "smallest error of the mean", "accuracy": "highest accuracy"}


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


# --- the page ---------------------------------------------------------------------------------------------------------


def facts(comparison: Findings) -> dict[str, str]:
    """Return the settings of the run by name."""
    s = comparison.settings
    found = {"data": f"{len(comparison.train[0])} training points, {len(comparison.test[0])} held back"}
    found |= {f"recipe of {name}": told for name, told in s.get("recipes", {}).items()}
    if "steps" in s:
        falling = f" with the schedule {s['schedule']}" if s.get("schedule") else ""
        batch = "all points" if s["batch_size"] is None else f"{s['batch_size']} points"
        usual = "ELBO(), with the large-K form and the temperature of the prior"
        found["training"] = f"Adam, learning rate {s['lr']:g}{falling}, {s['steps']} steps of {batch} for each guide"
        found["objective"] = usual if s["loss"] is None else repr(s["loss"])
    if "samples" in s:
        found["seeds"] = ", ".join(str(seed) for seed in s.get("which_seeds", range(s["seeds"])))
        linearised = f"; linearised: {', '.join(s['method'])}" if s.get("method") else ""
        found["predictions"] = f"{s['samples']} draws of the weights for each{linearised}"
        found["reference"] = str(s["reference"])
    kinds = {
        row.name: type(row.trained[0][1]).__name__ if row.trained else "nothing trained" for row in comparison.rows
    }
    found["guides"] = "; ".join(f"{name} ({kind})" for name, kind in kinds.items() if name != REFERENCE)
    if "device" in s:
        found["device"] = str(s["device"])
        if found["device"].startswith("cuda") and torch.cuda.is_available():
            found["device"] += f", {torch.cuda.get_device_name(found['device'])}"
        elif found["device"] == "cpu":
            found["device"] += f", {torch.get_num_threads()} thread(s)"
    found["time"] = f"{comparison.seconds:.0f} s in total" + (f", finished {s['when']}" if "when" in s else "")
    versions = [f"{name} {version(name)}" for name in ("pyro-dropout", "torch", "pyro-ppl", "arviz", "numpy")]
    found["versions"] = ", ".join([*versions, f"Python {platform.python_version()}", platform.system()])
    return found


def page(comparison: Findings) -> str:
    """Return the whole page, which is self-contained."""
    settings, keys = comparison.settings, set(comparison.columns) - set(PAPER)
    groups: dict[str, Iterable[str]] = {"Predictions of held-back data": tuple(scores()), **_GROUPS}
    groups["Other"] = keys - {key for group in groups.values() for key in group}
    groups = {title: keys & set(group) for title, group in groups.items()}
    more = ("log_lik",) if "accuracy" in keys else ()
    calibration = table_of(comparison, {"At the held-back points": (*more, *_CALIBRATION)})
    drawing = picture(partial(draw_scores, comparison)) if comparison.answers else ""
    kinds = [answer.target_distribution for answer in comparison.answers.values()]
    doubt = {"table": calibration, "picture": drawing, "classes": any(map(is_class, kinds))}
    doubt["whole"] = any(map(is_whole, kinds))
    # Only those who compare q(w) with p(w|y) need this part.
    undefined = [row.name for row in comparison.rows if row.scores.get("elbo", Score()).note.startswith("undefined")]
    said = [sentence("no_density", names=undefined)] if undefined else []
    paper = table_of(comparison, {"As an approximation of p(w|y)": PAPER})
    content = {  # by section; a section without content is left out
        "found": findings(comparison),
        "scores": table_of(comparison, groups),
        "predictions": picture(partial(draw_bands, comparison)) if comparison.curves else "",
        "doubt": doubt if drawing or calibration["groups"] else {},
        "paper": {"table": paper, "undefined": said, "own_models": "recipes" in settings} if paper["groups"] else {},
        "run": {"facts": facts(comparison), **{key: str(settings.get(key, "")) for key in ("command", "model")}},
    }
    return rendered(
        "page.html.jinja",
        [row.name for row in comparison.rows if row.name != REFERENCE],
        title=str(settings.get("title", "Posterior approximations compared")),
        note=str(settings.get("note") or ""),
        content=content,
    )


def rendered(template: str, guides: list[str], **values: object) -> str:
    """Return a page from a template, with its style, and the colour of every posterior's dot, that of its figures."""
    style = resources.files(__package__).joinpath("templates", "style.css").read_text("utf-8")
    style += environment().get_template("swatches.css.jinja").render(colours=COLOURS, grey=GREY)
    swatches = {REFERENCE: "reference"} | {name: f"c{k % len(COLOURS)}" for k, name in enumerate(guides)}
    return environment().get_template(template).render(style=Markup(style), swatches=swatches, **values)
