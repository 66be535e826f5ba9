"""Optimiser updates as functions of tensors, so that a compiled step can include the optimiser.

Each update follows torch.optim exactly (its tests compare the two); parameters, state and gradients go in as lists, and
new lists come out. Learning rates come from a schedule of the step, inside the graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.torch_internals import fused_adam
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.checks import check_count, check_non_negative, check_positive
from pyro_dropout.protocols import Record

Schedule = Callable[[Tensor], Tensor]
Bound = Callable[[list[Tensor], list[Tensor], list[list[Tensor]]], Callable[[Tensor, Tensor], None]]


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
        clip_value: the largest size of one element of the gradient, after ``clip_norm``; None for no limit.
        clip_each: whether ``clip_norm`` is the largest norm of each parameter's gradient, as in Pyro's optimisers.
        options: the settings of ``apply`` except the learning rate, so that two updates can be compared.
        schedule: multiplies ``lr``; a function of the number of steps done, as a tensor.
        bind: (parameters, gradients, state) -> a function of (lr, t) that changes all of these tensors at once, for
            steps in place, which otherwise copy what ``apply`` returns.
        optimiser: torch's, of which this is a reading, or which runs itself, beside the step.

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
    clip_value: float | None = None
    schedule: Schedule | None = None
    clip_each: bool = False
    options: tuple[tuple[str, object], ...] = ()
    bind: Bound | None = None
    optimiser: torch.optim.Optimizer | None = None

    @property
    def beside(self) -> bool:
        """Whether torch's optimiser takes the step, given the gradients."""
        return self.optimiser is not None and self.name == "beside"

    def __post_init__(self) -> None:
        check_non_negative("lr", self.lr)
        check_count("slots", self.slots, least=0)
        for name, value in (("apply", self.apply), ("numbers", self.numbers), ("schedule", self.schedule)):
            if value is not None and not callable(value):
                raise PyroDropoutError(f"{name} must be a function; got {type(value).__name__} {value!r}.")
        for name, limit in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if limit is not None:
                check_positive(name, limit)

    def start(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Return the state before the first step: zeros."""
        return [[torch.zeros_like(p, dtype=_counted(p)) for _ in range(self.slots)] for p in parameters]

    def step(
        self, parameters: list[Tensor], gradients: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return parameters and state after step number ``t`` (from 1) with base learning rate ``lr``."""
        gradients, lr = self.prepared(gradients, t, lr)
        numbers = _stored(self.numbers(lr, t))
        done = [
            self.apply(p.to(_counted(p)), g.to(_counted(g)), s, *numbers)
            for p, g, s in zip(parameters, gradients, state, strict=True)
        ]
        return [new.to(old.dtype) for (new, _), old in zip(done, parameters, strict=True)], [s for _, s in done]

    def step_in_place(
        self, parameters: list[Tensor], gradients: list[Tensor], state: list[list[Tensor]], t: Tensor, lr: Tensor
    ) -> None:
        """Change parameters and state as ``step`` does, without a second copy of them."""
        gradients, lr = self.prepared(gradients, t, lr)
        if self.bind is not None and _can_be_bound(parameters):
            self.bind(parameters, gradients, state)(lr, t)
            return
        numbers = _stored(self.numbers(lr, t))
        for p, g, own in zip(parameters, gradients, state, strict=True):
            value, new = self.apply(p.to(_counted(p)), g.to(_counted(g)), own, *numbers)
            for mine, each in zip([p, *own], [value, *new], strict=True):
                mine.copy_(each)

    def bound(
        self, parameters: list[Tensor], gradients: list[Tensor], state: list[list[Tensor]]
    ) -> Callable[[Tensor, Tensor], None]:
        """Return a function of (t, lr) that does what ``step_in_place`` does, for always these tensors."""
        every = [*parameters, *gradients, *(slot for own in state for slot in own)]
        copied = self.clip_norm is not None or self.clip_value is not None or not all(e.is_contiguous() for e in every)
        if self.bind is None or copied or not _can_be_bound(parameters):
            return lambda t, lr: self.step_in_place(parameters, gradients, state, t, lr)
        update = self.bind(parameters, gradients, state)
        return lambda t, lr: update(self.prepared([], t, lr)[1], t)

    def prepared(self, gradients: list[Tensor], t: Tensor, lr: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the clipped gradients, and the learning rate of a step."""
        if self.schedule is not None:
            lr = lr * self.schedule(t - 1)
        if self.clip_norm is not None:
            squares = [g.square().sum() for g in gradients]
            norms = squares if self.clip_each else [torch.stack(squares).sum()] * len(squares)
            shrink = [(self.clip_norm / (norm.sqrt() + 1e-6)).clamp(max=1.0) for norm in norms]
            gradients = [g * each.to(g.dtype) for g, each in zip(gradients, shrink, strict=True)]  # also of scalars
        if self.clip_value is not None:
            gradients = [g.clamp(-self.clip_value, self.clip_value) for g in gradients]
        return gradients, lr


def _counted(value: Tensor) -> torch.dtype:
    """Return the type to compute in: Adam's squares of gradients are zero in half precision."""
    return torch.float32 if torch.finfo(value.dtype).bits < 32 else value.dtype


def _can_be_bound(parameters: list[Tensor]) -> bool:
    """Whether torch's fused kernels can change these: their elements fill memory, in any order, each once."""
    dense = (torch.empty_like(p, device="meta").stride() == p.stride() for p in parameters)
    return bool(parameters) and all(dense) and all(_counted(p) == p.dtype for p in parameters)


def _in_memory(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a tensor in the parameter's order in memory, which is the order of torch's fused kernels.

    All tensors of a parameter have the same shape: on a GPU torch refuses others. If the parameter is not contiguous,
    that of a vector. Complex numbers are pairs.
    """
    if parameter.is_complex():
        parameter, value = torch.view_as_real(parameter), torch.view_as_real(value.resolve_conj())
    if parameter.is_contiguous():
        return value.contiguous()
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter).copy_(value)
    return value.as_strided((value.numel(),), (1,))


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

    def bind(
        parameters: list[Tensor], gradients: list[Tensor], state: list[list[Tensor]]
    ) -> Callable[[Tensor, Tensor], None]:
        done = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
        fused, kinds = fused_adam(decoupled), dict.fromkeys(p.dtype for p in parameters)
        settings: Any = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        calls = []
        for kind in kinds:
            own = [
                [_in_memory(p, value) for value in (p, g, *slots)]
                for p, g, slots in zip(parameters, gradients, state, strict=True)
                if p.dtype == kind
            ]
            calls.append([*(list(column) for column in zip(*own, strict=True)), [], [done] * len(own)])

        def update(lr: Tensor, t: Tensor) -> None:
            done.copy_(t)
            for lists in calls:
                fused(*lists, lr=float(lr), amsgrad=False, maximize=False, **settings)

        return update

    name = "adamw" if decoupled else "adam"
    options = (("betas", betas), ("eps", eps), ("weight_decay", weight_decay))
    return Update(name, lr, 2, apply, numbers, options=options, bind=bind)


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
    """A schedule that falls to zero along half a cosine, in this many steps.

    Example:
        >>> import torch
        >>> from pyro_dropout.training.optimisers import cosine_decay
        >>> cosine_decay(10)(torch.tensor([0.0, 5.0, 10.0])).round(decimals=4)
        tensor([1.0000, 0.5000, 0.0000])
    """

    def half_cosine(t: Tensor) -> Tensor:
        return 0.5 * (1 + (math.pi * (t / steps).clamp_max(1.0)).cos())

    return half_cosine


def plain(value: object) -> Any:
    """Return a setting in JSON form: tensors as numbers, tuples as lists.

    Example:
        >>> import torch
        >>> from pyro_dropout.training.optimisers import plain
        >>> plain({"lr": torch.tensor(0.5), "betas": (0.9, 0.99)})
        {'lr': 0.5, 'betas': [0.9, 0.99]}
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {str(name): plain(each) for name, each in value.items()} if isinstance(value, dict) else value


_OPTIONS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "momentum", "nesterov")


def from_group(kind: type, group: Record) -> Update | None:
    """Return the update of a torch optimiser of this class with one group; None if it is not implemented here."""
    options = {name: plain(value) for name, value in group.items() if name != "params"}
    if any(options.get(name) for name in ("amsgrad", "maximize", "dampening")):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay"))
        beta1, beta2 = options["betas"]
        found = adam(options["lr"], (beta1, beta2), options["eps"], options["weight_decay"], decoupled=decoupled)
    elif kind is torch.optim.SGD:
        found = sgd(*(options[name] for name in ("lr", "momentum", "weight_decay", "nesterov")))
    else:
        return None
    return replace(found, options=tuple((name, options[name]) for name in _OPTIONS if name in options))


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
    """Return the update for a name and a learning rate; an ``Update`` is returned as it is, with its own."""
    if not isinstance(optim, Update):
        return named(optim, lr, schedule, clip_norm)
    if schedule is not None or clip_norm is not None:
        raise PyroDropoutError("an Update has its own schedule and clip_norm; give them to it, not to fit.")
    return optim


def clock(update: Update, parameters: list[Tensor], taken: int) -> tuple[Tensor, Tensor]:
    """Return the number of steps taken and the base learning rate as tensors, in the parameters' type and device."""
    if not parameters:
        return torch.tensor(float(taken)), torch.tensor(update.lr)
    dtype = max((p.dtype for p in parameters), key=lambda kind: torch.finfo(kind).bits)
    # A 16-bit type cannot count far.
    dtype = torch.float32 if torch.finfo(dtype).bits < 32 else dtype
    like = parameters[0]
    return like.new_full((), float(taken), dtype=dtype), like.new_full((), update.lr, dtype=dtype)
