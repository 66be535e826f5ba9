"""``pyro-dropout benchmark``: how close posterior approximations are to posteriors that are known."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import Terminated, answer, complain

HELP = (
    "Measure how close posterior approximations are to posteriors that are known."
    "\n\nENTRY is a guide of this package by its name; [bold]MODULE:NAME[/] or [bold]FILE.py:NAME[/], which is a Pyro"
    " guide, a function of the model that returns one, or a function of the model and its data that returns a"
    " posterior; or a .npz or .safetensors file of draws, or a folder with one for each problem. Without any, all"
    " guides of this package take part. Every posterior meets every problem from every seed, and is scored against a"
    " reference."
    "\n\nThe same command continues a run that was stopped; entries, problems and seeds can be added to its folder. The"
    " results are JSON, one file each, and report.html."
    + options.examples(
        "benchmark",
        "benchmark my_package:MyGuide mean-field laplace",
        "benchmark my_guide.py:MyGuide --problems last-layer --seeds 5",
        "benchmark --list --suite full",
    )
)
Suite = Literal["small", "full"]


def benchmark(
    entries: Annotated[list[str] | None, typer.Argument(metavar="[ENTRY]...", help="What takes part.")] = None,
    *,
    suite: Annotated[Suite, typer.Option(metavar="NAME", help="small, or full for all problems.")] = "small",
    problems: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Comma-separated names of problems, instead of a whole suite."),
    ] = None,
    guides: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"Comma-separated guides of this package to compare with, from {', '.join(options.GUIDE_NAMES)}.",
        ),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--no-held-out/--held-out",
            help="Leave out held-out problems and test points: for as long as you improve a posterior.",
        ),
    ] = False,
    shown: Annotated[bool, typer.Option("--list", help="Show the problems, and stop.")] = False,
    seeds: Annotated[int, options.number_option(help="Runs of each posterior on each problem.")] = 3,
    steps: Annotated[int, options.number_option(help="Training steps of a guide.")] = 5000,
    lr: Annotated[float, options.computing_option(metavar="RATE", help="Their learning rate, which falls.")] = 0.02,
    samples: Annotated[int, options.number_option(help="Draws of each posterior.")] = 1000,
    workers: Annotated[int, options.number_option(help="Processes that share the work.")] = 1,
    out: Annotated[Path, options.output_option(metavar="FOLDER", help="Folder for the results.")] = Path(
        "out", "benchmark"
    ),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how close posterior approximations are to posteriors that are known."""
    from pyro_dropout.benchmark.problems import problems as known

    if shown:
        asked = known(suite)
        pairs = ((f"{name}: {each.title}{', held out' * each.held_out}", each.about) for name, each in asked.items())
        lines = [line for title, about in pairs for line in (title, f"    {about}")]
        answer({name: {"title": each.title, "held_out": each.held_out} for name, each in asked.items()}, as_json, lines)
        return
    from pyro_dropout.benchmark.run import benchmark as run
    from pyro_dropout.comparison.folder import scores_of

    try:
        results = run(
            [*(entries or ()), *options.listed(guides)] or None,
            suite,
            problems=options.listed(problems) or None,
            seeds=seeds,
            steps=steps,
            lr=lr,
            samples=samples,
            held_out=not held_out,
            workers=workers,
            out=out,
            progress=not quiet,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("; the same command continues.") from None
    except Terminated as stop:
        complain("stopped by SIGTERM; the same command continues.")
        raise SystemExit(stop.code) from None
    page = results.to_html()
    tables = {name: (results.on(name), results.ranks(name)) for name in results.problems}
    told = {name: {"scores": scores_of(scores), "ranks": scores_of(ranks)} for name, (scores, ranks) in tables.items()}
    record = {"problems": told, "settings": results.settings, "report": str(page)}
    answer(record, as_json, [*str(results).splitlines(), "", f"Report: {os.path.relpath(page)}"])
    if not any(record.get("scores") for record in results.records):
        raise typer.Exit(1)
