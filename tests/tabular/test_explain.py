"""The importance of columns: against what is known of linear functions, and what cannot be asked."""

import math

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.tabular.explain import explain
from tests.oracles.made_predictions import made

COLUMNS = {"size": [0], "kind": [1, 2, 3], "noise": [4]}


def table(rows: int) -> Tensor:
    kind = torch.nn.functional.one_hot(torch.randint(3, (rows,)), 3).float()
    return torch.cat([torch.randn(rows, 1), kind, torch.rand(rows, 1)], 1)


def numbers(x: Tensor) -> pd.prediction.Prediction:
    """y = 2·size + (0, 1 or 5 by kind), with a log precision that depends on the last column."""
    assert torch.equal(x[:, 1:4].sum(-1), torch.ones(len(x)))  # a category is shuffled whole
    mean = 2 * x[:, :1] + x[:, 1:4] @ torch.tensor([[0.0], [1.0], [5.0]])
    return made(torch.cat([mean, 4 * x[:, 4:]], -1).unsqueeze(0).double(), pd.HeteroscedasticGaussian())


def classes(x: Tensor) -> pd.prediction.Prediction:
    return made(torch.cat([50 * x[:, :1], 0 * x[:, :1]], -1).unsqueeze(0).double(), pd.Categorical())


def test_a_linear_function_changes_as_much_as_theory_says() -> None:
    found = explain(numbers, table(3000), COLUMNS, rows=3000, repeats=4)
    mean = dict(zip(found.names, found.mean.tolist(), strict=True))
    error = dict(zip(found.names, found.mean_error.tolist(), strict=True))
    # E|x - x'| of two normals is 2/√π; of two kinds, the mean over all nine pairs
    for name, wanted in (("size", 2 * 2 / math.sqrt(math.pi)), ("kind", 2 * (1 + 5 + 4) / 9)):
        assert abs(mean[name] - wanted) < 5 * error[name] + 0.02
        assert 0 < error[name] < 0.1
    assert mean["noise"] == 0
    assert found.names[-1] == "noise"
    doubt = dict(zip(found.names, found.doubt.tolist(), strict=True))
    assert doubt["noise"] > 0.1
    assert doubt["size"] == doubt["kind"] == 0


def test_what_moves_between_classes_is_their_probability() -> None:
    x = table(1000)
    found = explain(classes, x, COLUMNS, rows=1000)
    assert found.classes
    assert found.names[0] == "size"
    assert found.mean[0].item() == pytest.approx(0.5, abs=0.05)  # half of the rows change sides, and move all of it
    assert found.mean[1:].tolist() == [0, 0]


def test_of_thousands_of_columns_those_most_related_to_the_prediction_are_shuffled() -> None:
    """Each shuffle passes over all columns, so shuffling all of them takes time by the square of their number."""
    x, calls = torch.randn(200, 4000), []

    def ask(x: Tensor) -> pd.prediction.Prediction:
        calls.append(x)
        mean = 2 * x[:, 70:71] + x[:, 2000:2001].square()
        return made(torch.cat([mean, x[:, 3999:]], -1).unsqueeze(0).double(), pd.HeteroscedasticGaussian())

    found = explain(ask, x, {f"c{k}": [k] for k in range(4000)}, repeats=2)
    assert len(calls) == 2 + 2 * 30
    assert found.names[:2] == ("c70", "c2000")
    assert found.names[int(found.doubt.argmax())] == "c3999"
    assert (
        found.title.splitlines()[1]
        == "200 rows, the 30 of 4000 columns most related to the prediction shuffled 2 times"
    )


def test_other_draws_at_each_call_are_refused() -> None:
    with pytest.raises(pd.errors.PyroDropoutError, match="same draws at each call; give it a seed"):
        explain(lambda x: made(torch.randn(3, len(x), 1), pd.Gaussian(1.0)), table(20), COLUMNS)
    with pytest.raises(pd.errors.RangeError, match="at least 2 rows"):
        explain(numbers, table(1), COLUMNS)
