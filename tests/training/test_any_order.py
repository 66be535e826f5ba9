"""Fit, save, load, stop, resume and predict in any order: what is saved comes back, and nothing else moves."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from torch import Tensor, nn

import pyro_dropout as pd
from tests.oracles.both_types import dtypes

Values = dict[str, Tensor]
SEEDS = st.integers(0, 2**31)
GUIDES: dict[str, Any] = {
    "dropout": lambda model: pd.AutoDropout(model, keep=0.75),
    "mean field": pd.AutoMeanField,
    "mixture": pd.AutoRowMixture,
    "concrete": lambda model: pd.AutoConcreteDropout(model, keep=0.75),
}


def values_of(pair: tuple[Any, Any]) -> Values:
    """Every parameter and buffer of a model and its guide, copied."""
    named = [(f"{k}.{name}", value) for k, part in enumerate(pair) for name, value in part.state_dict().items()]
    return {name: value.clone() for name, value in named}


def put(values: Values, pair: tuple[Any, Any]) -> None:
    with torch.no_grad():
        for k, part in enumerate(pair):
            for name, target in (*part.named_parameters(), *part.named_buffers()):
                target.copy_(values[f"{k}.{name}"])


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Saved(NamedTuple):
    """A file, and what was in the guide when it was written."""

    path: Path
    values: Values


class Halted(NamedTuple):
    """A training that stopped half-way: where it began, and what it was asked for."""

    folder: Path
    start: Values
    options: dict[str, Any]


class AnyOrder(RuleBasedStateMachine):
    """One model and its guide, with a shadow: the values that it must hold by now."""

    files = Bundle("files")
    halted = Bundle("halted")

    @initialize(dtype=dtypes, kind=st.sampled_from(sorted(GUIDES)), seed=SEEDS)
    def begin(self, dtype: torch.dtype, kind: str, seed: int) -> None:
        self.dtype, self.kind, self.count = dtype, kind, 0
        self.folder = tempfile.TemporaryDirectory()
        torch.manual_seed(seed)
        self.x = torch.randn(12, 2, dtype=dtype)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.pair = self.built()
        self.shadow = values_of(self.pair)

    def built(self, width: int = 3, kind: str | None = None) -> tuple[Any, Any]:
        """A pair with starting values of its own."""
        net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).to(self.dtype)
        model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=4.0, learn=True))
        return model.to(self.dtype), GUIDES[kind or self.kind](model).to(self.dtype)

    def place(self) -> Path:
        self.count += 1
        return Path(self.folder.name, str(self.count))

    def train(self, pair: tuple[Any, Any], **options: Any) -> pd.training.History:
        return pd.fit(*pair, self.x, self.y, compile=False, progress=False, **options)

    # --- what may happen --------------------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 3), seed=SEEDS, optim=st.sampled_from(["adam", "sgd"]), batch=st.sampled_from([None, 5]))
    def fit(self, steps: int, seed: int, optim: str, batch: int | None) -> None:
        self.train(self.pair, steps=steps, seed=seed, optim=optim, batch_size=batch, lr=0.01)
        assert not same(values_of(self.pair), self.shadow)
        self.shadow = values_of(self.pair)

    @rule(target=files, note=st.text(max_size=5))
    def save(self, note: str) -> Saved:
        path = self.place()
        pd.save(path, *self.pair, extra={"note": note})
        assert pd.load(path, *self.pair) == {"note": note}
        return Saved(path, values_of(self.pair))

    @rule(file=files, fresh=st.booleans())
    def load(self, file: Saved, fresh: bool) -> None:
        if fresh:
            self.pair = self.built()
            assert not same(values_of(self.pair), file.values)
        pd.load(file.path, *self.pair)
        self.shadow = file.values

    @rule(seed=SEEDS, shared=st.booleans())
    def predict(self, seed: int, shared: bool) -> None:
        random = torch.get_rng_state()
        asked: Any = {"samples": 5, "seed": seed, "shared": shared}
        one, two = (pd.predict(*self.pair, self.x, **asked) for _ in range(2))
        assert torch.equal(one.samples, two.samples)
        assert torch.equal(torch.get_rng_state(), random)

    @rule(file=files, seed=SEEDS)
    def predict_as_saved(self, file: Saved, seed: int) -> None:
        loaded, kept = self.built(), self.built()
        pd.load(file.path, *loaded)
        put(file.values, kept)
        one, two = (pd.predict(*pair, self.x, samples=5, seed=seed) for pair in (loaded, kept))
        assert torch.equal(one.samples, two.samples)

    @rule(target=halted, done=st.integers(1, 2), more=st.integers(1, 2), seed=SEEDS, batch=st.sampled_from([None, 5]))
    def stop_half_way(self, done: int, more: int, seed: int, batch: int | None) -> Halted:
        pair, folder = self.built(), self.place()
        put(self.shadow, pair)
        options: dict[str, Any] = {"seed": seed, "batch_size": batch, "lr": 0.02}
        checkpoint = pd.training.Checkpoint(folder, every=1)
        self.train(pair, steps=done, checkpoint=checkpoint, **options)
        return Halted(folder, self.shadow, {**options, "steps": done + more})

    @rule(stopped=consumes(halted))
    def resume(self, stopped: Halted) -> None:
        whole, resumed = self.built(), self.built()
        put(stopped.start, whole)
        wanted = self.train(whole, **stopped.options)
        history = self.train(resumed, checkpoint=pd.training.Checkpoint(stopped.folder, every=1), **stopped.options)
        assert torch.equal(history.losses, wanted.losses)
        assert same(values_of(resumed), values_of(whole))
        self.pair, self.shadow = resumed, values_of(whole)

    @rule(stopped=halted)
    def resume_otherwise(self, stopped: Halted) -> None:
        other = self.built()
        before, files = values_of(other), sorted(stopped.folder.iterdir())
        with pytest.raises(
            pd.errors.PyroDropoutError, match="a checkpoint of another training run; these differ: update"
        ):
            self.train(other, checkpoint=stopped.folder, **{**stopped.options, "lr": 0.5})
        assert same(values_of(other), before)
        assert sorted(stopped.folder.iterdir()) == files

    # --- what must always hold --------------------------------------------------------------------------------------

    @invariant()
    def holds_what_it_must(self) -> None:
        if hasattr(self, "pair"):
            assert same(values_of(self.pair), self.shadow)
            assert all(bool(value.isfinite().all()) for value in self.shadow.values())
            assert all(value.dtype == self.dtype for value in self.pair[1].mean().values())

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


QUIET: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=8, stateful_step_count=10, derandomize=True, **QUIET)


@pytest.mark.deep
class TestAnyOrderForLong(AnyOrder.TestCase):
    settings = settings(max_examples=300, stateful_step_count=40, **QUIET)
