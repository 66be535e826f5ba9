"""Attacked runs answer as untouched ones or are refused; ``python -m tests.attacks`` is the long version."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pyro_dropout.tabular.run_folder import Run
from tests.attacks import folders, records
from tests.attacks.arena import GOOD, Arena, Attack, plan
from tests.cli.command import without_fsync


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with without_fsync():
        yield Arena.built(tmp_path_factory.mktemp("attacks") / "arena")


def test_some_attacks(arena: Arena) -> None:
    for attack in plan([*records.KINDS, *folders.KINDS], 36, 5):
        outcome = arena.attacked(attack)
        assert outcome.verdict in GOOD, (attack, outcome)


def test_an_attack_that_succeeds_is_noticed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_check_belongs", lambda self, path: None)
    attack = Attack("trees", "predict", "files of other runs", 0)
    found = {arena.attacked(replace(attack, seed=seed)).verdict for seed in range(12)}
    assert "different answers" in found
    monkeypatch.setattr("pyro_dropout.cli.predict.answer", lambda *args: 1 // 0)
    assert arena.attacked(replace(attack, kind="")).verdict == "traceback"
    monkeypatch.setattr("pyro_dropout.cli.predict.answer", lambda *args: time.sleep(9))
    monkeypatch.setattr("tests.attacks.arena.HANG", 1)
    assert arena.in_a_process(replace(attack, kind="")).verdict == "hang"


@pytest.mark.deep
def test_more_attacks_each_in_a_process() -> None:
    # From a process of its own: a worker has threads, and a fork beside them may wait for a lock for ever.
    words = [sys.executable, "-m", "tests.attacks", "--records", "150", "--folders", "150", "--seed", "7000"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
