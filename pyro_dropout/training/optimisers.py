"""Optimiser updates as functions of tensors, so that a compiled step can include the optimiser.

Each update follows torch.optim exactly (its tests compare the two); parameters, state and gradients go in as lists, and
new lists come out. Learning rates come from a schedule of the step, inside the graph. An optimiser of torch's own runs
beside a step: it trains what it holds, with the state and settings it has.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dropout.engines.torch_internals import (
    fused_adam,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.checks import check_count, check_non_negative, check_positive
from pyro_dropout.protocols import Record

Schedule = Callable[[Tensor], Tensor]
State = list[list[Tensor]]  # the optimiser's tensors for each parameter
_OPTIONS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "momentum", "nesterov")  # of torch's optimisers


@dataclass(frozen=True)
class Update:
    """One optimiser: how many tensors of state a parameter has, and how a step changes them.

    Attributes:
        name: its name for users.
        lr: the base learning rate.
        slots: tensors of state for each parameter.
        apply: (parameter, gradient, state, *numbers) -> (parameter, state).
        numbers: (lr, t) -> the numbers that ``apply`` needs at a step, with t counted from 1; by default lr and t.
        clip_norm: the largest norm of the whole gradient; None for no limit.
        options: the settings of ``apply`` except the learning rate, so that two updates can be compared.
        schedule: multiplies ``lr``; a function of the number of steps done, as a tensor.
        fused: changes (parameters, gradients, state, t, lr) where they are.
        optimiser: one of torch's, which runs itself, beside the step.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> halve = pdrop.training.Update("halve", lr=1.0, slots=0, apply=lambda p, g, s, lr, t: (p / 2, s))
        >>> halve.step([torch.tensor(8.0)], [torch.tensor(0.0)], [[]], torch.tensor(1.0), torch.tensor(1.0))[0]
        [tensor(4.)]
    """

    name: str
    lr: float
    slots: int
    apply: Callable[..., tuple[Tensor, list[Tensor]]]
    numbers: Callable[[Tensor, Tensor], list[Tensor]] = lambda lr, t: [lr, t]
    clip_norm: float | None = None
    schedule: Schedule | None = None
    options: tuple[tuple[str, object], ...] = ()
    fused: Callable[[list[Tensor], list[Tensor], State, Tensor, Tensor], None] | None = None
    optimiser: torch.optim.Optimizer | None = None

    def __post_init__(self) -> None:
        check_non_negative("lr", self.lr)
        check_count("slots", self.slots, least=0)
        for name, value in (("apply", self.apply), ("numbers", self.numbers), ("schedule", self.schedule)):
            if value is not None and not callable(value):
                raise PyroDropoutError(f"{name} must be a function; got {type(value).__name__} {value!r}.")
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)

    def start(self, parameters: list[Tensor]) -> State:
        """Return the state before the first step: zeros."""
        return [[torch.zeros_like(p, dtype=_counted(p)) for _ in range(self.slots)] for p in parameters]

    def step(
        self, parameters: list[Tensor], gradients: list[Tensor], state: State, t: Tensor, lr: Tensor
    ) -> tuple[list[Tensor], State]:
        """Return parameters and state after step number ``t`` (from 1) with base learning rate ``lr``."""
        gradients, lr = self.prepared(gradients, t, lr)
        numbers = _stored(self.numbers(lr, t))
        done = [
            self.apply(p.to(_counted(p)), g.to(_counted(g)), s, *numbers)
            for p, g, s in zip(parameters, gradients, state, strict=True)
        ]
        return [new.to(old.dtype) for (new, _), old in zip(done, parameters, strict=True)], [s for _, s in done]

    def in_place(self, parameters: list[Tensor], gradients: list[Tensor], state: State, t: Tensor, lr: Tensor) -> None:
        """Change parameters and state as ``step`` does, where they are, without a second copy of all of them."""
        gradients, lr = self.prepared(gradients, t, lr)
        laid = [_laid_out(*each) for each in zip(parameters, gradients, state, strict=True)]
        rows = [row for row in laid if row is not None]
        if self.fused is not None and rows and len(rows) == len(laid):
            self.fused([p for p, _, _ in rows], [g for _, g, _ in rows], [own for *_, own in rows], t, lr)
            return
        numbers = _stored(self.numbers(lr, t))
        for p, g, own in zip(parameters, gradients, state, strict=True):
            value, new = self.apply(p.to(_counted(p)), g.to(_counted(g)), own, *numbers)
            for mine, each in zip([p, *own], [value, *new], strict=True):
                mine.copy_(each)

    def prepared(self, gradients: list[Tensor], t: Tensor, lr: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the clipped gradients, and the learning rate of a step."""
        if self.schedule is not None:
            lr = lr * self.schedule(t - 1)
        if self.clip_norm is not None:
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            shrink = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients = [g * shrink.to(g.dtype) for g in gradients]  # also of scalars
        return gradients, lr


