"""The scores of a Pyro model that is not a network, from its observed sites at the test data."""

from dataclasses import dataclass, replace

import pyro
import torch
from torch import Tensor

from pyro_dropout.comparison.probes import between, outside, over
from pyro_dropout.comparison.scores import distances, held_out_scores
from pyro_dropout.engines.torch_internals import tree_map
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import observed_sites, trace_of, value_of
from pyro_dropout.generative.random_state import forked
from pyro_dropout.judging.scores.crps import crps
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.moments import is_class, is_normal
from pyro_dropout.prediction.predict import predict
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.site_prediction import SitePrediction
from pyro_dropout.protocols import Message, PyroModel


@dataclass(frozen=True)
class SiteExam:
    """The predictions and scores that are computed for every posterior.

    Attributes:
        call: the model's arguments with the training data; its model is that of the first seed.
        asked: the arguments with the test data.
        samples: draws of the latent sites for each prediction.
        reference: the reference's prediction at the test data, if there is one.
        seed: of the draws.
    """

    call: ModelCall
    asked: ModelCall
    samples: int
    reference: Prediction | None = None
    seed: int = 0

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """The indices of the training points, and their data."""
        return _numbered(self.call)

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """The indices of the test points, and their data."""
        return _numbered(self.asked)

    def check(self) -> None:
        """Raise before training if the model does not accept the data, or observes nothing with them."""
        names = []
        for name, call in (("train", self.call), ("test", self.asked)):
            try:
                call.check_bound()
                names.append(set(_data(call)))
            except PyroDropoutError as cause:
                raise type(cause)(f"{name}: {str(cause).splitlines()[0]}") from None
            if not names[-1]:
                raise PyroDropoutError(f"{name}: the model observes nothing with these arguments. Give it its data.")
        if names[0] != names[1]:
            raise PyroDropoutError(
                f"train and test must be data of the same sites; got {sorted(names[0])} and {sorted(names[1])}."
            )

    def answers(self, model: PyroModel, posterior: object) -> tuple[dict[str, float], SitePrediction | None]:
        """Return the scores that need predictions only and, if one site is observed, its prediction."""
        call = replace(self.asked, model=model)
        found = self._predicted(posterior, call)
        data = _data(call)
        each = {name: found[name].log_prob(value_of(site)) for name, site in data.items()}
        seen = {name: _seen(site, each[name]) for name, site in data.items()}
        total = sum(float(torch.where(seen[name], value, 0.0).sum()) for name, value in each.items())
        scores = {"log_lik": total / max(1, sum(int(mask.sum()) for mask in seen.values()))}
        if len(data) > 1:
            return scores, None
        ((name, site),) = data.items()
        answer = found[name]
        if bool(seen[name].all()):
            scores |= _site_scores(answer, value_of(site), self.seed)
        return scores | self._away(model, posterior) | distances(answer, self.reference), answer

    def _predicted(self, posterior: object, call: ModelCall) -> dict[str, SitePrediction]:
        found = predict(
            call.model, posterior, *call.args, samples=self.samples, seed=self.seed, keep_samples=True, **call.kwargs
        )
        return found if isinstance(found, dict) else {found.site: found}

    def _away(self, model: PyroModel, posterior: object) -> dict[str, float]:
        """Return the epistemic std between and outside the data over that at them, if the first argument is 2-D."""
        call = replace(self.call, model=model)
        x = next(iter(call.args), None)
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            return {}
        data = [site["value"] for site in _data(call).values()]
        blind = tree_map(lambda leaf: None if any(leaf is value for value in data) else leaf, (call.args, call.kwargs))

        def doubt(points: Tensor) -> tuple[float, float]:
            asked = ModelCall(model, (points[:500], *blind[0][1:]), blind[1])
            (answer,) = self._predicted(posterior, asked).values()
            return float(answer.epistemic.double().mean().sqrt()), float(answer.std.mean())

        try:
            here, unit = doubt(x)
            away = {"between": between(x), "outside": outside(x)}
            return {name: over(doubt(points)[0], here, unit) for name, points in away.items()}
        except Exception:  # another argument has a row for each point, or the data cannot be left out
            return {}


def _data(call: ModelCall) -> dict[str, Message]:
    """Return the observed sites of a call, leaving random states and parameters unchanged."""
    with torch.no_grad(), forked(), pyro.get_param_store().scope():
        return observed_sites(trace_of(call))


def _numbered(call: ModelCall) -> tuple[Tensor, Tensor]:
    found = [value_of(site) for site in _data(call).values()]
    y = found[0] if len(found) == 1 else torch.cat([value.reshape(-1).double() for value in found])
    return torch.arange(max(1, len(y) if y.dim() else 1)), y


def _seen(site: Message, like: Tensor) -> Tensor:
    """Return which points of a site are not masked."""
    mask = site["mask"]
    return torch.ones_like(like, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(like.shape)


def _site_scores(answer: SitePrediction, y: Tensor, seed: int) -> dict[str, float]:
    """Return the scores that apply to the site's distribution."""
    found = held_out_scores(answer, y)
    found.pop("log_lik")  # of all sites together
    if is_class(answer.target_distribution) or is_normal(answer.target_distribution):
        return found
    low, high = answer.interval(0.95)
    inside = (y.to(low) >= low) & (y.to(high) <= high)
    sampled = float(crps(answer, y, "sample", seed=seed).mean())
    return found | {"crps": sampled, "coverage": float(inside.double().mean())}
