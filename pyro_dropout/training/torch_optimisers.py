"""Optimisers of torch: read as an update inside the step, or run as they are beside it.

What an optimiser holds is trained, and nothing else, with the settings of each group and the state that it has. Adam,
AdamW and SGD that start afresh and hold everything in one group are read: the step then contains them.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from pyro_dropout.training.optimisers import Schedule, Update, from_group


def from_optimiser(
    optimiser: torch.optim.Optimizer,
    trained: Iterable[Tensor] = (),
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
) -> Update:
    """Return the update of a torch optimiser.

    Args:
        optimiser: the optimiser.
        trained: what would be trained by an update inside the step.
        schedule: multiplies its learning rates.
        clip_norm: the largest norm of the gradient of what it holds.

    Example:
        >>> w = torch.zeros(2, requires_grad=True)
        >>> from_optimiser(torch.optim.Adam([w])).name, from_optimiser(torch.optim.RMSprop([w])).name
        ('adam', 'beside')
    """
    groups = optimiser.param_groups
    started = any(value is not None for slots in optimiser.state.values() for value in slots.values())
    hooks = optimiser._optimizer_step_pre_hooks or optimiser._optimizer_step_post_hooks
    found = from_group(type(optimiser), groups[0]) if len(groups) == 1 and not started and not hooks else None
    found = _beside if found is None else found
    return for_parameters(replace(found, schedule=schedule, clip_norm=clip_norm, optimiser=optimiser), trained)


def for_parameters(update: Update, trained: Iterable[Tensor]) -> Update:
    """Return an update, beside the step if torch's optimiser does not hold all parameters that the step would change.

    Example:
        >>> held, other = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> update = from_optimiser(torch.optim.Adam([held]))
        >>> for_parameters(update, [held]).name, for_parameters(update, [held, other]).name
        ('adam', 'beside')
    """
    held = held_by(update.optimiser)
    if update.optimiser is None or all(id(each) in held for each in trained):
        return update
    return replace(_beside, schedule=update.schedule, clip_norm=update.clip_norm, optimiser=update.optimiser)


def held_by(optimiser: torch.optim.Optimizer | None) -> set[int]:
    """Return the ids of the parameters that an optimiser holds."""
    return set() if optimiser is None else {id(each) for group in optimiser.param_groups for each in group["params"]}


def trainable(*parts: object) -> list[Tensor]:
    """Return the parameters of modules that take gradients."""
    return [p for part in parts if isinstance(part, nn.Module) for p in part.parameters() if p.requires_grad]


_beside = Update("beside", 0.0, 0, lambda p, g, state, *numbers: (p, state))
