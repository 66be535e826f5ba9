"""Exception types and warnings. Exceptions are ``ValueError`` too, so code that catches the usual one keeps working."""

import sys
import warnings
from types import FrameType


class PyroDropoutError(ValueError):
    """Base class of all errors that pyro_dropout raises.

    Example:
        >>> import pyro_dropout as pdrop
        >>> try:
        ...     pdrop.paper.weight_decay(keep=1.5, tau=1.0, num_data=10)
        ... except pdrop.errors.PyroDropoutError as mistake:
        ...     print(mistake)
        keep must lie in (0, 1]; got 1.5.
    """


class RangeError(PyroDropoutError):
    """A value is outside its allowed range.

    Example:
        >>> import pyro_dropout as pdrop
        >>> try:
        ...     pdrop.paper.weight_decay(keep=0.9, tau=-1.0, num_data=10)
        ... except pdrop.errors.RangeError as mistake:
        ...     print(mistake)
        tau must be positive and finite; got -1.0.
    """


class ShapeError(PyroDropoutError):
    """Tensors whose shapes do not fit together.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> try:
        ...     pdrop.paper.BernoulliMixture(torch.ones(3, 4), keep=0.9, row_dim=2)
        ... except pdrop.errors.ShapeError as mistake:
        ...     print(mistake)
        row_dim must index a dimension of the weights, -2 to 1 for shape (3, 4); got 2.
    """


class SingularError(PyroDropoutError):
    """A density was requested from a distribution that has none, such as dropout at ``scale=0``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> try:
        ...     pdrop.paper.BernoulliMixture(torch.ones(2, 3), keep=0.9).log_prob(torch.zeros(2, 3))
        ... except pdrop.errors.SingularError as mistake:
        ...     print("no density at scale=0" if "scale=0" in str(mistake) else mistake)
        no density at scale=0
    """


class EmptyModelError(PyroDropoutError, RuntimeError):
    """A model has no site to make a guide for; ``RuntimeError`` is what Pyro's guides raise.

    Example:
        >>> import pyro_dropout as pdrop
        >>> try:
        ...     pdrop.AutoMeanField(lambda: None)()
        ... except pdrop.errors.EmptyModelError as mistake:
        ...     print("no latent site" in str(mistake))
        True
    """


class NoWeightWarning(UserWarning):
    """A guide that drops weights finds none in its model.

    Example:
        >>> import pyro, warnings, pyro.distributions as dist, pyro_dropout as pdrop
        >>> guide = pdrop.AutoDropout(lambda: pyro.sample("z", dist.Normal(0.0, 1.0)))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", pdrop.errors.NoWeightWarning)
        ...     print(list(guide()))
        ['z']
    """


class NotAvailableError(PyroDropoutError, AttributeError):
    """A prediction, or its network, does not have what was asked for; ``hasattr`` of an attribute is then False.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1))
        >>> answer = pdrop.predict(model, pdrop.AutoDropout(model), torch.ones(2, 1), samples=5)
        >>> hasattr(answer, "mean"), hasattr(answer, "probs")
        (True, False)
    """


