"""What all figures share: colours, and text that is drawn as it is."""

import contextlib
from collections.abc import Iterator

# Okabe and Ito's blue, orange, green, vermilion, pink, light blue and a grey: safe for colour-blind readers.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999")


@contextlib.contextmanager
def literal_text() -> Iterator[None]:
    """Within this context, or in a function that it decorates, text is drawn literally: a $ is a $."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield
