"""The table of scenarios, with every guide: printed by ``python -m tests.contracts.scenario_table``."""

import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pyro
from pyro.infer.autoguide import AutoNormal
from tqdm import tqdm

from pyro_dropout import PyroDropoutError
from tests.contracts.guides import GUIDES
from tests.contracts.scenarios import SCENARIOS

MAKERS: dict[str, Callable[..., Any]] = {"Pyro's AutoNormal": AutoNormal, **{n: c.make for n, c in GUIDES.items()}}


def refused(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is this package's own: a refusal by name."""
    while error is not None:
        if isinstance(error, PyroDropoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def outcome(scenario: str, guide: str) -> tuple[str, str]:
    """Run one scenario with one guide; return "passed", "refused" or "failed", and the message."""
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*finds no weight in this model.*")
            SCENARIOS[scenario].run(MAKERS[guide])
    except Exception as error:
        return ("refused" if refused(error) else "failed"), f"{type(error).__name__}: {error}"
    return "passed", ""


def main() -> int:
    """Print the table; the exit status is 1 where something failed."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    print(
        f"{len(SCENARIOS)} scenarios\n\n| guide | passed | refused by name | failed | seconds |\n|---|---|---|---|---|"
    )
    lost = []
    for guide in MAKERS:
        began = time.perf_counter()
        found = {name: outcome(name, guide) for name in tqdm(SCENARIOS, desc=guide, leave=False, file=sys.stderr)}
        counts = [sum(what == kind for what, _ in found.values()) for kind in ("passed", "refused", "failed")]
        print(f"| {guide} | {counts[0]} | {counts[1]} | {counts[2]} | {time.perf_counter() - began:.0f} |", flush=True)
        lost += [f"{guide}, {name}: {why}" for name, (what, why) in found.items() if what == "failed"]
    print("\n".join(lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