class NotFollowedError(PyroDropoutError):
    """The model does not support a separate weight draw for each data point, so all points must share each draw.

    Args:
        message: what was wrong, and what to do.
        site: the site that caused the error, if known.
        reason: the message without its advice, for the warning about falling back to shared draws.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> class Centred(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) - super().forward(x).mean(0)  # mixes the data points
        >>> model = pdrop.BayesianNet(Centred(1, 1))
        >>> try:
        ...     pdrop.ELBO().loss(model, pdrop.AutoDropout(model), torch.ones(4, 1), torch.ones(4, 1))
        ... except pdrop.errors.NotFollowedError as refused:
        ...     print(refused.site)
        weight
    """

    def __init__(self, message: str = "", site: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self._site, self._reason = site, reason

    def _original(self) -> "NotFollowedError":
        """Return the original error: Pyro raises it again with the shapes of the trace."""
        return self.__cause__._original() if isinstance(self.__cause__, NotFollowedError) else self

    @property
    def site(self) -> str | None:
        """The site that caused the error, if known."""
        return self._original()._site

    @property
    def reason(self) -> str:
        """The message without its advice, if given separately; otherwise the whole message."""
        first = self._original()
        return str(first).rstrip(".") if first._reason is None else first._reason


class IgnoredInputsWarning(UserWarning):
    """A trained posterior predicts the same at every input; the message says which layers, why, and what to do.

    ``fit``, ``Fleet.fit`` and ``predict`` issue it.

    Example:
        >>> import warnings, pyro_dropout as pdrop
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", pdrop.errors.IgnoredInputsWarning)  # stop where it happens
    """


class UnfinishedTrainingWarning(UserWarning):
    """A training by ``fit`` was over too soon: the loss was still falling, or members of an ensemble had not arrived.

    Or the learning rate had decayed before means of the posterior had arrived, so that the loss was flat.

    Example:
        >>> import warnings, pyro_dropout as pdrop
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", pdrop.errors.UnfinishedTrainingWarning)  # for trials
    """


class DivergedError(PyroDropoutError):
    """The training loss, a parameter, buffer or prediction is not finite; the message names the step, and what it is.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1))
        >>> x, y = torch.ones(1, 1), torch.tensor([[1e30]])  # its square is beyond float32
        >>> try:
        ...     pdrop.fit(model, pdrop.AutoDropout(model), x, y, steps=3, compile=False, progress=False)
        ... except pdrop.errors.DivergedError as stop:
        ...     print(str(stop).split(".")[0])
        the loss is inf at step 1
    """


class DamagedFileError(PyroDropoutError):
    """A file that is not whole, or not one of ours; nothing of it was used.

    Example:
        >>> import pathlib, tempfile, torch, pyro_dropout as pdrop
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "posterior.safetensors"
        >>> _, model = path.write_bytes(b"not a file of tensors"), pdrop.BayesianNet(torch.nn.Linear(1, 1))
        >>> try:
        ...     pdrop.load(path, model, pdrop.AutoDropout(model))
        ... except pdrop.errors.DamagedFileError as refused:
        ...     print(str(refused).split(": ")[0])
        posterior.safetensors cannot be used
    """


class DifferentModelError(PyroDropoutError):
    """A file belongs to another model or guide; the message lists the differences.

    Example:
        >>> import pathlib, tempfile, torch, pyro_dropout as pdrop
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "posterior.safetensors"
        >>> narrow, wide = (pdrop.BayesianNet(torch.nn.Linear(2, width)) for width in (1, 3))
        >>> pdrop.save(path, narrow, pdrop.AutoDropout(narrow))
        >>> try:
        ...     pdrop.load(path, wide, pdrop.AutoDropout(wide))
        ... except pdrop.errors.PyroDropoutError as refused:
        ...     print("guide.states.bias.loc: (1,) in the file, (3,) here" in str(refused))
        True
    """


class OutOfMemoryError(PyroDropoutError):
    """A training step needs more memory than the device has; the message says what needs less.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.training.history import explained
        >>> try:
        ...     with explained(512):
        ...         raise torch.OutOfMemoryError("CUDA out of memory")
        ... except pdrop.errors.PyroDropoutError as told:
        ...     print(str(told).split(". ")[0])
        memory runs out in a step of 512 points: CUDA out of memory
    """


_BETWEEN = {"pyro_dropout", "pyro", "torch", "sklearn", "joblib", "contextlib", "importlib"}


def warn_caller(message: str | Warning, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package, and those between, that has called into it, however deep this one is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, kind, frame.f_code.co_filename, frame.f_lineno, _module(frame), seen)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "<string>")
    return name


__all__ = sorted(name for name in globals() if name.endswith(("Error", "Warning")))
