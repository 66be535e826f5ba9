"""Output of commands: text or one JSON object on stdout, and one-line errors on stderr.

Names from a table are made harmless where they are shown: a terminal obeys escapes, and a spreadsheet runs formulas.
"""

import contextlib
import json
import math
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence

PROGRAM = "pyro-dropout"
_FORMULA = re.compile(r"'*[=+\-@＝＋－＠\t\r\n]")  # what a spreadsheet takes for the start of a formula
_NEXT_CELL = re.compile(r"([;\t\r\n] *)(?=[=+\-@＝＋－＠])")  # where some spreadsheets begin a new cell
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def complain(message: str) -> None:
    """Print an error on stderr, in one line."""
    print(f"{PROGRAM}: {for_terminal(' '.join(message.split()))}", file=sys.stderr)


class Terminated(SystemExit):
    """SIGTERM, where no training waits for its next checkpoint."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM raises ``Terminated``, unless the caller has a handler of their own."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: object) -> None:
    raise Terminated(128 + number)


def answer(record: Mapping[str, object], as_json: bool, lines: Sequence[str]) -> None:
    """Print the result of a command: one JSON object, or lines of text."""
    if as_json:
        from pyro_dropout.comparison.folder import plain  # loads torch, which help does without

        print(json.dumps(plain(record), allow_nan=False).replace("\x7f", r"\u007f"))  # the one that json leaves
    else:
        print("\n".join(map(for_terminal, lines)))


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each distinct warning once, as one line on stderr without its code location."""

    def show(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
        from pyro_dropout.training.history import ADVICE  # loads torch, which help does without

        text = str(message).replace(ADVICE, "Raise --steps or --lr.")
        if text not in seen:
            seen.add(text)
            complain(f"note: {text}")

    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


def figure(value: float) -> str:
    """Return a number with four digits, as people write it."""
    if not math.isfinite(value) or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.4g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def percent(share: float) -> str:
    """Return a share in percent; nothing but all is 100 %, and nothing but none is 0 %."""
    from pyro_dropout.prediction import plot_style  # loads torch, which help does without

    return plot_style.percent(share, 0)


def for_terminal(text: str) -> str:
    r"""Return a text in which characters that a terminal would obey, or not show, are written as escapes."""
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def for_spreadsheet(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula: one gets an apostrophe before it. Numbers stay numbers."""
    from pyro_dropout.tables.notation import is_number  # with pandas: a help text does not wait for it

    text = _CONTROL.sub(lambda found: _escape(found[0]), text)
    if is_number(text) and not text[0].isspace():
        return text
    text = _NEXT_CELL.sub(r"\1'", text)
    return f"'{text}" if _FORMULA.match(text) else text


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")
