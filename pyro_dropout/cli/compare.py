"""``pyro-dropout compare``: several posterior approximations on one set of data, as a folder of results."""

import itertools
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import PROGRAM, answer, complain, plain_warnings, score_table

if TYPE_CHECKING:
    from pyro_dropout.comparison.comparison import Comparison
    from pyro_dropout.generative.standardised import Standardised
    from pyro_dropout.protocols import Model, PyroModel, Record
    from pyro_dropout.tables.encoding import Dataset
    from pyro_dropout.tables.reading import Reading
    from pyro_dropout.tabular.recipe import Noise, Scale

HELP = (
    "Compare posterior approximations on one model and one set of data."
    "\n\nEvery guide is trained from several seeds and gets the same scores. DATA is [bold]co2[/] or [bold]sunspots[/],"
    f" which come with the package, or {options.FORMATS} with named columns. Text columns are one-hot encoded. A"
    f" target is treated as a class if it is text, or has only the values 0 and 1. {options.TABLES}"
    + options.examples(
        "compare",
        "compare houses.csv --target price",
        "compare sunspots --guides dropout,mean-field --seeds 5",
        "compare iris.parquet --target species --json > iris.json",
    )
)

_OUT = Path("out", "compare")
_WIDTH, _LR = 50, 0.01

# How guides are trained on a table: with a rate that falls to zero.
_STEPS, _ROWS = 1000, 256
_SERIES_STEPS = 1500  # of the bundled series, with all rows and a fixed rate


