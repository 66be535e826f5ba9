"""Stochastic variational inference, compiled: a drop-in for ``pyro.infer.SVI`` whose steps run as fused code.

The first step with inputs of a new shape is traced through Pyro and compiled, optimiser included. What cannot be traced
runs eagerly, with one warning that says why; nothing is approximated.
"""

import shutil
import warnings
from typing import Any, Literal

import pyro.infer
import pyro.optim
import torch
from torch import Tensor

from pyro_dropout.inference.compiled import Chain, Program
from pyro_dropout.inference.elbo import ELBO
from pyro_dropout.inference.functional import Buffers, Parameters, make_gradients, make_step, quietly
from pyro_dropout.inference.updates import Update, clock, from_pyro
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, describe

Compile = Literal["auto"] | bool


class SVI(pyro.infer.SVI):
    """Pyro's SVI with compiled steps: the same constructor, ``step`` and ``evaluate_loss``.

    Args:
        model: the Pyro model.
        guide: the Pyro guide.
        optim: a Pyro optimiser. Adam, AdamW and SGD run inside the compiled step, clipping included; any other runs
            beside it, on compiled gradients.
        loss: ``pyro_dropout.ELBO`` by default; Pyro's own losses look at values while they run, so they run eagerly.
        compile: "auto", compile and fall back to eager steps with a warning; True, compile or raise; False, eager.

    Example:
        >>> import pyro, torch, pyro_dropout as pd
        >>> _ = torch.manual_seed(0)
        >>> model = pd.BayesianNet(torch.nn.Linear(3, 1))
        >>> svi = pd.SVI(model, pd.AutoMeanField(model), pyro.optim.Adam({"lr": 0.1}), compile=False)
        >>> x = torch.randn(20, 3)
        >>> losses = [svi.step(x, x.sum(1, keepdim=True)) for _ in range(100)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self, model: Any, guide: Any, optim: Any, loss: Any = None, compile: Compile = "auto", **kwargs: Any
    ) -> None:
        check_compile(compile)
        if not isinstance(optim, pyro.optim.PyroOptim):
            raise PyroDropoutError(
                f"optim must be a Pyro optimiser, such as pyro.optim.Adam({{'lr': 1e-3}}); got {type(optim).__name__}."
            )
        if loss is not None and not callable(loss) and not isinstance(loss, pyro.infer.ELBO):
            raise PyroDropoutError(f"loss must be pyro_dropout.ELBO() or a loss of Pyro's; got {describe(loss)}.")
        loss = ELBO() if loss is None else loss
        super().__init__(model, guide, optim, loss, **kwargs)  # type: ignore[no-untyped-call]
        self._elbo, self._compile = loss, compile
        self._update: Update | None = from_pyro(optim)
        self._programs: dict[Any, _Compiled] = {}
        self._slots: dict[str, list[Tensor]] = {}
        self._taken = 0

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take one gradient step and return the loss before it."""
        if self._compile is False:
            return self._eager_step(args, kwargs)
        key = _signature(self.model, self.guide, args, kwargs)
        if key not in self._programs:
            try:
                self._programs[key] = _Compiled(self, args, kwargs)
            except Exception as cause:
                if self._compile is True:
                    raise
                if self._taken and self._update is not None:
                    # The optimiser's moments live in compiled steps of other shapes, and cannot move house.
                    warn_uncompiled(cause, "this step")
                    return self._functional_step(args, kwargs)
                self._compile = False
                warn_uncompiled(cause)
                return self._eager_step(args, kwargs)
        return float(self._programs[key].step(args, kwargs))

    def _eager_step(self, args: Any, kwargs: Any) -> float:
        return float(super().step(*args, **kwargs))  # type: ignore[no-untyped-call]

    def _functional_step(self, args: Any, kwargs: Any) -> float:
        """Take one step eagerly, with the optimiser that the compiled steps use."""
        assert self._update is not None
        parameters = Parameters(self.model, self.guide, self._elbo, args, kwargs)
        step = make_step(self.model, self.guide, self._elbo, parameters, self._update, lambda: (args, kwargs))
        self._taken += 1
        t, lr = clock(self._update, parameters.values, self._taken)
        with torch.no_grad():
            buffers = Buffers(self.model, self.guide).values
            values, state, loss = step(parameters.values, self._state(parameters), t, lr, buffers)
        parameters.write(values)
        self._slots.update(zip(parameters.names, state, strict=True))
        return float(loss)

    def _state(self, parameters: Parameters) -> list[list[Tensor]]:
        """Return the optimiser's state for these parameters; steps of another shape may have left one."""
        assert self._update is not None
        fresh = self._update.start(parameters.values)
        return [self._slots.get(name, new) for name, new in zip(parameters.names, fresh, strict=True)]


