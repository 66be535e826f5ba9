"""``guide="auto"``: an estimator whose guide, target scale and noise are chosen on held-back rows.

The rule is that of the command line; see ``tabular/choice.py``.
"""

from dataclasses import fields

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.protocols import Record
from pyro_dropout.tabular.choice import Choice, choose_recipe, natural_scale

# What the choice decides, or has values of its own for.
_DECIDED = ("activation", "keep", "length_scale", "tau", "learning_rate", "batch_size", "early_stopping", "warm_start")


def check_decided(settings: Record, kind: type) -> None:
    """Raise if a setting that ``guide="auto"`` decides is not at its default."""
    plain = {field.name: field.default for field in fields(kind)}
    for name in _DECIDED:
        if name in settings and settings[name] != plain[name]:
            raise RangeError(
                f"guide='auto' decides {name} itself; got {name}={settings[name]!r}. Leave it out, or name a guide."
            )


def choose(
    x: Tensor, y: Tensor, held: Tensor, outputs: int, classes: bool, *, width: int, members: int, steps: int, seed: int
) -> Choice:
    """Choose a recipe for rows x, (N, Q), and y, in float64, of which some are ``held`` back, (N,)."""
    names = tuple(map(str, range(outputs))) if classes else ()
    x = (x - x.mean(0)) / torch.where(x.std(0) > 0, x.std(0), 1.0)  # float32 could not hold large offsets
    if not classes:
        plain = natural_scale(y) == "plain"
        y = ((y - y.mean(0)) / torch.where(y.std(0) > 0, y.std(0), 1.0) if plain else y).float()
    train, test = ((x[rows].float(), y[rows]) for rows in (~held, held))
    return choose_recipe(train, test, names, width=width, members=members, steps=steps, seed=seed)
