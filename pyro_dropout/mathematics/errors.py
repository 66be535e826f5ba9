"""Exception types and warnings. Exceptions are ``ValueError`` too, so code that catches the usual one keeps working."""


class PyroDropoutError(ValueError):
    """Base class of all errors that pyro_dropout raises.

    Example:
        >>> import pyro_dropout as pd
        >>> try:
        ...     pd.weight_decay(keep=1.5, tau=1.0, num_data=10)
        ... except pd.PyroDropoutError as mistake:
        ...     print(mistake)
        keep must lie in (0, 1]; got 1.5.
    """


class RangeError(PyroDropoutError):
    """A value is outside its allowed range.

    Example:
        >>> import pyro_dropout as pd
        >>> try:
        ...     pd.weight_decay(keep=0.9, tau=-1.0, num_data=10)
        ... except pd.RangeError as mistake:
        ...     print(mistake)
        tau must be positive and finite; got -1.0.
    """


class ShapeError(PyroDropoutError):
    """Tensors whose shapes do not fit together.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> try:
        ...     pd.BernoulliMixture(torch.ones(3, 4), keep=0.9, row_dim=2)
        ... except pd.ShapeError as mistake:
        ...     print(mistake)
        row_dim must index a dimension of the weights, -2 to 1 for shape (3, 4); got 2.
    """


class SingularError(PyroDropoutError):
    """A density was requested from a distribution that has none, such as dropout at ``scale=0``.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> try:
        ...     pd.BernoulliMixture(torch.ones(2, 3), keep=0.9).log_prob(torch.zeros(2, 3))
        ... except pd.SingularError as mistake:
        ...     print("no density at scale=0" if "scale=0" in str(mistake) else mistake)
        no density at scale=0
    """


class EmptyModelError(PyroDropoutError, RuntimeError):
    """A model has no site to make a guide for; ``RuntimeError`` is what Pyro's guides raise."""


class NoWeightWarning(UserWarning):
    """A guide that drops weights finds none in its model.

    Example:
        >>> import pyro, warnings, pyro.distributions as dist, pyro_dropout as pd
        >>> guide = pd.AutoDropout(lambda: pyro.sample("z", dist.Normal(0.0, 1.0)))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", pd.NoWeightWarning)
        ...     print(list(guide()))
        ['z']
    """


class NotFollowedError(PyroDropoutError):
    """The model does not support a separate weight draw for each data point, so all points must share each draw.

    Args:
        message: what was wrong, and what to do.
        site: the site that caused the error, if known.
        reason: the message without its advice, for the warning about falling back to shared draws.
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
        >>> import warnings, pyro_dropout as pd
        >>> warnings.filterwarnings("error", category=pd.IgnoredInputsWarning)  # stop where it happens
        >>> warnings.filters.pop(0)[0]
        'error'
    """


class UnfinishedTrainingWarning(UserWarning):
    """The loss was still falling when the steps of ``fit`` were over; the message says how many more it would take.

    Example:
        >>> import warnings
        >>> from pyro_dropout.mathematics.errors import UnfinishedTrainingWarning
        >>> warnings.filterwarnings("ignore", category=UnfinishedTrainingWarning)  # for trials
        >>> warnings.filters.pop(0)[0]
        'ignore'
    """
