"""An ensemble as a posterior: the mixture of its members."""

import copy
import pickle
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

import pyro_dropout as pd


def model(outputs: int = 1) -> pd.BayesianNet:
    return pd.BayesianNet(
        nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)), pd.Prior(), pd.Gaussian(4.0)
    )


def test_every_member_is_used_equally() -> None:
    ensemble = pd.Ensemble(model(), members=5)
    assert ensemble.order(15).bincount().tolist() == [3] * 5
    counts = ensemble.order(12).bincount(minlength=5)
    assert counts.max() - counts.min() == 1
    drawn = ensemble.sample_weights(10)["0.weight"]
    own = ensemble.stacked()["states.0/weight.loc"]
    assert all(sum(torch.equal(row, value) for row in drawn) == 2 for value in own)


def test_predictions_average_the_members() -> None:
    net, x = model(), torch.randn(7, 2)
    ensemble = pd.Ensemble(net, members=6)
    f = net.evaluate(ensemble.draws_at(torch.arange(6)), x)
    answer = pd.predict(net, ensemble, x, samples=6)
    torch.testing.assert_close(answer.mean, f.mean(0))
    torch.testing.assert_close(answer.epistemic, f.var(0, unbiased=False))
    many = pd.predict(net, ensemble, x, samples=1000)
    torch.testing.assert_close(many.mean, f.mean(0))
    torch.testing.assert_close(ensemble.mean()["0.bias"], ensemble.stacked()["states.0/bias.loc"].mean(0))


def test_the_density_is_that_of_the_mixture() -> None:
    net = model()
    ensemble = pd.Ensemble(net, pd.AutoMeanField, members=3)
    weights = ensemble.sample_weights(4)
    each = []
    for m in range(3):
        with ensemble.as_member(m) as guide:
            each.append(torch.stack([guide.posterior(n).log_prob(w) for n, w in weights.items()]).sum(0))
    expected = torch.stack(each).double().exp().mean(0).log()
    torch.testing.assert_close(ensemble.log_prob(weights), expected, rtol=1e-4, atol=1e-4)


def test_members_start_apart_and_reproducibly() -> None:
    net = model()
    first, again, other = (pd.Ensemble(net, members=3, seed=seed).stacked() for seed in (1, 1, 2))
    key = "states.0/weight.loc"
    assert torch.equal(first[key], again[key])
    assert not torch.equal(first[key], other[key])
    assert not torch.equal(first[key][0], first[key][1])
    together = pd.Ensemble(net, members=3, start="module").stacked()[key]
    assert torch.equal(together[0], together[1])


def test_stock_svi_trains_a_plain_ensemble_and_refuses_an_anchored_one() -> None:
    net, x = model(), torch.randn(20, 2)
    y = x.sum(1, keepdim=True)
    plain = pd.Ensemble(net, members=2, anchored=False)
    before = {name: value.clone() for name, value in plain.stacked().items()}
    svi: Any = SVI(net, plain, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(100)]
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    assert all(not torch.equal(value[m], before[name][m]) for name, value in plain.stacked().items() for m in range(2))
    with pytest.raises(pd.errors.PyroDropoutError, match="fit"):
        SVI(net, pd.Ensemble(net, members=2), pyro.optim.Adam({"lr": 0.02}), Trace_ELBO()).step(x, y)


