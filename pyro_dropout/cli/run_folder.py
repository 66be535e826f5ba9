"""A fitted run as a folder: its data and settings in ``run.json``, and the trained posterior next to it.

The record is written before training starts, so that an interrupted run can be resumed; the posterior is written when
training ends. Both files are written atomically.
"""

import csv
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pyro_dropout.comparison.standard_models import GUIDES, regression_model, standard_guide
from pyro_dropout.generative.likelihoods import Categorical
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.random_state import forked
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.tables.csv_file import SEPARATORS
from pyro_dropout.tables.dataset import Dataset
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.learning import Task
from pyro_dropout.tables.notation import Decimal
from pyro_dropout.tables.reading import Missing, read_table
from pyro_dropout.training.checkpoints.atomic_file import whole_file
from pyro_dropout.training.checkpoints.posterior_file import load

FORMAT = 1
Rule = Callable[[object], bool]  # whether a value of a record is allowed
RECORD, POSTERIOR, CHECKPOINTS = "run.json", "posterior.safetensors", "checkpoints"


@dataclass(frozen=True)
class Reading:
    """How a table was read: the arguments of ``read_table``."""

    target: str | None
    task: Task = "auto"
    missing: Missing = "refuse"
    categorical: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    held_back: float = 0.0
    seed: int = 0
    decimal: Decimal | None = None
    encoding: str | None = None
    separator: str | None = None

    def read(self, file: str | Path) -> Dataset:
        """Return the data in a file."""
        return read_table(file, **asdict(self))

    def flags(self) -> list[str]:
        """Return the options of the command line that read a table in this way; not its target and its split.

        Example:
            >>> Reading("price", drop=("id", "a,b"), decimal="comma").flags()
            ['--drop', 'id,"a,b"', '--decimal', 'comma']
        """
        lists = {"categorical": self.categorical, "drop": self.drop}
        given: dict[str, str | None] = {"task": self.task, "missing": self.missing}
        given |= {name: _joined(names) for name, names in lists.items()}
        given |= {"decimal": self.decimal, "encoding": self.encoding, "separator": self.separator}
        plain = ("auto", "refuse", "", None)
        return [part for name, value in given.items() if value not in plain for part in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Training:
    """How long and how a guide was trained: arguments of ``fit``."""

    steps: int
    lr: float
    batch_size: int | None
    seed: int
    compile: bool | Literal["auto"] = "auto"


@dataclass(frozen=True)
class Run:
    r"""One table, one guide, one training.

    Attributes:
        file: path of the table.
        sha256: of that file.
        reading: how it was read.
        encoding: what its columns mean.
        guide: name of the guide, as on the command line.
        width: hidden units.
        training: how it was trained.
        members: of an ensemble; None for its default, and for any other guide.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "trees.csv").write_text("age,height\n" + "12,3\n30,8\n" * 10)
        >>> run = Run.plan(folder / "trees.csv", Reading("height"), "dropout", 20, Training(100, 0.01, None, 0))[0]
        >>> run.write(folder)
        >>> Run.read(folder) == run, run.build()[0].model.net[0]
        (True, Linear(in_features=1, out_features=20, bias=True))
    """

    file: str
    sha256: str
    reading: Reading
    encoding: Encoding
    guide: str
    width: int
    training: Training
    members: int | None = None

    @classmethod
    def plan(
        cls,
        file: str | Path,
        reading: Reading,
        guide: str,
        width: int,
        training: Training,
        members: int | None = None,
    ) -> tuple["Run", Dataset]:
        """Return an untrained run on a table, and its data."""
        data = reading.read(file)
        assert data.encoding is not None
        path = Path(file).resolve()
        return cls(str(path), sha256_of(path), reading, data.encoding, guide, width, training, members), data

    def data(self, file: str | Path | None = None) -> Dataset:
        """Return the data as read for training; raise if the file has changed since."""
        path = Path(self.file if file is None else file)
        if not path.is_file():
            raise PyroDropoutError(f"the training file {str(path)!r} does not exist; give its new path with --data.")
        if sha256_of(path) != self.sha256:
            raise PyroDropoutError(
                f"{path} has changed since the run started: its SHA-256 differs. Restore the file, or fit a new run."
            )
        data = self.reading.read(path)
        if data.encoding is None or data.encoding.network_inputs != self.encoding.network_inputs:
            raise PyroDropoutError(
                f"{path} is read differently by this version than by the one that started the run. Fit a new run."
            )
        return data

    def build(self, data: Dataset | None = None) -> tuple[Standardised, nn.Module]:
        """Return the untrained model and guide; without data, with shapes only, ready for loading a posterior."""
        train = _blank(self.encoding) if data is None else data.train
        with forked():
            torch.manual_seed(self.training.seed)
            model = table_model(train, self.encoding.classes, self.width)
            guide = standard_guide(self.guide, **_options(self.members))(model)
        assert isinstance(guide, nn.Module)
        return model, guide

    def trained(self, folder: str | Path) -> tuple[Standardised, nn.Module]:
        """Return the model and guide with the folder's posterior loaded."""
        path = Path(folder) / POSTERIOR
        if not path.is_file():
            raise PyroDropoutError(
                f"{folder} holds an unfinished run: there is no {POSTERIOR}. To continue: pyro-dropout resume {folder}"
            )
        model, guide = self.build()
        steps = load(path, model, guide).get("steps")
        if isinstance(steps, int) and steps < self.training.steps:
            warnings.warn(
                f"{folder} was trained for {steps} of the {self.training.steps} requested steps and predicts with that;"
                f" to continue: pyro-dropout resume {folder}",
                stacklevel=2,
            )
        return model, guide

    # --- on disk ------------------------------------------------------------------------------------------------------

    def write(self, folder: str | Path) -> None:
        """Write the record into an existing folder."""
        record = {
            "format": FORMAT,
            "made by": f"pyro-dropout {version('pyro-dropout')}",
            "data": {"file": self.file, "sha256": self.sha256, **asdict(self.reading)},
            "encoding": self.encoding.as_json(),
            "model": {"guide": self.guide, "width": self.width} | _options(self.members),
            "training": asdict(self.training),
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        with whole_file(Path(folder) / RECORD) as beside:
            beside.write_text(text, "utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """Return the run in a folder; raise if it is missing or damaged."""
        path = Path(folder) / RECORD
        if not Path(folder).is_dir():
            raise PyroDropoutError(f"there is no folder {str(folder)!r}; create a run with pyro-dropout fit.")
        if not path.is_file():
            raise PyroDropoutError(f"{folder} is not a run: it has no {RECORD}.")
        try:
            record = json.loads(path.read_text("utf-8"))
            if not isinstance(record, dict):
                raise TypeError("the record")
            if record["format"] != FORMAT:
                raise PyroDropoutError(f"{path} has format {record['format']!r}; this version reads {FORMAT}.")
            return cls._of(record)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise PyroDropoutError(f"{path} is damaged: it is not JSON. Fit the run again.") from None
        except (KeyError, TypeError, AttributeError, OverflowError) as cause:
            raise PyroDropoutError(f"{path} is damaged: {cause} is missing or wrong. Fit the run again.") from None

    @classmethod
    def _of(cls, record: Record) -> "Run":
        for section in ("data", "encoding", "model", "training"):
            if not isinstance(record[section], dict):
                raise TypeError(repr(section))
        data, model, training = (_checked(record[section], rules) for section, rules in _RULES.items())
        file, digest = data.pop("file"), data.pop("sha256")
        encoding = Encoding.from_json(record["encoding"])
        return cls(
            file,
            digest,
            Reading(**data),
            encoding,
            model["guide"],
            model["width"],
            Training(**training),
            model["members"],
        )


def _checked(found: Record, rules: Mapping[str, Rule]) -> Record:
    """Return a section of a record, lists as tuples; raise a ``TypeError`` that names a wrong key."""
    whole = {**{key: None for key in _OPTIONAL if key in rules}, **found}
    for key in (*whole, *rules):
        if key not in rules or not rules[key](whole[key]):
            raise TypeError(repr(key))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in whole.items()}


def _joined(names: tuple[str, ...]) -> str:
    """Return names as one line of CSV."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names)
    return line.getvalue()


def _options(members: int | None) -> dict[str, int]:
    return {} if members is None else {"members": members}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_count(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_OPTIONAL = ("members", "decimal", "encoding", "separator")  # keys that a record need not have
_RULES: dict[str, dict[str, Rule]] = {
    "data": {
        "file": _is_text,
        "sha256": _is_text,
        "target": lambda value: value is None or _is_text(value),
        "task": lambda value: value in get_args(Task),
        "missing": lambda value: value in get_args(Missing),
        "categorical": _are_texts,
        "drop": _are_texts,
        "held_back": _is_number,
        "seed": _is_count,
        "decimal": lambda value: value in (None, *get_args(Decimal)),
        "encoding": lambda value: value is None or _is_text(value),
        "separator": lambda value: value in (None, *SEPARATORS),
    },
    "model": {
        "guide": lambda value: _is_text(value) and value in GUIDES,
        "width": lambda value: _is_count(value) and value != 0,
        "members": lambda value: value is None or (_is_count(value) and value != 0),
    },
    "training": {
        "steps": _is_count,
        "lr": _is_number,
        "batch_size": lambda value: value is None or _is_count(value),
        "seed": _is_count,
        "compile": lambda value: isinstance(value, bool) or value == "auto",
    },
}


def table_model(train: tuple[Tensor, Tensor], classes: tuple[str, ...], width: int) -> Standardised:
    """Return a network with one hidden layer for a table: a learned precision for numbers, a softmax for classes.

    Example:
        >>> import torch
        >>> table_model((torch.randn(9, 2), torch.arange(9) % 3), ("a", "b", "c"), 20).model.net[-1].out_features
        3
    """
    if not classes:
        return regression_model(train, width)
    net = nn.Sequential(nn.Linear(train[0].shape[1], width), nn.ReLU(), nn.Linear(width, len(classes)))
    return Standardised(BayesianNet(net, likelihood=Categorical()), *train)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blank(encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Return data of the right shape; loading a posterior replaces the values taken from it."""
    y = torch.zeros(2, dtype=torch.long) if encoding.classes else torch.zeros(2, 1)
    return torch.zeros(2, len(encoding.features)), y
