"""A fitted run as a folder: its data and settings in ``run.json``, and the trained posterior next to it.

The record is written before training starts, so that an interrupted run can be resumed; the posterior is written when
training ends. Both files are written atomically.
"""

import contextlib
import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from pyro_dropout.errors import DamagedFileError, PyroDropoutError
from pyro_dropout.generative.random_state import forked
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.protocols import Record
from pyro_dropout.tables.encoding import Dataset, Encoding
from pyro_dropout.tables.reading import read
from pyro_dropout.tables.settings import Reading
from pyro_dropout.tabular.recipe import Recipe
from pyro_dropout.tabular.run_record import FORMAT, HELD_BACK, identity_of, read_record
from pyro_dropout.tabular.settings import Training
from pyro_dropout.training.checkpoints.atomic_file import whole_file
from pyro_dropout.training.checkpoints.posterior_file import load, save
from pyro_dropout.training.checkpoints.regular_file import check_name, check_no_links, check_regular
from pyro_dropout.training.checkpoints.tensor_file import read_facts

RECORD, POSTERIOR, CHECKPOINTS = "run.json", "posterior.safetensors", "checkpoints"
CHOOSING = "choosing"  # checkpoints of the trainings that choose what to train; removed when that is known
OWN = (RECORD, POSTERIOR, CHECKPOINTS, CHOOSING)


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

    def build(self, data: Dataset | None = None) -> tuple[Standardised, nn.Module]:
        """Return the untrained model and guide; without data, with shapes only, ready for loading a posterior."""
        if data is not None:
            train = self.rows_of(data)
        else:  # loading a posterior replaces the values taken from these
            y = torch.zeros(2, dtype=torch.long) if self.encoding.classes else torch.full((2, 1), 0.5)
            train = torch.zeros(2, len(self.encoding.features)), y
        with forked():
            torch.manual_seed(self.training.seed)
            return self.recipe.build(train, self.encoding.classes)

    def rows_of(self, data: Dataset) -> tuple[Tensor, Tensor]:
        """Return the rows to train on: all of them, once the held-back ones have said what they can."""
        return data.rows if self.held_back else data.train

    def loaded(self, folder: str | Path) -> tuple[Standardised, nn.Module, Record]:
        """Return the model and guide with the folder's posterior loaded, and what was saved with it."""
        path = Path(folder) / POSTERIOR
        if not path.exists():
            raise PyroDropoutError(
                f"{folder} holds an unfinished run: there is no {POSTERIOR}. To continue: pyro-dropout resume {folder}"
            )
        self._check_belongs(path)
        model, guide = self.build()
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
            "encoding": self.encoding.as_json(),
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
        path = Path(folder) / RECORD
        check_name(folder)
        if not Path(folder).is_dir():
            raise PyroDropoutError(f"there is no folder {str(folder)!r}; create a run with pyro-dropout fit.")
        check_no_links(Path(folder), *OWN)
        if not path.exists() and (Path(folder) / CHOOSING).is_dir():
            raise PyroDropoutError(
                f"{folder} was stopped before it was known what to train. To continue, give the same fit command again."
            )
        record, reading, encoding, recipe, training = read_record(path)
        file, digest = (record["data"][name] for name in ("file", "sha256"))
        return cls(file, digest, reading, encoding, recipe, training, record.get(HELD_BACK, {}))

    def check_checkpoints(self, folder: str | Path) -> None:
        """Raise if the folder's posterior or a checkpoint belongs to another run; damaged ones are passed over."""
        posterior = Path(folder) / POSTERIOR
        for path in (*checkpoints_in(folder), *([posterior] if posterior.exists() else [])):
            with contextlib.suppress(DamagedFileError):
                self._check_belongs(path)

    def _check_belongs(self, path: Path) -> None:
        """Raise unless a file is of this run, and large enough for its weights: before anything is built."""
        facts = read_facts(path)
        found = facts.get("extra" if path.name == POSTERIOR else "facts")
        if not isinstance(found, dict) or found.get("run") != self.identity:
            raise PyroDropoutError(
                f"{path} belongs to another run: its identity is not that of {RECORD}. Put the files of one run"
                " together again, or fit a new run."
            )
        outputs = len(self.encoding.classes) or 1
        weights = self.recipe.width * (len(self.encoding.features) + outputs) * (self.recipe.members or 1)
        if 4 * weights > path.stat().st_size:
            raise PyroDropoutError(
                f"{path} belongs to another model or guide: it is too small for the {weights} weights of {RECORD}."
            )


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, those of an ensemble's groups included."""
    return list((Path(folder) / CHECKPOINTS).rglob("step-*.safetensors"))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
