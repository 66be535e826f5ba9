"""The figure about a table: what its titles say is so, and every kind of table and target has one."""

import io

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.protocols import Figure
from pyro_dropout.tables.encoding import Column, Encoding
from pyro_dropout.tabular.partial_dependence import dependence
from pyro_dropout.tabular.pictures import picture
from tests.oracles.made_predictions import made

WIDE = Encoding((Column("size", centre=100), Column("kind", ("a", "b"), gaps=True), Column("rest")), "price $x$")
ONE = Encoding((Column("age"),), "height", target_centre=1000)
CLASSES = Encoding(WIDE.inputs, "pet", ("cat", "dog", "a very long name of a class"))


def table(rows: int) -> Tensor:
    kind = torch.nn.functional.one_hot(torch.randint(3, (rows,)), 3).float()
    return torch.cat([torch.randn(rows, 1), kind, torch.randn(rows, 1)], 1)


def numbers(x: Tensor) -> pd.prediction.Prediction:
    mean = 2 * x[:, :1] + (x[:, 1:4] @ torch.tensor([[0.0], [1.0], [9.0]]) if x.shape[1] > 1 else 0)
    return made(torch.stack([mean - 0.5, mean + 0.5]), pd.Gaussian(4.0))


def classes(x: Tensor) -> pd.prediction.Prediction:
    return made(torch.cat([x[:, :1], 0 * x[:, :1], x[:, 1:2]], -1)[None], pd.Categorical())


def drawn(figure: Figure) -> list[str]:
    figure.savefig(io.BytesIO(), format="svg")  # as a whole
    return [ax.get_title() for ax in figure.axes if ax.get_visible()]


def test_the_titles_of_numbers_are_true() -> None:
    x = table(60)
    y = numbers(x).mean + torch.where(torch.arange(60) < 12, 50.0, 0.1).unsqueeze(-1)  # a fifth is far outside
    far = torch.arange(60) == 7
    figure = picture(numbers, WIDE, x, y, unfamiliar=far)
    assert drawn(figure) == [
        "80 % of 60 held-back rows in their 95 % interval",
        "How often intervals hold, 60 held-back rows",
        "Prediction by kind, averaged over 60 rows",
        "Prediction by size, averaged over 60 rows",
    ]
    first = figure.axes[0]
    assert (first.get_xlabel(), first.get_ylabel()) == ("predicted price $x$", "actual price $x$")
    orange = next(line for line in first.lines if line.get_label() == "unlike the training rows")
    assert orange.get_ydata().tolist() == [y[7].item()]
    curve = next(line for line in figure.axes[1].lines if "own" in line.get_label())
    assert curve.get_ydata()[-1] == pytest.approx(0.8)


def test_without_targets_the_picture_says_what_matters() -> None:
    figure = picture(numbers, WIDE, table(300), rows="rows")
    assert drawn(figure) == [
        "Change of the prediction when a column is shuffled\n200 of 300 rows, each column shuffled 2 times",
        "Prediction by kind, averaged over 60 rows",
        "Prediction by size, averaged over 60 rows",
    ]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["±2 standard errors"]


def test_a_single_input_has_its_curve_in_the_units_of_the_table() -> None:
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    figure = picture(numbers, ONE, x, 2 * x)
    assert drawn(figure)[2] == "Prediction by age"
    curve = next(line for line in figure.axes[2].lines if line.get_label() == "prediction")
    torch.testing.assert_close(
        torch.tensor(curve.get_ydata()), 1000 + 2 * torch.tensor(curve.get_xdata()), rtol=1e-6, atol=0
    )
    assert len(drawn(picture(numbers, ONE, x))) == 2


def test_classes_have_a_confusion_and_no_intervals() -> None:
    x = table(60)
    y = classes(x).probs.argmax(-1)
    y[:15] = (y[:15] + 1) % 3
    figure = picture(classes, CLASSES, x, y)
    titles = drawn(figure)
    assert titles[0] == "75 % of 60 held-back rows right\ncolour: share of the actual class"
    assert titles[1] == "How often the most probable class is right, 60 held-back rows"
    assert sum(int(text.get_text().split()[0]) for text in figure.axes[0].texts) == 60
    assert "interval" not in " ".join(titles)
    assert len(drawn(picture(classes, CLASSES, x))) == 3


def test_no_category_is_left_out_without_a_word_and_no_legend_lies_over_a_label() -> None:
    names = tuple(f"a long name {k}" for k in range(22))
    encoding = Encoding((Column("model", names), Column("size")), "price", ())
    x = torch.cat([torch.eye(22).repeat(3, 1), torch.randn(66, 1)], 1)

    def predict(rows: Tensor) -> pd.prediction.Prediction:
        return made(rows[None, :, :22] @ torch.arange(22.0).unsqueeze(-1), pd.Gaussian(4.0))

    figure = picture(predict, encoding, x, predict(x).mean)
    assert "Prediction by model, the 10 most common of 22, averaged over 60 rows" in drawn(figure)
    (ax,) = [ax for ax in figure.axes if ax.get_xlabel() == "model"]
    box = ax.get_legend().get_window_extent()
    assert not box.overlaps(ax.xaxis.get_tightbbox())
    assert not box.overlaps(ax.title.get_window_extent())


def test_partial_dependence_is_that_of_a_sum() -> None:
    x = table(40)
    found = dependence(numbers, WIDE, x, "kind", lambda each: each.interval(0.9))
    others = (2 * x[:, 0]).mean()
    assert (found.names, found.values) == (("a", "b", "(missing)"), (0.0, 1.0, 2.0))
    torch.testing.assert_close(found.mean[:, 0], others + torch.tensor([0.0, 1.0, 9.0]))
    assert bool((found.low < found.mean).all() & (found.mean < found.high).all())
    torch.testing.assert_close(found.doubt, torch.full((3, 1), 0.5))
    size = dependence(numbers, WIDE, x, "size", lambda each: each.interval(0.9))
    assert size.values[0] >= 100 + x[:, 0].min().item() - 1e-6  # in the units of the table
    slope = (size.mean[-1, 0] - size.mean[0, 0]).item() / (size.values[-1] - size.values[0])
    assert slope == pytest.approx(2.0, rel=1e-4)


def test_missing_values_are_no_part_of_a_number() -> None:
    encoding = Encoding((Column("size", gaps=True), Column("rest")), "y")
    x = torch.stack([torch.linspace(0, 1, 40), torch.zeros(40), torch.randn(40)], 1)
    x[::4, 0], x[::4, 1] = -50.0, 1.0  # filled in, and marked

    def predict(inputs: Tensor) -> pd.prediction.Prediction:
        assert not inputs[:, 1].any() or len(inputs) == 40
        return made(inputs[None, :, :1], pd.Gaussian(1.0))

    found = dependence(predict, encoding, x, "size", lambda each: each.interval(0.9))
    assert min(found.values) >= 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(pd.errors.ShapeError, match=r"at least 2 rows, and y as many; got 5 rows and 4 targets"):
        picture(numbers, WIDE, table(5), torch.zeros(4, 1))
    with pytest.raises(pd.errors.PyroDropoutError, match="encoding has no classes"):
        picture(classes, WIDE, table(5))