def test_a_plain_pyro_model_is_met_when_it_is_first_called() -> None:
    def plain(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", pyro.distributions.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("n", len(x)):
            pyro.sample("y", pyro.distributions.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(pd.errors.PyroDropoutError, match=r"points or anchored need a network.*; got plain"):
        pd.Ensemble(plain, members=3)
    ensemble = pd.Ensemble(plain, pd.AutoMeanField, members=3)
    with pytest.raises(pd.errors.PyroDropoutError, match="has not seen"):
        ensemble.sample_weights(1)
    trace = pyro.poutine.trace(ensemble).get_trace(torch.ones(4, 2), torch.ones(4))  # which must not see the meeting
    assert trace.nodes["w"]["value"].shape == (2,)
    assert ensemble.sample_weights(6)["w"].shape == (6, 2)


def test_a_network_that_names_its_sites_when_it_runs_starts_at_draws_of_its_prior() -> None:
    """A deep GP: the layers of its copies are not there to be initialised anew."""
    gp, x = pd.paper.DeepGP(2, [5], 1, likelihood=pd.Gaussian(4.0)), torch.randn(12, 2)
    ensemble = pd.Ensemble(gp, members=3, seed=0)
    pd.fit(gp, ensemble, x, x[:, :1], steps=2, compile=False, progress=False)
    assert all(not torch.equal(value[0], value[1]) for value in ensemble.stacked().values())


# --- settings of members ----------------------------------------------------------------------------------------------


def rarely_or_nearly_always(m: Any) -> pd.AutoDropout:
    """Drops all rows, or none: which, is drawn anew for every member."""
    return pd.AutoDropout(m, keep=1e-7 if torch.rand(()) < 0.5 else 1 - 1e-7)


def test_members_have_settings_of_their_own() -> None:
    """In the loss, in draws and in files: the first member's would be wrong for the others without a word."""
    net, x = model(), torch.randn(20, 2)
    ensemble = pd.Ensemble(net, rarely_or_nearly_always, members=6, seed=3)
    keep = ensemble.settings()["states.0/weight.keep"]
    assert 0 < (keep < 0.5).sum() < 6
    drawn = ensemble.draws_at(torch.arange(6))["0.weight"].flatten(1).abs().sum(1)
    assert torch.equal(drawn > 0, keep > 0.5)
    history = pd.fit(net, ensemble, x, x[:, :1], steps=1, compile=False, progress=False, loss=pd.ELBO())
    assert history.member_losses is not None
    again = pd.Ensemble(net, rarely_or_nearly_always, members=6, seed=3)
    for m in range(6):
        with again.as_member(m) as guide:
            loss = pd.ELBO().loss(net, guide, x, x[:, :1], 20)
            assert history.member_losses[0, m].item() == pytest.approx(loss, rel=1e-5)


def test_members_must_not_differ_in_kind() -> None:
    def sometimes(m: Any) -> pd.AutoDropout:
        return pd.AutoDropout(m, keep=1.0 if torch.rand(()) < 0.5 else 0.5)  # a point, where nothing is dropped

    with pytest.raises(pd.errors.PyroDropoutError, match=r"differ in numbers only.*0\.weight.*keep of 1"):
        pd.Ensemble(model(), sometimes, members=9, seed=0)

    def plain(x: Tensor) -> None:
        pyro.sample("w", pyro.distributions.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        pyro.sample("y", pyro.distributions.Normal(0.0, 1.0), obs=x)

    with pytest.raises(pd.errors.PyroDropoutError, match=r"different settings \(states\.w\.keep\).*must have the same"):
        pd.Ensemble(plain, lambda m: pd.AutoDropout(m, keep=float(torch.rand(()))), members=2)(torch.ones(()))


# --- copies -----------------------------------------------------------------------------------------------------------


def mean_field(m: Any) -> pd.AutoMeanField:
    return pd.AutoMeanField(m)


@pytest.mark.parametrize("guide", [None, pytest.param(mean_field, marks=pytest.mark.deep)])
def test_a_trained_ensemble_can_be_pickled(guide: Any) -> None:
    net, x = model(), torch.randn(6, 2)
    ensemble = pd.Ensemble(net, guide, members=2)
    quiet: Any = {"steps": 1, "compile": False, "progress": False}
    pd.fit(net, ensemble, x, x[:, :1], **quiet)
    twin_net, twin = pickle.loads(pickle.dumps((net, ensemble)))
    answers = [pd.predict(m, e, x, samples=2, seed=0).mean for m, e in ((net, ensemble), (twin_net, twin))]
    assert torch.equal(*answers)
    torch.testing.assert_close(twin.stacked(), ensemble.stacked())
    pd.fit(twin_net, twin, x, x[:, :1], **quiet)
    assert copy.deepcopy(twin).members == 2
