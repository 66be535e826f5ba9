"""Every kind of network: predictions of its pair are those of training mode, and all else works on it."""

import re
from pathlib import Path

import pytest

from tests.networks.rows import carried_on, compiled, distance, network, read
from tests.networks.zoo import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BRIEF = {"ViT with DropPath", "nn.TransformerEncoder", "LSTM"}


def deep_unless(short: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in short else pytest.mark.deep) for name in ZOO]


def documented() -> dict[str, list[str]]:
    """The table of the page, by network."""
    lines = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (.+?) \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: list(cells) for name, *cells in lines}


@pytest.mark.parametrize("name", deep_unless(BRIEF))
def test_it_predicts_as_in_training_mode(name: str) -> None:
    made = network(name)
    assert read(made) == documented()[name][:2]
    assert distance(made) < 4
    assert documented()[name][2] == "yes"


@pytest.mark.parametrize("name", deep_unless({"ViT with DropPath"}))
def test_it_goes_to_arviz_and_through_a_file(name: str) -> None:
    carried_on(network(name))


@pytest.mark.deep
@pytest.mark.parametrize("name", ZOO)
def test_compiled_training_is_eager_training(name: str) -> None:
    found, reason = compiled(network(name))
    refused = "torch's compiler makes a program of this step that" in reason  # wrong gradients of torch 2.13, replayed
    assert refused or (found, reason) == (documented()[name][3], "")


def test_the_page_has_every_network() -> None:
    assert list(documented()) == list(ZOO)
