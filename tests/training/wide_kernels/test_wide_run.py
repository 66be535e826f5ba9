"""A training by the kernels of wide layers is one as any other: seeds, checkpoints, what is written back, fallbacks."""

from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.training.wide_kernels.wide_steps import WideSteps
from tests.training.wide_kernels.kernel_runs import PLACE, by_the_kernel

pytestmark = pytest.mark.usefixtures("exact")

QUIET: dict[str, Any] = {"progress": False, "lr": 0.02, "compile": True, "device": PLACE, "precision": "bf16"}


def data(points: int = 19) -> tuple[Tensor, Tensor]:
    x = torch.randn(points, 9, generator=torch.Generator().manual_seed(2))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0)


def pair() -> Any:
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 3)), likelihood=pd.Categorical())
    return model, pd.AutoDropout(model, keep=0.8)


def fitted(steps: int = 4, **how: Any) -> tuple[Any, Any]:
    """Return the history and the guide of a training by the kernels, in batches that leave some points over."""
    model, guide = pair()
    with by_the_kernel():
        history = pd.fit(model, guide, *data(), steps=steps, **{**QUIET, "seed": 5, "batch_size": 8, **how})
    return history, guide


def test_the_kernels_take_the_steps_that_fit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    advance = WideSteps.advance

    def counted(self: Any, steps: int, *rest: Any) -> Tensor:
        taken.append(steps)
        return advance(self, steps, *rest)

    monkeypatch.setattr(WideSteps, "advance", counted)
    history, _ = fitted(3)
    assert sum(taken) == history.steps == 3


@pytest.mark.deep
def test_a_checkpoint_of_other_steps_is_resumed_by_the_kernels(tmp_path: Path) -> None:
    model, guide = pair()
    how = {**QUIET, "seed": 5, "batch_size": 8, "checkpoint": tmp_path}
    first = pd.fit(model, guide, *data(), steps=2, **{**how, "compile": False})
    resumed, _ = fitted(steps=4, checkpoint=tmp_path)
    assert torch.equal(resumed.losses[:2], first.losses.cpu())
    model, guide = pair()
    back = pd.fit(model, guide, *data(), steps=5, **{**how, "compile": False})
    assert torch.equal(back.losses[:4].cpu(), resumed.losses)
