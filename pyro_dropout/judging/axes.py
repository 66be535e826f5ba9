"""The axes of a plot: those that the caller gives, or new ones."""

from pyro_dropout.protocols import Axes


def axes_or_new(ax: Axes, width: float = 5, height: float = 3.6) -> Axes:
    """Return ``ax``; if it is None, the axes of a new figure of this size, in inches."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]
