"""A table fitted in one call, its answers, its folder, and what it refuses."""

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.tables.table import unlisted
from pyro_dropout.tabular.fitted import FittedTable, _doubts
from tests.cli.command import run, succeeded, table_of

QUICK: dict[str, Any] = {"guide": "mean-field", "noise": "constant", "steps": 40, "progress": False}


def houses(rows: int = 120) -> pandas.DataFrame:
    dice = np.random.default_rng(0)
    frame = pandas.DataFrame({"area": dice.lognormal(4.5, 0.4, rows), "town": dice.choice(["north", "south"], rows)})
    frame["price"] = 2000 * frame["area"] * (1 + (frame["town"] == "north")) * dice.lognormal(0, 0.2, rows)
    frame.loc[::9, "area"] = None
    frame.index = frame.index + 1000
    return frame


@pytest.fixture(scope="module")
def fitted() -> FittedTable:
    return pd.fit_table(houses(), target="price", **QUICK)


def test_a_raw_frame_is_fitted_and_predicted(fitted: FittedTable, tmp_path: Path) -> None:
    frame = houses()
    found = fitted.predict(frame.drop(columns="price"), quantiles=[0.1], above=[200_000, 0])
    assert list(found.index) == list(frame.index)
    assert list(found) == [
        *("mean", "std", "epistemic_std", "lower", "upper", "q=0.1", "p>200000", "p>0", "unfamiliar"),
        *("unfamiliar_in", "beyond"),
    ]
    alike = fitted.predict(frame.drop(columns="price"), quantiles=0.1, above=200_000)
    assert (alike["p>200000"] == found["p>200000"]).all()
    frame.to_csv(tmp_path / "houses.csv", index=False)
    of_files = [fitted.predict(where) for where in (tmp_path / "houses.csv", str(tmp_path / "houses.csv"))]
    for answers in of_files:
        assert np.allclose(answers["mean"], found["mean"])
    assert (alike["q=0.1"] == found["q=0.1"]).all()
    assert (found["lower"] > 0).all()
    assert (found["p>0"] > 0.999).all()
    assert ((found["lower"] < found["q=0.1"]) & (found["q=0.1"] < found["mean"])).all()
    assert fitted.run.recipe.scale == "log"
    assert "log target" in fitted.said
    assert fitted.calibration.rows == 24
    assert {"calibrated_coverage_95", "interval_score_95"} <= set(fitted.scores)


def test_the_final_network_sees_all_rows_and_the_calibration_none_of_those_held_back(fitted: FittedTable) -> None:
    assert fitted.data is not None
    held = fitted.data.test[1]
    assert torch.allclose(fitted.model.y_mean, fitted.data.rows[1].log().mean(0))  # of the logarithms of all 120
    assert fitted.held is not None
    wanted = pd.conformal(fitted.held, held)
    assert fitted.calibration.intervals is not None
    assert torch.equal(fitted.calibration.intervals.scores, wanted.scores)


def test_a_folder_answers_as_the_fit_did_in_python_and_on_the_command_line(fitted: FittedTable, tmp_path: Path) -> None:
    fitted.save(tmp_path / "run")
    again = FittedTable.load(tmp_path / "run")
    new = houses(30).drop(columns="price")
    wanted = fitted.predict(new)
    pandas.testing.assert_frame_equal(again.predict(new), wanted)
    assert again.said == fitted.said != ""
    new.to_csv(tmp_path / "new.csv", index=False)
    done = succeeded(
        "predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--quiet", "--json"
    )
    assert json.loads(done.stdout)["calibrated"] is True
    for row, (_, own) in zip(table_of(tmp_path / "p.csv"), wanted.iterrows(), strict=True):
        assert float(row["upper"]) == pytest.approx(own["upper"], rel=1e-4)
        assert int(row["unfamiliar"]) == own["unfamiliar"]
    refused = {"run": "already holds a run", ".": "not empty", "new.csv": "is a file", "new.csv/run": "Not a directory"}
    for name, words in refused.items():
        with pytest.raises(pd.errors.PyroDropoutError, match=words):
            fitted.save(tmp_path / name)


def test_predictions_of_rows_with_the_target_are_compared_with_it(fitted: FittedTable, tmp_path: Path) -> None:
    fitted.save(tmp_path / "run")
    new = houses(30)
    new.loc[1003, "price"] = None
    new.to_csv(tmp_path / "new.csv", index=False)
    asked = ["predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--quiet"]
    scores = json.loads(run(*asked, "--json").stdout)["scores"]
    found, kept = fitted.predict(new), new["price"].notna()
    errors = (found["mean"] - new["price"])[kept]
    inside = ((found["lower"] <= new["price"]) & (new["price"] <= found["upper"]))[kept]
    assert scores == pytest.approx({"rows": 29, "rmse": (errors**2).mean() ** 0.5, "coverage": inside.mean()}, rel=1e-4)
    assert "On 29 rows, which have the target too: rmse " in run(*asked).stdout
    new["price"] = "unknown"
    new.to_csv(tmp_path / "new.csv", index=False)
    done = run(*asked, "--json")
    assert (done.exit_code, "scores" in json.loads(done.stdout)) == (0, False)


