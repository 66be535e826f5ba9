"""Posteriors of a table side by side: what ``fit`` trains with each guide, and what it chooses by itself.

A row takes the recipe, the steps and the seed of ``fit``, is trained without the held-back rows, and scored on them.
Its first seed has the scores that ``fit`` prints; the other seeds say how much they vary.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from pyro_dropout.comparison.compare import Comparison, examined, progress_over, reference_row
from pyro_dropout.comparison.exams import Exam
from pyro_dropout.comparison.findings import Row
from pyro_dropout.comparison.trained import Trained, one_by_one
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Record
from pyro_dropout.registry import resolve_guide
from pyro_dropout.tables.encoding import Dataset
from pyro_dropout.tables.settings import SCORED, Training, Wanted
from pyro_dropout.tabular.choice import choose_recipe, first_recipe
from pyro_dropout.tabular.fit_table import suited
from pyro_dropout.tabular.recipe import Recipe

AUTOMATIC = "what fit would do"
_NO_REFERENCE = (
    "none: guides learn their noise or are trained at the temperature of their prior, and NUTS samples at a given noise"
    " and T = 1; --reference nuts adds it all the same"
)


@forked()
def compare_table(
    data: Dataset,
    plans: Mapping[str, tuple[Wanted, Training]],
    *,
    seeds: Sequence[int],
    samples: int = SCORED,
    reference: str | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    labels: Mapping[str, str] | None = None,
) -> Comparison:
    """Train several posteriors on a table as ``fit`` does, and score all of them on its held-back rows."""
    start = time.perf_counter()
    for wanted, _ in plans.values():
        wanted.check(bool(data.classes))
    place = torch.device(device)
    train, test = ((x.to(place), y.to(place)) for x, y in (data.train, data.test))
    exam = Exam(ModelCall(None, train), ModelCall(None, test), samples, seed=seeds[0])
    rows: list[Row] = []
    recipes: dict[str, str] = {}
    suit = {name: suited(data, *plan) for name, plan in plans.items()}
    if reference is not None:  # of the network of a guide that is given, on the first scale
        plain = replace(next(iter(suit.values()))[0], guide="mean-field", members=None)
        model, _ = first_recipe(train[0].shape[1], data.train[1], bool(data.classes), plain).build(
            data.train, data.classes
        )
        rows.append(reference_row(reference, model.to(place), exam, progress))
        exam = replace(exam, reference=rows[0].answer)

    def trained(name: str, wanted: Wanted, training: Training) -> Trained:
        """Choose what is not given with the first seed, as ``fit`` does, and train the recipe from the others."""
        first = replace(training, seed=seeds[0])
        choice = choose_recipe(data.train, data.test, data.classes, wanted, first, device=device)
        recipe, history = choice.recipe, choice.history
        recipes[name] = f"{choice.said} {_told(recipe, training)}"

        def build(seed: int) -> tuple[Standardised, nn.Module]:
            torch.manual_seed(seed)
            return recipe.build(data.train, data.classes)

        options = training.options() | recipe.how(training.steps) | {"device": device}
        options.pop("seed")
        more, each, lost = one_by_one(build, list(seeds[1:]), ModelCall(None, data.train), options)
        own = 1e6 * history.seconds / history.steps
        return [choice.trained, *more], (own + len(more) * each) / (1 + len(more)) if more else own, lost

    for name, plan in progress_over(suit, progress):
        straight = plan[0].guide != "auto" and resolve_guide(plan[0].guide).method == "linearised"
        rows.append(
            examined(name, partial(trained, name, *plan), replace(exam, method="linearised" if straight else "mc"))
        )
    settings: Record = {
        "seeds": len(seeds), "which_seeds": list(seeds), "samples": samples, "recipes": recipes,
        "reference": reference or _NO_REFERENCE, "device": str(place), "when": time.strftime("%Y-%m-%d %H:%M %z"),
        **(labels or {}),
    }  # fmt: skip
    return Comparison(rows, data.train, data.test, settings, time.perf_counter() - start)


def _told(recipe: Recipe, training: Training) -> str:
    """Return how a recipe was trained, in one line."""
    units = f"{recipe.width} {recipe.activation.replace('relu', 'ReLU').replace('silu', 'SiLU')} units"
    rows = f"{training.batch_size} rows" if training.batch_size else "all rows"
    rate = f"{training.lr:g}" + (", falling to zero" if recipe.decay else "")
    members = f", {recipe.members} members" if recipe.members else ""
    return f"{units}, {recipe.prior} prior{members}; {training.steps} steps of {rows}, learning rate {rate}."
