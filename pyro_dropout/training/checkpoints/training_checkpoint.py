"""Training checkpoints: a resumed training continues as if it had never stopped."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pyro_dropout.errors import DamagedFileError, PyroDropoutError, warn_caller
from pyro_dropout.mathematics.checks import check_count, check_positive, formerly
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.posterior_file import ROOTS, check_identity, identity_of, put, tensors_of
from pyro_dropout.training.checkpoints.safe_files import check_no_links, clear_unfinished
from pyro_dropout.training.checkpoints.tensor_file import ADVICE, read_facts, read_tensors, write_tensors
from pyro_dropout.training.early_stopping import Watch
from pyro_dropout.training.training_run import TrainingRun

_NAME = re.compile(r"step-(\d+)\.safetensors")


@formerly(keep="keep_last")
@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a training run writes checkpoints.

    Args:
        folder: where they are written; created if it does not exist. Use one folder per training.
        every: steps between two checkpoints; None to go by time alone.
        seconds: time between two checkpoints, in seconds.
        keep_last: how many of the latest ones are kept.
        run: what identifies the training, such as a hash of its settings; it is written into each checkpoint, and one
            with another ``run`` is refused.

    Example:
        >>> import tempfile, torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> def train(steps):
        ...     torch.manual_seed(0)
        ...     model = pdrop.BayesianNet(torch.nn.Linear(1, 1))
        ...     guide = pdrop.AutoDropout(model)
        ...     quiet = {"compile": False, "progress": False, "seed": 0}
        ...     often = pdrop.training.Checkpoint(folder, every=20)
        ...     pdrop.fit(model, guide, x, x, steps=steps, checkpoint=often, **quiet)
        ...     return guide.mean()["weight"]
        >>> folder = tempfile.mkdtemp()
        >>> part = train(40)
        >>> whole = train(100)  # resumes from step 40
        >>> folder = tempfile.mkdtemp()
        >>> torch.equal(whole, train(100))
        True
    """

    folder: str | Path
    every: int | None = None
    seconds: float = 60.0
    keep_last: int = 3
    run: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("every", self.every)
        check_positive("seconds", self.seconds)
        if not isinstance(self.folder, str | Path):
            raise PyroDropoutError(f"folder must be the path of a folder; got {self.folder!r}.")
        check_count("keep_last", self.keep_last)
        if not isinstance(self.run, str | None):
            raise PyroDropoutError(f"run must be text that identifies the training; got {self.run!r}.")


def last_facts(checkpoint: Checkpoint) -> Record:
    """Return what the last readable checkpoint in a folder says of its training run; {} if there is none."""
    for _, path in reversed(_files(Path(checkpoint.folder))):
        try:
            found: Record = read_facts(path).get("facts", {})
            return found
        except DamagedFileError:
            continue
    return {}


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder with their steps, by age."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(name[1]), path) for name, path in named if name)


