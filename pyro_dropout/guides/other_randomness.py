"""Finds what draws random numbers in a network, besides the dropout that a guide has taken over, by running it.

Noise can be kept (``generative/own_noise.py``) if every data point has its own, from torch's generator, and if the
network computes the same when only the modules that draw it are in training mode. All other noise is refused by name.
"""

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyro_dropout.engines.torch_internals import TorchDispatchMode, tree_leaves
from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.inputs import AnyInputs, call_net, copies
from pyro_dropout.generative.own_noise import kept_random, silent
from pyro_dropout.generative.process_state import random_state, seeded
from pyro_dropout.generative.trial_run import evaluating, in_mode, quietly

_ROWS = (2, 3)  # of the data: noise of each point grows with their number
_MIXING = {"randperm", "randint", "random_", "multinomial"}  # they choose, perhaps among data points
_SHARED = "the same for all data points of a batch"


def with_dropout(net: nn.Module) -> list[str]:
    """Return the modules of torch's that have dropout in their own forward pass."""
    kinds = {nn.modules.dropout._DropoutNd: "p", nn.RNNBase: "dropout", nn.MultiheadAttention: "dropout"}
    return [
        path
        for path, module in net.named_modules()
        if any(isinstance(module, kind) and getattr(module, p) > 0 for kind, p in kinds.items())
    ]


