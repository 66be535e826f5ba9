"""Finds what draws random numbers in a network, besides the dropout that a guide has taken over, by running it.

A few rows of data are run in training mode, and whatever changes a random generator is found with the module that did
it. Noise can be kept (``generative/own_noise.py``) if every data point has its own, from torch's generator, and if it
is still drawn when only its module is in training mode. All other noise is refused by name.
"""

import functools
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_dropout.generative.inputs import AnyInputs, call_net
from pyro_dropout.generative.own_noise import kept_random, silent
from pyro_dropout.generative.random_state import random_state, seeded
from pyro_dropout.generative.trial_run import evaluating, quietly
from pyro_dropout.mathematics.errors import PyroDropoutError

_ROWS = (2, 3)  # of the data: noise of each point grows with their number
_MIXING = {"randperm", "randint", "random_", "multinomial"}  # they choose, perhaps among data points


def holds_dropout(module: nn.Module) -> bool:
    """Whether a module of torch's has dropout in its own forward pass."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0


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


def find_noise(net: nn.Module, x: AnyInputs, whole: bool = False) -> list[str] | None:
    """Return the modules of a network that draw noise in training mode; raise if it cannot be kept as it is.

    ``whole`` says that the network takes all its points at once; then each draw is a pass, and may be of the batch.
    None means that this cannot be told: the network does not run with x, or only in evaluation mode (with a warning).
    """
    # A number of data points may be built in; the network then runs with as many, or with a multiple.
    sizes = ((len(x), len(x)),) if whole else (_ROWS, (len(x), 2 * len(x)), (len(x), len(x)))
    choices = ([x[torch.arange(count, device=x.device) % len(x)] for count in each] for each in sizes)
    with quietly(net), torch.no_grad():
        batches = next((each for each in choices if _runs(net, each)), None)
        if batches is None:
            return None
        try:
            with training(net):
                first, again, more = (_watched(net, batch) for batch in (batches[0], batches[0], batches[1]))
        except Exception as cause:
            warnings.warn(
                f"{type(net).__name__} does not run in training mode ({type(cause).__name__}: {cause}), so random"
                " numbers that it draws there, other than in torch's dropout layers, were not looked for. The pair is"
                " right if there are none.",
                stacklevel=2,
            )
            return None
        _check_generators(first, again)
        _check_points(first, more, len(batches[1]) / len(batches[0]))
        found = list(dict.fromkeys(draw.path for draw in first.draws))
        with evaluating(net), silent(False), kept_random(map(net.get_submodule, found)):
            kept = _watched(net, batches[0])
    for draw in Counter(first.draws) - Counter(kept.draws):
        raise _refusal(draw.label, f"in {draw.operation}, but not when it alone is in training mode")
    label = _differs(first, kept)
    if label is not None:
        warnings.warn(
            f"{label} gives another output in training mode, for the same random numbers (a probability of 1, or"
            " statistics of its own): predictions are made as in evaluation mode there.",
            stacklevel=2,
        )
    return found


def _differs(one: "_Watch", other: "_Watch") -> str | None:
    """Return the first module whose output differs between two runs; None if the network's output does not."""
    pairs = [(label, a, b) for (label, a), (_, b) in zip(one.outputs[::-1], other.outputs[::-1], strict=False)]
    far = [a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for _, a, b in pairs]
    return pairs[len(far) - 1 - far[::-1].index(True)][0] if far[:1] == [True] else None


def _runs(net: nn.Module, batches: Sequence[AnyInputs]) -> bool:
    """Whether a network in evaluation mode takes these inputs."""
    try:
        with evaluating(net):
            for batch in batches:
                call_net(net, batch)
    except Exception:
        return False
    return True


def _watched(net: nn.Module, x: AnyInputs) -> "_Watch":
    """Return what a run from a fixed random state draws."""
    watch = _Watch()
    with quietly(net), seeded(0, x.device), watch.on(net):
        call_net(net, x)
    return watch


