"""Early stopping for any Pyro model, by the mean log predictive density of the observed sites on held-out data."""

import math
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import observed_sites, point_log_likelihood, trace_of
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.loop import Watch

_DRAWS = 16  # of the guide, for each check


class SiteWatch(Watch):
    """Keeps the parameters under which held-out data were most probable.

    Args:
        call: the model with its arguments, held-out data included.
        guide: the guide.
        run: the training.
        patience: how many checks without improvement are allowed.
        every: steps between checks.
        seed: for the draws.
    """

    def __init__(self, call: ModelCall, guide: Any, run: Any, patience: int, every: int, seed: int | None) -> None:
        nothing = torch.zeros(0)
        super().__init__(call.model, guide, run, (nothing, nothing), patience, every, seed)
        self.call = call.to(run.t.device)

    def _surprise(self) -> Tensor:
        found: dict[str, list[Tensor]] = {}
        for _ in range(_DRAWS):
            with poutine.block():
                guide_trace = self.call.of(poutine.trace(self.guide).get_trace)
            drawn = {name: site["value"] for name, site in guide_trace.nodes.items() if site["type"] == "sample"}
            for name, site in observed_sites(trace_of(self.call, drawn), drawn).items():
                found.setdefault(name, []).append(point_log_likelihood(site))
        if not found:
            raise PyroDropoutError("validation must hold data: the model observes nothing with these arguments.")
        each = [torch.logsumexp(torch.stack(part), 0) - math.log(_DRAWS) for part in found.values()]
        return torch.stack([-torch.stack([part.sum() for part in each]).sum(), each[0].new_tensor(_count(each))])

    def facts(self) -> dict[str, Any]:
        """Return what must be the same when the training is resumed."""
        held = [digest(leaf) for leaf in self.call.leaves()]
        return {"data": held, "patience": self.patience, "every": self.every}


def _count(each: list[Tensor]) -> int:
    return sum(part.numel() for part in each)
