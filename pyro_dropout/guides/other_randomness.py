"""Finds what draws random numbers in a network besides its dropout layers: stochastic depth, noise, attention dropout.

A graph of the network shows calls of torch's random functions. It does not show what other code does, so the network is
also run once it has data: whatever changes a random generator is found there, and so is an output that differs
between two runs.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_dropout.generative.inputs import AnyInputs, call_net
from pyro_dropout.generative.random_state import random_state
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.errors import PyroDropoutError

_RANDOM = {"bernoulli", "normal", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "multinomial"}
_RANDOM |= {"poisson", "gumbel_softmax", "uniform_", "normal_", "bernoulli_", "exponential_", "random_", "geometric_"}
_ROWS = 2  # of the data; more draw the same


def check_graph(graph: fx.Graph) -> None:
    """Raise if a graph of a network in training mode calls one of torch's random functions."""
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if node.op in ("call_function", "call_method") and _draws(name, node.args, node.kwargs):
            path, kind = next(reversed(node.meta.get("nn_module_stack", {"": ("", "network")}).values()))
            label = getattr(kind, "__name__", str(kind).rsplit(".", 1)[-1])
            library = "F" if getattr(node.target, "__module__", "") == F.__name__ else "torch"
            raise _refusal(f"{label} {path!r}", f"{library}.{name}")


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch's draws random numbers when it is called like this."""
    if name == "scaled_dot_product_attention":
        return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) != 0.0)
    if "dropout" in name:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        trained = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return bool(p != 0.0 and trained)
    return name in _RANDOM


@contextmanager
def training(net: nn.Module) -> Iterator[None]:
    """Within this context a network is in training mode, except for layers with running statistics."""
    modes = {module: module.training for module in net.modules()}
    for module in modes:
        module.training = not isinstance(module, nn.modules.batchnorm._NormBase)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_run(net: nn.Module, x: AnyInputs) -> None:
    """Raise if a network without its dropout layers draws random numbers, or gives two outputs for one input."""
    with quietly(net), torch.no_grad(), training(net):
        try:
            first, second = _Watch(), _Watch()
            with first.on(net):
                call_net(net, x[:_ROWS])
            with second.on(net):
                call_net(net, x[:_ROWS])
        except Exception:
            return  # a network that cannot run in training mode draws nothing in it
    for label, what in first.draws:
        raise _refusal(label, what)
    for (label, one), (_, other) in zip(first.outputs, second.outputs, strict=False):
        if not torch.equal(one, other):
            raise _refusal(label, "a generator of its own")


class _Watch(TorchDispatchMode):
    """Notes the random operations of a forward pass and the output of every module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, str]] = []
        self.outputs: list[tuple[str, Tensor]] = []
        self._operation = ""
        self._before: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._operation = f"torch.{func.overloadpacket.__name__}"
            if kwargs.get("generator") is not None:  # not one of those that are compared
                self._before[-1] = ()
        return func(*args, **kwargs)

    @contextmanager
    def on(self, net: nn.Module) -> Iterator[None]:
        """Watch the modules of a network."""
        with ExitStack() as stack:
            for path, module in net.named_modules():
                label = f"{type(module).__name__} {path!r}"
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(functools.partial(self._leave, label)).remove)
            stack.enter_context(self)
            yield

    def _enter(self, *_: object) -> None:
        self._before.append(_states())

    def _leave(self, label: str, module: nn.Module, inputs: object, output: object) -> None:
        after = _states()
        if self._before.pop() != after:
            self.draws.append((label, self._operation or "Python's or numpy's generator"))
        if isinstance(output, Tensor):
            self.outputs.append((label, output))


def _states() -> tuple[object, ...]:
    """Return the states of all generators, as values that can be compared."""
    shared, on_gpus = random_state()
    python, torchs, numpys = (shared[name] for name in ("random", "torch", "numpy"))
    return python, str(numpys), *(bytes(state.numpy()) for state in (torchs, *on_gpus))  # type: ignore[attr-defined]


def _refusal(label: str, what: str) -> PyroDropoutError:
    return PyroDropoutError(
        f"{label} draws random numbers in training mode ({what}), and from_dropout reads only nn.Dropout layers before"
        " weight layers: predictions of the pair would lack its spread. Put nn.Identity() in its place, or set its"
        " probability to 0, to leave it out; make dropout that is called as a function an nn.Dropout layer."
    )
