"""Posterior approximations side by side: one model, one set of data, one table."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pyro import poutine
from torch import nn
from tqdm.auto import tqdm

from pyro_dropout.comparison.exams import Exam, bounds_of, check_sites, numbered
from pyro_dropout.comparison.figure import draw_bands, draw_scores
from pyro_dropout.comparison.findings import REFERENCE, Findings, Row, Score, distinct
from pyro_dropout.comparison.report.page import page
from pyro_dropout.comparison.standard_models import standard_guide
from pyro_dropout.comparison.trained import Trained, as_a_fleet, for_seed, one_by_one
from pyro_dropout.engines.choose import Compile
from pyro_dropout.errors import (
    DivergedError,
    IgnoredInputsWarning,
    PyroDropoutError,
    RangeError,
    ShapeError,
    warn_caller,
)
from pyro_dropout.generative.inputs import check_inputs, check_pairs, inputs_of, takes_all
from pyro_dropout.generative.likelihoods.likelihood import Likelihood as OwnLikelihood
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.process_state import forked, one_at_a_time
from pyro_dropout.guides.summary import ignored_inputs
from pyro_dropout.mathematics.checks import (
    also,
    check_choice,
    check_count,
    check_positive,
    check_seed,
    describe,
)
from pyro_dropout.protocols import Figure, PyroModel, Record
from pyro_dropout.references.nuts.nuts import nuts
from pyro_dropout.registry import guide_names
from pyro_dropout.training.optimisers import Schedule
from pyro_dropout.training.svi import check_compile

MakeGuide = Callable[..., PyroModel]  # a function of the model
Item = TypeVar("Item")


class Comparison(Findings):
    """The result of ``compare``: one row per posterior, as a table, as figures and as an HTML report.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> options = {"steps": 100, "lr": 0.03, "seeds": 1, "samples": 50, "compile": False, "progress": False}
        >>> guides, train, test = {"mean field": pdrop.AutoMeanField}, (x, 2 * x), (x + 0.1, 2 * x + 0.2)
        >>> found = pdrop.compare(model, guides, train, test, **options)
        >>> [row.name for row in found.rows], found.rows[0].scores["rmse"].mean < 0.2
        (['mean field'], True)
    """

    def plot(self) -> Figure:
        """Draw predictive bands of all guides on shared axes; with several inputs, calibration curves and scores."""
        return draw_bands(self) if self.curves else draw_scores(self)

    def plot_scores(self) -> Figure:
        """Draw calibration curves and the main scores with their errors."""
        return draw_scores(self)

    def to_html(self, path: str | Path) -> Path:
        """Write a self-contained HTML report with table, figures and explanations, and return its path.

        Args:
            path: of the report; an existing file is replaced.
        """
        path = Path(path)
        if path.is_dir():
            raise PyroDropoutError(f"path must be a file to write the page to; {str(path)!r} is a folder.")
        if not path.parent.is_dir():
            raise PyroDropoutError(f"the folder of path does not exist: {str(path.parent)!r}.")
        path.write_text(page(self), "utf-8")
        return path


@also(num_samples="samples")
@one_at_a_time
@forked()
def compare(
    model: object,
    guides: Mapping[str, MakeGuide | str] | Sequence[MakeGuide | str],
    train: object,
    test: object,
    *,
    reference: object = None,
    seeds: int | Sequence[int] = 3,
    steps: int = 2000,
    lr: float = 0.01,
    batch_size: int | None = None,
    schedule: Schedule | None = None,
    samples: int = 500,
    method: str | Mapping[str, str] = "mc",
    loss: object = None,
    compile: Compile = "auto",
    progress: bool = True,
    labels: Mapping[str, str] | None = None,
) -> Comparison:
    """Fit several guides to one model, each from several seeds, and score all of them in the same way.

    The seeds of a guide are trained as one fleet. A guide that diverges or fails gets a row that says so. A Pyro model
    that is not a network is trained one seed after another and scored by its observed sites at the test data: with one
    site, by all scores that apply to its distribution; with several, by their log density alone.

    On one CPU the same seeds give the same scores, to the last digit, if training is compiled both times or neither
    time. Compiled and eager training use the same draws, but round sums in a different order, and the difference grows
    in long training. On a GPU neither is guaranteed.

    Args:
        model: a network or another module, which is copied and reinitialised for every seed, or any Pyro model. A
            ``Standardised`` model takes raw data.
        guides: {name: function that takes the model and returns a guide}, or a list of such functions,
            which are called by their ``__name__``, with a number after a name that repeats. For a network, a guide can
            be given by its name on the command line, such as "mean-field", with the settings that it has there.
        train: (x, y) to fit. For a Pyro model that is not a network, a tuple of its arguments, data included, or a
            dict of its keyword arguments.
        test: (x, y) to score on, or arguments in the same form.
        reference: what the predictive distributions are compared with: "nuts", which samples the true posterior of a
            small network, or a posterior that ``predict`` accepts.
        seeds: the number of seeds, or a list of seeds.
        steps: training steps, with Adam.
        lr: learning rate.
        batch_size: points in a mini-batch; all points by default.
        schedule: multiplies ``lr``, as in ``fit``.
        samples: draws of the weights for every prediction.
        method: how guides of networks predict, as in ``predict``: "mc" or "linearised", for all of them or by name, as
            in {"laplace": "linearised"}; the others predict with "mc", and so does the reference.
        loss: ``ELBO()`` by default.
        compile: whether training is compiled, as in ``fit``.
        progress: show a progress bar, guide by guide.
        labels: {"title": ..., "x": ..., "y": ..., "note": ..., "command": ...} for the figures and the HTML report;
            the command is the one that reproduces the comparison.

    Returns:
        The comparison, with its table, figures and report.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> guides = {"dropout": pdrop.AutoDropout, "mean field": pdrop.AutoMeanField}
        >>> options = {"steps": 100, "lr": 0.03, "seeds": 2, "samples": 50, "compile": False, "progress": False}
        >>> found = pdrop.compare(model, guides, (x, 2 * x), (x + 0.1, 2 * x + 0.2), **options)
        >>> [row.name for row in found.rows], found.cell(found.rows[0], "elbo")
        (['dropout', 'mean field'], 'undefined, σ = 0')
    """
    start = time.perf_counter()
    named = _named(guides)
    counts = {"seeds": len(seeds) if isinstance(seeds, Sequence) else seeds, "steps": steps, "samples": samples}
    for name, count in (counts | ({} if batch_size is None else {"batch_size": batch_size})).items():
        check_count(name, count)
    numbers = list(seeds) if isinstance(seeds, Sequence) else list(range(seeds))
    for number in numbers:
        check_seed(number)
    check_positive("lr", lr)
    check_compile(compile)
    if labels is not None and not isinstance(labels, Mapping):
        raise PyroDropoutError(f"labels must be a dict such as {{'title': ...}}; got {describe(labels)}.")
    methods = dict(method) if isinstance(method, Mapping) else dict.fromkeys(named, method)
    for name, each in methods.items():
        check_choice("a name in method", name, list(named))
        check_choice("method", each, ("mc", "linearised"))
    if not callable(model):
        raise PyroDropoutError(f"model must be a network or any other Pyro model; got {describe(model)}.")
    first = for_seed(model, numbers[0])
    network = is_network(first)
    if not network and "linearised" in methods.values():
        raise PyroDropoutError("method='linearised' is for networks; other Pyro models predict with draws.")
    given = _pair if network else _arguments
    exam = Exam(given("train", first, train), given("test", first, test), samples)
    if not network:
        check_sites(exam.call, exam.asked)
    options: Record = {"steps": steps, "lr": lr, "batch_size": batch_size, "loss": loss, "compile": compile}
    training = options | {"schedule": schedule}
    rows: list[Row] = []
    if reference is not None:
        rows.append(reference_row(reference, first, exam, progress))
        exam = replace(exam, reference=rows[0].answer)
    train_all = as_a_fleet if network else one_by_one
    for name, make in progress_over(named, progress):
        own = replace(exam, method=methods.get(name, "mc"))
        build = partial(_built, model, make)
        rows.append(examined(name, partial(train_all, build, numbers, own.call, training), own))
    seen, held_back = (call.args if network else numbered(call) for call in (exam.call, exam.asked))
    said = "none" if reference is None else reference if isinstance(reference, str) else type(reference).__name__
    settings = {
        "seeds": len(numbers), **options, "schedule": getattr(schedule, "__name__", None), "samples": samples,
        "reference": said, "method": {name: how for name, how in methods.items() if how != "mc"},
        "which_seeds": numbers, "device": str(seen[0].device),
        "when": time.strftime("%Y-%m-%d %H:%M %z"), "model": str(first), **(labels or {}),
    }  # fmt: skip
    return Comparison(rows, seen, held_back, settings, time.perf_counter() - start, None if network else exam.call)


def progress_over(named: Mapping[str, Item], shown: bool) -> Iterator[tuple[str, Item]]:
    """Yield the items, with a progress bar that says which is at work."""
    with tqdm(total=len(named), desc="compare", unit="guide", leave=False, disable=not shown) as bar:
        for name, item in named.items():
            bar.set_postfix_str(name)
            yield name, item
            bar.update()


# --- one row ------------------------------------------------------------------------------------------------------


def examined(name: str, train: Callable[[], Trained], exam: Exam) -> Row:
    """Return the row of a posterior: trained from all seeds, and scored; errors are recorded in its note."""
    row = Row(name)
    started = time.perf_counter()
    try:
        row.trained, each, lost = train()
    except Exception as cause:
        row.note = f"diverged: {cause}" if isinstance(cause, DivergedError) else f"failed: {_told(cause)}"
        return row
    spent = time.perf_counter() - started
    notes = []
    if lost:
        others = "; the others are scored." if row.trained else "."
        notes.append(f"diverged with {lost} of {lost + len(row.trained)} seeds{others}")
    ignoring = [told for _, guide in row.trained if (told := ignored_inputs(guide))]
    if ignoring:
        notes.append(f"with {len(ignoring)} of {len(row.trained)} seeds, {ignoring[0]}")
    row.note = " ".join(notes)
    if not row.trained:
        return row
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=IgnoredInputsWarning)  # the note says it
            _score(row, exam)
    except Exception as cause:
        row.note = f"{row.note} not scored: {_told(cause)}".lstrip()
        row.scores = {}
        return row
    row.scores |= {"us": Score([each]), "seconds": Score([spent])}
    return row


def _told(cause: Exception) -> str:
    return f"{type(cause).__name__}: {cause}"


def _score(row: Row, exam: Exam) -> None:
    """Fill in the scores of a row; the reference has those of its predictions alone."""
    for model, guide in row.trained:
        scores, answer = exam.answers(model, guide)
        row.answer = answer if row.answer is None else row.answer
        if row.name != REFERENCE:
            scores["parameters"] = sum(p.numel() for p in guide.parameters()) if isinstance(guide, nn.Module) else 0
            try:
                bounds, reasons = bounds_of(replace(exam.call, model=model), guide, exam.samples, exam.seed)
            except Exception as cause:  # a custom guide may predict well without a computable ELBO
                bounds, reasons = {}, {"elbo": "not computed"}
                row.note = f"{row.note} no ELBO: {_told(cause)}".lstrip()
            scores |= bounds
            for name, reason in reasons.items():
                row.scores.setdefault(name, Score()).note = reason
        for name, value in scores.items():
            row.scores.setdefault(name, Score()).add(value)
    if row.answer is not None:
        row.curve = exam.curve(row.answer, *row.trained[0])


def _built(model: PyroModel, make: MakeGuide, seed: int) -> tuple[PyroModel, PyroModel]:
    own = for_seed(model, seed)
    torch.manual_seed(seed)
    return own, make(own)


def reference_row(reference: object, model: PyroModel, exam: Exam, progress: bool) -> Row:
    """Return the row that the others are compared with: "nuts", sampled here, or a posterior that is given."""
    if isinstance(reference, str):
        check_choice("reference", reference, ["nuts"], "a posterior that predict takes")
        _warn_of_another_model(model)
        reference = nuts(model, *exam.call.args, progress=progress, **exam.call.kwargs)
    row = Row(REFERENCE, trained=[(model, reference)])
    _score(row, exam)
    return row


def _warn_of_another_model(model: PyroModel) -> None:
    """Say so where guides are trained on another model than NUTS samples: with a learned noise, or at T < 1."""
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    learned = any(list(part.parameters()) for part in parts if isinstance(part, OwnLikelihood))
    marks = [part.tempered(name, 1) for part in parts if isinstance(part, BayesianNet) for name in part.sites]
    if learned or any(mark is not None and mark.weights is not None for mark in marks):
        warn_caller(
            "the reference is sampled at T = 1 and at the noise that the model starts with, but guides learn their"
            " noise or are trained at the temperature of the prior, so distances to it are partly those. Take a fixed"
            " noise and Prior() to compare with NUTS.",
        )


# --- what is given --------------------------------------------------------------------------------------------------


def _named(guides: object) -> dict[str, MakeGuide]:
    """Return what makes each guide, by the name of its row."""
    if not isinstance(guides, Mapping):
        if not isinstance(guides, Sequence) or isinstance(guides, str):
            raise PyroDropoutError(
                "guides must be a list of names such as ['dropout', 'mean-field'] or of functions of the model, or a"
                f" dict {{name: function of the model}}; got {type(guides).__name__}."
            )
        given = [make if isinstance(make, str) else getattr(make, "__name__", "") for make in guides]
        names = distinct(name or f"guide {k + 1}" for k, name in enumerate(given))
        guides = dict(zip(names, guides, strict=True))
    makes = {}
    for name, make in guides.items():
        if isinstance(make, str):
            check_choice("a name in guides", make, guide_names())
        makes[name] = standard_guide(make) if isinstance(make, str) else make
    wrong = [name for name, make in makes.items() if not callable(make) or isinstance(make, nn.Module)]
    if wrong or not makes:
        what = f"{wrong[0]!r} is {type(makes[wrong[0]]).__name__}" if wrong else "there is none"
        raise PyroDropoutError(
            "guides must be functions that return a guide for a model, such as pyro_dropout.AutoDropout or lambda"
            f" model: pyro_dropout.AutoDropout(model, keep=0.8), since every seed needs its own guide; {what}."
        )
    if REFERENCE in makes:
        raise PyroDropoutError(f"a guide cannot be called {REFERENCE!r}.")
    return makes


def _arguments(name: str, model: PyroModel, data: object) -> ModelCall:
    """Return the call of a model that is no network."""
    if not isinstance(data, tuple | list | Mapping):
        raise ShapeError(
            f"{name} must be a tuple of the model's arguments, or a dict of its keyword arguments; got"
            f" {type(data).__name__}."
        )
    call = ModelCall(model, (), dict(data)) if isinstance(data, Mapping) else ModelCall(model, tuple(data))
    return call.with_num_data(only_if_needed=True)


def _pair(name: str, model: Any, data: object) -> ModelCall:
    """Return (x, y) as arguments; raise before training if they are no such pair, or do not fit the network."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ShapeError(f"{name} must be a pair of tensors (x, y); got {type(data).__name__}.")
    x, y = inputs_of(data[0], f"{name}: x", takes_all(model)), data[1]
    check_pairs(name, x, y)
    check_inputs(x, f"{name}: x")
    try:
        with torch.no_grad(), poutine.block(), forked():
            f = model(x)
            model.likelihood.check_values(f, model.likelihood.checked(f, y))
    except (ShapeError, RangeError) as cause:
        raise type(cause)(f"{name}: {str(cause).splitlines()[0]}") from None
    return ModelCall(None, (x, y))
