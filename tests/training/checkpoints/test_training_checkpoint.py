"""A training that was stopped goes on as if it had not been: bit by bit, whatever stopped it."""

import errno
import json
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.training.checkpoints import training_checkpoint as resumption
from pyro_dropout.training.checkpoints.fingerprint import told_update
from pyro_dropout.training.checkpoints.training_checkpoint import Keeper
from pyro_dropout.training.optimisers import named
from tests.own_process import python
from tests.training.kills import train

X = torch.linspace(-1, 1, 24).unsqueeze(-1)


class PulledPlugError(BaseException):
    """Ends a training without asking it."""


def stopped_after(step: int) -> Any:
    """A keeper whose process dies once, right after the checkpoint of a step."""
    real, died = Keeper.write, []

    def write(self: Keeper, at: int, losses: torch.Tensor) -> None:
        real(self, at, losses)
        if at >= step and not died:
            died.append(at)
            raise PulledPlugError

    return mock.patch.object(Keeper, "write", write)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(0, id="adam", marks=pytest.mark.deep),
        pytest.param(1, id="early stopping"),
        pytest.param(2, id="NAdam", marks=pytest.mark.deep),
        pytest.param(5, id="NAdam, early stopping", marks=pytest.mark.deep),
    ],
)
def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, case: int) -> None:
    whole = train(None, False, case)
    with stopped_after(40):
        with pytest.raises(PulledPlugError):
            train(tmp_path, False, case)
        assert train(tmp_path, False, case) == whole
    assert len(list(tmp_path.iterdir())) == 2  # the last ones, as asked


@pytest.mark.deep
def test_running_statistics_of_the_best_step_outlast_a_stop(tmp_path: Path) -> None:
    """The best step is before the stop, so that its statistics are in the checkpoint alone."""

    def train(folder: Path | None) -> tuple[dict[str, torch.Tensor], pd.training.History]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model = pd.BayesianNet(net, likelihood=pd.Gaussian(4.0))
        guide = pd.AutoDropout(model, keep=0.9)
        watched: Any = {"validation": (X, -X), "patience": 50, "check_every": 10}
        how: Any = {"steps": 80, "lr": 0.05, "batch_size": 8, "compile": False, "progress": False, "seed": 0}
        checkpoint = None if folder is None else pd.training.Checkpoint(folder, every=20)
        history = pd.fit(model, guide, X, X, checkpoint=checkpoint, **watched, **how)
        return {**model.state_dict(), **guide.state_dict(prefix="guide.")}, history

    whole, history = train(None)
    assert history.best_step is not None
    assert history.best_step < 40
    assert int(whole["net.1.num_batches_tracked"]) == history.best_step
    with stopped_after(40):
        with pytest.raises(PulledPlugError):
            train(tmp_path)
        torch.testing.assert_close(train(tmp_path)[0], whole, rtol=0, atol=0)


def kills(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(python("-m", "tests.training.kills", *words).stdout)
    return found


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("150", "--seed", "100"), marks=pytest.mark.deep),
        pytest.param(("50", "--seed", "300", "--compiled"), marks=pytest.mark.deep),
    ],
    ids=" ".join,
)
def test_kills_at_random_moments(words: tuple[str, ...]) -> None:
    found = kills(*words)
    assert found["kills"] >= int(words[0])
    assert [ending for ending in found["endings"] if not ending["same"]] == []


# --- what stops a training gently -------------------------------------------------------------------------------------


def short(folder: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = pd.BayesianNet(torch.nn.Linear(1, 1))
    guide = pd.AutoDropout(model)
    settings = {"steps": 60, "batch_size": 8, "compile": False, "progress": False, "seed": 0, **options}
    data = settings.pop("data", (X, X))
    history = pd.fit(model, guide, *data, checkpoint=folder, **settings)
    return guide.mean()["weight"], history


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, Path]:
    """What a training that nothing stopped finds, and its checkpoints."""
    folder = tmp_path_factory.mktemp("done")
    return short(folder)[0], folder


