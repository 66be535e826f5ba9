"""Draws every figure of the documentation anew: ``python docs/make_figures.py``."""

from pathlib import Path

import pyro_dropout as pd

FIGURES = Path(__file__).parent / "figures"


def main() -> None:
    """Write the figures beside this file and say where they are."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / "kl_gap.png"
    pd.plot_kl_gap().savefig(path, dpi=130)
    print(f"wrote {path.relative_to(FIGURES.parent.parent)}")


if __name__ == "__main__":
    main()
