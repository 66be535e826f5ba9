"""Scores of inputs unlike the training inputs, against scikit-learn and on its digits."""

import doctest

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn

import pyro_dropout as pd
from pyro_dropout.judging import out_of_distribution as ood


def test_auroc_and_fpr_are_those_of_scikit_learn(dtype: torch.dtype) -> None:
    inside, outside = torch.randn(300, dtype=dtype).round(decimals=1), torch.randn(200, dtype=dtype) + 1
    found, labels = ood.separation(inside, outside), [0] * 300 + [1] * 200
    scores = torch.cat([inside, outside]).double().numpy()
    assert found.auroc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert found.error == pytest.approx(0.02, abs=0.01)
    fpr, tpr, _ = roc_curve([1 - k for k in labels], -scores, drop_intermediate=False)  # inside is found by a low score
    assert found.fpr95 == pytest.approx(fpr[(tpr >= 0.95).argmax()], abs=1e-12)


def test_eights_and_nines_are_unlike_the_other_digits() -> None:
    # After 300 steps, seeds 0 to 2: 0.97 to 0.99 (distance), 0.97 to 0.98 (energy), 0.94 to 0.97 (the other two).
    pixels, digit = (torch.tensor(each) for each in load_digits(return_X_y=True))
    x, y = (pixels / 16).float(), digit
    known, strange = x[y < 8], x[y >= 8]
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 8))
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(known[:1000]), y[y < 8][:1000]).backward()
        optimiser.step()
    model, guide = pd.from_dropout(net.eval(), likelihood=pd.Categorical())
    found = ood.out_of_distribution(model, guide, known[:1000], known[1000:], strange, samples=50, seed=0)
    assert set(found) == {"distance", "mutual_information", "entropy", "energy"}
    assert found["distance"].auroc > 0.9
    assert found["energy"].auroc > 0.9
    assert min(each.auroc for each in found.values()) > 0.85
    support = ood.FeatureSupport.of(model, guide, known[:1000])
    assert support.flag(strange).float().mean() > 3 * support.flag(known[1000:]).float().mean()


def test_scores_that_do_not_exist_are_left_out_or_refused_by_name() -> None:
    x = torch.randn(40, 2)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
    guide = pd.AutoMeanField(model)
    assert set(ood.out_of_distribution(model, guide, x, x, x + 9, samples=20)) == {"distance", "epistemic"}
    ensemble = pd.Ensemble(model, members=2)
    assert set(ood.out_of_distribution(model, ensemble, x, x, x + 9, samples=20)) == {"epistemic"}
    with pytest.raises(pd.errors.PyroDropoutError, match="the energy is that of the logits"):
        ood.energy(pd.predict(model, guide, x, samples=2))
    with pytest.raises(
        pd.errors.PyroDropoutError, match="features of the last hidden layer are those of one BayesianNet"
    ):
        ood.features(model, ensemble, x)
    standard = pd.Standardised(model, x, x[:, :1])
    torch.testing.assert_close(ood.features(standard, guide, x), ood.features(model, guide, standard.standard_x(x)))


def test_its_examples_run() -> None:
    assert doctest.testmod(ood).failed == 0