def test_without_held_back_rows_nothing_is_chosen_or_calibrated() -> None:
    found = pd.fit_table(houses(60), target="price", held_back=0.0, steps=5, progress=False)
    assert found.said == ""
    assert found.scores == {}
    assert (found.run.recipe.guide, found.run.recipe.scale) == ("mean-field", "log")
    assert not found.calibration.calibrates(0.5)
    assert found.predict(houses(5))["upper"].notna().all()
    with pytest.raises(pd.errors.PyroDropoutError, match="held-back rows are known after fit_table only"):
        found.plot()


def test_columns_named_by_numbers_and_numbers_of_numpy_are_taken() -> None:
    frame = houses(60).set_axis([0, 1, 2], axis=1)
    found = pd.fit_table(frame, target=2, keep=0, **QUICK | {"steps": np.int64(5), "seed": np.int32(1)})
    assert (found.encoding.target, found.run.training.steps) == ("2", 5)
    assert list(found.predict(frame.head(3), above="12", quantiles=[0.1, 0.1000001]))[5:8] == [
        *("q=0.1", "q=0.1000001", "p>12")
    ]


def test_a_share_of_nothing_may_be_a_whole_number(tmp_path: Path) -> None:
    how: Any = {"held_back": 0, "guide": "mean-field", "steps": 2, "compile": False, "progress": False}
    found = pd.fit_table(houses(60), target="price", folder=tmp_path / "run", **how)
    again = FittedTable.load(tmp_path / "run")
    assert found.predict(houses(5)).equals(again.predict(houses(5)))


def test_classes_have_sets_whose_names_are_read_back(tmp_path: Path) -> None:
    names, far = ["oak", "oak; tall", 'the "elm"'], 'a;b "c"'
    frame = houses(90).assign(kind=names * 30).drop(columns="price").rename(columns={"area": far})
    found = pd.fit_table(frame, target="kind", steps=10, progress=False, guide="mean-field")
    answers = found.predict(frame, level=0.6)
    assert {"class", "probability", "set", "p=oak; tall"} <= set(answers)
    assert all(row["class"] in unlisted(row["set"]) for _, row in answers.iterrows())
    with pytest.raises(pd.errors.PyroDropoutError, match="the target is a class"):
        found.predict(frame, above=[3])
    found.save(tmp_path / "run")
    frame.assign(**{far: 1e6}).to_csv(tmp_path / "new.csv", index=False)
    asked = ["predict", tmp_path / "run", tmp_path / "new.csv", "--level", 0.6, "--out", tmp_path / "p.csv"]
    record = json.loads(run(*asked, "--json").stdout)
    cells = pandas.read_csv(tmp_path / "p.csv", keep_default_na=False)
    sets = [next(csv.reader([cell], delimiter=";", skipinitialspace=True)) for cell in cells["set"]]
    assert {name for each in sets for name in each} <= {*names}
    assert record["scores"]["coverage"] == np.mean([kind in each for kind, each in zip(names * 30, sets, strict=True)])
    assert record["beyond"]["inputs"] == {far: 90}
    assert all(unlisted(cell) == [far] for cell in cells["beyond"])
    told = " ".join(run(*asked).stdout.split())
    assert "log-likelihood -" in told
    assert "of them in their 60 % sets (" in told


@pytest.mark.deep
def test_counts_and_proportions_come_back_from_their_folder(tmp_path: Path) -> None:
    frame = houses(60).drop(columns="price")
    for name, target in (("visits", np.arange(60) % 9), ("share", (np.arange(60) + 1) / 70)):
        found = pd.fit_table(frame.assign(y=target), target="y", **QUICK | {"steps": 5})
        assert found.run.recipe.scale == {"visits": "count", "share": "logit"}[name]
        found.save(tmp_path / name)
        again = FittedTable.load(tmp_path / name)
        answers = again.predict(frame.head(4), samples=20)
        pandas.testing.assert_frame_equal(answers, found.predict(frame.head(4), samples=20))
        assert (answers["lower"] >= 0).all()


def test_a_centred_target_is_not_taken_on_another_scale() -> None:
    frame = houses(60).assign(price=1e9 + np.arange(60) % 7)
    with pytest.raises(pd.errors.PyroDropoutError, match="counted from"):
        pd.fit_table(frame, target="price", scale="log", **QUICK)


def test_an_unfamiliar_row_says_what_sets_it_apart(fitted: FittedTable) -> None:
    new = houses(4)
    new.loc[1001, "area"] = 1e6
    with pytest.warns(UserWarning, match="outside its own interval, in row 1001"):
        found = fitted.predict(new)
    assert (found["unfamiliar"][1001], found["unfamiliar_in"][1001]) == (True, "area")
    assert ((found["unfamiliar_in"] != "") == found["unfamiliar"]).all()


