"""A comparison as one self-contained page: findings, table, figures, diagnostics, and how to reproduce it."""

import html
from typing import Any

from pyro_dropout.comparison.columns import REFERENCE
from pyro_dropout.comparison.layer_gaps import MUCH, NEGLIGIBLE, LayerGap, layer_gaps
from pyro_dropout.comparison.report.figures import (
    Picture,
    band_pictures,
    calibration_picture,
    gap_picture,
    rejection_picture,
)
from pyro_dropout.comparison.report.style import SCRIPT, STYLE, policy
from pyro_dropout.comparison.report.table import meanings, table
from pyro_dropout.comparison.report.text import again, facts, findings, gap_table, khat_lines

__all__ = ["findings", "page"]

_TITLE = "Posterior approximations compared"


def page(comparison: Any) -> str:
    """Return the whole page, which is self-contained."""
    title = html.escape(str(comparison.settings.get("title", _TITLE)))
    sections = [
        ("found", "Findings", "Main findings", _list(findings(comparison))),
        ("scores", "Scores", "All scores", _scores(comparison)),
        ("predictions", "Predictions", "Predictions", _predictions(comparison)),
        ("doubt", "Calibration and rejection", "Is the uncertainty calibrated, and is it useful?", _doubt(comparison)),
        ("kl", "KL by layer", "Can the large-K form of the KL be used here?", _kl(comparison)),
        ("khat", "k̂", "How far is q from the posterior?", _khat(comparison)),
        ("run", "Run", "What was run, and how to reproduce it", _run(comparison)),
    ]
    shown = [section for section in sections if section[-1]]
    links = "".join(f'<a href="#{name}">{short}</a>' for name, short, _, _ in shown)
    note = comparison.settings.get("note")
    lead = f'<p class="lead">{html.escape(str(note))}</p>' if note else ""
    body = "".join(f'<section id="{name}"><h2>{heading}</h2>{text}</section>' for name, _, heading, text in shown)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1>{lead}<nav aria-label="Sections">{links}</nav></header>\n'
        f"<main>{body}</main>\n<footer>Made by pyro_dropout; this file is self-contained.</footer>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _list(sentences: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{sentence}</li>' for sentence in sentences)}</ul>" if sentences else ""


def _figures(pictures: list[Picture]) -> str:
    return f'<div class="figures">{"".join(picture.markup() for picture in pictures)}</div>' if pictures else ""


def _scores(comparison: Any) -> str:
    if not comparison.columns:
        return "<p>No guide could be scored.</p>"
    explained = f"<details><summary>What the columns mean</summary>{meanings(comparison)}</details>"
    return table(comparison) + explained


def _predictions(comparison: Any) -> str:
    pictures = band_pictures(comparison)
    if not pictures:
        return ""
    words = (
        "<p>The line is the predictive mean; the dark band is two epistemic standard deviations on either side, which"
        " more data would narrow; the light band should contain 95 % of the targets, noise included. Dots are training"
        " points and circles are held-back points. All panels show the first seed.</p>"
    )
    return words + _figures(pictures)


def _doubt(comparison: Any) -> str:
    pictures = [(name, draw(comparison)) for name, draw in _DOUBT]
    found = [(name, picture) for name, picture in pictures if picture is not None]
    if not found:
        return ""
    parts = "".join(f"<div><h3>{name}</h3>{picture.markup()}</div>" for name, picture in found)
    return f'<p>At the held-back points, with the first seed of each guide.</p><div class="figures">{parts}</div>'


_DOUBT = (("Calibration", calibration_picture), ("Rejection", rejection_picture))


def _kl(comparison: Any) -> str:
    layers: dict[str, list[LayerGap]] = {
        row.name: layer_gaps(row.trained[0][1]) for row in comparison.rows if row.trained and row.name != REFERENCE
    }
    if not layers:
        return ""
    picture = gap_picture(comparison, layers)
    words = (
        "<p>The paper's form of KL(q‖p) is too small by the gap E[H(z|w)]: the remaining uncertainty, given the"
        " weights, about which rows were dropped. It lies between 0 and H(z), and vanishes if the two components of a"
        f" row are many σ apart. The rule: up to {NEGLIGIBLE:g} nats the form is practically exact; up to {MUCH:g} nat"
        " it is good enough for training, but add the gap before comparing ELBOs, as the column ELBO does; beyond that"
        " it should not be used.</p>"
    )
    return words + gap_table(comparison, layers) + (picture.markup() if picture is not None else "")


def _khat(comparison: Any) -> str:
    lines = khat_lines(comparison)
    if not lines:
        return ""
    words = (
        "<p>k̂ is the shape of the tail of the importance ratios p(y, w)/q(w): below 0.5 q is close to the posterior,"
        " below 0.7 its draws can be reweighted, above that they cannot. Many weights of a network give the same"
        " function (swap two hidden units), and q covers one of them: k̂ may be large even if predictions are good."
        "</p>"
    )
    return words + _list(lines)


def _run(comparison: Any) -> str:
    told = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(what)}</dd>" for word, what in facts(comparison))
    model = str(comparison.settings.get("model", ""))
    shown = f"<details><summary>The model</summary><pre>{html.escape(model)}</pre></details>" if model else ""
    return f'<dl class="facts">{told}</dl><h3>Reproduce</h3><pre>{html.escape(again(comparison))}</pre>{shown}'
