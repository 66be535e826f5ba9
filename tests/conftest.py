"""What every test stands on: checked shapes, one thread, a seed of its own, and a clean parameter store."""

import importlib
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pyro
import pytest
import torch
from jaxtyping import install_import_hook

from tests import covered
from tests.shape_checks import checked

# Checking the annotated shapes doubles the time of the tests, so the long tests do it, and the short ones do not.
CHECKED = "deep" in (os.environ.get("HYPOTHESIS_PROFILE"), os.environ.get("SHAPE_CHECKS"))
if CHECKED:
    # Functions are wrapped when their module is imported; one imported earlier would stay unchecked.
    assert "pyro_dropout" not in sys.modules, "pyro_dropout was imported before its shape checks were installed"
    install_import_hook("pyro_dropout", f"{checked.__module__}.{checked.__name__}")
    importlib.import_module("pyro_dropout.errors")._BETWEEN.update({"jaxtyping", "beartype"})  # no callers to warn

COVERED = os.environ.get("COVERED")
if COVERED:
    covered.begin()

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start
os.environ["MPLBACKEND"] = "Agg"


class TorchRandom:
    """torch's generator, in the three words by which hypothesis keeps the examples of a property reproducible."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
hypothesis.register_random(TORCH_RANDOM)

TOO_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "ci", max_examples=20, deadline=None, derandomize=True, suppress_health_check=TOO_SLOW
)
hypothesis.settings.register_profile("deep", max_examples=5_000, deadline=None, suppress_health_check=TOO_SLOW)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_sessionfinish() -> None:
    """Write which statements were run, where that was asked for."""
    if COVERED:
        covered.write(Path(COVERED))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options to run a part of the long tests, so that every run of CI can afford some."""
    parser.addoption("--share", metavar="K/N", help="of the long tests, every N-th from the K-th, and no short ones")
    parser.addoption("--begin-within", type=float, metavar="SECONDS", help="begin no test after this time")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share of long tests that was asked for; which share a test is in depends on its name alone."""
    _thin(items)
    items.sort(key=lambda item: "compile" not in item.name)  # the longest first, so that no worker ends with one
    share = config.getoption("--share")
    if share is None:
        return
    which, parts = map(int, share.split("/"))
    chosen = [
        item
        for item in items
        if item.get_closest_marker("deep") and zlib.crc32(item.nodeid.encode()) % parts == which % parts
    ]
    # An order that depends on the share as it was given (7/5 is 2/5 in another order): where time runs out, it runs out
    # on other tests for another commit.
    chosen.sort(key=lambda item: zlib.crc32(f"{share} {item.nodeid}".encode()))
    left = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = chosen


def _thin(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked ``thinned(n)``, leave every n-th short, and mark the others as long."""
    seen: Counter[str] = Counter()
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and item.get_closest_marker("deep") is None:
            name = item.nodeid.split("[")[0]
            if seen[name] % thinned.args[0]:
                item.add_marker("deep")
            seen[name] += 1


STARTED = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin nothing new when the time is up, and say so."""
    limit = item.config.getoption("--begin-within")
    if limit is not None and time.monotonic() - STARTED > limit:
        pytest.skip(f"not begun: {limit:.0f} seconds were over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Give up on a test that takes half of the time by itself, where there is a limit."""
    limit = item.config.getoption("--begin-within")
    if limit is None:
        return (yield)

    def give_up(*_: object) -> None:
        pytest.skip(f"not finished in {limit / 2:.0f} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit / 2)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def fresh_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed by the test's own name, so that a test gives the same numbers alone, in any order and on any worker."""
    default = torch.get_default_dtype()
    pyro.clear_param_store()
    pyro.set_rng_seed(zlib.crc32(request.node.nodeid.encode()))
    yield
    torch.set_default_dtype(default)
    left, _ = torch.is_grad_enabled(), torch.set_grad_enabled(True)
    assert left, "the test left gradients switched off; all tests after it would fail"


# One scope for the whole run: a dtype never changes, and hypothesis forbids function-scoped fixtures in properties.
@pytest.fixture(scope="session", params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The floating-point type under test."""
    found: torch.dtype = request.param
    return found


@pytest.fixture
def in_float64() -> None:
    """Make float64 the default type; ``fresh_start`` takes it back."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs as the graphs that they were traced into; a C++ compiler takes seconds to build each."""
    monkeypatch.setattr("pyro_dropout.engines.program.compiled", lambda graph, inputs: graph)


@pytest.fixture
def quickly(request: pytest.FixtureRequest) -> None:
    """Run programs as they were traced, but in the deep tests, which build them."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "deep":
        request.getfixturevalue("as_traced")


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Let bad input through to the package's own checks, which are what a user without jaxtyping meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
