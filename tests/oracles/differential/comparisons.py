"""Two ways to the same answer, compared on a random case: each function returns how the answers differ, "" if not.

A refusal by name is an answer; one way may not refuse what another computes. What is random is compared in standard
errors: a difference beyond ``FAR`` of them is looked at again, with fresh and more numbers. On correct code a case has
at most 64 differences, so that it is looked at again with probability 4e-5, and reported with probability 1e-9.
"""

from collections.abc import Callable

import torch

import pyro_dropout as pd
from tests.networks.agreement import largest_z, predicted, stochastic_passes
from tests.oracles.differential.drawn import Dice, Net, inputs
from tests.oracles.differential.trainings import compiled, engines, files, fleets

FAR = 5.0


def dropout(dice: Dice) -> str:
    """``from_dropout``, and stochastic passes through the network in training mode."""
    x = inputs(dice, 2, torch.float64)
    net = Net(dice, tuple(x.shape[1:]), 2, dropout=True).double()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, *x.shape[1:], dtype=torch.float64))  # running statistics
    net.train(dice.chance(0.5))
    example, shared = dice.chance(0.7), dice.chance(0.3)
    dice.told += ["example" * example, "shared" * shared]
    try:
        model, guide = pd.from_dropout(net, example=x if example else None)
        found = predicted(model, guide, x, 300 if shared else 2000, shared)
    except pd.errors.PyroDropoutError as error:
        dice.told.append(f"refused: {error}"[:90])
        told = any(words in str(error) for words in ("example=x", "draws random numbers", "net must have dropout"))
        return "" if told else f"refused: {error}"
    if largest_z(stochastic_passes(net, x, 4000), found) < FAR:
        return ""
    samples = pd.predict(model, guide, x, samples=1500 if shared else 12000, shared=shared, keep_samples=True, seed=2)
    z = largest_z(stochastic_passes(net, x, 24000), samples.samples)
    return "" if z < FAR else f"means or variances differ by {z:.1f} standard errors"


COMPARISONS: dict[str, Callable[[Dice], str]] = {
    each.__name__: each for each in (engines, compiled, dropout, files, fleets)
}