class _Compiled:
    """The compiled step of one SVI for inputs of one shape."""

    def __init__(self, svi: SVI, args: Any, kwargs: Any) -> None:
        self.svi = svi
        self.parameters = Parameters(svi.model, svi.guide, svi._elbo, args, kwargs)
        self.buffers = Buffers(svi.model, svi.guide)
        self.where = [k for k, a in enumerate(args) if isinstance(a, Tensor)]
        self.names = [k for k, a in kwargs.items() if isinstance(a, Tensor)]
        inputs, values = self._tensors(args, kwargs), self.parameters.values

        def call(*tensors: Tensor) -> tuple[Any, Any]:
            given = list(args)
            for place, tensor in zip(self.where, tensors, strict=False):
                given[place] = tensor
            named = dict(zip(self.names, tensors[len(self.where) :], strict=True))
            return tuple(given), {**kwargs, **named}

        with quietly(svi.model, svi.guide):
            parts, buffers = (svi.model, svi.guide, svi._elbo, self.parameters), self.buffers.values
            if svi._update is None:
                self.program = Program(make_gradients(*parts, call), values, buffers, *inputs)
                return
            step = make_step(*parts, svi._update, call)
            self.t, self.lr = clock(svi._update, values, svi._taken)
            state = svi._state(self.parameters)
            self.program = Program(step, values, state, self.t, self.lr, buffers, *inputs)
            self.chain: Chain | None = None
            if self.t.is_cuda:
                self.static = [x.clone() for x in inputs]
                self.chain = Chain(self.program, values, state, self.t, self.lr, [(buffers, *self.static)])

    def _tensors(self, args: Any, kwargs: Any) -> list[Tensor]:
        return [args[k] for k in self.where] + [kwargs[k] for k in self.names]

    def step(self, args: Any, kwargs: Any) -> Tensor:
        inputs, svi = self._tensors(args, kwargs), self.svi
        svi._taken += 1
        if svi._update is None:
            return self._with_other_optimiser(inputs)
        self.t.fill_(svi._taken)
        if self.chain is not None:
            return self._replay(self.chain, inputs)
        state = svi._state(self.parameters)
        buffers = self.buffers.values
        values, state, loss = self.program(self.parameters.values, state, self.t, self.lr, buffers, *inputs)
        self.parameters.write(values)
        svi._slots.update(zip(self.parameters.names, state, strict=True))
        return torch.as_tensor(loss)

    def _with_other_optimiser(self, inputs: list[Tensor]) -> Tensor:
        loss, gradients = self.program(self.parameters.values, self.buffers.values, *inputs)
        for parameter, gradient in zip(self.parameters.by_name.values(), gradients, strict=True):
            parameter.grad = gradient
        self.svi.optim(list(self.parameters.by_name.values()))
        for parameter in self.parameters.by_name.values():
            parameter.grad = None
        return torch.as_tensor(loss)

    def _replay(self, chain: Chain, inputs: list[Tensor]) -> Tensor:
        for target, source in zip(self.static, inputs, strict=True):
            target.copy_(source)
        for mine, theirs in zip(chain.values, self.parameters.values, strict=True):
            if mine.data_ptr() != theirs.data_ptr():  # a step of another shape, or the user, has moved the parameters
                mine.copy_(theirs)
        for slots, name in zip(chain.state, self.parameters.names, strict=True):
            for own, other in zip(slots, self.svi._slots.get(name, slots), strict=True):
                if own is not other:
                    own.copy_(other)
        chain.t.copy_(self.t)
        chain.replay()
        self.parameters.write(chain.values)
        self.svi._slots.update(zip(self.parameters.names, chain.state, strict=True))
        return chain.losses[0]


def check_compile(compile: Any) -> None:
    """Raise an error unless ``compile`` is "auto", True or False."""
    if compile not in ("auto", True, False):
        raise RangeError(f"compile must be 'auto', True or False; got {compile!r}.")


def _signature(model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
    """Return what a compiled step depends on: shapes and types of tensors, values of the rest, and the modes."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.stride(), value.dtype, value.device)
        return value if isinstance(value, int | float | str | bool | type(None)) else id(value)

    named = tuple((k, of(v)) for k, v in sorted(kwargs.items()))
    # A CUDA graph reads buffers where they lay when it was captured; one that was put elsewhere since is another graph.
    moved = tuple(buffer.data_ptr() for buffer in Buffers(model, guide).values if buffer.is_cuda)
    training = tuple(getattr(each, "training", None) for each in (model, guide))
    return (tuple(map(of, args)), named, training, moved, torch.get_float32_matmul_precision())


def warn_uncompiled(cause: Exception, what: str = "this model or guide") -> None:
    """Say once that steps run eagerly, why, and what can be done."""
    first = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        cure = "There is no C++ compiler on this machine: install one (g++, or clang++)."
    else:
        cure = (
            "Usual causes: control flow that depends on values (.item(), if tensor > 0), or a loss of Pyro's own"
            " instead of pyro_dropout.ELBO."
        )
    warnings.warn(
        f"{what} cannot be compiled, and runs eagerly from here on: {type(cause).__name__}: {first[:300]}. {cure}"
        " compile=False silences this; compile=True raises the error.",
        stacklevel=3,
    )
