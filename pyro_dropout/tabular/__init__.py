"""From a table to predictions that can be used: the choice of a model, its training and its answers."""

from lazy_loader import attach_stub as _attach_stub

__getattr__, __dir__, __all__ = _attach_stub(__name__, __file__)
