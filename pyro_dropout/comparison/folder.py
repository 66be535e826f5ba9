"""A comparison as a folder: the HTML report, the scores, the figures, and every guide's draws for ArviZ."""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas

from pyro_dropout.comparison.compare import Comparison
from pyro_dropout.comparison.findings import Findings, Score, distinct
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.judging.diagnostics.inference_data import to_arviz
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.safe_files import (
    LOCK,
    check_no_links,
    claimed,
    clear_unfinished,
    naming,
    whole_file,
)

MARK = "comparison.json"  # only a folder with this file is overwritten
PAGE, TABLE, FIGURES, POSTERIORS = "report.html", "table.csv", "figures", "posteriors"
_OWN = (MARK, PAGE, TABLE, FIGURES, POSTERIORS)
_UNFINISHED = ".unfinished"  # what is written here is moved into place when it is complete


@contextlib.contextmanager
def claimed_folder(folder: Path) -> Iterator[bool]:
    """Hold the folder of a comparison exclusively; raise, before anything is computed, unless it can be written.

    Yields whether an earlier comparison into this folder was killed; what it left is removed.
    """
    if folder.suffix.lower() in (".html", ".htm"):
        raise PyroDropoutError(f"--out is a folder, and its page is {PAGE} inside; write {folder.with_suffix('')}.")
    if folder.exists() and not folder.is_dir():
        raise PyroDropoutError(f"--out must be a folder; {str(folder)!r} is a file.")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        raise PyroDropoutError(f"--out {str(folder)!r} cannot be created: {str(above)!r} is a file.")
    killed = (folder / LOCK).exists()  # who ends in any other way removes it
    with claimed(folder, make=True):
        check_no_links(folder, *_OWN, _UNFINISHED)
        if not (folder / MARK).is_file() and {each.name for each in folder.iterdir()} - {LOCK, _UNFINISHED}:
            raise PyroDropoutError(
                f"--out {str(folder)!r} is not empty and holds no comparison; give a new or an empty folder."
            )
        shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)
        clear_unfinished(folder, MARK)
        yield killed


def write_folder(comparison: Comparison, folder: Path, samples: int, seed: int) -> tuple[list[str], list[str]]:
    """Write everything to a temporary folder inside the target, then move it into place of an older comparison.

    ArviZ gets ``samples`` draws of every guide, from ``seed``. Returns the names of the files in the folder, and a
    sentence for each thing that could not be written.

    Example:
        >>> import tempfile, torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> options = {"steps": 20, "seeds": 1, "samples": 30, "compile": False, "progress": False}
        >>> guides, train, test = {"mean field": pdrop.AutoMeanField}, (x, 2 * x), (x + 0.1, 2 * x + 0.2)
        >>> found = pdrop.compare(model, guides, train, test, **options)
        >>> write_folder(found, Path(tempfile.mkdtemp()), 30, 0)[0]
        ['comparison.json', 'figures/bands.png', 'figures/scores.png', 'posteriors/mean-field.nc', 'report.html',
         'table.csv']
    """
    folder.mkdir(exist_ok=True)
    beside = folder / _UNFINISHED
    try:
        with naming(folder):
            for each in (beside, beside / FIGURES, beside / POSTERIORS):
                each.mkdir()
            comparison.to_html(beside / PAGE)
            _write_table(comparison, beside / TABLE)
            _write_figures(comparison, beside / FIGURES)
            complaints = _write_posteriors(comparison, beside / POSTERIORS, samples, seed)
            files = sorted([MARK, *(str(path.relative_to(beside)) for path in beside.rglob("*") if path.is_file())])
            settings = {key: value for key, value in comparison.settings.items() if key not in ("loss", "model")}
            seconds = round(comparison.seconds, 1)
            _put(folder, files, {"settings": settings, "seconds": seconds, "scores": scores_of(comparison)})
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return files, complaints


def _put(folder: Path, files: list[str], record: Record) -> None:
    """Move complete files into place; the record comes last, and until then one says that the rest is unfinished."""
    older = _older(folder)
    write_record(folder / MARK, {"unfinished": True, "files": sorted({*older, *files})})
    for name in set(older) - set(files):
        (folder / name).unlink()  # from an older comparison with other guides
    for name in set(files) - {MARK}:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / _UNFINISHED / name).replace(folder / name)
    write_record(folder / MARK, {**record, "files": files})


def write_record(path: Path, record: Record) -> None:
    """Write a JSON file, all of it or nothing, and the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as beside:
        beside.write_text(json.dumps(plain(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def _older(folder: Path) -> list[str]:
    """Return the figures and draws in the folder that an older comparison wrote; what others put there stays."""
    try:
        listed = json.loads((folder / MARK).read_text("utf-8"))["files"]
        there = (*folder.glob(f"{FIGURES}/*.png"), *folder.glob(f"{POSTERIORS}/*.nc"))
        return [name for name in (str(path.relative_to(folder)) for path in there) if name in listed]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _write_table(comparison: Comparison, path: Path) -> None:
    rows = []
    for row in comparison.rows:
        cells: dict[str, object] = {"posterior": row.name}
        for key in comparison.columns:
            score = row.scores.get(key, Score())
            cells |= {key: score.mean if score.values else None, f"{key}_error": score.error}
        rows.append(cells | {"note": row.note})
    pandas.DataFrame(rows).to_csv(path, index=False, float_format="%.8g")


def _write_figures(comparison: Comparison, folder: Path) -> None:
    import matplotlib.pyplot as plt

    drawn = {"bands": comparison.plot} if comparison.curves else {}
    drawn |= {"scores": comparison.plot_scores} if comparison.answers else {}
    for name, draw in drawn.items():
        figure = draw()
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def _write_posteriors(comparison: Comparison, folder: Path, samples: int, seed: int) -> list[str]:
    complaints = []
    names = distinct((re.sub(r"[^\w.-]+", "-", row.name) for row in comparison.rows), "-")
    for name, row in zip(names, comparison.rows, strict=True):
        if not row.trained or hasattr(row.trained[0][1], "sample_functions"):
            continue  # a process has no weights to draw
        model, posterior = row.trained[0]
        try:
            call = comparison.call or ModelCall(model, comparison.train)
            draws = to_arviz(model, posterior, *call.args, samples=samples, seed=seed, **call.kwargs)
            draws.to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
        except PyroDropoutError as cause:
            complaints.append(f"{row.name}: no draws for ArviZ: {cause}")
    return complaints


def scores_of(comparison: Findings) -> Record:
    """Return the scores as plain numbers, {posterior: {score: {mean, error, values}}}, and any notes."""
    found: Record = {}
    for row in comparison.rows:
        found[row.name] = {"note": row.note} if row.note else {}
        for key, score in row.scores.items():
            mean, note = (score.mean, {}) if score.values else (None, {"note": score.note})
            found[row.name][key] = {"mean": mean, "error": score.error, "values": score.values, **note}
    return found


def plain(value: object) -> object:
    """Return a value that JSON can hold; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