@pytest.mark.parametrize(
    ("number", "ending", "code"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_a_signal_is_answered_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], done: Any, number: int, ending: Any, code: int | None
) -> None:
    handler = signal.getsignal(number)
    real = resumption.TrainingRun.advance

    def advance(self: Any, steps: int) -> Any:
        if self.t.item() > 30:
            signal.raise_signal(number)
        return real(self, steps)

    with mock.patch.object(resumption.TrainingRun, "advance", advance), pytest.raises(ending) as raised:
        short(tmp_path / "part")
    if code is not None:
        assert raised.value.code == code
    assert f"stopped at step 60; training can resume from step 60 (checkpoints in {tmp_path / 'part'})" in (
        capsys.readouterr().err
    )
    assert signal.getsignal(number) is handler
    assert torch.equal(short(tmp_path / "part")[0], done[0])


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(tmp_path: Path, done: Any) -> None:
    full = mock.patch.object(resumption, "write_tensors", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full, pytest.warns(UserWarning, match="cannot be written: No space left on device. Training continues"):
        assert torch.equal(short(pd.training.Checkpoint(tmp_path / "part", every=20))[0], done[0])
    assert list((tmp_path / "part").iterdir()) == []


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    whole, _ = short(pd.training.Checkpoint(tmp_path, every=20))
    last = max(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="step-000000000060.safetensors cannot be used.*resumes from the previous"):
        assert torch.equal(short(pd.training.Checkpoint(tmp_path, every=20))[0], whole)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be used") as said:
        assert torch.equal(short(pd.training.Checkpoint(tmp_path, every=20))[0], whole)
    ends = [str(each.message).rpartition(". ")[2] for each in said]
    again = "Training resumes from the previous one."
    assert ends == [again] * (len(ends) - 1) + ["Training starts again from the first step."]


def test_a_loss_that_is_no_number_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    real = resumption.TrainingRun.advance

    def advance(self: Any, steps: int) -> Any:
        losses = real(self, steps)
        return losses * (float("nan") if self.t.item() > 30 else 1.0)

    with (
        mock.patch.object(resumption.TrainingRun, "advance", advance),
        pytest.raises(pd.errors.DivergedError, match="at step 21"),
    ):
        short(pd.training.Checkpoint(tmp_path, every=20))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000020.safetensors"]


OTHER = {
    "data": ({"data": (X, X + 1)}, "these differ: y"),
    "inputs": ({"data": (X * 2, X)}, "these differ: x"),
    "batch": ({"batch_size": 6}, "these differ: batch"),
    "rate": ({"lr": 0.5}, "these differ: update"),
    "optimiser": ({"optim": "sgd"}, "these differ: update"),
    "schedule": ({"schedule": pd.training.inverse_decay()}, "these differ: update"),
    "clipping": ({"clip_norm": 1.0}, "these differ: update"),
    "seed": ({"seed": 1}, "these differ: seed"),
    "precision": ({"precision": "bf16"}, "these differ: precision"),
    "loss": ({"loss": pd.ELBO(num_particles=2)}, "these differ: loss.num_particles"),
    "validation": ({"validation": (X, X)}, "these differ: validation"),
    "fewer steps": ({"steps": 40}, "is from step 60, beyond the 40 requested"),
}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.thinned(2)
def test_another_training_is_refused(tmp_path: Path, done: Any, name: str) -> None:
    shutil.copytree(done[1], tmp_path, dirs_exist_ok=True)
    options, words = OTHER[name]
    before = sorted(path.read_bytes() for path in tmp_path.iterdir())
    with pytest.raises(pd.errors.PyroDropoutError, match=words):
        short(tmp_path, **options)
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == before


def part_of_it(folder: Path, steps: int, frozen: int, order: int = 1) -> list[torch.Tensor]:
    """Train a guide one of whose parameters is frozen, by an optimiser that holds the rest in some order."""
    torch.manual_seed(0)
    model = pd.BayesianNet(torch.nn.Linear(1, 3))
    guide = pd.AutoMeanField(model)
    [*guide.parameters()][frozen].requires_grad_(False)
    optim = torch.optim.Adam([value for value in guide.parameters() if value.requires_grad][::order], lr=3e-3)
    how: Any = {"optim": optim, "seed": 0, "compile": False, "progress": False}
    pd.fit(model, guide, X, X.expand(-1, 3), steps=steps, checkpoint=folder, **how)
    return [value.detach() for value in guide.parameters()]


@pytest.mark.parametrize(("frozen", "order", "words"), [(3, 1, "frozen"), (2, -1, "optimiser holds")])
def test_a_training_of_other_parameters_is_refused(tmp_path: Path, frozen: int, order: int, words: str) -> None:
    """They have the same shapes: a mean would get the number of a width."""
    part_of_it(tmp_path, 20, 2)
    with pytest.raises(pd.errors.PyroDropoutError, match=f"these differ: {words}"):
        part_of_it(tmp_path, 40, frozen, order)
    longer = part_of_it(tmp_path, 40, 2)
    torch.testing.assert_close(longer, part_of_it(tmp_path / "whole", 40, 2), rtol=0, atol=0)


def late(step: int) -> Any:
    return lambda t: torch.where(t < step, 1.0, 0.1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (late(30), late(31)),
        (late(20_000), late(30_000)),
        (lambda t: 0.5 * (1 + torch.cos(t / 100)), lambda t: 0.5 * (1 + torch.cos(t / 101))),
        (lambda t: 1.0 if t < 500 else 0.5, lambda t: 1.0 if t < 501 else 0.5),
        (None, late(4)),
    ],
)
def test_schedules_are_told_apart(first: Any, second: Any) -> None:
    told = [told_update(named("sgd", 0.1, schedule=schedule)) for schedule in (first, second)]
    assert told[0] != told[1]
    assert told[0] == told_update(named("sgd", 0.1, schedule=first))


