"""Shape annotations: jaxtyping's where it is installed, and plain types where it is not.

jaxtyping is a development dependency: the tests install its import hook and check every annotated shape, and a user
who does not have it loses nothing but the check.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            """Stands in for a jaxtyping dtype: ``Float[Tensor, "n d"]`` is then just ``Tensor``."""

            def __class_getitem__(cls, item: tuple[type, str]) -> type:
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int"]
