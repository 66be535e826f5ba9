"""Some random cases of differential testing, and all that were ever found; ``python -m tests.oracles.differential``."""

import pytest

from tests.oracles.differential.cases import Case, known_cases

QUICK = {"dropout": 10, "files": 8}  # and those of dropout that are known
SLOW = {"engines": 3, "fleets": 2, "compiled": 1}
KNOWN = [pytest.param(case, marks=[] if case.kind == "dropout" else [pytest.mark.deep]) for case in known_cases()]


def cases(counts: dict[str, int]) -> list[Case]:
    return [Case(kind, number) for kind, count in counts.items() for number in range(count)]


@pytest.mark.parametrize("case", cases(QUICK), ids=str)
@pytest.mark.thinned(2)
def test_two_ways_give_one_answer(case: Case) -> None:
    assert case.run()[0] == ""


@pytest.mark.deep
@pytest.mark.parametrize("case", cases(SLOW), ids=str)
def test_two_slow_ways_give_one_answer(case: Case) -> None:
    assert case.run()[0] == ""


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_what_was_found_stays_mended(case: Case) -> None:
    assert case.run()[0] == ""
