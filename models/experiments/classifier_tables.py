"""The errors of a classifier, and the effect of deferring its uncertain inputs (§5.2).

Each function returns the rows of a table, with unformatted numbers, and some return a figure.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.band_plots import curve_panels
from experiments.detection import auroc
from experiments.standard_error import standard_error
from pyro_dropout.judging.decisions import cascade, defer, rejection_curve
from pyro_dropout.mathematics.errors import RangeError, ShapeError
from pyro_dropout.prediction.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


def error_table(
    answers: Mapping[str, Sequence[tuple[Any, Any]]],
    y: Tensor,
    *,
    group: str = "model",
    ways: tuple[str, str] = ("standard", "MC"),
) -> Rows:
    """Return the errors of two ways to predict, over seeds, and the gain of the second over the first, with its error.

    The gain varies with the seeds and with the inputs; the larger of the two standard errors is given.

    Args:
        answers: the two predictions of every seed, as returned by ``predict``, by the name of a model.
        y: the classes, (N,).
        group: what the models are, as the heading of the first column.
        ways: the names of the two ways.

    Returns:
        A row for each model: both errors in percent, the second's standard error over inputs (binomial) and over seeds,
        the gain in points with its standard error, and the mean log-likelihoods of an input in nats.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.classifier_tables import error_table
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 3), likelihood=pd.Categorical())
        >>> guide, x = pd.AutoDropout(model, keep=1.0), torch.randn(10, 2)
        >>> two = pd.predict(model, guide, x, method="standard"), pd.predict(model, guide, x, samples=5, seed=0)
        >>> (row,) = error_table({"none": [two, two]}, torch.zeros(10, dtype=torch.long))
        >>> row["standard %"] == row["MC %"], row["gain"], row["± gain"]  # without dropout the two ways are the same
        (True, 0.0, 0.0)
    """
    one, other = ways
    rows: Rows = []
    for name, seeds in answers.items():
        if len(seeds) < 2:
            raise RangeError(
                f"answers must hold at least two seeds of each model, for an error; {name!r} has {len(seeds)}."
            )
        wrong = torch.stack([torch.stack([(answer.probs.argmax(-1) != y).double() for answer in two]) for two in seeds])
        log_p = torch.tensor([[answer.log_prob(y).mean().item() for answer in two] for two in seeds]).mean(0).tolist()
        (first, second), gain = wrong.mean((0, 2)).tolist(), wrong[:, 0] - wrong[:, 1]  # wrong is (seeds, 2, N)
        shares = {f"{one} %": first, f"{other} %": second, "± binomial": (second * (1 - second) / len(y)) ** 0.5}
        shares |= {"± over seeds": standard_error(wrong[:, 1].mean(1)).item(), "gain": gain.mean().item()}
        shares["± gain"] = max(standard_error(gain.mean(1)).item(), standard_error(gain.mean(0)).item())
        percent = {column: 100 * share for column, share in shares.items()}
        rows.append({group: name, **percent, f"{one} log p": log_p[0], f"{other} log p": log_p[1]})
    return rows


def detection_row(
    ordinary: Mapping[str, Tensor], odd: Mapping[str, Tensor], misled: Tensor, *, fewest: int = 20
) -> dict[str, Any]:
    """Return how well uncertainties detect changed inputs, and those among them that mislead the model.

    Args:
        ordinary: uncertainties of unchanged inputs, (N,), by name.
        odd: the same for the changed inputs, (M,).
        misled: which of the changed inputs are misclassified but would be right unchanged, (M,).
        fewest: least number of misled inputs for an AUROC; with fewer it is given as 0.5.

    Returns:
        The number of misled inputs, the mean uncertainties of the changed inputs, the AUROC of separating all of them
        from ordinary ones, and that of separating the misled ones, which is the purpose of a detector.

    Example:
        >>> import torch
        >>> from experiments.classifier_tables import detection_row
        >>> calm, moved = {"entropy": torch.tensor([0.1, 0.2])}, {"entropy": torch.tensor([0.15, 0.9])}
        >>> row = detection_row(calm, moved, torch.tensor([False, True]), fewest=1)
        >>> row["misled"], row["AUROC, entropy"], row["misled, entropy"]
        (1, 0.75, 1.0)
    """
    count = int(misled.sum())
    row: dict[str, Any] = {"misled": count, **{name: value.mean().item() for name, value in odd.items()}}
    row |= {f"AUROC, {name}": auroc(value, ordinary[name]).value for name, value in odd.items()}
    told = {name: auroc(value[misled], ordinary[name]).value if count >= fewest else 0.5 for name, value in odd.items()}
    return row | {f"misled, {name}": value for name, value in told.items()}


def detection_figure(rows: Rows, uncertainties: Sequence[str]) -> "Figure":
    """Draw error, uncertainty and detection against the size ε of a change, a row of panels for each.

    Args:
        rows: of ``detection_row``, with the columns "attack", "ε" and "MC error %" beside it.
        uncertainties: their names.

    Example:
        >>> from experiments.classifier_tables import detection_figure
        >>> row = {"attack": "noise", "MC error %": 3.0, "entropy": 0.1, "AUROC, entropy": 0.6}
        >>> figure = detection_figure([row | {"ε": e} for e in (0.0, 0.1)], ["entropy"])
        >>> [axes.get_title() for axes in figure.axes]
        ['noise: error (%)', 'noise: uncertainty (nats)', 'noise: AUROC']
    """
    attacks = dict.fromkeys(row["attack"] for row in rows)
    parts = (
        ("error (%)", "", ["MC error %"]),
        ("uncertainty (nats)", "", uncertainties),
        ("AUROC", "AUROC, ", uncertainties),
    )
    curves: dict[str, dict[str, tuple[object, ...]]] = {}
    for (part, prefix, names), attack in product(parts, attacks):
        found = [row for row in rows if row["attack"] == attack]
        at = [row["ε"] for row in found]
        curves[f"{attack}: {part}"] = {name: (at, [row[prefix + name] for row in found]) for name in names}
    return curve_panels(curves, xlabel="ε", columns=3, size=(3.8, 2.5))


def rejection_table(
    answers: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]],
    *,
    group: str = "model",
    shares: Sequence[float] = (1.0, 0.99, 0.95),
) -> tuple[Rows, "Figure"]:
    """Return the error among the inputs kept when the most uncertain ones are deferred to a human.

    Args:
        answers: the uncertainty of each input and its error (1 for wrong, 0 for right), both (N,), by the name of a
            model and of the uncertainty.
        group: what the models are, as the heading of the first column.
        shares: of inputs kept, for the columns of the table.

    Returns:
        A row for each model and uncertainty: errors in percent, and the share of an oracle's gain over chance; and a
        figure of the error against the share kept, ± 2 standard errors, with a panel for each model.

    Example:
        >>> import torch
        >>> from experiments.classifier_tables import rejection_table
        >>> entropy, mistake = torch.tensor([0.1, 0.9, 0.3, 0.2]), torch.tensor([0.0, 1.0, 0.0, 0.0])
        >>> rows, _ = rejection_table({"LeNet": {"entropy": (entropy, mistake)}}, shares=(1.0, 0.75))
        >>> rows[0]["error % at 100%"], rows[0]["error % at 75%"], rows[0]["of the oracle's gain"]
        (25.0, 0.0, 1.0)
    """
    if not shares or not all(0 < share <= 1 for share in shares):
        raise RangeError(f"shares of inputs kept must lie in (0, 1]; got {list(shares)!r}.")
    rows: Rows = []
    panels: dict[str, dict[str, tuple[Tensor, ...]]] = {}
    for name, by_uncertainty in answers.items():
        panel = panels.setdefault(f"{group}: {name}", {})
        for by, (uncertainty, mistake) in by_uncertainty.items():
            curve = rejection_curve(uncertainty, mistake, higher_is_better=False)
            kept = {share: mistake[~defer(uncertainty, budget=1 - share)].double() for share in shares}
            errors = {f"error % at {share:.0%}": 100 * part.mean().item() for share, part in kept.items()}
            rows.append({group: name, "by": by, **errors, "of the oracle's gain": curve.ratio})
            panel[by] = 100 * curve.kept, 100 * curve.score, 200 * curve.error
    figure = curve_panels(panels, xlabel="inputs kept (%)", ylabel="error among them (%)", size=(5.0, 4.0))
    for axes, panel in zip(figure.axes, panels.values(), strict=True):
        worst = max(float(score[-1]) for _, score, _ in panel.values())
        axes.set(xlim=(80, 100), ylim=(0, 1.8 * worst + 1e-3))  # deferring more than a fifth is impractical
    return rows, figure


def cascade_table(
    weak: Callable[[Tensor], Prediction],
    strong: Callable[[Tensor], Prediction],
    x: Tensor,
    y: Tensor,
    *,
    budgets: Sequence[float],
    costs: tuple[float, float] = (1.0, 10.0),
) -> tuple[Rows, "Figure"]:
    """Return cost and error of a cascade of two classifiers, for each share of inputs deferred to the strong one.

    Args:
        weak: returns the prediction of a cheap model for inputs; called once, with all of them.
        strong: the same for an expensive model; called once with all inputs, for a budget of 1.
        x: inputs, (N, ...).
        y: their classes, (N,).
        budgets: shares of the inputs deferred, each from 0 to 1.
        costs: of one prediction by the weak and by the strong model, in any unit.

    Returns:
        A row for each budget: the mean cost of an input, as a share of the strong model's, and errors in percent if
        the weak model's entropy decides what is deferred, and if chance does; and a figure of them.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from experiments.classifier_tables import cascade_table
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 3), likelihood=pd.Categorical())
        >>> guide = pd.AutoDropout(model, keep=0.5)
        >>> weak, strong = (lambda x, T=T: pd.predict(model, guide, x, samples=T, seed=0) for T in (5, 500))
        >>> x, y = torch.randn(10, 2), torch.zeros(10, dtype=torch.long)
        >>> rows, figure = cascade_table(weak, strong, x, y, budgets=(0.0, 0.5, 1.0))
        >>> [row["cost"] for row in rows]
        [0.1, 0.6, 1.1]
    """
    if not budgets:
        raise ShapeError("budgets must hold at least one share of the inputs; it is empty.")
    known: dict[str, Prediction] = {"weak": weak(x)}

    def all_or_some(part: Tensor) -> Prediction:
        if len(part) < len(x):
            return strong(part)
        if "strong" not in known:
            known["strong"] = strong(part)
        return known["strong"]

    orders: dict[str, Any] = {"entropy": "entropy", "chance": lambda answer: torch.rand_like(answer.entropy)}
    rows: Rows = []
    for budget in budgets:
        row: dict[str, Any] = {"sent on %": 100 * budget}
        for name, order in orders.items():
            pair = (lambda _: known["weak"]), all_or_some
            found = cascade(*pair, x, budget=budget, uncertainty=order, costs=costs)
            row |= {"cost": found.cost / (costs[1] * len(x)), f"error % by {name}": 100 * (1 - found.accuracy(y))}
        rows.append(row)
    cost = [row["cost"] for row in rows]
    curves = {f"sent on by {name}": (cost, [row[f"error % by {name}"] for row in rows]) for name in orders}
    xlabel = "mean cost of an input (the large model alone: 1)"
    figure = curve_panels({"": curves}, xlabel=xlabel, ylabel="error (%)", size=(6.5, 4.5))
    figure.axes[0].set_xscale("log")
    return rows, figure