@contextmanager
def training(net: nn.Module) -> Iterator[None]:
    """Within this context a network is in training mode, except for layers with running statistics."""
    normed = {module for module in net.modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    with in_mode(normed, False), in_mode(set(net.modules()) - normed, True):
        yield


def find_noise(net: nn.Module, x: AnyInputs, whole: bool = False) -> list[str] | None:
    """Return the modules of a network that draw noise in training mode; raise if it cannot be kept as it is.

    ``whole`` says that the network takes all its points at once; then each draw is a pass, and may be of the batch.
    None means that the network does not run with x. One that runs in evaluation mode only gives a warning, and those of
    torch's modules that have dropout.
    """
    batches = runnable(net, x, whole)
    if batches is None:
        return None
    with quietly(net), torch.no_grad():
        try:
            with training(net):
                first, again, more = (_watched(net, batch) for batch in (batches[0], batches[0], batches[1]))
        except Exception as cause:
            warn_caller(
                f"{type(net).__name__} does not run in training mode ({type(cause).__name__}: {cause}), so random"
                " numbers that it draws there, other than in torch's dropout layers, were not looked for. The pair is"
                " right if there are none.",
            )
            return with_dropout(net)
        for label, operation in first.elsewhere:
            raise _refusal(label, f"from {operation}, {_SHARED}")
        if not alike(first.output, again.output):
            raise _refusal(f"a module of {type(net).__name__}", "from a generator of its own")
        if len(batches[0]) != len(batches[1]):  # otherwise each draw is a pass of its own: there is no other way
            _check_points(first.draws, more.draws, len(batches[1]) / len(batches[0]))
        found = list(dict.fromkeys(draw.path for draw in first.draws))
        with evaluating(net), silent(False), kept_random(map(net.get_submodule, found)):
            kept = _watched(net, batches[0])
    for draw in first.draws:
        if draw.path in kept.moved:
            raise _refusal(draw.label, f"in {draw.operation}, and changes its buffers in training mode")
    for draw in Counter(first.draws) - Counter(kept.draws):
        raise _refusal(draw.label, f"in {draw.operation}, but not when it alone is in training mode")
    if not alike(first.output, kept.output):
        raise PyroDropoutError(
            f"{type(net).__name__} computes something else in training mode than in evaluation mode, for the same"
            " random numbers: a module branches on self.training, has statistics of its own, or drops everything there."
            " from_dropout cannot tell which of the two you mean. Let it compute the same in both modes, apart from"
            " dropout (for classes: logits in both)."
        )
    return found


def runnable(net: nn.Module, x: AnyInputs, whole: bool = False) -> list[AnyInputs] | None:
    """Return two small batches of x that the network takes, of two sizes if it can; None if it does not run with x."""
    # A number of data points may be built in; the network then runs with as many, or with a multiple.
    sizes = ((len(x), len(x)),) if whole else (_ROWS, (len(x), 2 * len(x)), (len(x), len(x)))
    choices = ([x[torch.arange(count, device=x.device) % len(x)] for count in each] for each in sizes)
    with quietly(net), evaluating(net):
        return next((each for each in choices if _runs(net, each)), None)


def _runs(net: nn.Module, batches: Sequence[AnyInputs]) -> bool:
    """Whether a network takes these inputs."""
    try:
        for batch in batches:
            call_net(net, copies(batch, 1))
    except PyroDropoutError:
        raise  # of ours, at a layer whose rows are dropped
    except Exception:
        return False
    return True


def alike(one: object, other: object) -> bool:
    """Whether all numbers of the second result are in the first, which may hold more, up to rounding."""
    many, few = ([leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in (one, other))

    def same(a: Tensor, b: Tensor) -> bool:
        a, b = a.double(), b.double()
        # By the size of the tensor: a power iteration (spectral_norm) moves numbers that nearly cancel a little.
        least = 1e-5 + 1e-3 * float(b.abs().nan_to_num(0.0, 0.0).amax()) if b.numel() else 0.0
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=least, equal_nan=True)

    return all(any(same(a, b) for a in many) for b in few)


def _check_points(draws: "list[_Draw]", more: "list[_Draw]", ratio: float) -> None:
    """Raise unless there is as much noise for each data point in a batch that is ``ratio`` times as large."""
    for draw, other in zip(draws, more, strict=False):
        if draw.operation.removeprefix("torch.") in _MIXING:
            raise _refusal(draw.label, f"in {draw.operation}, which may mix data points")
        if other.numbers != draw.numbers * ratio:
            raise _refusal(draw.label, f"in {draw.operation}, {_SHARED}")
    if len(draws) != len(more):
        raise _refusal(max(draws, more, key=len)[min(len(draws), len(more))].label, "depending on the batch")


class _Draw(NamedTuple):
    """A random operation: the module that called it, and how many numbers it gave."""

    path: str
    label: str
    operation: str
    numbers: int


class _Watch(TorchDispatchMode):
    """Notes the random operations of a forward pass, its output, and whose buffers changed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[_Draw] = []
        self.elsewhere: list[tuple[str, str]] = []
        self.moved: set[str] = set()
        self.output: object = None
        self._inside: list[tuple[str, nn.Module, object]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._inside:
            return func(*args, **kwargs)
        path, module, _ = self._inside[-1]
        label, operation = f"{type(module).__name__} {path!r}", f"torch.{func.overloadpacket.__name__}"
        if kwargs.get("generator") is not None:
            self.elsewhere.append((label, "a generator of its own"))
        before = _states()[0]
        out = func(*args, **kwargs)
        numbers = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)).numel()
        # Some models draw a number for layers to leave out even if they never leave one out.
        idle = numbers == 1 and getattr(module, "layerdrop", None) == 0
        if before != _states()[0] and not idle:
            self.draws.append(_Draw(path, label, operation, numbers))
        return out

    def enter(self, path: str, module: nn.Module, inputs: object) -> None:
        """Note that a module begins."""
        self._inside.append((path, module, _states()[1]))

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        """Note that it ends, and whether it has drawn numbers that are not torch's."""
        path, _, before = self._inside.pop()
        if before != _states()[1]:
            self.elsewhere.append((f"{type(module).__name__} {path!r}", "Python's or numpy's generator"))


def _watched(net: nn.Module, x: AnyInputs) -> _Watch:
    """Return what a run from a fixed random state draws."""
    watch = _Watch()
    with quietly(net), seeded(0, x.device):
        buffers = {path: [buffer.clone() for buffer in part.buffers(False)] for path, part in net.named_modules()}
        with ExitStack() as stack:
            for path, module in net.named_modules():
                stack.callback(module.register_forward_pre_hook(functools.partial(watch.enter, path)).remove)
                stack.callback(module.register_forward_hook(watch.leave).remove)
            stack.enter_context(watch)
            watch.output = call_net(net, copies(x, 1))  # a network may write to its inputs
        now = {path: list(net.get_submodule(path).buffers(False)) for path in buffers}
        watch.moved = {path for path, own in buffers.items() if not all(map(torch.equal, own, now[path]))}
    return watch


def _states() -> tuple[object, object]:
    """Return the states of torch's generators, and of Python's and numpy's, as values that can be compared."""
    shared, on_gpus = random_state()
    numpys: Any = np.random.get_state()  # noqa: NPY002 - the generator that all share
    torchs = [bytes(state.numpy()) for state in (shared["torch"], *on_gpus)]  # type: ignore[attr-defined]
    return torchs, (random.getstate(), bytes(numpys[1]), *numpys[2:])


def _refusal(label: str, how: str) -> PyroDropoutError:
    return PyroDropoutError(
        f"{label} draws random numbers in training mode, {how}: from_dropout cannot keep such noise as it is, and"
        " predictions without it would lack its spread. To leave it out, put nn.Identity() in its place or set its"
        " probability to 0."
    )
