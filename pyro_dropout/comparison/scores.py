"""The scores of a comparison: predictions of each posterior, and the cells of its row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dropout import registry
from pyro_dropout.comparison.probes import between, outside, over
from pyro_dropout.generative.inputs import AnyInputs, takes_all
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.judging.diagnostics.elbo_report import elbo_report
from pyro_dropout.judging.diagnostics.inference_data import khat
from pyro_dropout.judging.scores.distance import predictive_distance
from pyro_dropout.mathematics.errors import SingularError
from pyro_dropout.prediction.moments import is_class, is_normal
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import PyroModel, Record

_GRID = 400  # points of a curve
_TAIL = 200  # least number of draws, for the tail of the importance ratios
_UNDEFINED = "undefined, σ = 0"  # for the whole guide, or for a point-mass site


@dataclass(frozen=True)
class Exam:
    """The predictions and scores that are computed for every posterior.

    Attributes:
        train: (x, y).
        test: (x, y).
        samples: draws of the weights for each prediction.
        reference: the reference's prediction at the test points, if there is one.
        seed: of the draws.
        method: of ``predict``.
    """

    train: tuple[AnyInputs, Tensor]
    test: tuple[AnyInputs, Tensor]
    samples: int
    reference: Prediction | None = None
    seed: int = 0
    method: str = "mc"

    @property
    def call(self) -> ModelCall:
        """The training data as arguments of a network."""
        return ModelCall(None, self.train)

    def predict(self, model: PyroModel, posterior: object, x: AnyInputs) -> Prediction:
        """Predict with shared draws (one function for all points), which every posterior supports."""
        how: Record = {"method": self.method, "shared": self.method == "mc"}  # no score is of several points together
        found: Prediction = predict(model, posterior, x, samples=self.samples, seed=self.seed, keep_samples=True, **how)
        return found

    def answers(self, model: PyroModel, posterior: object) -> tuple[dict[str, float], Prediction]:
        """Return the scores that need predictions only, and the prediction at the test points."""
        x, y = self.test
        answer = self.predict(model, posterior, x)
        scores = held_out_scores(answer, y)
        given = self.train[0]
        # Token ids, several inputs and graphs have no points between them.
        if isinstance(given, Tensor) and given.is_floating_point() and not takes_all(model):
            here, unit = self._doubt(model, posterior, given)
            for name, points in (("between", between(given)), ("outside", outside(given))):
                scores[name] = over(self._doubt(model, posterior, points)[0], here, unit)
        if is_normal(answer.target_distribution) or is_class(answer.target_distribution):
            scores |= distances(answer, self.reference)
        return scores, answer

    def curve(self, answer: Prediction, model: PyroModel, posterior: object) -> tuple[Tensor, ...] | None:
        """Return the bands along one input; None for several inputs or targets, or for classes."""
        x, test = self.train[0], self.test[0]
        if not isinstance(x, Tensor) or not isinstance(test, Tensor) or not x.is_floating_point() or takes_all(model):
            return None
        if x.dim() != 2 or not x.shape[1] == answer.mean.shape[1] == 1 or not is_normal(answer.target_distribution):
            return None
        everything = torch.cat([x, test])
        low, high = float(everything.min()), float(everything.max())
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
    report = elbo_report(call.model, guide, *call.args, samples=min(100, samples), seed=seed, **call.kwargs)
    scores = {"objective": report.objective}
    notes = {}
    if report.elbo is None or report.gap is None:
        notes = dict.fromkeys(("elbo", "gap", "khat"), _UNDEFINED)
    else:
        scores |= {"elbo": report.elbo, "gap": report.gap}
        try:
            scores["khat"] = khat(call.model, guide, *call.args, samples=max(_TAIL, samples), seed=seed, **call.kwargs)
        except SingularError:
            notes["khat"] = _UNDEFINED
    return scores, notes


def distances(answer: Prediction, reference: Prediction | None) -> dict[str, float]:
    """Return the scores that compare a prediction with the reference's; none if there is no reference."""
    if reference is None:
        return {}
    apart = predictive_distance(answer, reference)
    return {"d_mean": apart.mean, "d_std": apart.std, "d_w1": apart.wasserstein}


def held_out_scores(prediction: Prediction, y: Tensor) -> dict[str, float]:
    """Return every registered score that targets of this kind have."""
    kinds = {"any", "classes" if is_class(prediction.target_distribution) else "numbers"}
    kinds |= {"normal"} if is_normal(prediction.target_distribution) else set()
    asked = [entry for entry in registry.scores().values() if kinds & set(entry.of)]
    return {entry.name: float(torch.as_tensor(entry.compute(prediction, y)).double().mean()) for entry in asked}


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
