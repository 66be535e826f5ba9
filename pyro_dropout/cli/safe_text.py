"""Names from a table, made harmless where they are shown: a terminal obeys escapes, and a spreadsheet runs formulas."""

import re

_FORMULA = re.compile(r"'*[=+\-@＝＋－＠\t\r\n]")  # what a spreadsheet takes for the start of a formula
_NEXT_CELL = re.compile(r"([;\t\r\n] *)(?=[=+\-@＝＋－＠])")  # where some spreadsheets begin a new cell
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def for_terminal(text: str) -> str:
    r"""Return a text in which characters that a terminal would obey, or not show, are written as escapes.

    Example:
        >>> print(for_terminal("oak\x1b[2J"))
        oak\x1b[2J
    """
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def for_json(text: str) -> str:
    """Return a JSON text without the control characters that JSON allows in strings; its meaning stays the same."""
    return re.sub(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]", lambda found: f"\\u{ord(found[0]):04x}", text)


def for_spreadsheet(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula: one gets an apostrophe before it. Numbers stay numbers.

    Example:
        >>> [for_spreadsheet(text) for text in ("=1+1", "-3", "-1,5 %", "@oak", "oak", "a;=b")]
        ["'=1+1", '-3', '-1,5 %', "'@oak", 'oak', "a;'=b"]
    """
    from pyro_dropout.tables.notation import is_number  # with pandas: a help text does not wait for it

    text = _CONTROL.sub(lambda found: _escape(found[0]), text)
    if is_number(text) and not text[0].isspace():
        return text
    text = _NEXT_CELL.sub(r"\1'", text)
    return f"'{text}" if _FORMULA.match(text) else text


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")
