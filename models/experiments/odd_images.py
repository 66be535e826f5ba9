"""Images that are not digits, and how well each posterior of a classifier tells them from digits.

Pixels or patches are shuffled within each image, so that an odd image has the brightness of an ordinary one; and whole
digits are turned by 90°, which leaves a few of them digits (0 and 8).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.experiment import Experiment
from experiments.figures import curve_panels
from experiments.summaries import standard_error
from pyro_dropout.judging.out_of_distribution import separation
from pyro_dropout.judging.scores.class_calibration import ece
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Figure

Rows = list[dict[str, Any]]
Run = tuple[Any, Any]  # a model and its posterior
_PATCH = 7  # pixels along a side: 16 patches in an image of 28
_CLEAR = 2.0  # standard errors from which a difference counts
_ROUNDING = 1e-6  # nats; the mutual information of a single network is zero up to this


def odd_images(images: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Return images that are not digits, made from digits, by the name of what was done to them."""
    random = torch.Generator().manual_seed(seed)
    turned = torch.rot90(images, 1, (-2, -1)).contiguous()
    return {
        "pixels shuffled": _shuffled(images, 1, random),
        "patches shuffled": _shuffled(images, _PATCH, random),
        "turned by 90°": turned,
    }


def _shuffled(images: Tensor, size: int, random: torch.Generator) -> Tensor:
    """Return the squares of ``size`` pixels of each image in a random order of its own."""
    count, channels, height, width = images.shape
    down, across = height // size, width // size
    # (N, channels, down, size, across, size) -> (N, squares, channels, size, size)
    squares = images.reshape(count, channels, down, size, across, size).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(count, down * across, generator=random, device="cpu").argsort(-1).to(images.device)
    moved = squares[torch.arange(count, device=images.device)[:, None], order].unflatten(1, (down, across))
    found: Tensor = moved.permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    return found


def score_table(answers: Mapping[str, Sequence[Prediction]], y: Tensor) -> Rows:
    """Return the scores of posteriors on digits, means over training runs."""
    rows: Rows = []
    for name, runs in answers.items():
        wrong = torch.stack([100 * (run.probs.argmax(-1) != y).double() for run in runs])
        log_p = torch.stack([run.log_prob(y).double() for run in runs])
        row: dict[str, Any] = {"posterior": name, "runs": len(runs)}
        for title, each in (("error %", wrong), ("log p", log_p)):
            row |= {title: each.mean().item(), f"± {title.removesuffix(' %')}": _error(each)}
        rows.append(row | {"ECE": sum(ece(run, y) for run in runs) / len(runs)})
    return rows


def _error(values: Tensor) -> float:
    """Return the standard error of a mean over images, or over runs if that is larger; values are (runs, N)."""
    by_image = standard_error(values.mean(0)).item()
    return by_image if len(values) < 2 else max(by_image, standard_error(values.mean(1)).item())


def detection_table(
    digits: Mapping[str, Sequence[Prediction]], odd: Mapping[str, Mapping[str, Sequence[Prediction]]]
) -> Rows:
    """Return how well uncertainties tell odd images from digits, means over training runs."""
    rows: Rows = []
    for name, runs in digits.items():
        for by in ("entropy", "mutual_information"):
            if by == "mutual_information" and all(float(run.mutual_information.max()) < _ROUNDING for run in runs):
                continue
            row: dict[str, Any] = {"posterior": name, "by": by.replace("_", " ")}
            for kind, others in odd.items():
                found = [separation(getattr(b, by), getattr(a, by)) for a, b in zip(others[name], runs, strict=True)]
                values = torch.tensor([each.auroc for each in found])
                errors = [max(each.error for each in found)]
                errors += [standard_error(values).item()] if len(values) > 1 else []
                row |= {kind: values.mean().item(), f"± {kind}": max(errors)}
            rows.append(row)
    return rows


def verdict_of_detection(rows: Rows, kinds: Sequence[str], better: str, than: str) -> tuple[list[bool], str]:
    """Judge whether one posterior tells odd images from digits better than another, by their entropy."""
    by_name = {row["posterior"]: row for row in rows if row["by"] == "entropy"}
    one, other = by_name[better], by_name[than]
    clear, said = [], []
    for kind in kinds:
        gain, error = one[kind] - other[kind], (one[f"± {kind}"] ** 2 + other[f"± {kind}"] ** 2) ** 0.5
        clear.append(gain > _CLEAR * error)
        said.append(f"{kind}: {other[kind]:.3f} to {one[kind]:.3f}, {gain:+.3f} ± {error:.3f}")
    return clear, "AUROC by entropy, " + "; ".join(said)


def entropy_figure(
    digits: Mapping[str, Sequence[Prediction]], odd: Mapping[str, Mapping[str, Sequence[Prediction]]]
) -> Figure:
    """Draw the share of images whose entropy is below a value, a panel for each posterior (its first run)."""
    at = torch.linspace(0, 2.3, 200, dtype=torch.float64)  # log 10 is the largest entropy of ten classes
    panels = {}
    for name, runs in digits.items():
        sets = {"digits": runs[0]} | {kind: others[name][0] for kind, others in odd.items()}
        panels[name] = {
            kind: (at, torch.searchsorted(run.entropy.double().sort().values.cpu(), at) / len(run.entropy))
            for kind, run in sets.items()
        }
    how: dict[str, Any] = {"xlabel": "entropy of the prediction (nats)", "ylabel": "share of images below"}
    return curve_panels(panels, columns=3, size=(3.6, 2.9), share=True, **how)


def judge_detection(
    experiment: Experiment,
    posteriors: Mapping[str, Sequence[Run]],
    x: Tensor,
    y: Tensor,
    better: Sequence[str],
    **how: Any,
) -> None:
    """Record the scores of posteriors on digits, how well each detects odd images, and whether some are better."""

    def asked(images: Tensor) -> dict[str, list[Prediction]]:
        options = {"seed": experiment.args.seed, **how}
        return {name: [predict(*run, images, **options) for run in runs] for name, runs in posteriors.items()}

    digits, odd = asked(x), {kind: asked(each) for kind, each in odd_images(x, experiment.args.seed).items()}
    note = f"{len(x)} images; log p in nats; standard errors over images, or over training runs where larger."
    experiment.table("Posteriors of one network", score_table(digits, y), note)
    rows = detection_table(digits, odd)
    experiment.table("AUROC of images that are not digits", rows, "Against the test digits, by the uncertainty named.")
    for name in better:
        clear, said = verdict_of_detection(rows, list(odd), name, next(iter(posteriors)))
        experiment.claim(f"{name} detects images that are not digits better than a single network", clear, said)
    experiment.figure("odd", entropy_figure(digits, odd), "Entropy of the predictions for digits and for other images.")
