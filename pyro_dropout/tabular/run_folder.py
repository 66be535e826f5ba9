"""A fitted run as a folder: its data and settings in ``run.json``, and the trained posterior next to it.

The record is written before training starts, so that an interrupted run can be resumed; the posterior is written when
training ends. Both files are written atomically. The identity is a SHA-256 of what the answers depend on. It stands in
the record, the posterior and every checkpoint, so that files of two runs never mix. The path of the data and the
version that made the run may change.
"""

import contextlib
import functools
import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from torch import nn

from pyro_dropout.errors import DamagedFileError, PyroDropoutError, RangeError
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Record
from pyro_dropout.registry import guides
from pyro_dropout.tables.encoding import Dataset, Encoding
from pyro_dropout.tables.reading import read
from pyro_dropout.tables.settings import Reading, Training, built
from pyro_dropout.tabular.recipe import Recipe
from pyro_dropout.training.checkpoints.posterior_file import load, save
from pyro_dropout.training.checkpoints.safe_files import (
    LOCK,
    check_name,
    check_no_links,
    check_regular,
    claimed,
    clear_unfinished,
    whole_file,
)
from pyro_dropout.training.checkpoints.tensor_file import read_facts

RECORD, POSTERIOR, CHECKPOINTS = "run.json", "posterior.safetensors", "checkpoints"
CHOOSING = "choosing"  # checkpoints of the trainings that choose what to train; removed when that is known
OWN = (RECORD, POSTERIOR, CHECKPOINTS, CHOOSING)
FORMAT = 6
HELD_BACK = "held back"  # what the held-back rows say; not in a run without them
_SECTIONS = ("data", "encoding", "model", "training")
_LONGEST = 2**26  # bytes of a record


