"""Networks with pooling, whose gradients torch's compiler has computed wrongly, and what happens where it does."""

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import choose, program
from pyro_dropout.engines.program import Program
from pyro_dropout.engines.replayed import Inductor


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)], ids=str)
def test_a_compiled_gradient_of_a_network_with_pooling_is_the_eager_one(pool: nn.Module) -> None:
    """torch 2.13 read the sum of the gradients of a pooling before it was summed, or lost a tensor."""
    torch.manual_seed(0)
    x, given = torch.randn(6, 1, 28, 28), [torch.randn(4, 1, 3, 3), torch.randn(784, 10), torch.randn(4)]

    def gradient(*weights: Tensor) -> list[Tensor]:
        kernel, last, bias = leaves = [each.detach().requires_grad_() for each in weights]
        with torch.enable_grad():
            hidden = (nn.functional.conv2d(x, kernel, padding=1) + bias[:, None, None]).relu()
            return list(torch.autograd.grad((pool(hidden).flatten(1) @ last).square().sum(), leaves))

    torch.testing.assert_close(Program(gradient, *given)(*given), gradient(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["fails", "computes something else"])
def test_a_program_of_torchs_compiler_that_is_wrong_is_refused_by_name(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        return (
            (lambda *given: {}["s77"]) if wrong == "fails" else lambda *given: [1.01 * part for part in graph(*given)]
        )

    monkeypatch.setattr(choose, "engines_for", lambda *given: [Inductor()])
    monkeypatch.setattr(program, "compiled", broken)
    model = pd.BayesianNet(nn.Linear(2, 1))
    svi = pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.01}), compile=True)
    with pytest.raises(RuntimeError, match=f"torch's compiler makes a program of this step that {wrong}"):
        svi.step(torch.ones(4, 2), torch.ones(4, 1))