def compare(
    data: Annotated[str, typer.Argument(metavar="DATA", help="co2, sunspots or a file; - for standard input.")] = "co2",
    target: options.Target = None,
    task: options.TaskName = "auto",
    missing: options.MissingName = "auto",
    categorical: options.Categorical = None,
    drop: options.Drop = None,
    keep: options.Keep = None,
    decimal: options.DecimalMark = None,
    encoding: options.TextEncoding = None,
    separator: options.Separator = None,
    held_back: options.HeldBack = 0.2,
    scale: options.ComparedScale = "auto",
    noise: options.GivenNoise = "constant",
    guides: options.Guides = None,
    reference: Annotated[
        Literal["nuts"] | None,
        options.computing_option(
            help="Also sample the posterior (at T = 1, noise fixed); slow, for small networks only."
        ),
    ] = None,
    seeds: options.Seeds = 3,
    members: options.Members = None,
    width: options.Width = _WIDTH,
    steps: Annotated[
        int | None,
        options.computing_option(
            metavar="N", callback=options.count, help="Steps per training run; by default 1000 for tables."
        ),
    ] = None,
    lr: Annotated[
        float,
        options.computing_option(
            "--lr", metavar="RATE", callback=options.positive, help="Learning rate; for tables, it falls to zero."
        ),
    ] = _LR,
    batch_size: Annotated[
        int | None,
        options.computing_option(
            metavar="N", callback=options.count, help="Rows in a mini-batch; by default 256 for tables."
        ),
    ] = None,
    samples: options.Samples = 300,
    linearised: options.Linearised = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    no_compile: options.NoCompile = False,
    out: Annotated[Path, options.output_option(metavar="FOLDER", help="Folder for the results.")] = _OUT,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare posterior approximations on one model and one set of data."""
    names = options.guides_named(guides)
    straight = options.listed(linearised) or [name for name in names if options.METHODS[name] == "linearised"]
    unknown = [name for name in straight if name not in names]
    if unknown:
        raise options.refusal("--linearised", f"{unknown[0]!r} is not one of the guides, {', '.join(names)}.")
    members = options.checked_members(names, members)
    where = options.place(device)
    from pyro_dropout.comparison.compare import compare as run
    from pyro_dropout.comparison.folder import claimed_folder, scores_of, write_folder
    from pyro_dropout.datasets.bundled import BUNDLED
    from pyro_dropout.judging.diagnostics.arviz_export import arviz
    from pyro_dropout.tables.reading import Reading
    from pyro_dropout.training.optimisers import cosine_decay

    given: list[tuple[str, object]] = [("width", None if width == _WIDTH else width), ("members", members)]
    given += [("steps", steps), ("lr", None if lr == _LR else lr), ("batch-size", batch_size), ("seed", seed or None)]
    with plain_warnings(), claimed_folder(out) as killed:
        if killed:
            complain(f"note: an earlier comparison into {out} was killed; all guides are trained again.")
        arviz()  # the results are written with it at the end: a broken installation fails before the work
        kinds, gone, kept = (tuple(options.listed(each)) for each in (categorical, drop, keep))
        split = held_back, seed, decimal, encoding, separator
        reading = Reading(target, task, missing, kinds, gone, *split, kept)
        found, model, chosen = _data(data, reading, width, scale, noise)
        given += chosen
        is_table = data not in BUNDLED
        steps = steps or (_STEPS if is_table else _SERIES_STEPS)
        rows = len(found.train[0])
        batch_size = min(batch_size or (_ROWS if is_table else rows), rows)
        result = run(
            model.to(where),
            {name: _made(name, members) for name in names},
            (found.train[0].to(where), found.train[1].to(where)),
            (found.test[0].to(where), found.test[1].to(where)),
            reference=reference,
            seeds=list(range(seed, seed + seeds)),
            steps=steps,
            lr=lr,
            batch_size=batch_size if batch_size < rows else None,
            schedule=cosine_decay(steps) if is_table else None,
            samples=samples,
            method=dict.fromkeys(straight, "linearised"),
            compile=not no_compile and "auto",
            progress=not quiet,
            labels=_labels(found),
        )
        result.train, result.test = found.train, found.test  # figures are drawn on the CPU
        files, complaints = write_folder(result, out, samples, seed)
    for complaint in complaints:
        complain(complaint)
    record: Record = {"data": found.name, "about": found.note, "scores": scores_of(result), "ranking": result.ranking}
    record |= {"seconds": round(result.seconds, 2), "folder": str(out), "files": files}
    if not as_json:
        _show(result)
    scored = [row.name for row in result.rows if row.scores]
    best = scored[0] if len(scored) == 1 else result.best("log_lik")
    again = []
    if is_table and data != "-" and best in options.GUIDE_NAMES:
        again = [f"To predict with {best}: {_fit_command(data, found, best, reading, given)}"]
    answer(record, as_json, _lines(found, result, out, files, again))
    if not any(row.scores for row in result.rows):
        complain("no guide could be trained; the notes in the table say why.")
        raise typer.Exit(1)


def _made(name: str, members: int | None) -> "Callable[[Model], PyroModel]":
    """Return what builds a guide; the number of members is for ensembles."""
    from pyro_dropout.comparison.standard_models import standard_guide

    return standard_guide(name, **({"members": members} if members and name in options.HAS_MEMBERS else {}))


def _data(
    name: str, reading: "Reading", width: int, scale: "Scale | Literal['auto']", noise: "Noise"
) -> "tuple[Dataset, Standardised, list[tuple[str, object]]]":
    """Return the data, a model for them, and the options of ``fit`` for its scale and noise."""
    from pyro_dropout.comparison.standard_models import wave_model
    from pyro_dropout.datasets.bundled import BUNDLED
    from pyro_dropout.tabular.choice import natural_scale
    from pyro_dropout.tabular.recipe import table_model

    if name in BUNDLED:
        if reading.target is not None:
            raise options.refusal("--target", f"{name!r} has its own target; --target is for files.")
        _refuse_scale(scale, noise, f"{name!r} has a model of its own; this is for files.")
        data = BUNDLED[name]()
        return data, wave_model(data.train, 2 * width), []
    if not reading.held_back:
        raise options.refusal("--held-back", "compare needs some held-back rows for the scores.")
    if name != "-" and not Path(name).exists() and (name in options.GUIDE_NAMES or not Path(name).suffix):
        known = ", ".join(BUNDLED)
        hint = " Separate guides with commas: --guides a,b." if name in options.GUIDE_NAMES else ""
        raise typer.BadParameter(f"{name!r} is neither a file nor a bundled data set ({known}).{hint}")
    data = reading.read(name)
    if data.classes:
        _refuse_scale(scale, noise, "classes have no scale and no noise.")
        return data, table_model(data.train, data.classes, width), []
    on = natural_scale(data.train[1]) if scale == "auto" else scale
    model = table_model(data.train, data.classes, width, on, noise)
    if on != "plain":
        data = replace(data, note=f"{data.note} Guides are compared on its {on} scale (--scale plain for another).")
    return data, model, [("scale", on), ("noise", noise)]


def _refuse_scale(scale: str, noise: str, reason: str) -> None:
    """Raise if a scale or a noise was asked for, where the model has none to choose."""
    for option, value in (("--scale", scale), ("--noise", noise)):
        if value not in ("auto", "plain", "constant"):
            raise options.refusal(option, f"{reason} Got {value!r}.")


def _labels(data: "Dataset") -> dict[str, str]:
    title = f"{data.name}: posterior approximations compared"
    command = shlex.join(["pyro-dropout", *sys.argv[1:]])
    return {"title": title, "x": data.x_name, "y": data.y_name, "note": data.note, "command": command}


def _show(result: "Comparison") -> None:
    """Print the table with one line per score: screens are narrow."""
    best = [result.best(key) for key in result.columns]
    rows = [[column.heading, *(result.cell(row, key) for row in result.rows)] for key, column in result.columns.items()]

    def bold(i: int, k: int) -> bool:
        return k > 0 and best[i] == result.rows[k - 1].name

    score_table(["", *(row.name for row in result.rows)], rows, bold)


def _fit_command(file: str, data: "Dataset", best: str, reading: "Reading", given: "list[tuple[str, object]]") -> str:
    """Return the command that fits the best guide to the same table with the options given here, in a new folder."""
    target = "" if data.encoding is None else data.encoding.target
    own = [("guide", best), *given, ("held-back", reading.held_back), ("out", _free_folder())]
    if best not in options.HAS_MEMBERS:
        own = [each for each in own if each[0] != "members"]
    flags = [part for name, value in own if value is not None for part in (f"--{name}", str(value))]
    return shlex.join([PROGRAM, "fit", file, "--target", target, *reading.flags(), *flags])


def _free_folder() -> str:
    """Return a name for a folder that does not exist yet."""
    names = itertools.chain(["run"], (f"run-{k}" for k in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _lines(data: "Dataset", result: "Comparison", out: Path, files: list[str], again: list[str]) -> list[str]:
    from pyro_dropout.comparison.report.page import plain_findings

    shown = os.path.relpath(out)
    return [
        data.note,
        *(f"- {sentence}" for sentence in plain_findings(result)),
        *again,
        *(["`fit` without --guide, --scale and --noise chooses all three on held-back rows."] if again else []),
        f"{result.seconds:.0f} s in total. Report: {os.path.join(shown, 'report.html')}",
        f"{len(files) - 1} more files next to it: scores in table.csv, figures/, and posteriors/ for ArviZ.",
    ]
