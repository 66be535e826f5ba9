"""The distribution inside wrappers such as ``Independent``."""

from torch.distributions import Independent

from pyro_dropout.protocols import Distribution


def base_distribution(p: Distribution, *wrappers: type) -> Distribution:
    """Return the distribution inside ``Independent``, and inside the other wrappers given.

    Which ones may be ignored depends on the use: a mask changes a density but not a mean, and an expansion changes the
    batch shape.
    """
    while any(isinstance(p, kind) for kind in (Independent, *wrappers)):
        p = p.base_dist
    return p
