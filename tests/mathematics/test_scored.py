"""Mixtures whose component probabilities are trained, under Pyro's own losses: the right gradient, or a refusal."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import (
    EnergyDistance,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
)
from torch import Tensor

import pyro_dropout as pd

X, Y = torch.tensor([[1.0, 0.3], [-0.2, 1.0]]), torch.tensor([1.5, 2.5])
LOCS, WIDTH = torch.tensor([[[1.8, -1.5]], [[-0.6, 2.1]]]), 0.4


def divergence(locs: Tensor, probs: Tensor) -> Tensor:
    """KL of a mixture of two normals from N(0, 1), by adding up over a grid."""
    w = torch.linspace(-8, 8, 8001).unsqueeze(-1)
    log_q = (torch.distributions.Normal(locs, WIDTH).log_prob(w) + probs.log()).logsumexp(-1)
    log_p = torch.distributions.Normal(0.0, 1.0).log_prob(w[:, 0])
    return torch.trapezoid(log_q.exp() * (log_q - log_p), w[:, 0])


class Case:
    """A row of two weights in a mixture of two, and the exact gradient of its logits."""

    def __init__(self) -> None:
        self.logits = pyro.param("logits", torch.tensor([[0.3, -0.4], [1.0, 0.2]]))

    def model(self) -> None:
        prior = dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2)
        w = pyro.sample("w", prior)
        w = w.reshape(*w.shape[: max(0, w.dim() - 4)], -1, 2)  # vectorised particles stand in front
        with pyro.plate("data", len(X), dim=-2):
            pyro.sample("y", dist.Normal((X @ w.mT), 1.0), obs=Y.unsqueeze(-1))

    def guide(self) -> None:
        q = pd.paper.RowMixture(LOCS, WIDTH, pyro.param("logits").softmax(-1), validate_args=False)
        pyro.sample("w", q)  # type: ignore[arg-type]

    def exact(self) -> Tensor:
        probs = self.logits.softmax(-1)
        expected = sum(divergence(LOCS[:, 0, row], probs[row]) for row in (0, 1))
        for first in (0, 1):
            for second in (0, 1):
                w = torch.stack([LOCS[first, 0, 0], LOCS[second, 0, 1]])
                square = (Y - X @ w).square() + (X.square() * WIDTH**2).sum(-1)
                expected = expected + probs[0, first] * probs[1, second] * 0.5 * square.sum()
        return torch.autograd.grad(expected, self.logits)[0]


@pytest.mark.deep
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceGraph_ELBO, TraceEnum_ELBO])
def test_probabilities_have_the_gradient_of_their_expectation(loss: Any) -> None:
    pyro.set_rng_seed(0)
    case, repeats = Case(), 1000
    quiet: Any = {"strict_enumeration_warning": False} if loss is TraceEnum_ELBO else {}
    estimate = loss(max_plate_nesting=2, **quiet)
    found = []
    for _ in range(repeats):
        case.logits.grad = None
        estimate.loss_and_grads(case.model, case.guide)
        assert case.logits.grad is not None
        found.append(case.logits.grad.clone())
    seen, truth = torch.stack(found), case.exact()
    error = seen.std(0) / repeats**0.5
    assert bool(((seen.mean(0) - truth).abs() <= 4.5 * error).all()), (seen.mean(0), truth, error)
    assert (error.max() * 4.5) < 0.6 * truth.abs().max(), "the test sees nothing"


@pytest.mark.parametrize("loss", [RenyiELBO, TraceMeanField_ELBO, TraceTailAdaptive_ELBO])
def test_a_loss_without_scores_is_refused_by_name(loss: Any) -> None:
    case = Case()
    options: Any = {"num_particles": 3, "vectorize_particles": True} if loss is TraceTailAdaptive_ELBO else {}
    for checked in (True, False):
        with pyro.validation_enabled(checked), pytest.raises(ValueError, match=r"(?s)no score term.*weights='fixed'"):
            loss(max_plate_nesting=2, **options).loss_and_grads(case.model, case.guide)


def test_a_loss_that_needs_a_path_hears_that_there_is_none() -> None:
    case = Case()
    with pytest.raises(ValueError, match="fully reparametrized"):
        EnergyDistance(max_plate_nesting=3)(case.model, case.guide)


def test_fixed_probabilities_leave_a_path_to_everything() -> None:
    assert pd.paper.RowMixture(LOCS, WIDTH, torch.tensor([0.5, 0.5])).has_rsample
    assert not pd.paper.RowMixture(LOCS, WIDTH, torch.tensor([0.5, 0.5], requires_grad=True)).has_rsample
