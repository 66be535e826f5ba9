"""The worked scripts run as they stand, stay short, and use nothing of the library that would hide the model."""

import ast
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import jaxtyping
import matplotlib.image
import numpy as np
import pytest
import torch
from experiments.experiment import VERDICTS
from pyro import poutine
from scipy import stats

from pyro_dropout.guides import GUIDES

FOLDER = Path(__file__).parents[2] / "models"
SCRIPTS = sorted(FOLDER.glob("*.py"))
BY_HAND = [FOLDER / "bnn.py", FOLDER / "deep_gp.py"]
EXPERIMENTS = [path for path in SCRIPTS if path not in BY_HAND]
QUICK = ("thompson",)  # the others run in the long tests
TASKS = ("regression", "classification")
ALLOWED = {"torch", "pyro", "numpy", "pandas", "matplotlib", "tqdm", "pyro_dropout", "experiments"}
OPTIONAL = {"benchmark_contestants": {"laplace"}}  # contestants that take part where they are installed
NUMBER = re.compile(r"-?(?:\d+\.\d+|inf|nan)")


def loaded(path: Path) -> ModuleType:
    """The script as a module of its own; ``models`` is a folder, not a package."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_picture(path: Path) -> None:
    """A picture has a size, and shows more than an empty frame, which is nearly all of one colour."""
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) >= 300
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: path.stem)
@pytest.mark.thinned(2)
def test_a_script_prints_numbers_and_draws_a_picture(
    path: Path, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded(path).main(["--quick", "--task", task, "--out", "picture.png"])
    printed = capsys.readouterr()
    numbers = [float(number) for number in NUMBER.findall(printed.out)]
    assert len(numbers) >= 3  # a score, the spread on the data, the spread away from them
    assert all(math.isfinite(number) for number in numbers)
    assert task in printed.err  # the progress bar says what is being fitted
    assert [made.name for made in tmp_path.iterdir()] == ["picture.png"]
    check_picture(tmp_path / "picture.png")


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: path.stem)
def test_a_model_is_the_one_of_the_equations_above_it(path: Path) -> None:
    """Sites with their standard deviations, f from the weights, and the density of y, in numpy."""
    script = loaded(path)
    x, y = np.linspace(-2, 2, 7)[:, None], np.ones((7, 1))
    trace = poutine.trace(script.regression).get_trace(torch.tensor(x).float(), torch.tensor(y).float())
    trace.compute_log_prob()
    wide = 1 / script.LENGTH_SCALE
    for name, scale in {"W1": wide, "b1": wide, "W2": 1.0, "b2": wide, "W3": 1.0}.items():
        assert torch.allclose(trace.nodes[name]["fn"].stddev, torch.tensor(scale)), name
    w = {name: trace.nodes[name]["value"].numpy().astype(float) for name in ("W1", "b1", "W2", "b2", "W3")}
    if path.stem == "bnn":
        f = np.maximum(np.maximum(x @ w["W1"].T + w["b1"], 0) @ w["W2"].T + w["b2"], 0) @ w["W3"].T
    else:
        first = np.tanh(x @ w["W1"].T + w["b1"]) / np.sqrt(len(w["b1"])) @ w["W2"].T
        f = np.tanh(first + w["b2"]) / np.sqrt(len(w["b2"])) @ w["W3"].T
    np.testing.assert_allclose(trace.nodes["f"]["value"].numpy(), f, rtol=1e-3, atol=1e-3)
    density = stats.norm(f, 0.1).logpdf(y).sum()
    assert trace.nodes["y"]["log_prob_sum"].item() == pytest.approx(density, rel=1e-3)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_what_a_user_has(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [str(node.module)]
        for name in names:
            allowed = ALLOWED | OPTIONAL.get(path.stem, set()) | sys.stdlib_module_names
            assert name.split(".")[0] in allowed
            # An experiment may use modules above training; a model that is written by hand may not.
            upper = ("prediction", "judging", "datasets")
            allowed = tuple(f"pyro_dropout.{room}." for room in upper) if path in EXPERIMENTS else ()
            inside = name.startswith("pyro_dropout.") and not name.startswith(allowed)
            assert not inside, f"{name} is behind the door; import from pyro_dropout"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.deep, id=path.stem) for path in EXPERIMENTS],
)
def test_an_experiment_writes_a_whole_record(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYRO_DROPOUT_DATA", raising=False)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checking shapes takes longer than the run
    loaded(path).main(["--quick", "--quiet", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert record["how"]["command"].startswith(f"pyro-dropout reproduce {path.stem} --quick")
    assert record["tables"]
    for table in record["tables"]:
        assert table["rows"], table["title"]
        assert {tuple(row) for row in table["rows"]} == {tuple(table["rows"][0])}
        numbers = [value for row in table["rows"] for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(number) for number in numbers), table["title"]
    assert {claim["verdict"] for claim in record["claims"]} <= set(VERDICTS)
    page = (tmp_path / "results.md").read_text("utf-8")
    for figure in record["figures"]:
        check_picture(tmp_path / figure["file"])
        assert figure["file"] in page


@pytest.mark.deep
def test_the_figure_of_the_guides_has_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = loaded(FOLDER.parent / "docs" / "make_figures.py")
    names = list(figures.GUIDES)
    missing = {guide.__name__ for guide in GUIDES} ^ set(names)
    assert not missing, f"docs/make_figures.py, GUIDES: {missing} is missing, or no guide"
    figures.main(["--only", "six_posteriors", "--quick", "--out", str(tmp_path)])
    rows = re.findall(r"^\| `(\w+)` \|(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in rows] == names
    assert all(math.isfinite(float(number)) for _, row in rows for number in NUMBER.findall(row))
    check_picture(tmp_path / "six_posteriors.png")
    shown = (FOLDER.parent / "docs" / "six_posteriors.md").read_text("utf-8")
    missing = {name for name in names if f"| `{name}` |" not in shown}
    assert not missing, f"docs/six_posteriors.md: {missing} is missing in the table"


@pytest.mark.deep
def test_the_figure_of_simulated_data_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = loaded(FOLDER.parent / "docs" / "make_figures.py")
    figures.main(["--only", "sbc", "--quick", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.findall(r"^\| (Auto\w+).*? \| f\[0\] ", said, re.MULTILINE) == ["AutoDropout", "AutoMeanField"]
    check_picture(tmp_path / "sbc.png")
