"""Arguments have the names of Pyro and scikit-learn too, and former names warn."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.sklearn.estimators import DropoutClassifier, DropoutRegressor


@pytest.mark.filterwarnings("ignore:chains disagree")
def test_pyros_names_are_accepted_where_ours_are() -> None:
    model = pd.BayesianNet(nn.Linear(1, 1))
    x = torch.linspace(-1, 1, 5).unsqueeze(-1)
    drawn = pd.nuts(model, x, x, num_chains=2, num_samples=7, warmup_steps=5, progress=False, compile=False)
    assert drawn.sample_weights(14)["weight"].shape == (14, 1, 1)
    assert len(pd.predict(model, pd.AutoDropout(model), x, num_samples=6, keep_samples=True).samples) == 6
    judged = (pd.to_arviz, pd.khat, pd.loo, pd.sbc, pd.compare, pd.judging.elbo_report, pd.prediction.predict_fleet)
    for door in judged:
        assert "samples" in inspect.signature(door).parameters  # which shows one name
        with pytest.raises(TypeError, match=rf"{door.__name__}\(\) got both 'num_samples' and 'samples'"):
            door(samples=3, num_samples=3)


@pytest.mark.parametrize("estimator", [DropoutRegressor, DropoutClassifier])
def test_estimators_take_scikit_learns_names(estimator: type) -> None:
    made = estimator(max_iter=5, n_estimators=3, n_samples=10)
    assert (made.max_steps, made.members, made.samples) == (5, 3, 10)
    assert made.set_params(max_iter=7) is made
    assert made.get_params()["max_steps"] == 7
    assert not {"max_iter", "n_estimators"} & set(made.get_params())
    with pytest.raises(TypeError, match="both 'max_iter' and 'max_steps'"):
        estimator(max_iter=5, max_steps=5)


def test_former_names_warn(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"'keep' of Checkpoint\(\) .* version 2\.0; use 'keep_last'"):
        assert pd.training.Checkpoint(tmp_path, keep=2).keep_last == 2
    report = pd.judging.ElboReport(-12.0, 12.0, 0.5, 10.0, 2.0, 2.0, 0.25, True, "")
    with pytest.warns(DeprecationWarning, match="use kl_gap"):
        assert report.gap == report.kl_gap == 0.25
