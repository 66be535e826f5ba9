"""What is installed here, and which parts of the library exist: ``python -m pyro_dropout``."""

import argparse
import pkgutil
import platform
from importlib.metadata import version
from pathlib import Path

import torch

FLOORS = ("mathematics", "generative", "guides", "inference", "answers", "faces")


def device() -> str:
    """Return the fastest device that torch can use here, in words."""
    if torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name()})"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def modules(floor: str) -> list[str]:
    """Return the names of a floor's modules; a floor that is not built yet has none."""
    folder = Path(__file__).parent / floor
    return sorted(found.name for found in pkgutil.iter_modules([str(folder)]) if not found.name.startswith("_"))


def report() -> str:
    """Return the whole account: versions first, then the floors, then where to go on."""
    versions = {
        "pyro_dropout": version("pyro-dropout"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyro": version("pyro-ppl"),
        "arviz": version("arviz"),
        "device": device(),
        "threads": str(torch.get_num_threads()),
    }
    floors = {floor: ", ".join(modules(floor)) or "not there yet" for floor in FLOORS}
    lines = [f"{name:<13} {what}" for name, what in (versions | floors).items()]
    lines.insert(len(versions), "")
    return "\n".join([*lines, "", "To compare posterior approximations: pyro-dropout compare --help"])


def main() -> None:
    """Print the report; ``--help`` is the only argument so far."""
    argparse.ArgumentParser(prog="python -m pyro_dropout", description=__doc__).parse_args()
    print(report())


if __name__ == "__main__":
    main()
