"""Images that are not digits: what was done to them, and whether the scores and the verdict say what happened."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.experiment import Experiment
from experiments.odd_images import detection_table, judge_detection, odd_images, score_table, verdict_of_detection

import pyro_dropout as pd
from tests.models.test_scripts import picture_size


def test_every_image_keeps_its_pixels_and_is_shuffled_in_its_own_way() -> None:
    images = torch.arange(2 * 28 * 28.0).reshape(2, 1, 28, 28)
    images[1] = images[0]
    odd = odd_images(images, seed=3)
    for kind, each in odd.items():
        assert torch.equal(each.flatten(1).sort().values, images.flatten(1).sort().values), kind
        assert not torch.equal(each, images)
        assert torch.equal(each[0], each[1]) == (kind == "turned by 90°")
    assert torch.equal(odd["turned by 90°"][0, 0, 27], images[0, 0, :, 0])  # the first column is the last row
    whole = {tuple(part.flatten().tolist()) for row in images[0, 0].split(7, 0) for part in row.split(7, 1)}
    found = {
        tuple(part.flatten().tolist()) for row in odd["patches shuffled"][0, 0].split(7) for part in row.split(7, 1)
    }
    assert whole == found
    assert torch.equal(odd_images(images, seed=3)["pixels shuffled"], odd["pixels shuffled"])
    with pytest.raises(pd.ShapeError, match="multiple of 7"):
        odd_images(torch.zeros(2, 1, 8, 8))


def answer(probs: torch.Tensor, information: torch.Tensor | None = None) -> Any:
    entropy = -(probs * probs.log()).sum(-1)
    own = torch.zeros(len(probs)) if information is None else information
    return SimpleNamespace(probs=probs, entropy=entropy, mutual_information=own)


def sure(of_first: list[float]) -> torch.Tensor:
    return torch.tensor([[p, 1 - p] for p in of_first])


def test_areas_by_hand_and_no_information_in_a_single_network() -> None:
    digits = {"one": [answer(sure([0.9, 0.8])), answer(sure([0.9, 0.9]))]}
    odd = {"noise": {"one": [answer(sure([0.85, 0.6])), answer(sure([0.95, 0.95]))]}}
    (row,) = detection_table(digits, odd)  # without mutual information there is no row for it
    assert row["noise"] == pytest.approx((0.75 + 0.0) / 2)
    assert row["± noise"] == pytest.approx(0.375)  # the two runs are 0.75 apart: more than over images
    digits["two"] = [answer(sure([0.9, 0.8]), torch.tensor([0.1, 0.2]))]
    odd["noise"]["two"] = [answer(sure([0.9, 0.8]), torch.tensor([0.3, 0.4]))]
    assert [row["noise"] for row in detection_table(digits, odd)[1:]] == [0.5, 1.0]


def test_each_verdict() -> None:
    def said(*gains: float) -> str:
        rows = [
            {
                "posterior": name,
                "by": "entropy",
                **{f"k{k}": a for k, a in enumerate(areas)},
                "± k0": 0.03,
                "± k1": 0.04,
            }
            for name, areas in (("one", (0.5, 0.5)), ("many", [0.5 + gain for gain in gains]))
        ]
        return verdict_of_detection(rows, ["k0", "k1"], "many", "one")[0]

    assert said(0.2, 0.2) == "holds"
    assert said(0.2, 0.1) == "holds in part"  # 0.1 is less than twice √2 · 0.04
    assert said(0.05, -0.2) == "does not hold"


def test_scores_and_record(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(49, 2))
    model = pd.BayesianNet(net, likelihood=pd.Categorical())
    x, y = torch.randn(40, 1, 7, 7), torch.arange(40) % 2
    runs = {name: [(model, pd.Ensemble(model, members=m, seed=m))] for name, m in (("one", 1), ("six", 6))}
    found = pd.predict(model, runs["six"][0][1], x)
    (row,) = score_table({"six": [found]}, y)
    assert row["error %"] == pytest.approx(100 * (found.probs.argmax(-1) != y).double().mean().item())
    assert row["log p"] == pytest.approx(found.probs[torch.arange(40), y].log().mean().item(), rel=1e-5)
    experiment = Experiment("odd", "Are odd images noticed?")
    experiment.start(["--quiet", "--out", str(tmp_path)])
    judge_detection(experiment, runs, x, y, better=["six"])
    record = json.loads(experiment.finish().read_text("utf-8"))
    assert [[row["posterior"] for row in table["rows"]] for table in record["tables"]] == [
        ["one", "six"],
        ["one", "six", "six"],
    ]
    assert record["tables"][0]["rows"][1]["ECE"] == pytest.approx(pd.ece(found, y))
    assert record["claims"][0]["claim"].startswith("six detects")
    assert picture_size(tmp_path / "odd.png")[2] > 10_000
