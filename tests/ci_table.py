"""The table at the end of CI: ``python -m tests.ci_table FOLDER``.

The folder holds what pytest wrote: a ``NAME.xml`` for each run (``--junitxml``), and ``lines/`` of ``tests.covered``.
Speed is that of training steps over plain torch's in the same process, here and in the commit before, by turns.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyro_dropout as pd
from pyro_dropout.registry import FLOORS
from tests import covered, interface, wheel

ROOT = Path(__file__).parents[1]
LEAST_COVERED = 0.92
SPEED = """
import statistics, time, warnings, torch, pyro_dropout as pd
from torch import nn
warnings.simplefilter("ignore")
torch.set_num_threads(1)
x, y = torch.randn(128, 13), torch.randn(128, 1)
net = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Dropout(0.05), nn.Linear(50, 1))
optim = torch.optim.Adam(net.parameters())
def plain():
    optim.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optim.step()
def timed(run, steps):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / steps
def fitted(guide, how, steps):
    model = pd.BayesianNet(nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1)))
    history = pd.fit(model, guide(model), x, y, steps=steps, compile=how, progress=False)
    return history.seconds / history.steps
for name, guide in (("dropout", pd.AutoDropout), ("mean field", pd.AutoMeanField)):
    for how, steps in ((False, 20), (True, 1000)):
        found = [fitted(guide, how, steps) / timed(lambda: [plain() for _ in range(300)], 300) for _ in range(3)]
        print(f"{name}, {'compiled' if how else 'eager'}: {statistics.median(found)}")
"""


def tests(folder: Path) -> Iterator[tuple[str, str]]:
    """Passed, failed and skipped of each run, and why."""
    for path in sorted(folder.glob("*.xml")):
        cases = list(xml.parse(path).getroot().iter("testcase"))
        skipped = Counter(each.get("message", "") for case in cases for each in case.iter("skipped"))
        failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
        seconds = sum(float(suite.get("time", 0)) for suite in xml.parse(path).getroot().iter("testsuite"))
        passed = len(cases) - failed - skipped.total()
        yield f"tests, {path.stem}", f"{passed} passed, {failed} failed, {skipped.total()} skipped; {seconds:.0f} s"
        yield from (("  skipped", f"{count} x {why[:90]}") for why, count in skipped.most_common(4))


def size() -> Iterator[tuple[str, str]]:
    """Lines of the package and of the tests, bytes of the wheel, and public names."""
    for name in ("pyro_dropout", "tests", "models"):
        files = list((ROOT / name).rglob("*.py"))
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
        yield f"lines in {name}/", f"{lines:,} in {len(files)} files"
    with tempfile.TemporaryDirectory() as name:
        yield "wheel", f"{wheel.built(Path(name)).stat().st_size:,} bytes, and at most {wheel.LARGEST:,} may be"
    rooms = [getattr(pd, room) for room in (*FLOORS, "errors", "paper", "protocols", "registry")]
    below = sum(len(getattr(room, "__all__", ())) for room in rooms)
    yield "public names", f"{len(pd.__all__)} at the top, {below} in its modules"
    yield "lines of the frozen interface", str(len(interface.lines()))


def speed(tree: Path) -> dict[str, float]:
    """By setting: the time of a step over that of plain torch."""
    alone = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SPEED]
    done = subprocess.run(command, cwd=tree, env=alone, capture_output=True, text=True, check=True)
    return {line.split(": ")[0]: float(line.split(": ")[1]) for line in done.stdout.splitlines()}


def speeds() -> Iterator[tuple[str, str]]:
    """The ratios of this commit and of the one before it."""
    now = [speed(ROOT)]
    with tempfile.TemporaryDirectory() as name:
        packed = subprocess.run(["git", "archive", "HEAD~1", "pyro_dropout"], cwd=ROOT, capture_output=True)
        if packed.returncode:
            before = []
        else:
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tree:
                tree.extractall(name, filter="data")
            before = [speed(Path(name))]
            now.append(speed(ROOT))
    for what in now[0]:
        ours = min(found[what] for found in now)
        then = f"{before[0][what]:.2f} in the commit before" if before else "there is no commit before"
        yield f"step over torch's, {what}", f"{ours:.2f} ({then})"


def main() -> int:
    """Print the table; return whether too little of the package was run."""
    folder = Path(sys.argv[1])
    rows = [*tests(folder), *size()]
    enough = True
    if (folder / "lines").exists():
        by_file = covered.shares(folder / "lines")
        run, of = (sum(parts) for parts in zip(*by_file.values(), strict=True))
        enough = run >= LEAST_COVERED * of
        rows.append(
            ("statements that tests run", f"{run / of:.1%} of {of:,}, and at least {LEAST_COVERED:.0%} must be")
        )
    rows += speeds()
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {what}" for name, what in rows))
    return not enough


if __name__ == "__main__":
    sys.exit(main())
