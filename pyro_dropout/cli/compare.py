"""``pyro-dropout compare``: several posterior approximations on one set of data, as a folder of results."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import answer, complain
from pyro_dropout.tables.settings import SAMPLES, SCORED

if TYPE_CHECKING:
    from pyro_dropout.comparison.compare import Comparison
    from pyro_dropout.protocols import Record
    from pyro_dropout.tables.encoding import Dataset
    from pyro_dropout.tables.settings import Reading

HELP = (
    "Compare posterior approximations on one set of data."
    "\n\nEvery guide is trained from several seeds and gets the same scores. DATA is [bold]co2[/] or [bold]sunspots[/],"
    " which come with the package, or a CSV, Parquet or Excel file with named columns. A row of a table is what"
    " fit --guide NAME trains, with the same options, and the first row what fit trains without --guide. Text columns"
    " are one-hot encoded. A target is treated as a class if it is text, or has only the values 0 and 1."
    f" {options.TABLES}"
    "\n\nA comparison of a table takes minutes, and the bar says how many are left once the first row is done. Nothing"
    " is kept of one that is stopped: the same command starts again. For a first look: [bold]--seeds 1[/]."
    + options.examples(
        "compare",
        "compare houses.csv --target price",
        "compare sunspots --guides dropout,mean-field --seeds 5",
        "compare iris.parquet --target species --json > iris.json",
    )
)


@options.with_settings("guide")
def compare(
    data: Annotated[str, typer.Argument(metavar="DATA", help="co2, sunspots or a file.")] = "co2",
    *,
    settings: dict[str, Any],
    guides: Annotated[
        list[str] | None,
        options.computing_option(
            metavar="NAMES",
            help=f"Comma-separated, from {', '.join(options.GUIDE_NAMES)}; by default"
            f" {', '.join(options.DEFAULT_GUIDES)}.",
        ),
    ] = None,
    reference: Annotated[
        Literal["nuts", "none"] | None,
        options.computing_option(
            help="What guides are compared with: by default the exact posterior for co2 and sunspots, and nothing for"
            " tables. nuts samples the posterior (at T = 1, noise fixed); slow, for small networks only."
        ),
    ] = None,
    seeds: Annotated[int, options.number_option(help="Training runs per guide.")] = 3,
    samples: Annotated[
        int,
        options.number_option(
            help=f"Weight draws per prediction; by default those by which fit scores. predict takes {SAMPLES}: it has"
            " the rows in pieces, and not all of them at once for every guide."
        ),
    ] = SCORED,
    device: options.Device = "auto",
    out: Annotated[Path, options.output_option(metavar="FOLDER", help="Folder for the results.")] = Path(
        "out", "compare"
    ),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare posterior approximations on one set of data."""
    from pyro_dropout.tables.settings import settings_of

    named = options.listed(guides) or options.DEFAULT_GUIDES
    names = list(dict.fromkeys(settings_of({"guide": name})[1].guide for name in named))
    for name in names:
        if name not in options.GUIDE_NAMES:
            raise options.refusal("--guides", f"unknown guide {name!r}; choose from {', '.join(options.GUIDE_NAMES)}.")
    if settings["members"] is not None and not set(names) & options.HAS_MEMBERS:
        raise options.refusal("--members", f"only an ensemble has members, not {', '.join(names)}.")
    where, reading = options.place(device), settings_of(settings)[0]
    from pyro_dropout.comparison.folder import claimed_folder, scores_of, write_folder
    from pyro_dropout.judging.diagnostics.arviz_export import arviz
    from pyro_dropout.tabular.compare_table import AUTOMATIC, compare_table

    with claimed_folder(out) as killed:
        if killed:
            complain(f"note: an earlier comparison into {out} was killed; all guides are trained again.")
        arviz()  # the results are written with it at the end: a broken installation fails before the work
        how: Record = {"seeds": list(range(reading.seed, reading.seed + seeds)), "samples": samples}
        found = _data(data, settings, reading)
        labels = {"title": f"{found.name}: posterior approximations compared", "x": found.x_name, "y": found.y_name}
        labels |= {"note": found.note, "command": shlex.join(["pyro-dropout", *sys.argv[1:]])}
        how |= {"progress": not quiet, "labels": labels, "device": where}
        if found.encoding is None:
            result = _compare_series(found, names, settings, reference, how)
        else:
            plans = {AUTOMATIC: settings_of(settings)[1:]}
            for name in names:
                members = settings["members"] if name in options.HAS_MEMBERS else None
                plans[name] = settings_of(settings | {"guide": name, "members": members})[1:]
            result = compare_table(found, plans, reference="nuts" if reference == "nuts" else None, **how)
        result.train, result.test = found.train, found.test  # figures are drawn on the CPU
        files, complaints = write_folder(result, out, samples, reading.seed)
    for complaint in complaints:
        complain(complaint)
    record: Record = {"data": found.name, "about": found.note, "scores": scores_of(result), "ranking": result.ranking}
    record |= {"seconds": round(result.seconds, 2), "folder": str(out), "files": files}
    answer(record, as_json, _lines(found, result, out, files))
    if not any(row.scores for row in result.rows):
        complain("no guide could be trained; the notes in the table say why.")
        raise typer.Exit(1)


