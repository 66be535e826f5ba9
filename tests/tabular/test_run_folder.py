"""A run's folder: what is written is what is read, and what does not fit together is refused."""

import contextlib
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.tables.reading import read
from pyro_dropout.tables.settings import Reading, Training
from pyro_dropout.tabular.recipe import Recipe
from pyro_dropout.tabular.run_folder import RECORD, Run, identity_of, sha256_of

TRAINING = Training(3, 0.01, None, 5, False)


def table(folder: Path, target: str) -> Path:
    path = folder / "table.csv"
    lines = [f"{k / 7},{'ab'[k % 2]},{3 * k},{('oak', 'elm', 'ash')[k % 3]}" for k in range(30)]
    path.write_text("\n".join(["size,colour,price,kind", *lines]), "utf-8")
    return path


def planned(folder: Path, target: str = "price", guide: str = "dropout") -> tuple[Run, Any]:
    left = "kind" if target == "price" else "price"
    path, how = table(folder, target), Reading(target, drop=(left,))
    data = read(path, how)
    assert data.encoding is not None
    return Run(str(path), sha256_of(path), how, data.encoding, Recipe(guide, 7), TRAINING), data


def test_the_data_must_be_the_same(tmp_path: Path) -> None:
    run, data = planned(tmp_path)
    assert torch.equal(run.data().train[0], data.train[0])
    path = Path(run.file)
    moved = tmp_path / "moved.csv"
    moved.write_bytes(path.read_bytes())
    assert torch.equal(run.data(moved).train[1], data.train[1])
    path.write_text(path.read_text("utf-8").replace("0.0,a", "0.1,a"), "utf-8")
    with pytest.raises(pd.errors.PyroDropoutError, match=r"table.csv has changed since the run started"):
        run.data()
    path.unlink()
    with pytest.raises(pd.errors.PyroDropoutError, match=r"training file .*table.csv.*--data"):
        run.data()


def test_a_posterior_of_another_run_is_refused(tmp_path: Path) -> None:
    run, data = planned(tmp_path)
    run.write(tmp_path)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"unfinished run: there is no posterior.safetensors.*resume"):
        run.loaded(tmp_path)
    other = planned(tmp_path, guide="mean-field")[0]
    other.save(tmp_path, *other.recipe.build(data.train), {})
    with pytest.raises(pd.errors.PyroDropoutError, match=r"posterior.safetensors belongs to another run: its identity"):
        run.loaded(tmp_path)
    run.save(tmp_path, *other.recipe.build(data.train), {})  # with this run's identity
    with pytest.raises(pd.errors.PyroDropoutError, match="belongs to another model or guide"):
        run.loaded(tmp_path)


def test_commands_that_are_advised_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    run, _ = planned(folder)
    run.write(folder)
    with pytest.raises(pd.errors.PyroDropoutError) as caught:
        run.loaded(folder)
    assert shlex.split(str(caught.value))[-3:] == ["pyro-dropout", "resume", str(folder)]


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["format"], 4, "has format 4; this version reads 6. Fit the run again"),
        (["format"], None, "'format' is missing or wrong"),
        (["data"], None, "'data' is missing"),
        (["data", "colour"], "red", "'colour' is missing or wrong"),
        (["encoding", "inputs"], [{"title": "a"}], "'title' is missing or wrong"),
        (["encoding", "target_notation"], {"kind": "poem"}, "'kind' is missing or wrong"),
        (["data", "decimal"], "dot", "'decimal' is missing or wrong"),
        (["encoding", "inputs", 0, "cycles"], ["moon"], "'cycles' is missing or wrong"),
        (["model", "guide"], "swag", "'guide' is missing or wrong"),
        (["model", "width"], 0, "width must lie in"),
        (["model", "width"], 10**12, "width must lie in"),
        (["data", "seed"], 2**70, "seed must lie in"),
        (["data", "file"], "a\0b", "'file' is missing or wrong"),
        (["data", "file"], "a\ud800b", "it is not JSON"),
        (["data", "held_back"], 1, "held_back must lie in"),
        (["training", "lr"], math.inf, "'lr' is missing or wrong"),
        (["encoding", "classes"], "ab", "'classes' is missing or wrong"),
        (["model", "width"], True, "'width' is missing or wrong"),
        (["training"], [], "'training' is missing or wrong"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, where: list[Any], value: Any, message: str) -> None:
    planned(tmp_path)[0].write(tmp_path)
    path = tmp_path / RECORD
    record = json.loads(path.read_text("utf-8"))
    place = record
    for key in where[:-1]:
        place = place[key]
    if value is None:
        del place[where[-1]]
    else:
        place[where[-1]] = value
    with contextlib.suppress(KeyError, AttributeError):
        record["identity"] = identity_of(record)  # as if it had been written so
    path.write_text(json.dumps(record), "utf-8")
    with pytest.raises(pd.errors.PyroDropoutError, match=message) as caught:
        Run.read(tmp_path)
    assert RECORD in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_read_differently_now_is_not_resumed(tmp_path: Path) -> None:
    run, _ = planned(tmp_path)
    run.write(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text("utf-8"))
    record["encoding"]["inputs"][0]["centre"] = 2
    record["identity"] = identity_of(record)
    (tmp_path / RECORD).write_text(json.dumps(record), "utf-8")
    with pytest.raises(
        pd.errors.PyroDropoutError, match=r"table.csv is read differently by this version.*Fit a new run"
    ):
        Run.read(tmp_path).data()