def _counted(value: Tensor) -> torch.dtype:
    """Return the type to compute in: Adam's squares of gradients are zero in half precision."""
    return torch.float32 if torch.finfo(value.dtype).bits < 32 else value.dtype


def _laid_out(p: Tensor, g: Tensor, state: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]] | None:
    """Return a parameter, its gradient and its state as they lie in memory, by which torch's fused kernels pair them.

    A matrix may lie there by its columns, and its gradient by its rows. None for what these kernels do not take.
    """
    if p.dim() > 1 and not p.is_contiguous():
        p, g, state = p.mT, g.mT, [slot.mT for slot in state]
    taken = p.dtype in (torch.float32, torch.float64) and all(each.is_contiguous() for each in (p, *state))
    return (p, g.contiguous(), state) if taken else None


def _stored(numbers: list[Tensor]) -> list[Tensor]:
    """Return the same numbers, each computed once, as the mean of sixteen equal ones, which is exact.

    A compiler that fuses operations would recompute a single number for every element, and the exponentials of Adam
    cost more than the rest of it. A sum is stored first.
    """
    joined = torch.stack(torch.broadcast_tensors(*numbers), -1)
    return list(joined.unsqueeze(-1).expand(*joined.shape, 16).mean(-1).unbind(-1))


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled: bool = False,
) -> Update:
    """Return Adam, or with ``decoupled`` AdamW."""
    beta1, beta2 = betas

    def numbers(lr: Tensor, t: Tensor) -> list[Tensor]:
        # 1 - βᵗ corrects the running means for their start at zero
        unbiased1, unbiased2 = -torch.expm1(t * math.log(beta1)), -torch.expm1(t * math.log(beta2))
        return [lr / unbiased1, unbiased2.rsqrt(), 1 - lr * weight_decay]

    def apply(
        p: Tensor, g: Tensor, state: list[Tensor], rate: Tensor, unbias: Tensor, shrink: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        if weight_decay:
            p, g = (p * shrink, g) if decoupled else (p, g + weight_decay * p)
        mean = beta1 * state[0] + (1 - beta1) * g
        square = beta2 * state[1] + (1 - beta2) * g * g
        return p - rate * mean / (square.sqrt() * unbias + eps), [mean, square]

    def fused(parameters: list[Tensor], gradients: list[Tensor], state: State, t: Tensor, lr: Tensor) -> None:
        kernel, done, rate = fused_adam(decoupled), t.float(), float(lr)
        settings: Any = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        rows = [(p, g, *slots) for p, g, slots in zip(parameters, gradients, state, strict=True)]
        for kind in dict.fromkeys(p.dtype for p in parameters):
            own = [row for row in rows if row[0].dtype == kind]
            lists = [list(column) for column in zip(*own, strict=True)]
            kernel(*lists, [], [done] * len(own), lr=rate, amsgrad=False, maximize=False, **settings)

    name = "adamw" if decoupled else "adam"
    options = (("betas", betas), ("eps", eps), ("weight_decay", weight_decay))
    return Update(name, lr, 2, apply, numbers, options=options, fused=fused)


def sgd(lr: float = 1e-2, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> Update:
    """Return stochastic gradient descent, optionally with momentum."""

    def apply(p: Tensor, g: Tensor, state: list[Tensor], lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        if weight_decay:
            g = g + weight_decay * p
        if not momentum:
            return p - lr * g, []
        velocity = momentum * state[0] + g
        return p - lr * (g + momentum * velocity if nesterov else velocity), [velocity]

    options = (("weight_decay", weight_decay),) if weight_decay else ()
    return Update("sgd", lr, 1 if momentum else 0, apply, lambda lr, t: [lr], options=options)


def inverse_decay(gamma: float = 1e-4, power: float = 0.25) -> Schedule:
    """The paper's learning-rate schedule, base·(1 + γt)^(-p): it decays slowly, and never reaches zero.

    Args:
        gamma: γ, how soon the decay begins.
        power: p, how steep the decay is.

    Returns:
        A function of the number of steps done, to multiply the base rate with.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.training.inverse_decay(gamma=1.0, power=0.5)(torch.tensor([0.0, 3.0]))
        tensor([1.0000, 0.5000])
    """
    check_non_negative("gamma", gamma)
    check_non_negative("power", power)
    return lambda t: (1 + gamma * t) ** -power


def cosine_decay(steps: int) -> Schedule:
    """A schedule that falls to zero along half a cosine, in this many steps."""

    def half_cosine(t: Tensor) -> Tensor:
        return 0.5 * (1 + (math.pi * (t / steps).clamp_max(1.0)).cos())

    return half_cosine


def plain(value: object) -> Any:
    """Return a setting in JSON form: tensors as numbers, tuples as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {str(name): plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def named(optim: object, lr: float, schedule: Schedule | None = None, clip_norm: float | None = None) -> Update:
    """Return "adam", "adamw" or "sgd" (momentum 0.9, as the paper trains) with a learning rate, and no weight decay.

    The KL is the decay: torch's default for AdamW, 0.01, would be a second one beside it.
    """
    check_positive("lr", lr)
    kinds = {"adam": adam(lr), "adamw": adam(lr, decoupled=True), "sgd": sgd(lr, momentum=0.9)}
    found = kinds.get(optim.lower()) if isinstance(optim, str) else None
    if found is None:
        raise PyroDropoutError(f"optim must be 'adam', 'adamw', 'sgd' or a torch optimiser; got {optim!r}.")
    return replace(found, schedule=schedule, clip_norm=clip_norm)


def chosen(optim: object, lr: float, schedule: Schedule | None, clip_norm: float | None) -> Update:
    """Return the update for a name and a learning rate, of torch's optimiser, or the ``Update`` itself."""
    if isinstance(optim, torch.optim.Optimizer):
        how: Any = {"schedule": schedule, "clip_norm": clip_norm, "optimiser": optim}
        return Update(type(optim).__name__, 0.0, 0, lambda p, g, state, *numbers: (p, state), **how)
    if not isinstance(optim, Update):
        return named(optim, lr, schedule, clip_norm)
    if schedule is not None or clip_norm is not None:
        raise PyroDropoutError("an Update has its own schedule and clip_norm; give them to it, not to fit.")
    return optim


def from_group(kind: type, group: Record) -> Update | None:
    """Return the update of a torch optimiser of this class with one group; None if it is not implemented here."""
    options = {name: plain(value) for name, value in group.items() if name != "params"}
    if any(options.get(name) for name in ("amsgrad", "maximize", "dampening")):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay"))
        found = adam(
            options["lr"], tuple(options["betas"]), options["eps"], options["weight_decay"], decoupled=decoupled
        )
    elif kind is torch.optim.SGD:
        found = sgd(*(options[name] for name in ("lr", "momentum", "weight_decay", "nesterov")))
    else:
        return None
    return replace(found, options=tuple((name, options[name]) for name in _OPTIONS if name in options))


def clock(lr: float, parameters: list[Tensor], taken: int) -> tuple[Tensor, Tensor]:
    """Return the number of steps taken and the base learning rate as tensors, in the parameters' type and device."""
    like = max(parameters, key=lambda p: torch.finfo(p.dtype).bits, default=torch.empty(0))
    kind: Any = {"dtype": _counted(like), "device": like.device}  # a 16-bit type cannot count far
    return torch.tensor(float(taken), **kind), torch.tensor(lr, **kind)


class TorchOptimiser:
    """Lets a torch optimiser take the steps, for the parameters ``trained`` that a step has gradients of."""

    def __init__(self, update: Update, trained: list[Tensor], guide: object = None) -> None:
        assert update.optimiser is not None
        self._update, self._optimiser, self._trained = update, update.optimiser, trained
        held = {id(each) for group in self._optimiser.param_groups for each in group["params"]}
        self._held = {k: each for k, each in enumerate(trained) if id(each) in held}
        places = {id(each): k for k, each in enumerate(trained)}
        moved = places.keys()
        mine = [id(each) for each in (guide.parameters() if isinstance(guide, nn.Module) else ())]
        given = [id(each) for group in self._optimiser.param_groups for each in group["params"]]
        order, usual = ([places[each] for each in some if each in moved] for some in (given, mine))
        # Its state is by their order, which a checkpoint names if it is not the guide's.
        self.told: Record = {} if order in (usual, sorted(places.values())) else {"optimiser holds": order}
        own = moved & {*mine}
        if self._held and own and not own & held and held - moved:
            raise PyroDropoutError(
                f"optim must hold parameters of the guide; this {update.name} holds weights of the network in their"
                " place, which are drawn from the guide here. Make it with guide.parameters()."
            )
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
