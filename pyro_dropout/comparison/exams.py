"""What is asked of every posterior in a comparison: predictions at the test data, and scores.

A posterior should be less certain where there is no data. Outside the data most approximations are; in gaps between
clusters many are not, and scores on held-back data from the same region do not show it. So uncertainty is measured in
gaps between the data and outside them as well.
"""

import contextlib
import sys
import warnings
from dataclasses import dataclass, replace

import pyro
import torch
from torch import Tensor

from pyro_dropout import registry
from pyro_dropout.errors import PyroDropoutError, SingularError
from pyro_dropout.generative.inputs import AnyInputs, takes_all
from pyro_dropout.generative.likelihoods.moments import is_class, is_normal
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.observed_sites import check_whole, observed_sites, trace_of, value_of
from pyro_dropout.generative.process_state import forked
from pyro_dropout.judging.diagnostics.elbo_report import elbo_report
from pyro_dropout.judging.diagnostics.inference_data import khat
from pyro_dropout.judging.scores.distance import predictive_distance
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.site_prediction import SitePrediction
from pyro_dropout.protocols import Message, PyroModel, Record

_PAIRS = 4000
_KEPT = 50
_FAR = 3.0


def between(x: Tensor, *, seed: int = 0) -> Tensor:
    """Return points between data points that lie farthest from all of them, (50, ...).

    Each is a convex combination of two data points, so they lie in the data's convex hull; with one input they fill the
    widest gap.
    """
    flat = x.reshape(len(x), -1).double().cpu()  # the same points on every device
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(len(x), (_PAIRS,), generator=generator, device="cpu") for _ in range(2))
    share = torch.rand(_PAIRS, 1, generator=generator, dtype=torch.float64, device="cpu")
    points = share * flat[first] + (1 - share) * flat[second]
    unit = _unit(flat)
    nearest = torch.cat([torch.cdist(part / unit, flat / unit).amin(1) for part in points.split(512)])
    found = points[nearest.topk(_KEPT).indices]
    return found.reshape(-1, *x.shape[1:]).to(x)


def outside(x: Tensor) -> Tensor:
    """Return the data points farthest from the centre, moved to three times their distance from it, (50, ...)."""
    flat = x.reshape(len(x), -1).double()
    middle = flat.mean(0)
    farthest = ((flat - middle) / _unit(flat)).norm(dim=1).topk(min(_KEPT, len(x))).indices
    found = middle + _FAR * (flat[farthest] - middle)
    return found.reshape(-1, *x.shape[1:]).to(x)


def over(there: float, here: float, unit: float) -> float:
    """Return a standard deviation over another, 1 if both are less than rounding in the unit of y."""
    rounding = 1e-12 * unit or sys.float_info.min
    return (there + rounding) / (here + rounding)


def _unit(flat: Tensor) -> Tensor:
    """Return the standard deviation of each column, 1 for a constant one."""
    std = flat.std(0)
    return torch.where(std > 0, std, 1.0)


Scores = dict[str, float | Tensor]

_GRID = 400  # points of a curve
_TAIL = 200  # least number of draws, for the tail of the importance ratios
_UNDEFINED = "undefined, σ = 0"  # for the whole guide, or for a point-mass site


@dataclass(frozen=True)
class Exam:
    """The predictions and scores of posteriors.

    Attributes:
        call: the training data as the model's arguments, (x, y) of a network.
        asked: the test data in the same form.
        samples: draws of every prediction.
        reference: what the reference predicts at the test data.
        seed: of the draws.
        method: how networks predict.
    """

    call: ModelCall
    asked: ModelCall
    samples: int
    reference: Prediction | None = None
    seed: int = 0
    method: str = "mc"

    def answers(self, model: PyroModel, posterior: object) -> tuple[Scores, Prediction | None]:
        """Return the scores that need predictions only, and the prediction at the test data; None for several sites."""
        scores, answer = (self._of_network if is_network(model) else self._of_sites)(model, posterior)
        if answer is not None and self.reference is not None:
            kind = answer.target_distribution
            if is_normal(kind) or is_class(kind) or isinstance(answer, SitePrediction):  # the distance is known
                apart = predictive_distance(answer, self.reference)
                scores |= {"d_mean": apart.mean, "d_std": apart.std, "d_w1": apart.wasserstein}
        return scores, answer

    def predict(self, model: PyroModel, posterior: object, x: AnyInputs) -> Prediction:
        """Predict with shared draws (one function for all points), which every posterior supports."""
        how: Record = {"method": self.method, "shared": self.method == "mc"}  # no score is of several points together
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the network's own noise")  # see above
            found: Prediction = predict(
                model, posterior, x, samples=self.samples, seed=self.seed, keep_samples=True, **how
            )
        return found

    def _of_network(self, model: PyroModel, posterior: object) -> tuple[Scores, Prediction]:
        (x, _), (test, y) = self.call.args, self.asked.args
        answer = self.predict(model, posterior, test)
        scores = held_out_scores(answer, y)
        # Token ids, several inputs and graphs have no points between them.
        if isinstance(x, Tensor) and x.is_floating_point() and not takes_all(model):
            here, unit = self._doubt(model, posterior, x)
            for name, points in (("between", between(x)), ("outside", outside(x))):
                scores[name] = over(self._doubt(model, posterior, points)[0], here, unit)
        return scores, answer

    def _of_sites(self, model: PyroModel, posterior: object) -> tuple[Scores, Prediction | None]:
        call = replace(self.asked, model=model)
        how: Record = {"samples": self.samples, "seed": self.seed, "keep_samples": True, **call.kwargs}
        predicted = predict(model, posterior, *call.args, **how)
        found = predicted if isinstance(predicted, dict) else {predicted.site: predicted}
        data = _data(call)
        each = {name: found[name].log_prob(value_of(site)) for name, site in data.items()}
        seen = {name: _seen(site, each[name]) for name, site in data.items()}
        total = sum(float(torch.where(seen[name], value, 0.0).sum()) for name, value in each.items())
        scores: Scores = {"log_lik": total / max(1, sum(int(mask.sum()) for mask in seen.values()))}
        if len(data) > 1:
            return scores, None
        ((name, site),) = data.items()
        if bool(seen[name].all()):
            scores = held_out_scores(found[name], value_of(site)) | scores
        return scores, found[name]

    def curve(self, answer: Prediction, model: PyroModel, posterior: object) -> tuple[Tensor, ...] | None:
        """Return the bands of a network along one input; None for several inputs or targets, or for classes."""
        if not is_network(model):
            return None
        x, test = self.call.args[0], self.asked.args[0]
        if not isinstance(x, Tensor) or not isinstance(test, Tensor) or not x.is_floating_point() or takes_all(model):
            return None
        if x.dim() != 2 or not x.shape[1] == answer.mean.shape[1] == 1 or not is_normal(answer.target_distribution):
            return None
        low, high = (float(end) for end in torch.cat([x, test]).aminmax())
        margin = 0.12 * (high - low)
        grid = torch.linspace(low - margin, high + margin, _GRID, dtype=x.dtype).unsqueeze(-1)
        found = self.predict(model, posterior, grid)
        parts = (grid, found.mean, *found.interval(0.95), found.epistemic.sqrt())
        return tuple(part.detach().cpu().squeeze(-1) for part in parts)

    def _doubt(self, model: PyroModel, posterior: object, x: Tensor) -> tuple[float, float]:
        """Return the mean epistemic standard deviation at some points, and that of y."""
        found = self.predict(model, posterior, x[:500])
        return float(found.epistemic.double().sum(-1).sqrt().mean()), float(found.std.mean())