# --- what is on the disk, and what is said of it --------------------------------------------------------------------


def two_of_which_the_last_is_damaged(folder: Path) -> None:
    """Leave the checkpoints of steps 40 and 60."""
    short(pd.training.Checkpoint(folder, every=20, keep_last=2), steps=60)
    last = max(folder.iterdir())
    last.write_bytes(last.read_bytes()[:-5])


def test_the_checkpoints_that_are_written_outlive_a_damaged_later_one(tmp_path: Path) -> None:
    two_of_which_the_last_is_damaged(tmp_path)
    with pytest.warns(UserWarning, match="cannot be used"):
        short(pd.training.Checkpoint(tmp_path, every=5, keep_last=1), steps=55)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000000055.safetensors",
        "step-000000000060.safetensors",
    ]
    with pytest.warns(UserWarning, match="cannot be used"):
        assert short(pd.training.Checkpoint(tmp_path, every=5, keep_last=1), steps=70)[1].steps == 70
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000070.safetensors"]


# --- longer trainings -----------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize(("every", "seed"), [(13, 0), (30, 0), (13, None)])
def test_a_longer_training_with_validation_goes_on_from_a_shorter_one(
    tmp_path: Path, every: int, seed: int | None
) -> None:
    watched: Any = {"validation": (X, X), "patience": 50, "check_every": every, "seed": seed, "lr": 0.03}
    _, part = short(tmp_path / "a", steps=50, **watched)
    longer, history = short(tmp_path / "a", steps=100, **watched)
    whole, once = short(tmp_path / "b", steps=100, **watched)
    assert part.validation[-1][0] == 50
    assert torch.equal(history.losses, once.losses)
    assert history.validation == once.validation
    assert torch.equal(longer, whole)
    again, same = short(tmp_path / "b", steps=100, **watched)  # which is done: only the last check is made again
    assert same.validation == once.validation
    assert torch.equal(again, whole)


# --- torch's own optimisers -----------------------------------------------------------------------------------------


def test_checkpoints_by_time(tmp_path: Path) -> None:
    with warnings.catch_warnings(), mock.patch.object(Keeper, "write") as write:
        short(pd.training.Checkpoint(tmp_path, seconds=1e-9))
    assert [call.args[0] for call in write.call_args_list] == [20, 40, 60]
