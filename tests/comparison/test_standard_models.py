"""The models and guides that the command line compares."""

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.comparison.standard_models import GUIDES, kept, regression_model, wave_model

SHORT = [pytest.param(name, marks=[pytest.mark.deep] if "ensemble" in name else []) for name in GUIDES]


@pytest.mark.filterwarnings("ignore:the point of this Laplace")
@pytest.mark.parametrize("name", SHORT)
def test_every_guide_fits_both_models(name: str) -> None:
    data = pd.datasets.co2()
    for model in (wave_model(data.train, width=5), regression_model(data.train, width=5)):
        guide = GUIDES[name](model)
        pd.fit(model, guide, *data.train, steps=2, compile=False, progress=False)
        assert torch.isfinite(pd.predict(model, guide, data.test[0], samples=3, shared=True).mean).all()
        assert kept(model)(next(iter(model.sites))) == 1.0  # the only input is never dropped
