"""``guide="auto"``: an estimator whose guide, target scale and noise are chosen on held-back rows.

The rule is that of the command line; see ``tabular/choice.py``.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pyro_dropout.mathematics.errors import RangeError
from pyro_dropout.protocols import Record
from pyro_dropout.sklearn.network import Pair
from pyro_dropout.tabular.choice import Choice, choose_recipe, natural_scale
from pyro_dropout.tabular.recipe import Recipe

# What the choice decides, or has values of its own for.
_DECIDED = ("activation", "keep", "length_scale", "tau", "learning_rate", "batch_size", "early_stopping", "warm_start")


@dataclass(frozen=True)
class Chosen:
    """The network of a recipe, as an ``Architecture``: what is needed to build it before training.

    Example:
        >>> import torch
        >>> from pyro_dropout.tabular.recipe import Recipe
        >>> plan = Chosen(3, 1, False, Recipe("mean-field", scale="log"))
        >>> plan.pair(torch.randn(9, 3), torch.rand(9, 1))[0].likelihood.link
        'log'
    """

    inputs: int
    outputs: int
    classes: bool
    recipe: Recipe

    @property
    def guide(self) -> str:
        """The name of the guide."""
        return self.recipe.guide

    def pair(self, x: Tensor, y: Tensor, tau: Tensor | None = None) -> Pair:
        """Return a model in the units of the data, and its guide; the noise is always learned."""
        names = tuple(map(str, range(self.outputs))) if self.classes else ()
        made: Pair = self.recipe.build((x, y), names)  # type: ignore[assignment]
        return made

    def blank(self) -> tuple[Tensor, Tensor]:
        """Return data of the right shape, which have a logarithm and log-odds."""
        y = torch.zeros(2, dtype=torch.long) if self.classes else torch.full((2, self.outputs), 0.5).double()
        return torch.zeros(2, self.inputs, dtype=torch.float64), y


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