def _check_generators(first: "_Watch", again: "_Watch") -> None:
    """Raise if noise comes from another generator than torch's, or changes the state of the module that draws it."""
    for label, operation in first.elsewhere:
        raise _refusal(label, f"from {operation}, the same for all data points of a batch")
    own = _differs(first, again)
    if own is not None:
        raise _refusal(own, "from a generator of its own")
    for draw in first.draws:
        if draw.path in first.moved:
            raise _refusal(draw.label, f"in {draw.operation}, and changes its buffers in training mode")


def _check_points(first: "_Watch", more: "_Watch", ratio: float) -> None:
    """Raise unless there is as much noise for each data point in a batch of another size, if there can be one."""
    if ratio == 1:
        return  # each draw is a pass of its own, as there is no other way to run the network
    both = list(zip(first.draws, more.draws, strict=False))
    for draw, other in both:
        if draw.operation.removeprefix("torch.") in _MIXING:
            raise _refusal(draw.label, f"in {draw.operation}, which may mix data points")
        if other.numbers != draw.numbers * ratio:
            raise _refusal(draw.label, f"in {draw.operation}, the same for all data points of a batch")
    if len(first.draws) != len(more.draws):
        raise _refusal(max(first.draws, more.draws, key=len)[len(both)].label, "depending on the batch")


class _Draw(NamedTuple):
    """A random operation: the module that called it, and how many numbers it gave."""

    path: str
    label: str
    operation: str
    numbers: int


class _Watch(TorchDispatchMode):
    """Notes the random operations of a forward pass and the output of every module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[_Draw] = []
        self.elsewhere: list[tuple[str, str]] = []
        self.outputs: list[tuple[str, Tensor]] = []
        self.moved: set[str] = set()
        self._inside: list[tuple[str, nn.Module, tuple[object, ...], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._inside:
            return func(*args, **kwargs)
        path, module, *_ = self._inside[-1]
        label, operation = f"{type(module).__name__} {path!r}", f"torch.{func.overloadpacket.__name__}"
        if kwargs.get("generator") is not None:
            self.elsewhere.append((label, "a generator of its own"))
        before = _torch_states()
        out = func(*args, **kwargs)
        numbers = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)).numel()
        # Some models draw a number for layers to leave out even if they never leave one out.
        idle = numbers == 1 and getattr(module, "layerdrop", None) == 0
        if before != _torch_states() and not idle:
            self.draws.append(_Draw(path, label, operation, numbers))
        return out

    @contextmanager
    def on(self, net: nn.Module) -> Iterator[None]:
        """Watch the modules of a network."""
        with ExitStack() as stack:
            for path, module in net.named_modules():
                enter, leave = functools.partial(self._enter, path), functools.partial(self._leave, path)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            stack.enter_context(self)
            yield

    def _enter(self, path: str, module: nn.Module, inputs: object) -> None:
        own = [buffer.clone() for buffer in module._buffers.values() if buffer is not None]
        self._inside.append((path, module, _other_states(), own))

    def _leave(self, path: str, module: nn.Module, inputs: object, output: object) -> None:
        *_, before, own = self._inside.pop()
        label = f"{type(module).__name__} {path!r}"
        if before != _other_states():
            self.elsewhere.append((label, "Python's or numpy's generator"))
        now = [buffer for buffer in module._buffers.values() if buffer is not None]
        if len(now) != len(own) or not all(map(torch.equal, now, own)):
            self.moved.add(path)
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        self.outputs += [(label, leaf) for leaf in leaves if leaf.is_floating_point()]


def _torch_states() -> list[bytes]:
    """Return the states of torch's generators, as values that can be compared."""
    shared, on_gpus = random_state()
    return [bytes(state.numpy()) for state in (shared["torch"], *on_gpus)]  # type: ignore[attr-defined]


def _other_states() -> tuple[object, ...]:
    """Return the states of Python's and numpy's generators, as values that can be compared."""
    numpys: Any = np.random.get_state()  # noqa: NPY002 - the generator that all share
    return random.getstate(), bytes(numpys[1]), *numpys[2:]


def _refusal(label: str, how: str) -> PyroDropoutError:
    return PyroDropoutError(
        f"{label} draws random numbers in training mode, {how}: from_dropout cannot keep such noise as it is, and"
        " predictions without it would lack its spread. To leave it out, put nn.Identity() in its place or set its"
        " probability to 0."
    )
