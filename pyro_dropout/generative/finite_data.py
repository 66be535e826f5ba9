"""Data that are not finite: a training on them diverges at its first step, whatever the learning rate is.

A Pyro model may hold them and never use them: it masks them, or puts latent values in their places, or has no bound on
one side. So it is refused only if they leave its observed sites without a density.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.engines.torch_internals import keystr, tree_flatten_with_path
from pyro_dropout.errors import RangeError
from pyro_dropout.generative.model_call import ModelCall, signature_of
from pyro_dropout.generative.observed_sites import log_density, observed_sites
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.checks import check_data_finite, check_held
from pyro_dropout.protocols import Tree

_RUNS = 5  # draws from the prior, one of which has a density if the data can have one


def check_call_finite(call: ModelCall) -> None:
    """Raise if numbers among a model's arguments are not finite, and its data have no density for that reason.

    Random states and parameters are left unchanged. The model is run only if there are such numbers.
    """
    wrong = [(name, leaf) for name, leaf in _named_leaves(call) if not bool(leaf.isfinite().all())]
    if not wrong or any(_has_density(call) for _ in range(_RUNS)):
        return
    for name, leaf in wrong:
        check_data_finite(name, leaf)


def _has_density(call: ModelCall) -> bool:
    """Whether log p(y | w) is finite at a draw of w from the prior."""
    try:
        with torch.no_grad(), quietly(call.model), pyro.get_param_store().scope(), poutine.block():
            sites = observed_sites(call.of(poutine.trace(call.model).get_trace)).values()
            return all(bool(log_density(site).isfinite()) for site in sites)
    except (ValueError, RuntimeError, RangeError):  # distributions reject such parameters and such values
        return False


def _named_leaves(call: ModelCall) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the arguments, with the name of the argument that each is in."""
    known = signature_of(call.model)
    given: dict[Any, Tree] = dict(enumerate(call.args)) | call.kwargs
    with suppress(TypeError):  # the arguments do not fit, which the run of the model will say
        given = given if known is None else known.bind(*call.args, **call.kwargs).arguments
    for name, value in given.items():
        for path, leaf in tree_flatten_with_path(value)[0]:
            check_held(f"{name}{keystr(path)}", leaf)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                yield f"{name}{keystr(path)}", leaf
