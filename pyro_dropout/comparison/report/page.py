"""A comparison as one self-contained page: findings, table, figures, diagnostics, and how to reproduce it."""

from typing import TYPE_CHECKING

from pyro_dropout.comparison.columns import REFERENCE
from pyro_dropout.comparison.figure import COLOURS, GREY
from pyro_dropout.comparison.layer_gaps import MUCH, NEGLIGIBLE, layer_gaps
from pyro_dropout.comparison.report.figures import band_pictures, calibration_picture, gap_picture, rejection_picture
from pyro_dropout.comparison.report.rendering import render, verbatim
from pyro_dropout.comparison.report.table import score_table, swatches
from pyro_dropout.comparison.report.text import again, facts, findings, gap_table, khat_lines

if TYPE_CHECKING:
    from pyro_dropout.comparison.findings import Comparison

_TITLE = "Posterior approximations compared"


def page(comparison: "Comparison") -> str:
    """Return the whole page, which is self-contained."""
    settings = comparison.settings
    doubt = {"Calibration": calibration_picture(comparison), "Rejection": rejection_picture(comparison)}
    content = {  # by section; a section without content is left out
        "found": findings(comparison),
        "scores": score_table(comparison),
        "predictions": band_pictures(comparison),
        "doubt": {name: picture for name, picture in doubt.items() if picture is not None},
        "kl": _kl(comparison),
        "khat": khat_lines(comparison),
        "run": {"facts": facts(comparison), "again": again(comparison), "model": str(settings.get("model", ""))},
    }
    return render(
        "page.html.jinja",
        title=str(settings.get("title", _TITLE)),
        note=str(settings.get("note") or ""),
        style=verbatim("style.css") + render("swatches.css.jinja", colours=COLOURS, grey=GREY),
        script=verbatim("sort.js"),
        swatches=swatches(comparison),
        content=content,
    )


def _kl(comparison: "Comparison") -> dict[str, object]:
    layers = {row.name: layer_gaps(row.trained[0][1]) for row in comparison.rows if row.trained}
    layers.pop(REFERENCE, None)
    if not layers:
        return {}
    table, picture = gap_table(comparison, layers), gap_picture(comparison, layers)
    return {"table": table, "picture": picture, "negligible": NEGLIGIBLE, "much": MUCH}
