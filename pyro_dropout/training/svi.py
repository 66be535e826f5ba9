"""Compiled stochastic variational inference: a drop-in for ``pyro.infer.SVI`` whose steps run as fused code.

The first step with arguments of a new structure is traced through Pyro and compiled, optimiser included. What cannot be
traced runs eagerly, with one warning that says why; nothing is approximated.
"""

import os
import shutil
import traceback
from collections.abc import Hashable
from pathlib import Path

import pyro
import pyro.infer
import pyro.optim
import torch

from pyro_dropout.engines.choose import Compile
from pyro_dropout.engines.tracing import reads_values
from pyro_dropout.errors import DivergedError, PyroDropoutError, ShapeError, warn_caller
from pyro_dropout.generative.misfits import check_call_finite
from pyro_dropout.generative.model_call import ModelCall, check_programs
from pyro_dropout.generative.observed_sites import check_first_step
from pyro_dropout.generative.precision import Precision, check_precision, products_in
from pyro_dropout.generative.process_state import one_at_a_time
from pyro_dropout.mathematics.checks import check_choice, describe
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.compile.compiled_step import Arguments, CompiledStep
from pyro_dropout.training.history import all_finite, is_divergence
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.preflight import check_gradients, warn_of_decay

_MOST = 16  # the most programs of one SVI; a model that needs more is not worth compiling