def bounds_of(call: ModelCall, guide: object, samples: int, seed: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the scores of a guide that need its density, and why some of them do not exist."""
    how: Record = {"seed": seed, **call.kwargs}
    report = elbo_report(call.model, guide, *call.args, samples=min(100, samples), **how)
    scores = {"objective": report.objective}
    if report.elbo is None or report.kl_gap is None:
        return scores, dict.fromkeys(("elbo", "gap", "khat"), _UNDEFINED)
    scores |= {"elbo": report.elbo, "gap": report.kl_gap}
    try:
        scores["khat"] = khat(call.model, guide, *call.args, samples=max(_TAIL, samples), **how)
    except SingularError:
        return scores, {"khat": _UNDEFINED}
    return scores, {}


def held_out_scores(prediction: Prediction, y: Tensor) -> Scores:
    """Return every registered score that targets of this kind have: a number, or one for each held-back point."""
    kinds = {"any", "classes" if is_class(prediction.target_distribution) else "numbers"}
    kinds |= {"normal"} if is_normal(prediction.target_distribution) else set()
    found: Scores = {}
    for entry in (each for each in registry.scores().values() if kinds & set(each.of)):
        with contextlib.suppress(PyroDropoutError):  # this noise has no such score
            found[entry.name] = entry.compute(prediction, y)
    return found


def off_level(held: float, count: int, level: float = 0.95) -> str:
    """Return whether intervals that contain this share of ``count`` targets are too "narrow" or too "wide".

    "" if calibrated intervals would miss their level by as much more often than once in a hundred times.

    Example:
        >>> off_level(0.5, 40), off_level(1.0, 40), off_level(1.0, 400)
        ('narrow', '', 'wide')
    """
    if abs(held - level) <= 2.6 * (level * (1 - level) / count) ** 0.5:
        return ""
    return "narrow" if held < level else "wide"


def check_sites(train: ModelCall, test: ModelCall) -> None:
    """Raise before training if a Pyro model does not accept the data, or observes nothing with them."""
    names = []
    for name, call in (("train", train), ("test", test)):
        try:
            call.check_bound()
            names.append(sorted(_data(call)))
        except PyroDropoutError as cause:
            raise type(cause)(f"{name}: {str(cause).splitlines()[0]}") from None
        if not names[-1]:
            raise PyroDropoutError(f"{name}: the model observes nothing with these arguments. Give it its data.")
    if names[0] != names[1]:
        raise PyroDropoutError(f"train and test must be data of the same sites; got {names[0]} and {names[1]}.")


def _data(call: ModelCall) -> dict[str, Message]:
    """Return the observed sites of a call, leaving random states and parameters unchanged."""
    with torch.no_grad(), forked(), pyro.get_param_store().scope():
        trace = trace_of(call)
    check_whole(trace)
    return observed_sites(trace)


def numbered(call: ModelCall) -> tuple[Tensor, Tensor]:
    """Return the indices of the points of a Pyro model, and their data."""
    found = [value_of(site) for site in _data(call).values()]
    y = found[0] if len(found) == 1 else torch.cat([value.reshape(-1).double() for value in found])
    return torch.arange(max(1, len(y) if y.dim() else 1)), y


def _seen(site: Message, like: Tensor) -> Tensor:
    """Return which points of a site are not masked."""
    mask = site["mask"]
    return torch.ones_like(like, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(like.shape)
