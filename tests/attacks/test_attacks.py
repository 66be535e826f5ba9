"""Attacked runs answer as untouched ones or are refused; ``python -m tests.attacks`` is the long version."""

from pathlib import Path

import pytest

from tests.attacks import folders, records
from tests.attacks.__main__ import main
from tests.attacks.arena import GOOD, Arena, plan
from tests.cli.command import without_fsync


def test_some_attacks(tmp_path: Path) -> None:
    with without_fsync():
        arena = Arena.built(tmp_path / "arena")
        for attack in plan([*records.KINDS, *folders.KINDS], 36, 5):
            outcome = arena.attacked(attack)
            assert outcome.verdict in GOOD, (attack, outcome)


@pytest.mark.deep
def test_more_attacks_each_in_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--records", "150", "--folders", "150", "--seed", "7000"]) == 0, capsys.readouterr().err
