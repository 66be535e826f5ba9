"""Imports what ``fit`` and ``predict`` need, so that Python keeps its bytecode; ``make install`` ends with it.

``python -m pyro_dropout.cli.first_import``: the first command after it starts as soon as every later one.
"""

import contextlib
import tempfile
from pathlib import Path

from pyro_dropout.cli.main import main


def first_import() -> None:
    """Fit a tiny table, predict and draw."""
    rows = "\n".join(f"{k * 7 % 23 + 0.5},{'ab'[k % 2]},{3 * (k * 7 % 23) + k % 2}" for k in range(40))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        data, run = f"{folder}/table.csv", f"{folder}/run"
        Path(data).write_text(f"size,kind,price\n{rows}\n")
        main(["fit", data, "--target", "price", "--out", run, "--steps", "200", "--quiet"])
        main(["predict", run, data, "--out", f"{folder}/p.csv", "--plot", f"{folder}/p.png", "--quiet"])


if __name__ == "__main__":
    first_import()
