"""Problems whose posterior is known, and how near a posterior approximation comes to it."""

from lazy_loader import attach_stub as _attach_stub

__getattr__, __dir__, __all__ = _attach_stub(__name__, __file__)