class SVI(pyro.infer.SVI):
    """Pyro's SVI with compiled steps: the same constructor, ``step`` and ``evaluate_loss``.

    Arguments of ``step`` are trees: dicts, lists and tuples of tensors and numbers. Tensors and floats may change from
    step to step; a new structure, shape or whole number is compiled again, and what holds other objects runs eagerly.
    The optimiser's state stays where Pyro keeps it, so compiled and eager steps can follow each other.

    Args:
        model: the Pyro model.
        guide: the Pyro guide.
        optim: a Pyro optimiser. Adam, AdamW and SGD run inside the compiled step, clipping included; any other runs
            outside it, on compiled gradients.
        loss: ``pyro_dropout.ELBO`` by default, with a draw for each data point where the model allows it, and shared
            draws where it does not. Pyro's own losses read values while they run, so they run eagerly.
        compile: "auto", compile and fall back to eager steps with a warning; True, compile or raise; False, eager.
        precision: "bf16" for products of a ``BayesianNet`` in bfloat16, as in ``fit``.

    Example:
        >>> import pyro, torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(3, 1))
        >>> svi = pdrop.SVI(model, pdrop.AutoMeanField(model), pyro.optim.Adam({"lr": 0.1}), compile=False)
        >>> x = torch.randn(20, 3)
        >>> losses = [svi.step(x, x.sum(1, keepdim=True)) for _ in range(100)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: PyroModel,
        guide: PyroModel,
        optim: object,
        loss: object = None,
        compile: Compile = "auto",
        precision: Precision = "float32",
        **kwargs: object,
    ) -> None:
        check_compile(compile)
        check_programs(model, guide)
        check_precision(precision, model)
        if not isinstance(optim, pyro.optim.PyroOptim):
            raise PyroDropoutError(
                f"optim must be a Pyro optimiser, such as pyro.optim.Adam({{'lr': 1e-3}}); got {type(optim).__name__}."
            )
        if loss is not None and not callable(loss) and not isinstance(loss, pyro.infer.ELBO):
            raise PyroDropoutError(f"loss must be pyro_dropout.ELBO() or a loss of Pyro's; got {describe(loss)}.")
        loss = ELBO(per_example="auto") if loss is None else loss
        super().__init__(model, guide, optim, loss, **kwargs)  # type: ignore[no-untyped-call]
        self._elbo, self._compile, self._precision = loss, compile, precision
        self._programs: dict[Hashable, list[CompiledStep]] = {}
        self._built, self._looked = 0, False
        self._told: set[str] = set()

    @one_at_a_time
    def step(self, *args: object, **kwargs: object) -> float:
        """Take one gradient step and return the loss before it."""
        check_gradients()
        try:
            with products_in(self._precision):
                if not self._looked:
                    check_call_finite(ModelCall(self.model, args, kwargs))
                    check_first_step(ModelCall(self.model, args, kwargs))
                found = self._step(args, kwargs)
        except (RuntimeError, ValueError) as cause:
            check_call_finite(ModelCall(self.model, args, kwargs))
            if not self._looked or not is_divergence(cause, self.optim.optim_objs):
                raise
            lost = sum(not all_finite([value]) for value in self.optim.optim_objs)
            raise DivergedError(
                f"this step cannot be computed ({_first_line(cause).rstrip('.')}); {lost} of"
                f" {len(self.optim.optim_objs)} parameters are not finite. Lower the learning rate, clip gradients"
                " (pyro.optim.ClippedAdam), or look for data that are not finite."
            ) from cause
        if not self._looked:  # Pyro makes its optimisers in the first step
            self._looked = True
            warn_of_decay(self.optim, self._elbo)
        return found

    def _step(self, args: tuple[object, ...], kwargs: dict[str, object]) -> float:
        if self._compile is False:
            return self._eagerly(*args, **kwargs)
        given = Arguments(args, kwargs)
        try:
            program = self._program(given)
        except _Eagerly as reason:
            if self._compile is True:
                raise (reason.__cause__ or PyroDropoutError(f"this step cannot be compiled: {reason}.")) from None
            self._compile = False if reason.for_good else self._compile
            if str(reason) not in self._told:
                self._told.add(str(reason))
                what = "this model or guide" if reason.for_good else "this step"
                warn_uncompiled(reason.__cause__ or reason, what=what)
            return self._eagerly(*args, **kwargs)
        found = float(program.step(given))
        program.loss.steps += 1
        return found

    def _eagerly(self, *args: object, **kwargs: object) -> float:
        with torch.enable_grad():  # as a compiled step does: in no_grad(), Pyro's would change nothing
            return float(super().step(*args, **kwargs))  # type: ignore[no-untyped-call]

    @one_at_a_time
    def evaluate_loss(self, *args: object, **kwargs: object) -> float:
        """Return the loss, without gradients."""
        with products_in(self._precision):
            return super().evaluate_loss(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]

    def _program(self, given: Arguments) -> CompiledStep:
        """Return the compiled step for these arguments; raise the reason if there is none."""
        elbo = self._elbo
        if not isinstance(elbo, ELBO):
            reads = "which reads values while it runs; pyro_dropout.ELBO can be compiled"
            raise _Eagerly(f"the loss is {type(elbo).__name__}, {reads}", for_good=True)
        if given.unknown:
            raise _Eagerly(given.unknown)
        # What a compiled step depends on besides its arguments and what the model reads.
        setting = (torch.get_float32_matmul_precision(), torch.get_default_dtype())
        known = self._programs.setdefault((given.key, setting), [])
        for program in known:
            if program.valid():
                return program
        if self._built >= _MOST:
            changed = next((program.changed for program in known if program.changed), "")
            what = f"{changed!r} keeps changing" if changed else "its arguments keep changing their structure or shapes"
            raise _Eagerly(f"{_MOST} programs were compiled for it already, and {what}")
        self._built += 1
        parts = (self.model, self.guide, elbo, self.optim, given, known)
        try:
            program = CompiledStep(*parts)
        except ShapeError:  # a mistake in the data, which an eager step would meet as well
            raise
        except Exception as cause:
            # A model that could never be traced will not be traceable for the next batch either.
            never = not any(self._programs.values())
            raise _Eagerly(f"{type(cause).__name__}: {_first_line(cause)}", for_good=never) from cause
        if program.replaces is not None:
            known.remove(program.replaces)
        self._built -= not program.counts
        known.append(program)
        return program


class _Eagerly(Exception):
    """Why a step is not compiled: permanently, or for these arguments only."""

    def __init__(self, reason: str, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


def check_compile(compile: object) -> None:
    """Raise an error unless ``compile`` is "auto", True or False."""
    check_choice("compile", compile, ("auto", True, False))


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def _place(cause: BaseException | None) -> str:
    """Name the line of the user's or another library's code that an error came from; "" if there is none."""
    folders = (Path(torch.__path__[0]), Path(pyro.__path__[0]), Path(__file__).parents[1])
    ours, found = ("<", *(f"{folder}{os.sep}" for folder in folders)), ""
    while cause is not None:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith(ours)]
        if frames:
            found = f" (in {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})"
        cause = cause.__cause__
    return found


def warn_uncompiled(cause: BaseException, engine: str = "eager", what: str = "this model or guide") -> None:
    """Warn once that steps run eagerly, or are replayed, with the reason and what can be done."""
    reason, cure = _first_line(cause), ""
    if reads_values(cause):
        reason = f"it reads the value of a tensor{_place(cause)}"
        cure = " A recorded step cannot contain control flow that depends on values (.item(), if tensor > 0): use"
        cure += " torch.where, if the code is yours."
    elif not isinstance(cause, _Eagerly):
        reason = f"{type(cause).__name__}: {reason[:300].rstrip('.')}{_place(cause)}"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        cure = " There is no C++ compiler on this machine: install one (g++, or clang++)."
    how = "runs eagerly" if engine == "eager" else "replays its recorded operations"
    warn_caller(
        f"{what} cannot be compiled, and {how} from here on: {reason}.{cure} compile=False silences this;"
        " compile=True raises the error.",
    )
