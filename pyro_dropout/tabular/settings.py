"""What is to be trained on a table, and how: with ``Reading``, the options of ``fit_table`` and of the command line.

Importing this module does not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.registry import listed_guides
from pyro_dropout.tables.settings import LARGEST, SEEDS, Reading, Settings, option, tuples

Noise = Literal["constant", "by-input"]
Scale = Literal["plain", "log", "logit", "count"]
_COUNT: Any = {"metavar": "N", "limits": (1, LARGEST)}


@dataclass(frozen=True)
class Wanted(Settings):
    """What is to be trained on a table; "auto" is chosen on held-back rows, None is the default of the guide."""

    guide: str = field(
        default="auto", metadata=option("One of {guides}; auto chooses on the held-back rows.", metavar="NAME")
    )
    scale: Literal["auto"] | Scale = field(
        default="auto",
        metadata=option(
            "Scale of a numeric target: log for positive numbers, logit for proportions, count for whole numbers."
        ),
    )
    noise: Literal["auto"] | Noise = field(
        default="auto", metadata=option("Noise of a numeric target: the same for all rows, or learned from the inputs.")
    )
    width: int | None = field(
        default=None, metadata=option("Hidden units; by default 50, and fewer for more than 500 inputs.", **_COUNT)
    )
    members: int | None = field(
        default=None,
        metadata=option(
            "Members of an ensemble; by default 8 with --guide auto, 32 for ensemble, 16 for others.", **_COUNT
        ),
    )

    def check(self, classes: bool) -> None:
        """Raise unless all of it makes sense for a target that is a class, or a number."""
        from pyro_dropout.registry import guide_names, resolve_guide

        if self.guide not in (known := ("auto", *guide_names())):
            raise RangeError(f"guide must be one of {', '.join(known)}; got {self.guide!r}.")
        if self.members is not None and self.guide != "auto" and "members" not in resolve_guide(self.guide).options:
            raise PyroDropoutError(f"members={self.members}: only an ensemble has members, not {self.guide}.")
        if classes and (self.scale not in ("auto", "plain") or self.noise == "by-input"):
            given = f"scale={self.scale!r} and noise={self.noise!r}"
            raise PyroDropoutError(f"classes have no scale and no noise; got {given}.")


@dataclass(frozen=True)
class Training(Settings):
    """How long and how a guide is trained; ``conformal`` says whether held-back rows calibrate intervals."""

    steps: int = field(
        default=1200, metadata=option("Training steps; by default 1200, and 2000 for a given guide.", **_COUNT)
    )
    lr: float = field(
        default=0.05,
        metadata=option(
            "Learning rate; by default 0.05, falling to zero, and 0.01 for a given guide.",
            metavar="RATE",
            limits=(math.ulp(0.0), 1e300),
        ),
    )
    batch_size: int | None = field(
        default=None,
        metadata=option("Rows in a mini-batch; by default all, up to 2,048, and otherwise 1,024.", **_COUNT),
    )
    seed: int = field(default=0, metadata=option(limits=(0, SEEDS - 1)))
    compile: bool | Literal["auto"] = "auto"
    conformal: bool = True

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``fit``."""
        return {name: value for name, value in asdict(self).items() if name != "conformal"}


_KINDS = (Reading, Wanted, Training)
_GIVEN = {"steps": 2000, "lr": 0.01}  # by default, of a guide that is named


def settings_of(options: Mapping[str, Any]) -> tuple[Reading, Wanted, Training]:
    """Return the settings that options by name say; those that are None, or not given, have their defaults."""
    known = {each.name for kind in _KINDS for each in fields(kind)}
    strange = next((name for name in options if name not in known), None)
    if strange is not None:
        raise PyroDropoutError(f"there is no option {strange!r}; choose from {', '.join(sorted(known))}.")
    given = tuples((name, value) for name, value in options.items() if value is not None)
    aliases = {each.alias: each.name for each in listed_guides() if each.alias}
    guide = given.get("guide", "auto")
    given = ({} if guide == "auto" else _GIVEN) | given | {"guide": aliases.get(guide, guide)}
    parts = ({each.name: given[each.name] for each in fields(kind) if each.name in given} for kind in _KINDS)
    reading, wanted, training = (kind(**part) for kind, part in zip(_KINDS, parts, strict=True))
    return reading, wanted, training
