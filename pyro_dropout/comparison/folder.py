"""A comparison as a folder: the HTML report, the scores, the figures, and every guide's draws for ArviZ."""

import contextlib
import csv
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyro_dropout.comparison.columns import Score
from pyro_dropout.comparison.distinct_names import distinct
from pyro_dropout.comparison.findings import Comparison
from pyro_dropout.comparison.json_values import plain
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.judging.diagnostics.inference_data import to_arviz
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import Record

MARK = "comparison.json"  # only a folder with this file is overwritten
PAGE, TABLE, FIGURES, POSTERIORS = "report.html", "table.csv", "figures", "posteriors"


def check_folder(folder: Path) -> None:
    """Raise, before anything is computed, unless a comparison can be written to this folder."""
    if folder.suffix.lower() in (".html", ".htm"):
        raise PyroDropoutError(f"--out is a folder, and its page is {PAGE} inside; write {folder.with_suffix('')}.")
    if folder.exists() and not folder.is_dir():
        raise PyroDropoutError(f"--out must be a folder; {str(folder)!r} is a file.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise PyroDropoutError(
            f"--out {str(folder)!r} is not empty and holds no comparison; give a new or an empty folder."
        )
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        raise PyroDropoutError(f"--out {str(folder)!r} cannot be created: {str(above)!r} is a file.")
    with _beside(folder):  # test that it is writable now, not after training
        pass


def write_folder(comparison: Comparison, folder: Path, samples: int, seed: int) -> tuple[list[str], list[str]]:
    """Write everything to a temporary folder next to the target, then move it into place of an older comparison.

    ArviZ gets ``samples`` draws of every guide, from ``seed``. Returns the names of the files in the folder, and a
    sentence for each thing that could not be written.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1), likelihood=pd.Gaussian(tau=100.0))
        >>> options = {"steps": 20, "seeds": 1, "samples": 30, "compile": False, "progress": False}
        >>> found = pd.compare(model, {"mean field": pd.AutoMeanField}, (x, 2 * x), (x + 0.1, 2 * x + 0.2), **options)
        >>> write_folder(found, Path(tempfile.mkdtemp()), 30, 0)[0]
        ['comparison.json', 'figures/bands.png', 'figures/scores.png', 'posteriors/mean-field.nc', 'report.html',
         'table.csv']
    """
    with _beside(folder) as beside:
        comparison.to_html(beside / PAGE)
        _write_table(comparison, beside / TABLE)
        _write_figures(comparison, beside / FIGURES)
        complaints = _write_posteriors(comparison, beside / POSTERIORS, samples, seed)
        settings = {key: value for key, value in comparison.settings.items() if key not in ("loss", "model")}
        seconds = round(comparison.seconds, 1)
        record = plain({"settings": settings, "seconds": seconds, "scores": scores_of(comparison)})
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        (beside / MARK).write_text(f"{text}\n", "utf-8")
        files = sorted(str(path.relative_to(beside)) for path in beside.rglob("*") if path.is_file())
        _put(beside, folder, files)
    return files, complaints


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same disk; remove it afterwards, with the parents created for it."""
    absent = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".comparison-"))
        except OSError as cause:
            raise PyroDropoutError(f"--out {str(folder)!r} cannot be written: {cause.strerror}.") from None
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    finally:
        for parent in absent:
            with contextlib.suppress(OSError):  # no longer empty
                parent.rmdir()


def _put(beside: Path, folder: Path, files: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob(f"{FIGURES}/*.png"), *folder.glob(f"{POSTERIORS}/*.nc")):
        if str(old.relative_to(folder)) not in files:
            old.unlink()  # from an older comparison with other guides
    for name in files:
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        (beside / name).replace(place)


def _write_table(comparison: Comparison, path: Path) -> None:
    keys = list(comparison.columns)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["posterior", *(name for key in keys for name in (key, f"{key}_error")), "note"])
        for row in comparison.rows:
            scores = [row.scores.get(key, Score()) for key in keys]
            numbers = [part for score in scores for part in (score.mean if score.values else None, score.error)]
            writer.writerow([row.name, *("" if part is None else f"{part:.8g}" for part in numbers), row.note])


def _write_figures(comparison: Comparison, folder: Path) -> None:
    import matplotlib.pyplot as plt

    folder.mkdir()
    drawn = {}
    if comparison.curves:
        drawn["bands"] = comparison.plot()
    if comparison.answers:
        drawn["scores"] = comparison.plot_scores()
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def _write_posteriors(comparison: Comparison, folder: Path, samples: int, seed: int) -> list[str]:
    folder.mkdir()
    complaints = []
    names = distinct((re.sub(r"[^\w.-]+", "-", row.name) for row in comparison.rows), "-")
    for name, row in zip(names, comparison.rows, strict=True):
        if not row.trained:
            continue
        model, posterior = row.trained[0]
        try:
            call = comparison.call or ModelCall(model, comparison.train)
            draws = to_arviz(model, posterior, *call.args, samples=samples, seed=seed, **call.kwargs)
        except PyroDropoutError as cause:
            complaints.append(f"{row.name}: no draws for ArviZ: {cause}")
            continue
        draws.to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    return complaints


def scores_of(comparison: Comparison) -> Record:
    """Return the scores as plain numbers, {posterior: {score: {mean, error, values}}}, and any notes."""
    found: Record = {}
    for row in comparison.rows:
        found[row.name] = {
            key: {"mean": score.mean, "error": score.error, "values": score.values}
            if score.values
            else {"mean": None, "error": None, "values": [], "note": score.note}
            for key, score in row.scores.items()
        }
        if row.note:
            found[row.name]["note"] = row.note
    return found
