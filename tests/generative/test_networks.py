"""Any module as a model: against the same module with the same weights loaded into it."""

import copy
import math

import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout import BayesianNet
from tests.contracts.models import KINDS, Problem
from tests.networks.layers import Parts

F64 = torch.float64
# The kinds of model that are modules with a likelihood on top.
NETS = [kind for kind in KINDS if kind not in ("gp", "deep-gp", "plain", "noisy")]


def scaled() -> nn.Module:
    """A network with a parameter of no dimension, which sample dimensions in front make easy to get wrong."""
    size = nn.Parameter(torch.tensor(2.0))
    return Parts(
        lambda net, x: net.cell(net.first(x) * net.size), first=nn.Linear(2, 3), size=size, cell=nn.GRUCell(3, 3)
    )


def prior_draws(model: BayesianNet, *batch: int) -> dict[str, Tensor]:
    return {name: model.prior_of(name).sample(batch) for name in model.sites}


def loaded(net: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of the plain network with the weights in it."""
    plain = copy.deepcopy(net).requires_grad_(False)  # attention takes another kernel where it needs a gradient
    _missing, unexpected = plain.load_state_dict(weights, strict=False)
    assert not unexpected
    return plain


# --- which sites there are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETS)
def test_sites_are_the_parameters_but_those_of_normalisation(kind: str) -> None:
    problem = KINDS[kind](torch.float32)
    trace = poutine.trace(problem.model).get_trace(problem.x, problem.y)
    names = [name for name, _ in problem.model.net.named_parameters()]
    assert [name for name in trace.stochastic_nodes if name != "data"] == [n for n in names if "norm" not in n]
    assert list(problem.model.hidden_parameters()) == [name for name in names if "norm" in name]


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.thinned(3)
def test_given_weights_it_is_the_plain_network(kind: str, training: bool, dtype: torch.dtype) -> None:
    problem = KINDS[kind](dtype)
    problem.model.train(training)
    weights = prior_draws(problem.model)
    plain = loaded(problem.model.net, weights)
    f = poutine.condition(problem.model, weights)(problem.x)
    assert torch.equal(f, plain(problem.x))


@pytest.mark.parametrize("batch", [(3,), (3, 1), (2, 3, 1), (1,), (1, 1)])
@pytest.mark.parametrize("kind", [*NETS, "scaled"])
@pytest.mark.thinned(4)
def test_sample_dimensions_are_a_loop_over_samples(kind: str, batch: tuple[int, ...]) -> None:
    """Batches as Predictive makes them, (S,), and as a plate of particles does, with a place for the data."""
    if kind == "scaled":
        problem = Problem(BayesianNet(scaled()).to(F64), torch.randn(4, 2, dtype=F64), torch.zeros(4, 3, dtype=F64), 6)
    else:
        problem = KINDS[kind](F64)
    problem.model.eval()
    weights = prior_draws(problem.model, *batch)
    if kind == "scaled" and batch[-1] != 1:
        weights["size"] = weights["size"].unsqueeze(-1)  # where Predictive puts a scalar
    f = problem.model.evaluate(weights, problem.x)
    samples = batch[:-1] if batch[-1] == 1 else batch
    assert f.shape[:-2] == samples
    flat = {n: v.reshape(-1, *problem.model.net.get_parameter(n).shape) for n, v in weights.items()}
    each = [loaded(problem.model.net, {n: v[s] for n, v in flat.items()})(problem.x) for s in range(math.prod(batch))]
    assert torch.allclose(f.reshape(len(each), *f.shape[-2:]), torch.stack(each), rtol=1e-12, atol=1e-14)
