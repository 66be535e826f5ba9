"""Measurements: ``python -m tests.benchmarks``. Some take data of the experiments in ``models``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "models"))
