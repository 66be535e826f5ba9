"""The page of a comparison: valid, alone, safe from names, and right in what it marks and says."""

import base64
import hashlib
import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.comparison.compare import Comparison
from pyro_dropout.comparison.exams import Exam
from pyro_dropout.comparison.figure import calibration_curve
from pyro_dropout.comparison.findings import Row, Score
from pyro_dropout.comparison.report.page import facts, page
from pyro_dropout.generative.model_call import ModelCall
from tests.comparison.sample_comparison import HOSTILE, SETTINGS, regression, scored, series

VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def found() -> Comparison:
    pyro.set_rng_seed(0)
    return regression()


@pytest.fixture(scope="module")
def text(found: Comparison) -> str:
    return page(found)


def made(*rows: Row, **settings: Any) -> Comparison:
    return Comparison(list(rows), series(20), series(10), {"seeds": 2, **settings}, 1.0)


# --- the page itself --------------------------------------------------------------------------------------------------


def test_the_page_is_valid_and_stands_alone(text: str) -> None:
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_500_000
    read = Reader(text)
    assert read.open == []
    assert read.all("html") == [{"lang": "en"}]
    assert "".join(read.texts["title"]) == f"Waves {HOSTILE}"
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in read.all("a"):
        assert attributes["href"] in {f"#{name}" for name in ids}
    assert not re.search(r"https?:(?!//www\.w3\.org/)|@import|url\(|<link|<iframe|<base", text)
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for attributes in read.all("img"):
        assert str(attributes["src"]).startswith("data:image/svg+xml;base64,")
        assert len(str(attributes["alt"])) > 20
    for attributes in read.all("th"):
        assert attributes["scope"] in {"col", "row", "colgroup"}


def test_the_policy_allows_this_style_and_no_script(text: str) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    (inside,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    assert policy.endswith(f"style-src 'sha256-{digest}'")
    assert not any("style" in attributes for _, attributes in Reader(text).elements)  # the policy would refuse them


def test_names_are_text_wherever_they_stand(text: str) -> None:
    read = Reader(text)
    assert not read.all("script")
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert "Net(&lt;b&gt;)" in text
    images = [base64.b64decode(str(each["src"]).split(",")[1]).decode() for each in read.all("img")]
    words = ""
    for image in images:
        root = ET.fromstring(image)
        assert not [each for each in root.iter() if each.tag.endswith(("script", "foreignObject"))]
        links = [v for each in root.iter() for name, v in each.attrib.items() if name.endswith("href")]
        assert all(link.startswith(("#", "data:image/png")) for link in links)
        words += " ".join(each.text or "" for each in root.iter() if each.tag.endswith("text"))
    assert HOSTILE in words  # a dollar starts no formula
    assert "高さ (m)" in words


def test_the_same_comparison_makes_the_same_page_and_leaves_no_mark(found: Comparison, text: str) -> None:
    before = torch.get_rng_state()
    assert page(found) == text
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_shown_is_left_out() -> None:
    text = page(made(Row("a", note="failed: no"), Row("b", note="failed: neither")))
    assert "No guide could be scored." in text
    assert "<img" not in text
    assert Reader(text).open == []
    assert 'id="paper"' not in text


def test_a_page_needs_a_place(tmp_path: Path) -> None:
    found = made(Row("a", {"rmse": Score([1.0])}))
    with pytest.raises(pd.errors.PyroDropoutError, match="is a folder"):
        found.to_html(tmp_path)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"does not exist: '.*nowhere'"):
        found.to_html(tmp_path / "nowhere" / "page.html")
    path = found.to_html(str(tmp_path / "page.html"))
    assert path.read_text("utf-8").endswith("</html>\n")


# --- what is marked and said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "one", "other", "leaders"),
    [
        ("rmse", [1.0, 1.2], [2.0, 2.2], "a"),  # 1.0 apart, errors of 0.1
        ("rmse", [1.0, 1.2], [1.2, 1.4], "ab"),  # 0.2 apart, 0.14 the error of that
        ("log_lik", [1.0, 1.2], [2.0, 2.2], "b"),
        ("rmse", [1.0], [2.0], ""),  # one seed has no error
        ("coverage", [0.92, 0.93], [0.97, 0.98], "ab"),  # equally far from 0.95
        ("coverage", [0.94, 0.95], [0.99, 1.0], "a"),
        ("gap", [1.0, 1.1], [2.0, 2.1], ""),  # neither way is better
    ],
)
def test_the_best_mark_is_shared_within_error(key: str, one: list[float], other: list[float], leaders: str) -> None:
    pair = made(Row("a", {key: Score(one)}), Row("b", {key: Score(other)}), Row("reference", {key: Score([0.0, 0.0])}))
    assert sorted(pair.leaders(key)) == list(leaders)
    tables = 2 if key == "coverage" else 1  # with that of calibration
    assert page(pair).count(" (best)</span>") == tables * len(leaders)


