"""The library as a user gets it: ``python -m tests.wheel`` builds it, installs it and tests it, away from the checkout.

``make test-wheel ARGS="--python python3.13 --newest"`` does so with another Python and the newest of everything else.
The sdist is built first and the wheel from it, so both are whole. The wheel goes into an empty environment, with what
it needs and the test tools alone, and the README's examples and a part of the tests run from a folder without the
package's source.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "jaxtyping", "beartype", "mpmath")
COPIED = ("README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "docs", "tests")
ASKED = ("tests/compatibility", "tests/contracts", "tests/test_documents.py", "tests/test_public_names.py")
NEEDED = "(block_runs and README) or compatibility or test_likelihoods or (public_names and not help)"
LARGEST = 1_000_000  # bytes of the wheel
# Seconds of the processor, so that a machine with other work says the same: the import alone, and the whole command.
IMPORT, HELP = 0.3, 1.0
COMMAND = """
import os, subprocess, sys
subprocess.run([sys.executable, "-m", "pyro_dropout", "--help"], capture_output=True, check=True)
print(os.times().children_user + os.times().children_system)
"""
OWN = """
import time
start = time.process_time()
import pyro_dropout
print(time.process_time() - start)
"""


def run(*words: object, folder: Path, **more: str) -> str:
    """Run a command; return what it prints, and end with what it says if it fails."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=own | more, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    return done.stdout


def built(folder: Path) -> Path:
    """Build the sdist from the checkout and the wheel from the sdist; return the wheel."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder, folder=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, folder=source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def best(count: int, *words: object, folder: Path) -> float:
    """The shortest of several runs of a program that prints seconds."""
    return min(float(run(*words, folder=folder)) for _ in range(count))


def main() -> None:
    """Build, install, measure and test; the last line says how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the empty environment")
    parser.add_argument("--newest", action="store_true", help="not the versions of constraints.txt, but the newest")
    parser.add_argument("--torch", help="this version of torch, as in 2.10.0")
    parser.add_argument("--tests", default=NEEDED, help="which tests, as for pytest -k")
    parser.add_argument("--junitxml", type=Path, help="where pytest writes what it found, for the table of CI")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        run(args.python, "-m", "venv", "--without-pip", folder / "env", folder=folder)
        python = folder / "env" / "bin" / "python"
        pins = [] if args.newest else (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        pins = [line for line in pins if not (args.torch and line.startswith("torch=="))]
        (folder / "pins.txt").write_text("\n".join([*pins, f"torch=={args.torch}" if args.torch else ""]), "utf-8")
        # Not all bytecode, which takes a minute: the first command makes what the tests need.
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
        run(*pip, "-c", "pins.txt", wheel, *TOOLS, folder=folder)
        print(run(python, "-m", "pyro_dropout", "info", folder=folder).strip())
        away = folder / "away"
        away.mkdir()
        for each in COPIED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            copy(ROOT / each, away / each)
        where = run(python, "-c", "import pyro_dropout; print(pyro_dropout.__file__)", folder=away).strip()
        size, seconds = wheel.stat().st_size, best(5, python, "-c", OWN, folder=away)
        shown = best(5, python, "-c", COMMAND, folder=away)
        print(f"{wheel.name}: {size:,} bytes; import {seconds:.2f} s, --help {shown:.2f} s")
        wrong = [
            (not where.startswith(str(folder / "env")), f"the checkout was imported: {where}"),
            (size > LARGEST, f"the wheel has more than {LARGEST:,} bytes"),
            (seconds > IMPORT, f"the import takes longer than {IMPORT} s"),
            (shown > HELP, f"--help takes longer than {HELP} s"),
        ]
        asked = ["-q", "-n", "2", "-p", "no:cacheprovider", "-k", args.tests, *ASKED]
        if args.junitxml:
            asked.append(f"--junitxml={args.junitxml.absolute()}")
        print(run(python, "-m", "pytest", *asked, folder=away, OMP_NUM_THREADS="1").strip().splitlines()[-1])
        if said := [text for failed, text in wrong if failed]:
            sys.exit("; ".join(said))


if __name__ == "__main__":
    main()
