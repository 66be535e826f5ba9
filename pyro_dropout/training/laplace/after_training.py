"""Curvature where training ends: ``fit`` and ``Fleet.fit`` train the point of an ``AutoLaplace`` and then finish it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import inputs_of
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.protocols import PyroModel, Record
from pyro_dropout.training.history import History
from pyro_dropout.training.laplace.curvature import network_in
from pyro_dropout.training.laplace.kronecker import layers_of
from pyro_dropout.training.laplace.laplace import batches_of, finish
from pyro_dropout.training.loader import Target

Finished = Callable[[History], History]


@contextlib.contextmanager
def as_points(model: PyroModel, guide: object, loss: object) -> Iterator[None]:
    """Within this context an ``AutoLaplace`` is points; raise if its structure does not describe the model.

    If the context ends with an error and the points are where they were, their curvature is that of before.
    """
    if not isinstance(guide, AutoLaplace):
        yield
        return
    temperature = getattr(loss, "temperature", 1.0)
    if not callable(temperature) and temperature != 1.0:
        raise PyroDropoutError(
            f"AutoLaplace is a Gaussian at the maximum of the posterior, and with ELBO(temperature={temperature:g}) the"
            " maximum is elsewhere. Leave temperature out, or give a schedule that ends at 1, such as warm_up(1000)."
        )
    if not all(hasattr(model, name) for name in ("evaluate", "prior_of", "likelihood")):
        raise PyroDropoutError(
            f"AutoLaplace needs the BayesianNet that it was made with; got {type(model).__name__}, whose curvature is"
            " not known."
        )
    if guide.structure == "kron":
        net = network_in(model)
        layers_of(net, list(net.sites))
    before = guide.curvature if guide.finished else None
    points = {name: value.clone() for name, value in guide.point().items()}
    guide.set_curvature(None)
    try:
        yield
    except BaseException:
        if not guide.finished and all(torch.equal(value, points[name]) for name, value in guide.point().items()):
            guide.set_curvature(before)
        raise


def finish_on(
    guide: object,
    call: ModelCall,
    loader: DataLoader[Any] | None,
    target: Target,
    batch_size: int | None,
    held_out: ModelCall | None = None,
) -> None:
    """Add the curvature of a call's data, or of a loader's, to an ``AutoLaplace``; held-out data tune its width."""
    if isinstance(guide, AutoLaplace):
        x, y, *number = call.args
        batches = batches_of(call.model, x, y) if loader is None else batches_of(call.model, loader, None, target)
        num_data = number[0] if number else call.kwargs.get("num_data")
        validation = None if held_out is None else held_out.args
        finish(guide, call.model, batches, batch_size=batch_size, num_data=num_data, validation=validation)


@contextlib.contextmanager
def curvature_after(replicas: Iterable[tuple[Any, Any]], x: object, y: Tensor, options: Record) -> Iterator[Finished]:
    """Yield what finishes the replicas of a fleet that have not diverged, each on its own rows of the data."""
    pairs = list(replicas)

    def finished(history: History) -> History:
        inputs, rows = inputs_of(x), options.get("indices")
        for k, (model, guide) in enumerate(pairs):
            if isinstance(guide, AutoLaplace) and not bool(history.diverged[k]):
                own = slice(None) if rows is None else rows[k].to(y.device)
                finish(guide, model, [(inputs[own], y[own])], batch_size=options.get("batch_size"))
        return history

    with contextlib.ExitStack() as stack:
        for model, guide in pairs:
            stack.enter_context(as_points(model, guide, options.get("loss")))
        yield finished