def test_guides_are_ranked_by_their_distance_to_the_reference_or_else_by_their_likelihood() -> None:
    rows = [Row("a", {"log_lik": Score([1.0])}), Row("b", {"log_lik": Score([3.0])})]
    assert made(*rows).ranking == ["b", "a"]
    for row, distance in zip(rows, (0.1, 0.2), strict=True):
        row.scores["d_w1"] = Score([distance])
    assert made(Row("reference"), *rows).ranking == ["a", "b"]


def test_the_error_of_a_difference_is_over_the_same_held_back_points() -> None:
    """With one seed too; what all rows share, such as an outlier, is no error of their difference."""
    hard, tilt = 100 * torch.randn(50), torch.linspace(-0.1, 0.1, 50)
    scores = {name: Score() for name in "abc"}
    for name, own in {"a": tilt, "b": tilt - 1, "c": -tilt}.items():
        scores[name].add(hard.double() + own)
    found = made(*(Row(name, {"log_lik": score}) for name, score in scores.items()))
    assert sorted(found.leaders("log_lik")) == ["a", "c"]


# --- curves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classes", "yes and no", "counts"])
@pytest.mark.thinned(2)
def test_other_targets_have_their_own_curves(kind: str) -> None:
    x = torch.randn(30, 2)
    likelihood, y, width = {
        "classes": (pd.Categorical(), (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), 3),
        "yes and no": (pd.Bernoulli(), (x > 0).float(), 2),
        "counts": (pd.Poisson(), torch.poisson(torch.exp(x[:, :1])), 1),
    }[kind]
    data = ModelCall(None, (x, y))
    exam = Exam(data, data, samples=40)
    row = scored(
        "mean field", pd.AutoMeanField, exam, lambda: pd.BayesianNet(nn.Linear(2, width), likelihood=likelihood), (0, 1)
    )
    compared = Comparison([row], (x, y), (x, y), {"seeds": 2}, 1.0)
    text = page(compared)
    alts = [str(each["alt"]) for each in Reader(text).all("img")]
    assert 'id="predictions"' not in text  # two inputs
    asked = {"95 % coverage", "interval score", "CRPS"} if kind == "counts" else {"calibration error", "Brier"}
    assert asked <= set(re.findall(r'title="[^"]*">([^<]+)</th>', text.split('id="doubt"')[1]))
    assert len(alts) == 1
    # the caption speaks of what is drawn
    said = " ".join(text.split('id="doubt"')[1].split())
    assert ("grey band" in said) == ("Intervals of whole numbers" in said) == (kind == "counts")
    assert ("95 % interval of its accuracies" in said) == (kind != "counts")
    assert ("Accuracy against confidence" in alts[0]) == (kind != "counts")
    axes = compared.plot_scores().axes[0]
    assert len(axes.collections) == 1  # one band: of all curves, or of the only one
    if kind == "counts":
        assert calibration_curve(compared.answers["mean field"], y) is not None


def test_every_curve_of_the_gap_falls_and_every_axis_is_named() -> None:
    figure = pd.comparison.plot_kl_gap(keeps=[0.5, 0.9], scales=[0.3, 1.0, 3.0], draws=50)
    left, right = figure.axes
    for axes, curves in ((left, 2), (right, 3)):
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        assert len(lines) == curves == len(axes.get_legend().get_texts())
        assert axes.get_xlabel()
        assert "nats" in axes.get_ylabel()
        for line in lines:
            y = list(line.get_ydata())
            assert y[0] > y[-1] >= 0
    # d = 8 at even odds, read off the picture
    even = left.lines[0]
    at_eight = dict(zip(even.get_xdata().tolist(), even.get_ydata().tolist(), strict=True))[8.0]
    assert at_eight == pytest.approx(9.35351e-5, rel=1e-5)


# --- how it was made --------------------------------------------------------------------------------------------------


def test_it_can_be_run_again(found: Comparison) -> None:
    told = facts(found)
    assert told["seeds"] == "3, 8"
    assert told["time"] == "12 s in total, finished 2024-05-01 12:00 +0000"
    assert f"torch {version('torch')}" in told["versions"]
    assert "dropout (AutoDropout)" in told["guides"]
    assert "_broken (nothing trained)" in told["guides"]
    command = "pyro-dropout compare <my.csv> --seeds 2"
    shown = page(made(Row("a", {"rmse": Score([1.0])}), **{**SETTINGS, "command": command}))
    assert "<pre>pyro-dropout compare &lt;my.csv&gt; --seeds 2</pre>" in shown