@pytest.mark.deep
def test_a_row_with_a_category_that_training_did_not_have_is_unfamiliar(tmp_path: Path) -> None:
    frame = houses(400).drop(columns="price").assign(y=np.arange(400.0))
    gaps = frame.copy()
    gaps.loc[gaps.index[::20], "town"] = None  # so that gaps are as ordinary as a town
    several = frame.assign(town=[f"village {k}" if k < 12 else town for k, town in enumerate(frame["town"])])
    for known in (gaps, several):
        found = pd.fit_table(known, target="y", scale="plain", **QUICK)
        new = frame.head(40).assign(town=["Atlantis"] * 20 + ["north"] * 20, y=0.0)
        answers = found.predict(new)
        assert answers["unfamiliar"][:20].all()
        assert answers["unfamiliar_in"][:20].str.split("; ").map(lambda names: names[0] == "town").all()
        assert (answers["beyond"][:20] == "town").all()
        assert answers["unfamiliar"][20:].sum() < 10
        assert (answers["beyond"][20:] == "").all()
        labels = [each.get_label() for each in found.plot(new).axes[0].lines]
        assert "unlike the training rows" in labels
    seen = known["town"].map(set(known["town"].head(12)).__contains__)
    assert not any("town" in names for names in found.predict(known)["beyond"][~seen])
    found.save(tmp_path / "run")
    new.to_csv(tmp_path / "new.csv", index=False)
    asked = ["predict", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--quiet"]
    assert f"rows unlike the training rows (unfamiliar): {answers['unfamiliar'].sum()}" in run(*asked).stdout
    assert json.loads(run(*asked, "--json").stdout)["unfamiliar"] == answers["unfamiliar"].sum() >= 20
    assert [row["unfamiliar"] for row in table_of(tmp_path / "p.csv")[:20]] == ["1"] * 20


def test_a_column_without_any_value_is_named(fitted: FittedTable) -> None:
    new = houses(12).assign(town=None)
    with pytest.warns(UserWarning, match="column 'town' has no value in any row, unlike in training"):
        fitted.predict(new)
    with pytest.warns(UserWarning, match="columns 'area', 'town' have no value"):
        fitted.predict(new.assign(area=np.nan))
    fitted.predict(houses(3).assign(area=np.nan))  # gaps of which training had many


@pytest.mark.thinned(4)
@pytest.mark.parametrize("guide", ["mean-field", "dropout-ensemble", "full-rank", "ensemble"])
def test_the_answer_for_a_row_does_not_depend_on_the_rows_beside_it(guide: str) -> None:
    found = pd.fit_table(houses(60), target="price", **QUICK | {"guide": guide, "steps": 5})
    rows = houses(900).drop(columns="price")
    options: Any = {"samples": 150, "quantiles": 0.2, "above": 200_000}
    whole, few = found.predict(rows, **options), found.predict(rows.iloc[[3, 700]], **options)
    numbers = list(few.select_dtypes("float"))
    assert np.allclose(whole.iloc[[3, 700]][numbers], few[numbers], rtol=1e-4)


@pytest.mark.deep
def test_counts_have_a_picture() -> None:
    found = pd.fit_table(houses(60).assign(price=np.arange(60) % 9), target="price", **QUICK)
    assert found.run.recipe.scale == "count"
    left, right = found.plot(houses(40).assign(price=np.arange(40) % 9)).axes
    assert "40 rows" in left.get_title()
    shares = right.lines[1].get_ydata()
    assert (np.diff(shares) >= 0).all()
    assert 0 <= shares[0] <= shares[-1] <= 1


@pytest.mark.deep
def test_a_gap_where_training_had_none_is_unfamiliar() -> None:
    frame = houses(200).assign(rooms=np.arange(200.0) % 7)  # gaps among areas are usual
    found = pd.fit_table(frame, "price", scale="plain", **QUICK)
    new = frame.head(50).copy()
    new.loc[new.index[:20], "rooms"] = None
    answers = found.predict(new)
    assert answers["unfamiliar"][:20].all()
    assert (answers["unfamiliar_in"][:20].str.split("; ").str[0] == "rooms").all()
    assert (answers["beyond"][:20].str.split("; ").str[-1] == "rooms").all()
    assert answers["unfamiliar"][20:].sum() < 10


def test_columns_outside_their_range_in_most_rows_are_warned_of(fitted: FittedTable) -> None:
    new = houses(40).assign(area=lambda frame: 1000 * frame["area"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # means that are of no use are warned of too
        fitted.predict(new)
    assert any("area is outside its training range in 35 of 40 rows" in str(each.message) for each in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.predict(houses())


def test_means_of_no_use_are_warned_of() -> None:
    ends, none = {"lower": [1.0] * 3, "upper": [3.0] * 3}, pandas.Series(dtype="int64")
    (said,) = _doubts(pandas.DataFrame({"mean": [2.0, 9.0, float("nan")], **ends}), none)
    assert "outside its own interval, in row 1, 2:" in said
    assert _doubts(pandas.DataFrame({"mean": [2.0] * 3, **ends}), none) == []
