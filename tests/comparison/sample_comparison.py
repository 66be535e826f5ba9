"""Small comparisons for the tests of the page: trained for a moment, so that everything on it is real."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.comparison import compare as comparison
from pyro_dropout.comparison.compare import Comparison
from pyro_dropout.comparison.exams import Exam
from pyro_dropout.comparison.findings import Row
from pyro_dropout.generative.model_call import ModelCall

QUICK: Any = {"steps": 25, "lr": 0.03, "compile": False, "progress": False}
SETTINGS: Any = {
    "seeds": 2, "which_seeds": [3, 8], "steps": 25, "lr": 0.03, "batch_size": None, "samples": 30, "loss": None,
    "compile": False, "reference": "none", "device": "cpu", "when": "2024-05-01 12:00 +0000", "model": "Net(<b>)",
}  # fmt: skip
HOSTILE = "<script>window.hacked = 1</script> \"' & $x"
KEEP = {"0.weight": 1.0, "2.weight": 0.8}


def series(count: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, count).unsqueeze(-1)
    return x, torch.sin(3 * x) + 0.1 * torch.randn(count, 1)


def small_model() -> Any:
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    return pd.BayesianNet(net, likelihood=pd.Gaussian(tau=100.0))


def smooth(scale: float) -> Any:
    return lambda model: pd.AutoDropout(model, keep=KEEP, scale=scale, bias="gaussian", init_scale=0.05)


def scored(name: str, make: Any, exam: Exam, model: Any = small_model, seeds: tuple[int, ...] = (3, 8)) -> Row:
    """A row as ``compare`` makes it, but trained one by one: to trace a fleet takes longer than these few steps."""
    row = Row(name)
    for seed in seeds:
        torch.manual_seed(seed)
        own = model()
        guide = make(own)
        pd.fit(own, guide, *exam.call.args, seed=seed, **QUICK)
        row.trained.append((own, guide))
    comparison._score(row, exam)
    return row


@functools.cache
def regression() -> Comparison:
    """Four guides along one input, one of which failed, with names that would break a careless page."""
    train, test = series(40), series(30)
    exam = Exam(ModelCall(None, train), ModelCall(None, test), samples=30)
    rows = [
        scored("dropout", lambda model: pd.AutoDropout(model, keep=KEEP), exam),
        scored(HOSTILE, smooth(0.5), exam),
        scored("mean field", lambda model: pd.AutoMeanField(model, init_scale=0.05), exam),
        Row("_broken", note=f"failed: RangeError: keep must lie in (0, 1]; got {HOSTILE}."),
    ]
    labels = {"title": f"Waves {HOSTILE}", "x": f"time ($s) {HOSTILE}", "y": "高さ (m)", "note": HOSTILE}
    return Comparison(rows, train, test, {**SETTINGS, **labels}, 12.0)
