"""The models and guides that the command line compares."""

import torch

import pyro_dropout as pd
from pyro_dropout.comparison.standard_models import WaveKernel, WaveProcess, kept, wave_model


def test_the_reference_of_the_series_has_the_covariance_of_the_networks_prior() -> None:
    """By drawing networks: 40,000 of them, so that a right kernel is off by 0.08 less often than once in 100,000."""
    x = torch.tensor([[-1.5], [-0.02], [0.0], [0.03], [1.4]])
    net = wave_model((x, x), width=20).model
    draws = {name: net.prior_of(name).sample((40_000,)) for name in net.sites}
    f = torch.vmap(lambda weights: net.evaluate(weights, x))(draws).squeeze(-1)
    torch.testing.assert_close(f.mT @ f / len(f), WaveKernel(1)(x), atol=0.08, rtol=0)
    torch.testing.assert_close(WaveKernel(1)(x, diag=True), WaveKernel(1)(x).diagonal())


def test_the_reference_of_the_series_goes_through_the_data_and_is_unsure_away_from_them() -> None:
    data = pd.datasets.co2()
    model = wave_model(data.train)
    assert kept(model)(next(iter(model.sites))) == 1.0  # the only input is never dropped
    exact = WaveProcess(model, data.train)
    near, far = (pd.predict(model, exact, x, samples=200, seed=0) for x in (data.train[0], data.test[0]))
    noise = near.aleatoric.sqrt().mean()
    assert (near.mean - data.train[1]).square().mean().sqrt() < noise
    assert far.epistemic.sqrt().mean() > 2 * near.epistemic.sqrt().mean()


def test_the_rows_that_dropout_drops_are_the_inputs_of_a_layer() -> None:
    model = pd.paper.DeepGP(1, [4, 3], 1)
    assert {site: kept(model)(site) for site in ("W1", "W2", "W3")} == {"W1": 1.0, "W2": 0.9, "W3": 0.9}
