"""What must be the same in a training that is taken up again, told so that JSON can hold it and two can be compared."""

from typing import Any

import torch

from pyro_dropout.inference.updates import Update


def told_update(update: Update | torch.optim.Optimizer) -> Any:
    """Return what an optimiser does, so that two of a kind with other settings are told apart: a few of its steps.

    Example:
        >>> import pyro_dropout as pd
        >>> from pyro_dropout.inference.facts import told_update
        >>> from pyro_dropout.inference.updates import named
        >>> told_update(named("sgd", 0.1)) == told_update(named("sgd", 0.1))
        True
        >>> told_update(named("sgd", 0.1)) == told_update(named("sgd", 0.1, schedule=pd.inverse_decay()))
        False
    """
    if isinstance(update, torch.optim.Optimizer):
        return type(update).__name__
    p, state = [torch.ones(2)], update.start([torch.ones(2)])
    seen: list[float] = []
    for t in (1.0, 2.0, 1000.0, 100_000.0):
        p, state = update.step(p, [torch.tensor([0.3, -7.0])], state, torch.tensor(t), torch.tensor(update.lr))
        seen += p[0].tolist()
    return [update.name, update.clip_norm, update.clip_value, *seen]


def told_loss(loss: Any) -> dict[str, Any]:
    """Return which loss it is, with its settings.

    Example:
        >>> import pyro_dropout as pd
        >>> from pyro_dropout.inference.facts import told_loss
        >>> told_loss(pd.ELBO(num_particles=2))["num_particles"]
        2
    """
    return {"kind": type(loss).__name__} | {
        name: value for name, value in vars(loss).items() if isinstance(value, str | int | float | bool)
    }
