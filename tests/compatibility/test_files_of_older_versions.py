"""What a released version wrote is read by this one, with the same answers, or refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import pyro_dropout as pd
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.tabular.fitted import FittedTable
from pyro_dropout.training.checkpoints import tensor_file
from tests.compatibility import files

VERSIONS = sorted(path.name for path in files.HERE.iterdir())


def close(found: object, told: object) -> None:
    """Other machines round sums in another order."""
    np.testing.assert_allclose(np.array(found), np.array(told), rtol=1e-3, atol=1e-3)


def expected(version: str, name: str) -> list[list[float]]:
    """What the version that wrote a file answered."""
    told = json.loads((files.HERE / version / "answers.json").read_text("utf-8"))
    return told[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", files.GUIDES)
def test_a_posterior_answers_as_it_did(version: str, name: str) -> None:
    path = files.HERE / version / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"{version} did not have {name}")
    model, guide = files.pair(name, seed=1)
    assert pd.load(path, model, guide) == {"name": name}
    close(files.answers(model, guide), expected(version, name))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_training_goes_on(version: str, tmp_path: Path) -> None:
    shutil.copytree(files.HERE / version / "checkpoints", tmp_path / "checkpoints")
    close(files.answers(*files.trained("dropout", tmp_path / "checkpoints")), expected(version, "dropout"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_folder_predicts_as_it_did(version: str) -> None:
    found = FittedTable.load(files.HERE / version / "run").predict(files.table(), samples=50)
    close(found[["mean", "std", "lower"]], expected(version, "run"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_benchmark_says_what_it_said_and_is_not_continued_by_another_version(version: str, tmp_path: Path) -> None:
    shutil.copytree(files.HERE / version / "benchmark", tmp_path / "benchmark")
    found = files.scores(pd.benchmark.Results.read(tmp_path / "benchmark"))
    assert found == pytest.approx(expected(version, "benchmark"))
    path = tmp_path / "benchmark" / "benchmark.json"
    told = json.loads(path.read_text("utf-8"))
    told["settings"]["pyro-dropout"] = "0.9"
    path.write_text(json.dumps(told), "utf-8")
    with pytest.raises(PyroDropoutError, match=r"has results with pyro-dropout 0\.9 and not"):
        files.benchmark(tmp_path)
    path.write_text(json.dumps({**told, "format": 2}), "utf-8")
    with pytest.raises(PyroDropoutError, match="has format 2; this version reads 1"):
        pd.benchmark.Results.read(tmp_path / "benchmark")


def test_another_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, guide = files.pair("dropout")
    with monkeypatch.context() as later:
        later.setattr(tensor_file, "FORMAT", tensor_file.FORMAT + 1)
        pd.save(tmp_path / "new.safetensors", model, guide)
    with pytest.raises(PyroDropoutError, match="it has format 2, and this version reads format 1"):
        pd.load(tmp_path / "new.safetensors", model, guide)
