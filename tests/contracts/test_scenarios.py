"""Every guide where Pyro's AutoNormal was: what AutoNormal can do, a guide with a density can do, and others refuse."""

import itertools
import warnings
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_median

from pyro_dropout.errors import PyroDropoutError
from tests.contracts.guides import GUIDES
from tests.contracts.scenarios import SCENARIOS

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # torch.jit traces through functions whose shapes are tensors


def refused(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is this package's own: a refusal by name."""
    while error is not None:
        if isinstance(error, PyroDropoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def outcome(scenario: str, guide: str) -> tuple[str, str]:
    """Run one scenario with one guide; return "passed", "refused" or "failed", and the message."""
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*finds no weight in this model.*")
            SCENARIOS[scenario](GUIDES[guide].make)
    except Exception as error:
        return ("refused" if refused(error) else "failed"), f"{type(error).__name__}: {error}"
    return "passed", ""


# What needs log q of a weight. A guide whose weights have no density refuses these by name, and passes all others.
NEED_A_DENSITY = {f"regression_by_modules-{loss}" for loss in ("trace", "graph", "enum", "renyi", "jit")}
# A guide that drops vectors, whole or by element, has no density for them either.
DROPS_VECTORS = ("dropout-dropped-bias", "dropout-each-bias")
WHOLE = ("mean-field",)  # the guides that run through all scenarios in the short tests, but for the slow ones
SLOW = ("conjugate", "jit", "local_numbers")


def cases() -> list[object]:
    found: list[object] = []
    for number, (guide, scenario) in enumerate(itertools.product(GUIDES, SCENARIOS)):
        repeated = scenario.startswith("every_shape_of_site") and not scenario.endswith("trace-median")
        others = scenario not in NEED_A_DENSITY and number % 3 > 0  # a third of the rest, another one for each guide
        long = (guide not in WHOLE and (repeated or others)) or any(word in scenario for word in SLOW)
        marks = [pytest.mark.deep] if long else []
        found.append(pytest.param(guide, scenario, id=f"{guide}-{scenario}", marks=marks))
    return found


@pytest.mark.parametrize(("guide", "scenario"), cases())
@pytest.mark.thinned(7)
def test_it_stands_where_autonormal_stood(guide: str, scenario: str) -> None:
    what, why = outcome(scenario, guide)
    if guide in DROPS_VECTORS:
        assert what != "failed", why
        return
    expected = "refused" if scenario in NEED_A_DENSITY and not GUIDES[guide].density else "passed"
    assert what == expected, why
    if what == "refused":
        assert "linear.weight" in why or "scale=0" in why


def on_a_sphere() -> None:
    pyro.sample("direction", dist.ProjectedNormal(torch.tensor([1.0, 0.0, 0.0])))


def a_count() -> None:
    pyro.sample("count", dist.Poisson(3.0))


def nothing() -> None:
    pass


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (on_a_sphere, "'direction'.*ProjectedNormalReparam"),
        (a_count, "'count' is discrete"),
        (nothing, "no latent site"),
    ],
)
@pytest.mark.thinned(4)
def test_what_no_guide_can_do_is_refused_by_name(guide: str, model: Callable[[], None], words: str) -> None:
    with pytest.raises(PyroDropoutError, match=words):
        GUIDES[guide].make(model)()


@pytest.mark.parametrize("guide", GUIDES)
def test_a_start_is_said_once(guide: str) -> None:
    with pytest.raises(PyroDropoutError, match="init or init_loc_fn, not both"):
        GUIDES[guide].make(nothing, init="paper", init_loc_fn=init_to_median)
    with pytest.raises(PyroDropoutError, match="init_loc_fn must be a function"):
        GUIDES[guide].make(nothing, init_loc_fn="median")
    with pytest.raises(PyroDropoutError, match="other must be 'gaussian' or 'map'"):
        GUIDES[guide].make(nothing, other="none")
