"""A benchmark as strangers use it: what they enter, what goes wrong, what is kept, and what the page shows."""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.benchmark import problems, run
from pyro_dropout.benchmark.posteriors import FromLaplace, entry_of, from_state_dicts, linearised
from pyro_dropout.benchmark.result import MARK, Results
from pyro_dropout.benchmark.scores import Truth, half_of, scored
from pyro_dropout.errors import PyroDropoutError, ShapeError
from tests.cli.command import run as command
from tests.cli.command import succeeded

QUICK: Any = {"problems": ["line"], "seeds": 1, "steps": 5, "samples": 50, "progress": False}
OPTIONS = ("--problems", "line", "--seeds", "1", "--steps", "5", "--samples", "50", "--quiet")


def record_of(given: object, problem: str = "line", **settings: Any) -> dict[str, Any]:
    how = run.Settings(**{"steps": 5, "samples": 400, **settings})
    return run.measured(entry_of(given), problems()[problem], 0, how)


def exact(model: Any, data: Any) -> Any:
    return pd.references.conjugate(model, *data)


def draws(model: Any, data: Any) -> dict[str, Tensor]:
    return {"weight": torch.randn(30, 1, 5), "bias": torch.randn(30, 1)}


def of_pyro(x: Tensor, y: Tensor | None = None, num_data: int | None = None) -> None:
    for name, shape in (("weight", (1, 5)), ("bias", (1,))):
        loc = pyro.param(f"{name}.loc", torch.zeros(shape))
        pyro.sample(name, dist.Normal(loc, 0.1).to_event(len(shape)))


# --- what can be entered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["line", "last-layer"])
def test_the_exact_posterior_is_as_near_as_the_reference_itself(name: str) -> None:
    problem = problems()[name]
    found, half = record_of(exact, name, samples=1000), scored(half_of(problem), Truth.of(problem), problem.kind)
    assert found["note"] == ""
    assert found["scores"]["w2"][0] < 1.5 * half["w2"][0]
    assert abs(found["scores"]["energy"][0]) < 0.01
    assert found["scores"]["coverage"][0] == pytest.approx(0.95, abs=0.02)
    assert found["scores"]["moments"][0] < 0.1


def test_everything_that_can_be_entered_gives_draws(tmp_path: Path) -> None:
    nets = [nn.Linear(5, 1) for _ in range(7)]
    np.savez(tmp_path / "line.npz", **{name: value.double().numpy() for name, value in draws(0, 0).items()})
    given: dict[str, tuple[object, int, int | None, int | None]] = {  # draws, parameters, gradients
        "a name": ("mean-field", 400, 12, 200),
        "a class": (AutoNormal, 400, 12, 200),
        "a partial": (functools.partial(pd.AutoLowRank, rank=2), 400, 22, 200),
        "a function": (lambda model: pd.AutoDropout(model, keep=0.5), 400, 6, 200),
        "a function of Pyro": (lambda model: of_pyro, 400, 6, 200),
        "a posterior": (exact, 400, None, None),
        "state dicts": (lambda model, data: [net.state_dict() for net in nets], 7, 42, None),
        "networks": (nets, 7, 42, None),
        "draws": (draws, 30, 180, None),
        "a file": (tmp_path / "line.npz", 30, 180, None),
        "a folder": (str(tmp_path), 30, 180, None),
    }
    for name, (each, count, parameters, gradients) in given.items():
        record = record_of(each)
        assert record["note"] == "", name
        assert (record["draws"], record["parameters"], record["gradients"]) == (count, parameters, gradients), name
        assert {"w2", "energy", "width", "coverage", "moments"} <= set(record["scores"]), name


class LikeLaplace:
    """What laplace-torch's objects have: flat draws of all weights, or of those of the last layer."""

    def __init__(self, model: nn.Module, start: float, size: int) -> None:
        self.model, self.mean = model, start + torch.arange(float(size))

    def sample(self, n: int) -> Tensor:
        return self.mean + torch.arange(float(n)).unsqueeze(-1)


