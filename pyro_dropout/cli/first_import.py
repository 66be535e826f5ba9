"""Imports what ``fit`` and ``predict`` need, so that Python keeps its bytecode; ``make install`` ends with it.

``python -m pyro_dropout.cli.first_import``: the first command after it starts as soon as every later one.
"""

import contextlib
import tempfile
from pathlib import Path

_ROWS = "\n".join(f"{k * 7 % 23 + 0.5},{'ab'[k % 2]},{3 * (k * 7 % 23) + k % 2}" for k in range(40))


def first_import() -> list[str]:
    """Fit a tiny table, predict and draw; return the names of the files that came out.

    Example:
        >>> first_import()
        ['predictions.csv', 'predictions.png']
    """
    from pyro_dropout.cli.main import app

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        data, run, out = (Path(folder) / name for name in ("table.csv", "run", "predictions.csv"))
        data.write_text(f"size,kind,price\n{_ROWS}\n")
        figure = out.with_suffix(".png")
        for given in (
            ["fit", data, "--target", "price", "--out", run, "--steps", 200, "--quiet"],
            ["predict", run, data, "--out", out, "--plot", figure, "--quiet"],
        ):
            app(args=[str(each) for each in given], standalone_mode=False)
        return sorted(each.name for each in Path(folder).glob("predictions.*"))


if __name__ == "__main__":
    first_import()
