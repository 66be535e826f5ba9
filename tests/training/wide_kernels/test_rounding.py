"""Steps in bfloat16 on a GPU: those of float64 with the same numbers rounded, and near those of float64 without."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.training.wide_kernels.kernel_runs import PLACE, data, masks_of, net, one_run

pytestmark = pytest.mark.skipif(PLACE == "cpu", reason="needs a GPU")

TAU = 4.0


def rounded(value: Tensor) -> Tensor:
    return value.float().bfloat16().double()


def gradients(
    run: Any, x: Tensor, y: Tensor, masks: Tensor, rounds: bool
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the loss, and the gradient of each parameter beside the size of what it is summed from, in float64."""
    keep = rounded if rounds else Tensor.double
    widths = run._loop._network.widths
    values = [value.double() for value in run.leaves[: 2 * len(widths) - 2]]
    last = len(widths) - 2
    masked = list(masks.double().split(list(widths[:-1]), 1))
    a, inputs, bends = x.double() * masked[0], [], []
    for k, (before, after) in enumerate(pairwise(widths)):
        thin = min(before, after) < 8
        a = a if thin and k == 0 else keep(a)
        inputs.append(a)
        z = a @ (values[2 * k] if thin else keep(values[2 * k])).mT + values[2 * k + 1]
        if k < last:
            bends.append((z > 0) * masked[k + 1])
            a = z.relu() * masked[k + 1]
    f = z.detach().requires_grad_()
    if y.is_floating_point():
        loss = F.gaussian_nll_loss(f, y.double(), torch.full_like(f, 1 / TAU), full=True, reduction="sum")
    else:
        loss = F.cross_entropy(f, y, reduction="sum")
    (slope,) = torch.autograd.grad(loss, f)
    found: list[tuple[Tensor, Tensor]] = []
    for k in range(last, -1, -1):
        thin = min(widths[k : k + 2]) < 8
        slope = slope if thin and k == last else keep(slope)
        found = [(slope.mT @ inputs[k], slope.abs().mT @ inputs[k].abs()), (slope.sum(0), slope.abs().sum(0)), *found]
        if k:
            slope = (slope @ (values[2 * k] if thin else keep(values[2 * k]))) * bends[k - 1]
    return loss.detach(), found


@pytest.mark.parametrize("widths", [(1, 512, 512, 1), (100, 300, 257, 10), (9, 256, 3)])
@pytest.mark.parametrize("classes", [False, True])
def test_numbers_are_rounded_in_products_and_nowhere_else(widths: tuple[int, ...], classes: bool) -> None:
    widths = (*widths[:-1], max(2, widths[-1])) if classes else widths
    model = pd.BayesianNet(net(*widths, kind=nn.ReLU), likelihood=pd.Categorical() if classes else pd.Gaussian(TAU))
    x, y = data(130, widths[0], widths[-1])
    y = y.argmax(1) if classes else y
    run = one_run(model, pd.AutoDropout(model, keep=0.9), x, y, len(x), None, True, "bf16")
    masks = masks_of(run, 1, len(x))
    pulls = []
    for name, value in zip(model.sites, run.values, strict=True):
        scale = model.get_buffer(f"prior_scale/{name.replace('.', '/')}").double()
        pulls.append((0.9 if value.dim() == 2 else 1.0) / scale**2 * value.double())
    exact = [gradients(run, x.to(PLACE), y.to(PLACE), masks[0, 0], rounds) for rounds in (True, False)]
    constant = run._loop._current_settings()[3].double()
    kl = constant + sum(0.5 * (pull * value).sum() for pull, value in zip(pulls, run.values, strict=True))
    found = run._loop.advance(1, None, masks)
    for (loss, slopes), tight, loose in zip(exact, (1e-5, 1e-3), (2e-4, 2e-2), strict=True):
        torch.testing.assert_close(found.double(), (loss + kl).reshape(1), rtol=tight, atol=tight)
        for (first, _), (slope, size), pull in zip(run._loop.state, slopes, pulls, strict=True):
            error = (10 * first.double() - slope - pull).norm() / size.norm()  # after one step, m = 0.1 g
            assert error.item() < loose