class LikeFeatureExtractor(nn.Module):
    """The model of laplace-torch's last-layer approximations."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "last_layer", model[2])


def test_a_laplace_object_is_read_by_the_order_of_its_parameters() -> None:
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    drawn = FromLaplace(LikeLaplace(net, 0.0, 7)).sample_weights(3)
    assert drawn["0.weight"][1].tolist() == [[1.0], [2.0]]
    assert drawn["2.bias"].flatten().tolist() == [6.0, 7.0, 8.0]
    last = FromLaplace(LikeLaplace(LikeFeatureExtractor(net), 4.0, 3)).sample_weights(3)
    assert last["model.2.bias"].flatten().tolist() == [6.0, 7.0, 8.0]
    assert torch.equal(last["model.0.weight"][2], net[0].weight)
    with pytest.raises(ShapeError, match="sample\\(n\\) gives 5 numbers a draw, and the model has 7"):
        FromLaplace(LikeLaplace(net, 0.0, 5)).sample_weights(3)


def test_a_laplace_object_is_predicted_with_linearised() -> None:
    record = record_of(lambda model, data: LikeLaplace(model.net, 0.0, 6))
    assert record["note"] == ""  # of a linear model linearised, which is the model
    assert record["scores"]["w2"][0] == pytest.approx(
        record_of(lambda model, data: FromLaplace(LikeLaplace(model.net, 0.0, 6), "mc"))["scores"]["w2"][0]
    )


def test_a_linearised_network_is_its_tangent() -> None:
    model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)))
    mean = {name: torch.randn_like(value) for name, value in model.net.named_parameters()}
    apart = {name: torch.randn(4, *value.shape) for name, value in mean.items()}
    x, small = torch.randn(5, 1), 1e-3
    near = {name: mean[name] + small * value for name, value in apart.items()}
    found = linearised(model, mean).evaluate(near, x)
    assert torch.allclose(found, model.evaluate(near, x), atol=1e-5)  # and the change is 1e-3
    far = {name: mean[name] + value for name, value in apart.items()}
    f = model.evaluate(mean, x)
    assert torch.allclose(linearised(model, mean).evaluate(far, x) - f, (found - f) / small, atol=2e-3)


def test_words_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from pyro.infer.autoguide import AutoNormal as Mine\nnumber = 3\n")
    assert entry_of("pyro.infer.autoguide:AutoNormal").what == "pyro.infer.autoguide:AutoNormal"
    entry = entry_of(f"{tmp_path / 'mine.py'}:Mine")
    assert (entry.name, entry.trains, len(entry.code)) == ("Mine", True, 64)
    monkeypatch.chdir(tmp_path)
    assert entry_of("mine:Mine").trains
    assert entry_of("row-mixture").what == "guide mixture"  # an alias


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mean-feild", "unknown posterior 'mean-feild'; give .* Did you mean 'mean-field'"),
        ("no_such_module:Guide", "'no_such_module' cannot be imported. ModuleNotFoundError: No module named"),
        ("missing.py:Guide", "there is no file 'missing.py'"),
        ("pyro.infer.autoguide:AutoNormall", "has no 'AutoNormall'. Did you mean 'AutoNormal'"),
        ("math:pi", "a benchmark takes .* got 3.14"),
        ("missing.npz", "there is no file 'missing.npz'"),
        (3, "a benchmark takes .* got 3"),
        (lambda: None, "must take \\(model\\), and return a guide, or \\(model, data\\), .* it takes \\(\\)"),
        (lambda model, data, third: None, "it takes \\(model, data, third\\)"),
    ],
)
def test_what_cannot_be_entered_is_refused_before_anything_runs(given: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(PyroDropoutError, match=said):
        run.benchmark([given], out=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def of_another(model: Any, data: Any) -> dict[str, Tensor]:
    return {"weight": torch.randn(30, 1, 4), "bias": torch.randn(30, 1)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (of_another, "failed: ShapeError: draws of 'weight' must have shape .S, 1, 5. .* got .30, 1, 4.*"),
        (lambda m, d: {"w": torch.ones(3, 1, 5), "bias": torch.ones(3, 1)}, "no draws of weight; it has bias, w. .*"),
        (lambda m, d: {"weight": torch.ones(3, 1, 5), "bias": torch.ones(2, 1)}, "with the same S ≥ 1 at every site"),
        (lambda m, d: {"weight": torch.ones(0, 1, 5), "bias": torch.ones(0, 1)}, "with the same S ≥ 1 at every site"),
        (
            lambda m, d: {n: v * torch.nan for n, v in draws(m, d).items()},
            "diverged: draws of 'weight' are not numbers",
        ),
        (lambda m, d: [], "the list of state dicts is empty"),
        (lambda m, d: [nn.Linear(5, 1), nn.Linear(4, 1)], "state dict 1 is of another network than the first"),
        (lambda m, d: None, "a function of a model and its data must return a posterior .* got None"),
        (lambda m, d: 1 / 0, "failed: ZeroDivisionError"),
        (lambda m: None, "failed: "),
    ],
)
def test_what_is_wrong_with_a_posterior_is_in_its_row(given: object, said: str) -> None:
    record = record_of(given)
    assert re.search(said, record["note"])
    assert "scores" not in record


def test_names_of_weights_may_have_one_prefix() -> None:
    found = from_state_dicts([{f"module.{k}": v[0] for k, v in draws(0, 0).items()}] * 3)
    assert record_of(lambda model, data: found)["note"] == ""
    both = {**found.draws, **{f"other.{k.removeprefix('module.')}": v for k, v in found.draws.items()}}
    assert "several" in record_of(lambda model, data: both)["note"]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_continues_and_recomputes_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(run, "measured", lambda *args: made.append((args[0].name, args[2])) or measured(*args))
    (tmp_path / "mine.py").write_text("from pyro.infer.autoguide import AutoNormal as Mine\n")
    entries, out = ["mean-field", f"{tmp_path / 'mine.py'}:Mine"], tmp_path / "out"
    run.benchmark(entries, out=out, **QUICK)
    first = json.loads((out / "runs" / "mean-field" / "line-0.json").read_text("utf-8"))
    assert first["versions"]["torch"] == torch.__version__
    assert first["hardware"]
    assert made == [("mean-field", 0), ("Mine", 0)]
    (tmp_path / "mine.py").write_text("from pyro.infer.autoguide import AutoDelta as Mine\n")
    run.benchmark(entries, out=out, **QUICK | {"seeds": 2})
    assert made[2:] == [("mean-field", 1), ("Mine", 0), ("Mine", 1)]
    with pytest.raises(PyroDropoutError, match=r"has results of another 'Mine', from .* and not 'AutoNormal'"):
        run.benchmark({"Mine": AutoNormal}, out=out, **QUICK)
    with pytest.raises(PyroDropoutError, match=r"has results with steps 5 and not 6\. Give another folder"):
        run.benchmark(entries, out=out, **QUICK | {"steps": 6})
    with pytest.raises(PyroDropoutError, match="is not empty and holds no benchmark"):
        run.benchmark(entries, out=tmp_path, **QUICK)


measured = run.measured


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        if args[2] == 1:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(run, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.benchmark(["mean-field"], out=tmp_path / "out", **QUICK | {"seeds": 3})
    found = Results.read(tmp_path / "out")
    assert [record["seed"] for record in found.records] == [0]
    assert (tmp_path / "out" / MARK).exists()


def test_several_workers_write_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from pyro.infer.autoguide import AutoNormal as Mine\n")
    entries = {"low-rank": "low-rank", "a file": f"{tmp_path / 'mine.py'}:Mine", "a function": draws}
    how = QUICK | {"problems": ["line", "eight-schools"]}
    found = {workers: run.benchmark(entries, out=tmp_path / str(workers), workers=workers, **how) for workers in (1, 2)}
    own = {"when", "seconds", "hardware"}
    one, two = ([{k: v for k, v in each.items() if k not in own} for each in found[k].records] for k in (1, 2))
    assert [record["note"][:6] for record in one].count("failed") == 1  # the function, on the program
    assert one == two


def end_the_process(model: Any, data: Any) -> None:
    os._exit(9)


def test_a_worker_that_ends_is_told_and_what_is_done_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(PyroDropoutError, match=r"a worker ended, .* the same command continues"):
        run.benchmark([draws, end_the_process], out=out, workers=2, **QUICK | {"seeds": 2})
    assert len(run.benchmark([draws], out=out, **QUICK | {"seeds": 2}).records) == 2


def test_what_cannot_be_sent_to_a_worker_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PyroDropoutError, match=r"'mine' cannot be sent to other processes: .* Give it as FILE.py:NAME"):
        run.benchmark({"mine": lambda model, data: draws}, out=tmp_path, workers=2, **QUICK | {"seeds": 2})


def test_names_that_differ_have_results_of_their_own(tmp_path: Path) -> None:
    found = run.benchmark({"a b": draws, "a-b": draws, "a/b": draws}, out=tmp_path / "out", **QUICK)
    assert set(found.entries) == {"a b", "a-b", "a/b"}


def test_a_result_of_another_reference_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.benchmark([exact], out=tmp_path / "out", **QUICK)
    (path,) = (tmp_path / "out" / "runs" / "exact").iterdir()
    path.write_text(path.read_text("utf-8").replace('"reference": "', '"reference": "0'), "utf-8")
    monkeypatch.setattr(run, "measured", lambda *args: {**measured(*args), "note": "again"})
    assert run.benchmark([exact], out=tmp_path / "out", **QUICK).records[0]["note"] == "again"


def test_ranks_and_best_marks_have_errors_and_failures_are_last(tmp_path: Path) -> None:
    entries = {"exact": exact, "off": draws, "broken": of_another}
    found = run.benchmark(entries, out=tmp_path / "out", **QUICK | {"seeds": 2, "samples": 400})
    table, ranks = found.on("line"), found.ranks("line")
    assert [row.name for row in table.rows] == ["reference", *sorted(entries)]
    rows = {row.name: row for row in table.rows}
    assert "of another" not in rows["broken"].note
    assert rows["broken"].note.startswith("with 2 of 2 seeds: failed: ShapeError")
    assert table.leaders("w2") == ["exact"]
    assert {row.name: row.scores["w2"].values for row in ranks.rows} == {
        "exact": [1.0, 1.0], "off": [2.0, 2.0], "broken": [3.0, 3.0]
    }  # fmt: skip
    error = rows["exact"].scores["coverage"].error
    assert error is not None
    assert 0 < error < 0.02
    page = found.to_html().read_text("utf-8")
    assert page.count('<section id="line">') == 1
    assert "with 2 of 2 seeds: failed: ShapeError" in page
    assert page.count("data:image/svg+xml") == 1
    assert "line: Linear regression" in str(found)
    assert [ax.get_title(loc="left") for ax in found.plot("line", ["off", "exact"]).axes] == ["off", "exact"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["dropout", "concrete", "multiplicative"])
def test_guides_of_rows_take_part_in_a_deep_gaussian_process(name: str, tmp_path: Path) -> None:
    how = {"problems": ["deep-gp"], "seeds": 1, "steps": 5, "samples": 5, "out": tmp_path, "progress": False}
    found = run.benchmark([name], **how)
    assert not any(row.note for row in found.on("deep-gp").rows)


def test_what_is_held_out_is_left_out(tmp_path: Path) -> None:
    seen = record_of(exact, held_out=False)["scores"]["w2"], record_of(exact, held_out=True)["scores"]["w2"]
    assert seen[0] != seen[1]
    held_out = [name for name, problem in problems("full").items() if problem.held_out]
    for name in held_out[:1]:
        with pytest.raises(PyroDropoutError, match="there is no problem left"):
            run.benchmark(["mean-field"], out=tmp_path / "out", held_out=False, **QUICK | {"problems": [name]})


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_prints_the_table(tmp_path: Path) -> None:
    done = succeeded("benchmark", "mean-field", "pyro.infer.autoguide:AutoNormal", "--out", tmp_path / "out", *OPTIONS)
    assert re.search(r"^ +reference +AutoNormal +mean-field$", done.stdout, re.MULTILINE)
    assert "report.html" in done.stdout
    again = command("benchmark", "--guides", "mean-field", "--out", tmp_path / "out", "--json", *OPTIONS)
    found = json.loads(again.stdout)["problems"]["line"]
    assert set(found["scores"]) == {"reference", "AutoNormal", "mean-field"}
    assert set(found["ranks"]) == {"AutoNormal", "mean-field"}


def test_the_command_lists_problems_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    assert "line: Linear regression" in command("benchmark", "--list").stdout
    for words, said in (
        (["mean-feild"], "Did you mean 'mean-field'"),
        (["mean-field", "--problems", "lines"], "a name in problems must be"),
    ):
        done = command("benchmark", *words, "--out", tmp_path / "out")
        assert done.exit_code == 2
        assert said in done.stderr
