"""A training that is killed again and again: ``python -m tests.training.kills 10 --device cpu``.

Children are forked from one process that has imported everything, train, and are killed at a random moment; the next
child goes on. What is printed is whether the last one's parameters are those of a training that nobody killed.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pyro_dropout as pd

STEPS = 120


def train(folder: Path | None, compiled: bool, case: int, device: str = "cpu") -> str:
    """Train on mini-batches, with a schedule or early stopping by the case; return a hash of what was learned."""
    torch.manual_seed(case)
    x = torch.linspace(-1, 1, 90).unsqueeze(-1)
    y = torch.sin(3 * x) + 0.1 * torch.randn(90, 1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
    model = pd.BayesianNet(net, likelihood=pd.Gaussian(10.0, learn=True))
    guide = pd.AutoDropout(model, keep=0.9) if case % 2 else pd.AutoMeanField(model)
    options: Any = {"validation": (x[::7], y[::7]), "patience": 50, "check_every": 37} if case % 2 else {}
    model.to(device), guide.to(device)  # before an optimiser takes hold of the parameters
    if case % 3 == 2:
        options["optim"] = torch.optim.NAdam([*guide.parameters(), *model.likelihood.parameters()], lr=1e-2)
    else:
        options["lr"], options["schedule"] = 1e-2, lambda t: 0.5 * (1 + torch.cos(3.14159 * t / STEPS))
    history = pd.fit(
        model,
        guide,
        x,
        y,
        steps=STEPS,
        batch_size=32,
        compile=compiled,
        progress=False,
        seed=case,
        device=device,
        checkpoint=None if folder is None else pd.training.Checkpoint(folder, every=20, seconds=1e9, keep_last=2),
        **options,
    )
    found = hashlib.sha256(history.losses.numpy().tobytes())
    for _, value in sorted((*guide.state_dict().items(), *model.state_dict().items())):
        found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()


def survived(action: Callable[[], object], leash: float | None) -> bool:
    """Do something in a forked child and return whether it ended before it was killed; without a leash it is not."""
    number = os.fork()
    if not number:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + (1e9 if leash is None else leash)
    found, status = 0, 0
    while not found and time.monotonic() < end:
        time.sleep(0.005)
        found, status = os.waitpid(number, os.WNOHANG)
    if not found:
        os.kill(number, signal.SIGKILL)
        status = os.waitpid(number, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return status == 0


def main() -> None:
    """Kill as often as asked, and print what came of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device != "cpu":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    for case in (0, 2):  # what a training imports on its way is then imported for all children; no GPU before a fork
        train(None, False, case)
    dice, kills, endings, case = random.Random(args.seed), 0, [], args.seed
    while kills < args.kills:
        with tempfile.TemporaryDirectory() as name:
            ending, more = killed_until_done(Path(name), dice, args.compiled, case, args.device)
        endings.append({"case": case, **ending})
        kills, case = kills + more, case + 1
    print(json.dumps({"kills": kills, "endings": endings}))


def killed_until_done(
    root: Path, dice: random.Random, compiled: bool, case: int, device: str
) -> tuple[dict[str, object], int]:
    """Train once undisturbed, and once with kills until it is done; return how it ended, and how many kills it took."""

    def tell(folder: Path | None, said: str) -> None:
        (root / said).write_text(train(folder, compiled, case, device))

    start = time.monotonic()
    assert survived(partial(tell, None, "whole"), None)
    leash, kills = time.monotonic() - start, 0
    while not survived(partial(tell, root / "checkpoints", "said"), dice.uniform(0.02, 1.0) * leash):
        kills, leash = kills + 1, 1.05 * leash  # longer and longer, or a machine that grows busy would never be done
    left = sorted(path.name for path in (root / "checkpoints").iterdir() if not path.name.startswith("."))
    same = (root / "said").read_text() == (root / "whole").read_text()
    return {"same": same, "files": left}, kills


if __name__ == "__main__":
    main()
