"""The guides under contract: every guide of the registry, most of them with several settings."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyro_dropout import (
    AutoConcreteDropout,
    AutoDropout,
    AutoFullRank,
    AutoLowRank,
    AutoMeanField,
    AutoMultiplicative,
    AutoRowMixture,
)
from pyro_dropout.registry import guides


@dataclass(frozen=True)
class Config:
    """A guide as a user makes it, and whether its draws of weights have a density."""

    make: Callable[..., Any]
    density: bool = True

    def __call__(self, model: Any, **options: Any) -> Any:
        """Make the guide for a model."""
        return self.make(model, **options)


def _standard(name: str, model: Any, **options: Any) -> Any:
    """A guide that has no settings of its own here: as its registry entry makes it."""
    return guides()[name].guide(model, **options)


GUIDES: dict[str, Config] = {
    "dropout": Config(partial(AutoDropout, keep=0.8), density=False),
    "dropout-scale": Config(partial(AutoDropout, keep=0.8, scale=0.1)),
    "dropout-gaussian-bias": Config(partial(AutoDropout, keep=0.8, scale=0.1, bias="gaussian")),
    "dropout-dropped-bias": Config(partial(AutoDropout, keep=0.8, bias="dropout"), density=False),
    "dropout-each-bias": Config(partial(AutoDropout, keep=0.8, bias="dropout_each"), density=False),
    "multiplicative-row": Config(partial(AutoMultiplicative, alpha=0.25), density=False),
    "multiplicative-row-scale": Config(partial(AutoMultiplicative, alpha=0.25, scale=0.1)),
    "multiplicative-weight": Config(partial(AutoMultiplicative, alpha=0.25, per="weight", learn_alpha=True)),
    "mean-field": Config(AutoMeanField),
    "row-mixture": Config(partial(AutoRowMixture, components=2)),
    "low-rank-layer": Config(partial(AutoLowRank, rank=2)),
    "low-rank-net": Config(partial(AutoLowRank, rank=2, per="net")),
    "full-rank-net": Config(AutoFullRank),
    "full-rank-layer": Config(partial(AutoFullRank, per="layer")),
    "concrete": Config(partial(AutoConcreteDropout, keep=0.8), density=False),
}


_COVERED = {config.make.func if isinstance(config.make, partial) else config.make for config in GUIDES.values()}
GUIDES |= {
    name: Config(partial(_standard, name), entry.density)
    for name, entry in guides().items()
    if entry.guide not in _COVERED and entry.per_site
}


def guide_classes() -> set[type]:
    return {config.make.func if isinstance(config.make, partial) else config.make for config in GUIDES.values()}
