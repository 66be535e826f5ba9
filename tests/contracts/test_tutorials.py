"""Our guides give AutoNormal's answers on the models of Pyro's tutorials, by stock SVI and by ours."""

import pytest

from tests.contracts.tutorials import ALLOWED, CASES, distance, traced


@pytest.mark.deep
@pytest.mark.parametrize(("name", "guide", "ours"), CASES)
def test_it_agrees_with_autonormal(name: str, guide: str, ours: bool) -> None:
    with traced():
        assert distance(name, guide, ours) <= ALLOWED
