"""What is drawn of a fitted table: the importance of columns is what theory says, and what titles say is so."""

import io
import math

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.protocols import Figure
from pyro_dropout.tables.encoding import Column, Encoding
from pyro_dropout.tabular.explain import explain
from pyro_dropout.tabular.pictures import picture
from tests.oracles.made_predictions import made

COLUMNS = {"size": [0], "kind": [1, 2, 3], "noise": [4]}
PRICE = Encoding((Column("size"),), "price $x$")
PETS = Encoding((Column("size"),), "pet", ("cat", "dog", "a very long name of a class"))


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


def drawn(figure: Figure) -> list[str]:
    figure.savefig(io.BytesIO(), format="svg")  # as a whole
    return [ax.get_title() for ax in figure.axes]


def test_a_linear_function_changes_as_much_as_theory_says() -> None:
    found = explain(numbers, table(3000), COLUMNS, rows=3000)
    mean, error, doubt = (found.table[name] for name in ("mean", "mean_error", "doubt"))
    # E|x - x'| of two normals is 2/√π; of two kinds, the mean over all nine pairs
    for name, wanted in (("size", 2 * 2 / math.sqrt(math.pi)), ("kind", 2 * (1 + 5 + 4) / 9)):
        assert abs(mean[name] - wanted) < 5 * error[name] + 0.02
        assert 0 < error[name] < 0.1
    assert mean["noise"] == 0
    assert doubt["noise"] > 0.1
    assert doubt["size"] == doubt["kind"] == 0
    assert drawn(found.plot()) == ["", ""]
    with pytest.raises(pd.errors.RangeError, match="at least 2 rows"):
        explain(numbers, table(1), COLUMNS)


def test_what_moves_between_classes_is_their_probability() -> None:
    found = explain(classes, table(1000), COLUMNS, rows=1000)
    assert found.classes
    assert found.names[0] == "size"
    # half of the rows change sides, and move all of it
    assert found.table["mean"].tolist() == [pytest.approx(0.5, abs=0.05), 0, 0]


def test_of_thousands_of_columns_those_most_related_to_the_prediction_are_shuffled() -> None:
    """Each shuffle passes over all columns, so shuffling all of them takes time by the square of their number."""
    x, calls = torch.randn(200, 4000), []

    def ask(x: Tensor) -> pd.prediction.Prediction:
        calls.append(x)
        mean = 2 * x[:, 70:71] + x[:, 2000:2001].square()
        return made(torch.cat([mean, x[:, 3999:]], -1).unsqueeze(0).double(), pd.HeteroscedasticGaussian())

    found = explain(ask, x, {f"c{k}": [k] for k in range(4000)})
    assert len(calls) == 1 + 3 * 30
    assert found.names[:2] == ["c70", "c2000"]
    assert found.table["doubt"].idxmax() == "c3999"
    assert "200 rows, the 30 of 4000 columns most related to the prediction shuffled 3 times" in found.about


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_picture_of_numbers_says_how_many_are_in_their_intervals(calibrated: bool) -> None:
    x = table(60)
    answer = numbers(x)
    y = answer.mean + torch.where(torch.arange(60) < 12, 50.0, 0.1).unsqueeze(-1)  # a fifth is far outside
    ends = (answer.mean - 60, answer.mean + 60) if calibrated else None
    figure = picture(answer, y, PRICE, ends=ends, unfamiliar=torch.arange(60) == 7)
    inside = "100 %" if calibrated else "80 %"
    assert drawn(figure) == [f"{inside} of 60 rows in their 95 % interval", "How often intervals hold, 60 rows"]
    left, right = figure.axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("predicted price $x$", "actual price $x$")
    orange = next(line for line in left.lines if line.get_label() == "unlike the training rows")
    assert orange.get_ydata().tolist() == [y[7].item()]
    own = next(line for line in right.lines if "own" in str(line.get_label()))
    assert own.get_ydata()[-1] == pytest.approx(0.8)
    assert any("calibrated 95 % interval: 100" in str(line.get_label()) for line in right.lines) == calibrated


def test_a_picture_of_classes_has_a_confusion() -> None:
    x = table(60)
    answer = made(torch.cat([x[:, :1], 0 * x[:, :1], x[:, 1:2]], -1)[None], pd.Categorical())
    y = answer.probs.argmax(-1)
    y[:15] = (y[:15] + 1) % 3
    figure = picture(answer, y, PETS)
    titles = drawn(figure)
    assert titles[0] == "75 % of 60 rows right"
    assert titles[1] == "How often the most probable class is right, 60 rows"
    assert sum(int(text.get_text().split()[0]) for text in figure.axes[0].texts) == 60
    with pytest.raises(pd.errors.ShapeError, match="at least 2 rows"):
        picture(answer, y[:1], PETS)