def _data(name: str, settings: "Record", reading: "Reading") -> "Dataset":
    """Return a bundled series, or a table with held-back rows; raise if options are given that are not for it."""
    from pyro_dropout.datasets.bundled import BUNDLED
    from pyro_dropout.tables.reading import read

    if name in BUNDLED:
        for option in ("target", "scale", "noise"):
            if settings[option] not in (None, "auto", "plain", "constant"):
                raise options.refusal(f"--{option}", f"{name!r} has its own target and model; --{option} is for files.")
        return BUNDLED[name]()
    if not reading.held_back:
        raise options.refusal("--held-back", "compare needs some held-back rows for the scores.")
    if not Path(name).exists() and not Path(name).suffix:
        raise typer.BadParameter(f"{name!r} is neither a file nor a bundled data set ({', '.join(BUNDLED)}).")
    return read(name, reading)


def _compare_series(
    data: "Dataset", names: list[str], settings: "Record", reference: str | None, how: "Record"
) -> "Comparison":
    """Return the comparison of guides on a bundled series, all with the same network."""
    from pyro_dropout.comparison.compare import compare as run
    from pyro_dropout.comparison.standard_models import WaveProcess, standard_guide, wave_model
    from pyro_dropout.registry import resolve_guide
    from pyro_dropout.training.optimisers import cosine_decay

    width, steps, lr = (settings["width"] or 50, settings["steps"] or 600, settings["lr"] or 0.03)
    batch, members = settings["batch_size"], {"members": settings["members"]} if settings["members"] else {}
    device = how.pop("device")
    train, test = ((x.to(device), y.to(device)) for x, y in (data.train, data.test))
    model = wave_model(data.train, 2 * width).to(device)
    against: object = {"nuts": "nuts", "none": None}.get(reference or "", WaveProcess(model, train))
    if reference is None:
        how["labels"]["reference"] = f"exact: the network with infinitely many waves, not {2 * width}"
    return run(
        model,
        {name: standard_guide(name, **(members if name in options.HAS_MEMBERS else {})) for name in names},
        train,
        test,
        reference=against,
        steps=steps,
        lr=lr,
        batch_size=batch if batch is not None and batch < len(data.train[0]) else None,
        schedule=cosine_decay(steps),
        method={name: "linearised" for name in names if resolve_guide(name).method == "linearised"},
        compile="auto" if settings["compile"] is None else settings["compile"],
        **how,
    )


def _lines(data: "Dataset", result: "Comparison", out: Path, files: list[str]) -> list[str]:
    """Return what is printed: the scores, the data, and what follows from both."""
    from pyro_dropout.comparison.report.page import plain_findings

    shown = os.path.relpath(out)
    return [
        *str(result).splitlines(),
        "",
        data.note,
        *(f"- {sentence}" for sentence in plain_findings(result)),
        f"{result.seconds:.0f} s in total. Report: {os.path.join(shown, 'report.html')}",
        f"{len(files) - 1} more files next to it: scores in table.csv, figures/, and posteriors/ for ArviZ.",
    ]
