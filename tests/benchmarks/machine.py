"""What the numbers were measured on, and with."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess

import torch

PACKAGES = {"torch": "torch", "pyro": "pyro-ppl", "jax": "jax", "numpyro": "numpyro"}


def cpu_model() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        shown = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except OSError:
        shown = ""
    found = re.search(r"^Model name:\s*(\S.*)$", shown, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def described(device: str, precisions: list[str]) -> dict[str, str]:
    """Return the head of a report."""
    return {
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "python": platform.python_version(),
        **{name: version(package) for name, package in PACKAGES.items()},
        "matrix products": " and ".join({"high": "TF32", "highest": "fp32"}[p] for p in precisions),
    }


def file_name(device: str) -> str:
    """Return a short name for this machine: ``cpu``, or the last word of its GPU's name."""
    if device == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return next((word for word in words if any(letter.isdigit() for letter in word)), "cuda")


def moment() -> str:
    """Return the date and how busy the machine is, to know what to think of a number."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = f", load average {os.getloadavg()[0]:.2f} before it began" if hasattr(os, "getloadavg") else ""
    return f"on {now}{load}"
