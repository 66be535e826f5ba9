"""What a seed fixes, from process to process: the page "The same numbers again" promises it."""

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from tests.own_process import python

TRAINED = """
import hashlib, sys, warnings, torch, pyro_dropout as pd
warnings.simplefilter("ignore")
torch.manual_seed(0)
x = torch.linspace(-1, 1, 30).unsqueeze(-1)
for guide in (pd.AutoDropout, pd.AutoMeanField, pd.AutoLowRank):
    model = pd.BayesianNet(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    q = guide(model)
    history = pd.fit(model, q, x, x.sin(), steps=12, batch_size=7, seed=3, compile=eval(sys.argv[1]), progress=False)
    answer = pd.predict(model, q, x, samples=20, seed=4)
    values = [history.losses, answer.mean, answer.variance]
    print(history.engine, *(hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in values))
"""


def numbers(compile: str, hashing: str) -> list[list[str]]:
    """The engine and hashes of losses and predictions of three guides, in a process of its own."""
    return [line.split() for line in python("-c", TRAINED, compile, PYTHONHASHSEED=hashing).stdout.splitlines()]


@pytest.mark.deep
@pytest.mark.parametrize("compile", ["False", "True"])
def test_another_process_finds_the_same_bits(compile: str) -> None:
    one, other = numbers(compile, "1"), numbers(compile, "2")
    assert one == other
    assert [line[0] for line in one] == [{"False": "eager", "True": "C"}[compile]] * 3
    assert len({line[1] for line in one}) == 3  # and they are not the numbers of one guide


@pytest.mark.deep
def test_recorded_steps_find_the_bits_of_eager_ones() -> None:
    eager, recorded = numbers("False", "0"), numbers("'traced'", "0")
    assert [line[1:] for line in eager] == [line[1:] for line in recorded]
    assert {line[0] for line in recorded} == {"recorded"}


def test_another_number_of_threads_makes_the_same_draws() -> None:
    """Other draws change the prediction by hundredths: see the last line."""
    x, found = torch.linspace(-1, 1, 256).unsqueeze(-1), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(1, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
            model = pd.BayesianNet(net)
            guide = pd.AutoDropout(model)
            losses = pd.fit(model, guide, x, x.sin(), steps=3, seed=3, compile=False, progress=False).losses
            found.append((losses, pd.predict(model, guide, x, samples=5, seed=4).mean))
        finally:
            torch.set_num_threads(1)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    other = pd.predict(model, guide, x, samples=5, seed=5).mean
    assert (other - found[0][1]).abs().max() > 1e-2