class Keeper:
    """Writes a training run's checkpoints, and resumes it from the last one."""

    def __init__(
        self,
        checkpoint: str | Path | Checkpoint,
        run: TrainingRun,
        model: object,
        guide: object,
        facts: Record,
        watch: Watch | None,
    ) -> None:
        self.how = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        self.folder = Path(self.how.folder)
        named = {} if self.how.run is None else {"run": self.how.run}
        self.run, self.model, self.guide, self.facts, self.watch = run, model, guide, facts | named, watch
        self._time = time.monotonic()
        self._damaged: set[Path] = set()
        self.step = 0  # that of the last checkpoint on disk
        self.writes = True  # one of several processes that share a run writes for all
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_unfinished(self.folder, "step-*.safetensors")
        except OSError as cause:
            reason = f"{str(self.folder)!r} cannot be one: {cause.strerror}"
            raise PyroDropoutError(f"checkpoint must be a folder; {reason}.") from None

    def due(self, step: int) -> bool:
        """Whether it is time for the next checkpoint."""
        every = self.how.every
        due = every is not None and step // every > self.step // every
        return due or time.monotonic() - self._time > self.how.seconds

    def write(self, step: int, losses: Tensor) -> None:
        """Write a checkpoint, then remove the oldest; if it cannot be written, warn and continue training."""
        if step == self.step:
            return
        if not self.writes or self._written(step, losses):
            self.step = step
        self._time = time.monotonic()

    def _written(self, step: int, losses: Tensor) -> bool:
        """Write a checkpoint and return whether that succeeded."""
        tensors, rest = self.run.state()
        found = tensors_of(self.model, self.guide) | {"losses": losses}
        facts = {"kind": "training", "step": step, "facts": self.facts, "run": rest}
        parts = {"run": tensors, "rng": {"cpu": torch.get_rng_state()}}
        if self.run.t.is_cuda:
            parts["rng"]["cuda"] = torch.cuda.get_rng_state(self.run.t.device)
        if self.watch is not None:
            parts["watch"], facts["watch"] = self.watch.state()
        for part, named in parts.items():
            found |= {f"{part}.{name}": value for name, value in named.items()}
        path = self.folder / f"step-{step:012d}.safetensors"
        try:
            write_tensors(path, found, facts | identity_of(self.model, self.guide))
        except OSError as cause:
            left = "the previous checkpoint is kept" if self.step else "there is no checkpoint yet"
            warn_caller(
                f"the checkpoint of step {step} cannot be written: {cause.strerror or cause}. Training continues;"
                f" {left}.",
            )
            return False
        self._damaged.discard(path)
        past = [file for number, file in self._files() if number <= step]
        past.sort(key=lambda file: file not in self._damaged)  # what cannot be used goes first, then the oldest
        for old in past[: -self.how.keep_last]:
            old.unlink(missing_ok=True)
        return True

    def resume(self, total: int) -> list[Tensor]:
        """Resume the training from its last intact checkpoint; return the losses before it, or nothing."""
        found = self._last()
        if found is None:
            return []
        name, tensors, facts = found
        self._check(name, tensors, facts, total)
        put(tensors, self.model, self.guide)
        self.run.set_state(_under("run.", tensors), facts["run"])
        if self.watch is not None:
            self.watch.set_state(_under("watch.", tensors), facts["watch"])
        own = _under("rng.", tensors)
        torch.set_rng_state(own["cpu"])
        if self.run.t.is_cuda and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], self.run.t.device)
        self.step = facts["step"]
        return [tensors["losses"].to(self.run.t.device)]

    def _last(self) -> tuple[str, dict[str, Tensor], Record] | None:
        """Return the name, the tensors and the facts of the last intact checkpoint; None if there is none."""
        files = self._files()
        while files:
            _, path = files.pop()
            try:
                return path.name, *read_tensors(path)
            except DamagedFileError as damage:
                why = str(damage).removesuffix(ADVICE)
                then = "resumes from the previous one" if files else "starts again from the first step"
                warn_caller(f"{why} Training {then}.")
                self._damaged.add(path)
        return None

    def _files(self) -> list[tuple[int, Path]]:
        found = _files(self.folder)
        check_no_links(self.folder, *(path.name for _, path in found))
        return found

    def _check(self, file: str, tensors: dict[str, Tensor], facts: Record, total: int) -> None:
        if facts.get("kind") != "training":
            raise PyroDropoutError(f"{file} is not a training checkpoint; give another folder.")
        own = {name: value for name, value in tensors.items() if name.startswith(ROOTS)}
        check_identity(file, facts, own, self.model, self.guide)
        wrong = _different(facts["facts"], self.facts)
        if wrong:
            raise PyroDropoutError(
                f"{file} is a checkpoint of another training run; these differ: {', '.join(wrong)}. Call fit with the"
                " same data and settings to resume, or give another folder to start over."
            )
        if facts["step"] > total:
            raise PyroDropoutError(f"{file} is from step {facts['step']}, beyond the {total} requested.")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _different(theirs: object, mine: object, name: str = "") -> list[str]:
    """Return the names under which two trees of facts differ."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        keys = sorted(theirs.keys() | mine.keys())
        return [w for k in keys for w in _different(theirs.get(k), mine.get(k), f"{name}.{k}" if name else k)]
    return [] if theirs == mine else [name]
