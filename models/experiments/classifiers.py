"""The errors of a classifier, what deferring its uncertain inputs gains, and what uncertainty detects (§5.2)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.nn import functional

from experiments.figures import curve_panels
from experiments.summaries import standard_error
from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.judging.decisions import cascade, defer, rejection_curve
from pyro_dropout.judging.out_of_distribution import separation
from pyro_dropout.mathematics.shapes import Bool, Float
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Figure
from pyro_dropout.training.loss.per_example import per_example


def envelopes_overlap(f: Float[Tensor, "T N C"], level: float = 0.95) -> Bool[Tensor, " N"]:
    """Return where draws disagree on the class: whether the envelopes of the two largest softmax inputs overlap."""
    leader, second = f.gather(2, f.mean(0).topk(2).indices.expand(len(f), -1, -1)).unbind(-1)
    return leader.quantile((1 - level) / 2, 0) < second.quantile((1 + level) / 2, 0)


def loss_gradient(model: Any, guide: Any, x: Tensor, y: Tensor, *, draws: int | None = None) -> Tensor:
    """Return the gradient of minus the log-likelihood of each point with respect to its input.

    ``x + ε * loss_gradient(...).sign()`` is the fast gradient sign method of Goodfellow, Shlens and Szegedy (2015).
    """
    likelihood = likelihood_of(model)
    x = x.detach().clone().requires_grad_()
    if draws is None:
        count, rows = 1, x
        f = model.evaluate(guide.mean(), x)
    else:
        count, rows = draws, x.repeat(draws, *[1] * (x.dim() - 1))  # every copy of a point has its own draw
        with per_example():
            f = poutine.replay(model, trace=poutine.trace(guide).get_trace(rows))(rows)
    y = y.repeat(count, *[1] * (y.dim() - 1))
    loss = -likelihood.distribution(f).log_prob(likelihood.checked(f, y)).sum() / count
    return torch.autograd.grad(loss, x)[0]


def turned(images: Tensor, degrees: Float[Tensor, " A"]) -> Tensor:
    """Return images rotated anticlockwise about their centre."""
    (n, _, height, width), count = images.shape, len(degrees)
    cos, sin, zero = degrees.deg2rad().cos(), degrees.deg2rad().sin(), torch.zeros_like(degrees)
    # affine_grid runs from -1 to 1 along both sides, so rotating a non-square image needs their ratio.
    turns = torch.stack([cos, -sin * height / width, zero, sin * width / height, cos, zero], -1).reshape(count, 2, 3)
    grid = functional.affine_grid(turns.to(images).repeat(n, 1, 1), [n * count, 1, height, width], align_corners=False)
    found = functional.grid_sample(images.repeat_interleave(count, 0), grid, align_corners=False)
    every: Tensor = found.unflatten(0, (n, count))
    return every


Rows = list[dict[str, Any]]
Ask = Callable[[Tensor], Prediction]  # returns the prediction of a model for inputs


def error_table(answers: Mapping[str, Sequence[tuple[Any, Any]]], y: Tensor) -> Rows:
    """Return the errors of the standard prediction and of MC dropout, over seeds, and what the second gains.

    The gain varies with the seeds and with the inputs; the larger of the two standard errors is given.
    """
    rows: Rows = []
    for name, seeds in answers.items():
        wrong = torch.stack([torch.stack([(answer.probs.argmax(-1) != y).double() for answer in two]) for two in seeds])
        log_p = torch.tensor([[answer.log_prob(y).mean().item() for answer in two] for two in seeds]).mean(0).tolist()
        (first, second), gain = wrong.mean((0, 2)).tolist(), wrong[:, 0] - wrong[:, 1]  # wrong is (seeds, 2, N)
        shares = {"standard %": first, "MC %": second, "± binomial": (second * (1 - second) / len(y)) ** 0.5}
        shares |= {"± over seeds": standard_error(wrong[:, 1].mean(1)).item(), "gain": gain.mean().item()}
        shares["± gain"] = max(standard_error(gain.mean(1)).item(), standard_error(gain.mean(0)).item())
        percent = {column: 100 * share for column, share in shares.items()}
        rows.append({"dropout": name, **percent, "standard log p": log_p[0], "MC log p": log_p[1]})
    return rows


def detection_row(
    ordinary: Mapping[str, Tensor], odd: Mapping[str, Tensor], misled: Tensor, *, fewest: int = 20
) -> dict[str, Any]:
    """Return how well uncertainties detect changed inputs, and those among them that mislead the model."""
    count = int(misled.sum())
    row: dict[str, Any] = {"misled": count, **{name: value.mean().item() for name, value in odd.items()}}
    row |= {f"AUROC, {name}": separation(ordinary[name], value).auroc for name, value in odd.items()}
    told = {
        name: separation(ordinary[name], value[misled]).auroc if count >= fewest else 0.5 for name, value in odd.items()
    }
    return row | {f"misled, {name}": value for name, value in told.items()}


def detection_figure(rows: Rows, uncertainties: Sequence[str]) -> Figure:
    """Draw error, uncertainty and detection against the size ε of a change, a row of panels for each."""
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


def rejection_table(answers: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]) -> tuple[Rows, Figure]:
    """Return the error among the inputs kept when the most uncertain ones are deferred to a human.

    ``answers`` are the uncertainty of each input and its error, 1 or 0, by network and by uncertainty.
    """
    rows: Rows = []
    panels: dict[str, dict[str, tuple[Tensor, ...]]] = {}
    for name, by_uncertainty in answers.items():
        panel = panels.setdefault(f"dropout: {name}", {})
        for by, (uncertainty, mistake) in by_uncertainty.items():
            curve = rejection_curve(uncertainty, mistake, higher_is_better=False)
            kept = {share: mistake[~defer(uncertainty, budget=1 - share)].double() for share in (1.0, 0.99, 0.95)}
            errors = {f"error % at {share:.0%}": 100 * part.mean().item() for share, part in kept.items()}
            rows.append({"dropout": name, "by": by, **errors, "of the oracle's gain": curve.ratio})
            panel[by] = 100 * curve.kept, 100 * curve.score, 200 * curve.error
    figure = curve_panels(panels, xlabel="inputs kept (%)", ylabel="error among them (%)", size=(5.0, 4.0))
    for axes, panel in zip(figure.axes, panels.values(), strict=True):
        worst = max(float(score[-1]) for _, score, _ in panel.values())
        axes.set(xlim=(80, 100), ylim=(0, 1.8 * worst + 1e-3))  # deferring more than a fifth is impractical
    return rows, figure


def cascade_table(
    weak: Ask, strong: Ask, x: Tensor, y: Tensor, *, budgets: Sequence[float], costs: tuple[float, float]
) -> tuple[Rows, Figure]:
    """Return cost and error of a cascade of two classifiers, for each share of inputs deferred to the strong one."""
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
