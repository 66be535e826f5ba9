"""An optimiser of torch's own, beside a training step: it trains what it holds, with the state and settings it has."""

import torch
from torch import Tensor

from pyro_dropout.engines.torch_internals import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.training.optimisers import Update


class TorchOptimiser:
    """Lets a torch optimiser take the steps, for the parameters ``trained`` that a step has gradients of."""

    def __init__(self, update: Update, trained: list[Tensor]) -> None:
        assert update.optimiser is not None
        self._update, self._optimiser, self._trained = update, update.optimiser, trained
        held = {id(each) for group in self._optimiser.param_groups for each in group["params"]}
        self._held = {k: each for k, each in enumerate(trained) if id(each) in held}
        if trained and not self._held:
            raise PyroDropoutError(
                f"optim must hold parameters of the guide or the model; this {update.name} holds none of them. Make it"
                " with guide.parameters()."
            )

    def move(self, values: list[Tensor], gradients: list[Tensor], t: Tensor) -> None:
        """Take step number ``t``, at the optimiser's learning rates times the schedule.

        ``values`` are the parameters' memory, which stays the same.
        """
        slopes, factor = self._update.prepared([gradients[k] for k in self._held], t, torch.ones_like(t))
        for parameter, slope in zip(self._held.values(), slopes, strict=True):
            parameter.grad = slope.clone()  # the optimiser may change it
        rates = [group["lr"] for group in self._optimiser.param_groups]
        if self._update.schedule is not None:
            for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * float(factor)
        self._optimiser.step()
        self._optimiser.zero_grad()
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        for mine, theirs in zip(values, self._trained, strict=True):
            if mine.data_ptr() != theirs.data_ptr():  # the optimiser has given a parameter new memory
                theirs.data = mine.copy_(theirs.detach())

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Return its state: tensors by name, and the rest, which is JSON."""
        leaves, shape = tree_flatten(self._optimiser.state_dict())
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        other = next((leaf for leaf in rest if not isinstance(leaf, int | float | bool | str | None)), None)
        if other is not None:
            raise PyroDropoutError(
                f"the state of {self._update.name} (which holds a {type(other).__name__}) cannot be written to a"
                " checkpoint; train without one, or with Adam, AdamW or SGD."
            )
        tensors = {f"optimiser.{k}": leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        return tensors, {"leaves": rest, "shape": treespec_dumps(shape)}

    def set_state(self, tensors: dict[str, Tensor], rest: Record) -> None:
        """Restore a state."""
        leaves = [tensors.get(f"optimiser.{k}", leaf) for k, leaf in enumerate(rest["leaves"])]
        self._optimiser.load_state_dict(tree_unflatten(leaves, treespec_loads(rest["shape"])))