@dataclass(frozen=True)
class Run:
    """One table, one guide, one training.

    Attributes:
        file: path of the table.
        sha256: of that file.
        reading: how it was read.
        encoding: what its columns mean.
        recipe: what is trained.
        training: how it was trained.
        held_back: what the held-back rows said before training, as JSON; {} if there were none.
    """

    file: str
    sha256: str
    reading: Reading
    encoding: Encoding
    recipe: Recipe
    training: Training
    held_back: Record = field(default_factory=dict)

    @functools.cached_property
    def identity(self) -> str:
        """What the record, the posterior and the checkpoints of this run carry."""
        found: str = self.as_json()["identity"]
        return found

    def data(self, file: str | Path | None = None) -> Dataset:
        """Return the data as read for training; raise if the file has changed since."""
        path = Path(self.file if file is None else file)
        advice = "give its new path with --data."
        check_regular(path, advice, f"the training file {str(path)!r} does not exist; {advice}")
        if sha256_of(path) != self.sha256:
            raise PyroDropoutError(
                f"{path} has changed since the run started: its SHA-256 differs. Restore the file, or fit a new run."
            )
        data = read(path, self.reading)
        if data.encoding is None or replace(data.encoding, ranges=self.encoding.ranges) != self.encoding:
            raise PyroDropoutError(
                f"{path} is read differently by this version than by the one that started the run. Fit a new run."
            )
        return data

    def loaded(self, folder: str | Path) -> tuple[Standardised, nn.Module, Record]:
        """Return the model and guide with the folder's posterior loaded, and what was saved with it."""
        path = Path(folder) / POSTERIOR
        if not path.exists():
            raise PyroDropoutError(
                f"{folder} holds an unfinished run: there is no {POSTERIOR}. To continue: {resuming(folder)}"
            )
        self._check_belongs(path)
        model, guide = self.recipe.empty(len(self.encoding.features), self.encoding.classes)
        return model, guide, load(path, model, guide)

    def save(self, folder: str | Path, model: object, guide: object, extra: Record) -> None:
        """Write the trained posterior into the folder."""
        save(Path(folder) / POSTERIOR, model, guide, extra | {"run": self.identity})

    # --- on disk ------------------------------------------------------------------------------------------------------

    def as_json(self) -> Record:
        """Return the record of the run."""
        record: Record = {
            "format": FORMAT,
            "made by": f"pyro-dropout {version('pyro-dropout')}",
            "data": {"file": self.file, "sha256": self.sha256, **asdict(self.reading)},
            "encoding": asdict(self.encoding),
            "model": asdict(self.recipe),
            "training": asdict(self.training),
        }
        record |= {HELD_BACK: self.held_back} if self.held_back else {}
        return record | {"identity": identity_of(record)}

    def write(self, folder: str | Path) -> None:
        """Write the record into an existing folder, all of it or nothing."""
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"
        with whole_file(Path(folder) / RECORD) as beside:
            beside.write_text(text, "utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """Return the run in a folder; raise if it is missing or damaged, or has links."""
        check_name(folder)
        folder = Path(folder)
        if not folder.is_dir():
            raise PyroDropoutError(f"there is no folder {str(folder)!r}; create a run with pyro-dropout fit.")
        check_no_links(folder, *OWN)
        path = folder / RECORD
        missing = f"{folder} is not a run: it has no {RECORD}."
        if (folder / CHOOSING).is_dir():
            missing = f"{folder} was stopped before it was known what to train: give the same fit command again."
        check_regular(path, "a run's record is needed. Fit the run again.", missing)
        try:
            if path.stat().st_size > _LONGEST:
                raise ValueError
            record = json.loads(path.read_text("utf-8"))
            json.dumps(record, ensure_ascii=False).encode()  # raises for half a character
        except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
            raise PyroDropoutError(f"{path} is damaged: it is not JSON, or too long. Fit the run again.") from None
        try:
            if record["format"] != FORMAT:
                raise PyroDropoutError(
                    f"{path} has format {record['format']!r}; this version reads {FORMAT}. Fit the run again."
                )
            run = cls._from_json(record)
            if record["identity"] != identity_of(record):
                raise PyroDropoutError(
                    f"{path} has been edited since the run started: its identity differs. Only the path of the data may"
                    " change. Restore the file, or fit a new run."
                )
        except (KeyError, TypeError, AttributeError, OverflowError, RangeError) as cause:
            what = str(cause).rstrip(".") if isinstance(cause, RangeError) else f"{cause} is missing or wrong"
            raise PyroDropoutError(f"{path} is damaged: {what}. Fit the run again.") from None
        return run

    @classmethod
    def _from_json(cls, record: Record) -> "Run":
        """Return what ``as_json`` was made from; raise ``KeyError`` or ``TypeError`` with the name of what is wrong."""
        for section in (*_SECTIONS, HELD_BACK):
            if not isinstance(record.get(section, {}), dict):
                raise TypeError(repr(section))
        data = dict(record["data"])
        file, digest = data.pop("file"), data.pop("sha256")
        if not isinstance(file, str) or not file or "\0" in file:
            raise TypeError("'file'")
        recipe = built(Recipe, record["model"])
        if recipe.guide not in guides():
            raise TypeError("'guide'")
        parts = built(Reading, data), built(Encoding, record["encoding"]), recipe, built(Training, record["training"])
        return cls(file, digest, *parts, record.get(HELD_BACK, {}))

    def check_checkpoints(self, folder: str | Path) -> None:
        """Raise if the folder's posterior or a checkpoint belongs to another run; damaged ones are passed over."""
        posterior = Path(folder) / POSTERIOR
        for path in (*checkpoints_in(folder), *([posterior] if posterior.exists() else [])):
            with contextlib.suppress(DamagedFileError):
                self._check_belongs(path)

    def _check_belongs(self, path: Path) -> None:
        """Raise unless a file is of this run."""
        facts = read_facts(path)
        found = facts.get("extra" if path.name == POSTERIOR else "facts")
        if not isinstance(found, dict) or found.get("run") != self.identity:
            raise PyroDropoutError(
                f"{path} belongs to another run: its identity is not that of {RECORD}. Put the files of one run"
                " together again, or fit a new run."
            )


def identity_of(record: Record) -> str:
    """Return the SHA-256 of what a run's answers depend on.

    Example:
        >>> record = {"data": {"file": "a.csv"}, "encoding": {}, "model": {"width": 5}, "training": {"steps": 3}}
        >>> moved = record | {"data": {"file": "b.csv"}}
        >>> other = record | {"model": {"width": 6}}
        >>> identity_of(record) == identity_of(moved), identity_of(record) == identity_of(other)
        (True, False)
    """
    bound = {name: record[name] for name in (*_SECTIONS, HELD_BACK) if name in record}
    bound["data"] = {name: value for name, value in record["data"].items() if name != "file"}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def resuming(folder: str | Path) -> str:
    """Return the command that continues a run, to be pasted into a shell."""
    return f"pyro-dropout resume {shlex.quote(str(folder))}"


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, those of an ensemble's groups included."""
    return list((Path(folder) / CHECKPOINTS).rglob("step-*.safetensors"))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def claimed_run(folder: Path, make: bool = False) -> Iterator[None]:
    """Hold a folder exclusively, and remove what a killed process left half-written."""
    with claimed(folder, make=make):
        clear_unfinished(folder, RECORD)
        clear_unfinished(folder, POSTERIOR)
        yield


def check_new(folder: Path) -> None:
    """Raise if a folder holds a run that has come further than its record, or other things."""
    check_no_links(folder, *OWN)
    if (folder / POSTERIOR).exists() or any((folder / CHECKPOINTS).rglob("*.*")):
        advice = f"continue it ({resuming(folder)}) or use another folder"
        raise PyroDropoutError(f"{str(folder)!r} already holds a run; {advice}.")
    if any(each.name not in (LOCK, *OWN) for each in folder.iterdir()):
        raise PyroDropoutError(f"{str(folder)!r} is not empty; use a new folder.")
