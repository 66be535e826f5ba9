"""Networks with a target at every position: tokens of a text, and maps of classes or numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.judging.scores.errors import accuracy, rmse

QUIET: dict[str, Any] = {"compile": False, "progress": False}
N, T, C, H, W = 6, 5, 3, 4, 2


def tagger() -> nn.Module:
    """Gives every token its classes, (N, T, C)."""
    return nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, C))


CASES = {
    "tokens": (tagger, lambda: torch.randint(9, (N, T)), (None, C), -1, (T,)),
    "maps": (lambda: nn.Conv2d(2, C, 1), lambda: torch.randn(N, 2, H, W), (C, H, W), 0, (H, W)),
}


def problem(case: str, ignore: bool = True) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    build, make, dims, dim, positions = CASES[case]
    model = pd.BayesianNet(build(), likelihood=pd.Categorical(dims, dim, ignore_index=-100 if ignore else None))
    y = torch.randint(C, (N, *positions))
    if ignore:
        y.view(N, -1)[:, ::2] = -100
        y.view(N, -1)[0] = -100  # a point without any target
    return model, make(), y


def oracle(model: pd.BayesianNet, weights: Any, x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Log-likelihoods of each draw and point, (S, N), by torch's own loss."""
    each = []
    for t in range(len(next(iter(weights.values())))):
        logits = torch.func.functional_call(model.net, {k: w[t] for k, w in weights.items()}, x)
        logits = logits.movedim(-1, 1) if dim == -1 else logits
        each.append(-F.cross_entropy(logits, y, reduction="none", ignore_index=-100).flatten(1).sum(1))
    return torch.stack(each)


@pytest.mark.parametrize("case", list(CASES))
def test_the_likelihood_is_that_of_torchs_own_loss(case: str) -> None:
    model, x, y = problem(case)
    guide = pd.AutoMeanField(model)
    guide(x, y)
    weights = guide.sample_weights(4)
    wanted = oracle(model, weights, x, y, CASES[case][3])
    f = model.evaluate(weights, x)
    torch.testing.assert_close(model.likelihood.distribution(f).log_prob(y), wanted)
    assert bool((wanted[:, 0] == 0).all())
    parts = pd.ELBO(per_example=False).parts(model, pd.AutoDropout(model, keep=1.0), x, y, 2 * N)
    own = {name: value.unsqueeze(0) for name, value in model.net.named_parameters()}
    torch.testing.assert_close(parts["nll"], -2 * oracle(model, own, x, y, CASES[case][3]).sum())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.thinned(2)
def test_positions_have_probabilities_and_scores(case: str, tmp_path: Path) -> None:
    model, x, y = problem(case)
    guide = pd.AutoDropout(model, keep=0.9)
    pd.fit(model, guide, x, y, steps=3, batch_size=4, validation=(x, y), check_every=2, **QUIET)
    answer = pd.predict(model, guide, x, samples=40, seed=0)
    assert answer.probs.shape == (*y.shape, C)
    assert answer.entropy.shape == answer.mutual_information.shape == y.shape
    torch.testing.assert_close(answer.probs.sum(-1), torch.ones(y.shape))
    known = y != -100
    probs, right = answer.probs[known], y[known]
    assert pd.judging.brier(answer, y).shape == right.shape
    torch.testing.assert_close(pd.judging.brier(answer, y), (probs - F.one_hot(right, C)).square().sum(-1))
    table = pd.judging.reliability(answer, y)
    assert int(table.count.sum()) == len(right)
    found = pd.compare(model, [pd.AutoDropout], (x, y), (x, y), steps=2, seeds=2, samples=10, **QUIET)
    assert found.rows[0].note == ""
    assert len(found.rows[0].scores["accuracy"].values) == 2
    found.to_html(tmp_path / "report.html")
    draws = pd.to_arviz(model, guide, x, y, samples=5)
    assert draws.log_likelihood["y"].shape == (1, 5, N)
    assert draws.observed_data["y"].shape == y.shape
    with pytest.raises(pd.errors.ShapeError, match="one number for each input"):
        pd.defer(answer.entropy, budget=0.5)


def test_accuracy_counts_no_ignored_target() -> None:
    model, x, y = problem("tokens")
    guide = pd.AutoDropout(model, keep=1.0)
    guide(x, y)
    answer = pd.predict(model, guide, x, samples=1)
    y = torch.where(y == -100, y, answer.probs.argmax(-1))
    assert accuracy(answer, y) == 1.0
    fleet = pd.Fleet(lambda seed: (model, guide), {"seed": [0]})
    assert pd.prediction.predict_fleet(fleet, x, y, samples=1).scores()["accuracy"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: y[:, :2], r"one class index a position, shape \(6, 5\); got \(6, 2\)"),
        (lambda y: y + 1, "class indices from 0 to 2; got .* to 3"),
        (lambda y: torch.full_like(y, -100), "and not ignore_index=-100 alone"),
        (lambda y: y.float(), "class indices of an integer type"),
    ],
)
def test_wrong_targets_are_named(change: Any, says: str) -> None:
    model, x, _ = problem("tokens")
    y = torch.arange(N * T).reshape(N, T) % C
    with pytest.raises(pd.errors.PyroDropoutError, match=says):
        pd.fit(model, pd.AutoDropout(model), x, change(y), steps=1, **QUIET)


@pytest.mark.parametrize(("dims", "dim"), [((2, H, W), 0), ((None, 4), -1)])
@pytest.mark.deep
def test_maps_of_numbers_have_noise_of_their_own(dims: Any, dim: int) -> None:
    """Means first and log precisions after them, along one dimension; the rest are positions."""
    if dim == 0:
        net: nn.Module = nn.Conv2d(1, 2, 1)
        x, y = torch.randn(N, 1, H, W), torch.randn(N, H, W)
    else:
        net = nn.Linear(1, 4)
        x, y = torch.randn(N, T, 1), torch.randn(N, T, 2)
    model = pd.BayesianNet(net, likelihood=pd.HeteroscedasticGaussian(dims, dim))
    guide = pd.AutoDropout(model, keep=0.9)
    pd.fit(model, guide, x, y, steps=3, **QUIET)
    answer = pd.predict(model, guide, x, samples=20, seed=0)
    y = y.unsqueeze(1) if dim == 0 else y
    mean, log_tau = net(x).detach().chunk(2, 1 if dim == 0 else -1)
    wanted = torch.distributions.Normal(mean, (-log_tau / 2).exp()).log_prob(y).flatten(1).sum(1)
    p = model.likelihood.distribution(model.evaluate({}, x))
    torch.testing.assert_close(p.log_prob(y), wanted)
    assert answer.mean.shape == answer.variance.shape == y.shape
    given = y.squeeze(1) if dim == 0 else y  # a map of one number may come without its dimension
    torch.testing.assert_close(torch.tensor(rmse(answer, given)), (answer.mean - y).square().mean().sqrt())
    with pytest.raises(pd.errors.PyroDropoutError, match="covariance is for points with targets in a row"):
        _ = answer.covariance
