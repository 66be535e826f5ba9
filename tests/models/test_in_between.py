"""The experiment in between two clusters: its record, and its pieces against sums written out by hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch
from experiments.two_clusters import on_line

import pyro_dropout as pd
from tests.models.test_scripts import FOLDER, loaded, picture_size

script = loaded(FOLDER / "in_between.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("in_between")
    jaxtyping.config.update("jaxtyping_disable", True)  # checking shapes takes longer than the run
    script.main(["--quick", "--quiet", "--out", str(out)])
    jaxtyping.config.update("jaxtyping_disable", False)
    return out


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "results.json").read_text("utf-8"))
    return record


@pytest.mark.deep
def test_the_table_has_every_guide_in_every_problem(found: dict[str, Any]) -> None:
    (table,) = found["tables"]
    named = [(row["hidden layers"], row["inputs"], row["guide"]) for row in table["rows"]]
    names = ("NUTS", "dropout", "mean field", "ensemble", script.LAPLACE)
    assert named == [(1, q, name) for q in (1, 5) for name in names]
    for row in table["rows"]:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert len(numbers) == 9
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert row["at data"] > 0
        assert row["in gap"] > 0
    for row in table["rows"][::5]:
        assert row["ratio ÷ NUTS"] == pytest.approx(1.0)
        assert row["ratio"] == pytest.approx(row["in gap"] / row["at data"])


@pytest.mark.deep
def test_guides_of_a_page_stand_beside_a_new_reference(folder: Path, found: dict[str, Any], tmp_path: Path) -> None:
    page, quiet = str(folder / "results.md"), ["--quick", "--quiet", "--draws", "8", "--out", str(tmp_path)]
    script.main([*quiet, "--guides", "dropout", "--beside", page])
    (table,) = json.loads((tmp_path / "results.json").read_text("utf-8"))["tables"]
    for row, old in zip(table["rows"], found["tables"][0]["rows"], strict=True):
        assert row["guide"] == old["guide"]
        if row["guide"] == "NUTS":
            reference = row
            assert row["ratio"] != old["ratio"]
        else:
            assert row["ratio"] == pytest.approx(old["ratio"], rel=1e-3)  # a page has four digits
        assert row["ratio ÷ NUTS"] == pytest.approx(row["ratio"] / reference["ratio"])
        assert row["at data ÷ NUTS"] == pytest.approx(row["at data"] / reference["at data"])


@pytest.mark.deep
def test_claims_and_pictures(folder: Path, found: dict[str, Any]) -> None:
    assert [each["claim"] for each in found["claims"]] == [
        "dropout is over-confident in between",
        "mean field is over-confident in between",
        "an anchored ensemble is within 45 % of the posterior's ratio",
        "linearised Laplace has at least 0.30 of the posterior's ratio",
        "linearised Laplace is within 15 % of the posterior's width at the data",
    ]
    assert [each["file"] for each in found["figures"]] == ["bands.png", "widths.png"]
    for each in found["figures"]:
        width, height, pixels = picture_size(folder / each["file"])
        assert min(width, height) >= 300
        assert pixels > 10_000


def test_errors_are_those_of_seeds_and_of_the_reference() -> None:
    def flat(*ratios: float) -> torch.Tensor:
        std = torch.ones(len(ratios), 30 + len(script.GRID))
        std[:, 30:] = torch.tensor(ratios).unsqueeze(-1)
        return std

    reference = SimpleNamespace(std=flat(4.0)[0], by_chain=flat(3.0, 5.0))
    row = script.row_of(1, 1, "dropout", flat(1.0, 3.0), flat(1.0, 3.0), reference)
    assert row["ratio"] == pytest.approx(2.0)
    assert row["± ratio"] == pytest.approx(1.0)  # √2 / √2
    assert row["ratio ÷ NUTS"] == pytest.approx(0.5)
    assert row["± of that"] == pytest.approx(0.5 * math.sqrt(0.5**2 + 0.25**2))
    own = script.row_of(1, 1, "NUTS", flat(4.0), reference.by_chain, reference)
    assert (own["ratio"], own["± ratio"], own["ratio ÷ NUTS"]) == pytest.approx((4.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("relative", "error", "over"), [(0.3, 0.05, True), (0.45, 0.05, False), (0.9, 0.0, False), (0.49, 0.0, True)]
)
def test_over_confidence_needs_more_than_the_error(relative: float, error: float, over: bool) -> None:
    assert script.is_overconfident({"ratio ÷ NUTS": relative, "± of that": error}) is over


@pytest.mark.parametrize(
    ("one", "error", "better"),
    [(0.30, 0.01, True), (0.24, 0.0, False), (0.30, 0.06, False), (1.9, 0.0, False), (1.3, 0.01, True)],
)
def test_better_is_nearer_to_the_reference(one: float, error: float, better: bool) -> None:
    other = {"ratio ÷ NUTS": 0.2, "± of that": 0.0}
    assert script.is_better({"ratio ÷ NUTS": one, "± of that": error}, other) is better


def test_verdicts_follow_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(name: str, relative: float) -> dict[str, Any]:
        return {"guide": name, "ratio ÷ NUTS": relative, "± of that": 0.01}

    class Record:
        def __init__(self) -> None:
            self.said: dict[str, str] = {}

        def claim(self, text: str, verdict: str, number: str) -> None:
            self.said[text.split(" is ")[0]] = verdict

    record = Record()
    ratios = {"dropout": (0.1, 0.2), "mean field": (0.3, 0.8), "low rank": (0.31, 0.81), "row mixture": (0.5, 0.95)}
    script.judge(record, [row(name, value) for name, both in ratios.items() for value in both])
    assert record.said == {
        "dropout": "holds",
        "mean field": "holds in part",
        "low rank": "does not hold",
        "row mixture": "holds",
    }


@pytest.mark.deep
@pytest.mark.parametrize(("name", "widest", "least"), [(script.LAPLACE, 0.15, 1.5), (script.LOW_RANK, 0.6, 0.45)])
def test_laplace_doubts_in_the_gap(name: str, widest: float, least: float) -> None:
    """One seed of a small network: at the data NUTS has a width of 0.07, and dropout a ratio of 0.15."""
    how = SimpleNamespace(seed=0, seeds=1, steps=200, quiet=True, quick=True, samples=200, laplace_rate=0.01)
    mean, std = script.laplaced(name, lambda: script.model(1, 10), [script.two_clusters(1, 0)], how)
    assert mean.shape == std.shape == (1, 1, 30 + len(script.GRID))
    at_data, _, ratio = script.gap_ratio(std[0, 0])
    assert 0.04 < at_data < widest
    assert ratio > least


def test_dropout_has_the_variance_of_its_masks_and_cannot_see_the_gap() -> None:
    """Var f(x) = Σ_k p(1 − p) m_k² relu(w_k x + b_k)²: a sum of convex functions, so no gap can be its maximum."""
    torch.manual_seed(0)
    net = script.model(depth=1, width=20)
    guide = script.guide("dropout", net)
    x = on_line(script.GRID, 5)
    hidden = torch.relu(net.net[0](x)).detach()
    out = guide.posterior("2.weight").loc.detach()  # (1, 20)
    variance = 0.9 * 0.1 * (hidden.square() * out.square()).sum(-1)
    drawn = pd.predict(net, guide, x, samples=4000, seed=0).epistemic[:, 0]
    # A variance of 4,000 draws of a sum of twenty coins is known to about 2.5 %: five times that.
    assert torch.allclose(drawn, variance, rtol=0.125)
    assert (variance[2:] - 2 * variance[1:-1] + variance[:-2] > -1e-6).all()
    left, right = (int((script.GRID - t).abs().argmin()) for t in (-1.4, 1.0))
    assert variance[left : right + 1].max() <= max(variance[left], variance[right]) + 1e-6


def test_idle_inputs_change_nothing() -> None:
    """Weights of inputs that are zero meet no data: f is that of a network with one input."""
    torch.manual_seed(0)
    net = script.model(depth=2, width=4)
    t = script.GRID
    first = net.net[0]
    f = net.net(on_line(t, 1))
    with torch.no_grad():
        first.weight[:, 1:] = 100.0
    assert torch.equal(net.net(on_line(t, 1)), f)


@pytest.mark.parametrize("name", script.GUIDES)
def test_every_guide_is_a_posterior_of_both_networks(name: str) -> None:
    for depth in (1, 2):
        torch.manual_seed(0)
        net = script.model(depth, 3)
        guide = script.guide(name, net)
        assert set(guide.mean()) == {f"{2 * k}.{part}" for k in range(depth + 1) for part in ("weight", "bias")}
        kind = "exact" if name == "row mixture" else "large_k"
        problem = script.two_clusters(5, 0)
        parts = pd.ELBO(kl=kind).parts(net, guide, problem.x, problem.y)
        assert bool(torch.isfinite(parts["kl"]))


@pytest.mark.parametrize("name", [*script.KIN[1:], "mean field", "low rank"])
def test_the_large_k_form_may_stand_for_the_exact_one(name: str) -> None:
    """For one Gaussian the two are the same; for dropout they differ by the entropy of a coin a hidden unit at most."""
    torch.manual_seed(0)
    net = script.model(depth=1, width=20)
    guide = script.guide(name, net)
    x, y = sample()
    large, exact = (float(pd.ELBO(kl=kind).parts(net, guide, x, y)["kl"].detach()) for kind in ("large_k", "exact"))
    coin = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    most = 20 * coin if name.startswith("dropout") else 1e-3
    assert -1e-3 <= exact - large <= most


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    problem = script.two_clusters(5, 0)
    return problem.x, problem.y
