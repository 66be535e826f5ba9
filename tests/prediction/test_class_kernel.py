"""The kernel for the moments of classes gives what whole operations give."""

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.generative.likelihoods.categorical import _in_cache
from pyro_dropout.generative.likelihoods.gaussian_outputs import Nodes, outputs_of
from pyro_dropout.mathematics.class_kernel import class_moments, has_class_kernel
from tests.oracles.triton_here import PLACE, needed

needed()


def _outputs(points: int, classes: int, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    mean = 2 * torch.randn(points, classes)
    root = size * torch.randn(points, classes, classes).tril()
    return mean.to(PLACE), root.to(PLACE)


@pytest.mark.parametrize(("classes", "size"), [(2, 1.0), (3, 0.01), (10, 1.0), (17, 5.0), (32, 0.3)])
def test_moments_are_those_of_whole_operations(classes: int, size: float) -> None:
    affine, z = Nodes(300, 5).affine(*_outputs(7, classes, size))
    ours = class_moments(affine, z)
    theirs = _in_cache(affine.double() @ z.double())
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name].double(), theirs[name], rtol=2e-4, atol=2e-6, msg=name)


def test_a_small_spread_keeps_its_digits() -> None:
    """With squares of p itself, a spread of 1e-9 would drown in rounding."""
    mean, root = _outputs(5, 4, 1e-4)
    affine, z = Nodes(512, 1).affine(mean, root)
    theirs = _in_cache(affine.double() @ z.double())["spread"]
    assert theirs.max() < 1e-6
    torch.testing.assert_close(class_moments(affine, z)["spread"].double(), theirs, rtol=1e-2, atol=1e-13)


@pytest.mark.skipif(PLACE == "cpu", reason="the kernel is asked for on a GPU only")
def test_predictions_on_a_gpu_use_it() -> None:
    mean, root = _outputs(50, 10, 1.0)
    covariance = root.double() @ root.double().mT + 0.1 * torch.eye(10, device=PLACE)
    assert has_class_kernel(Nodes(256, 0).affine(mean, root)[0])
    ours = outputs_of(pd.Categorical(), Nodes(256, 0)).moments(mean, covariance)
    theirs = outputs_of(pd.Categorical(), Nodes(256, 0)).moments(mean.cpu(), covariance.cpu())
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name].cpu(), theirs[name], rtol=1e-3, atol=1e-5, msg=name)
