"""Run a benchmark: every posterior on every problem from every seed, one file each, so that a run can be continued."""

import hashlib
import json
import platform
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import active_children, get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import torch
from pyro import set_rng_seed
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dropout.benchmark.posteriors import Entry, as_posterior, entry_of, linearised, weights_of
from pyro_dropout.benchmark.problems import Problem, problems
from pyro_dropout.benchmark.reference import versions
from pyro_dropout.benchmark.result import CELLS, FORMAT, MARK, Results
from pyro_dropout.benchmark.scores import Drawn, Truth, rows_of, scored
from pyro_dropout.comparison.findings import REFERENCE, distinct
from pyro_dropout.comparison.folder import write_record
from pyro_dropout.comparison.trained import Owned, one_by_one
from pyro_dropout.errors import DivergedError, PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.process_state import forked, one_at_a_time
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import check_choice, check_count, check_positive, check_seed, describe
from pyro_dropout.protocols import HasMean, Record, Weights
from pyro_dropout.registry import guides
from pyro_dropout.training.checkpoints.safe_files import claimed
from pyro_dropout.training.optimisers import cosine_decay

_PIECE = 128  # draws whose quantities are computed at once


@dataclass(frozen=True)
class Settings:
    """How guides are trained and read; a folder holds results of one setting.

    Attributes:
        steps: of Adam, over all data, with a cosine schedule.
        lr: its first learning rate.
        samples: draws of each posterior.
        held_out: whether held-out test points and problems are used too; False while something is improved.
    """

    steps: int = 5000
    lr: float = 0.02
    samples: int = 1000
    held_out: bool = True


@one_at_a_time
@forked()
def benchmark(
    entries: Mapping[str, object] | Sequence[object] | None = None,
    suite: Literal["small", "full"] = "small",
    *,
    problems: Sequence[str] | None = None,
    seeds: int | Sequence[int] = 3,
    steps: int = Settings.steps,
    lr: float = Settings.lr,
    samples: int = Settings.samples,
    held_out: bool = True,
    workers: int = 1,
    out: str | Path = Path("out", "benchmark"),
    progress: bool = True,
) -> Results:
    """Measure how close posteriors are to known ones, and write what is found into a folder.

    Every posterior meets every problem from every seed. Each result is a JSON file in the folder: an interrupted run
    goes on where it stopped, and further posteriors, problems and seeds can be added. What fails or diverges gets a row
    that says so.

    Args:
        entries: what takes part: names of registered guides, "module:name", files with draws, guides' classes,
            functions ``model -> guide`` or ``(model, data) -> posterior``; a list of them, or a dict by name. All
            registered guides by default.
        suite: "small", or "full" for all problems.
        problems: the names of some problems instead of a whole suite.
        seeds: the number of seeds, or a list of seeds.
        steps: training steps of guides.
        lr: their learning rate.
        samples: draws of each posterior.
        held_out: whether to use held-out test points and problems; give False while you improve a posterior.
        workers: processes that share the work. Each has its share of the cores; the results are the same but for
            rounding, which depends on the number of threads, and for the seconds.
        out: the folder.
        progress: show a progress bar, with the remaining time.

    Returns:
        The results of all that is in the folder: print them, or write a page with ``to_html``.

    Example:
        >>> import tempfile
        >>> from pyro_dropout.benchmark import benchmark
        >>> quick = {"problems": ["line"], "seeds": 1, "steps": 50, "progress": False, "out": tempfile.mkdtemp()}
        >>> found = benchmark(["mean-field"], **quick)
        >>> [row.name for row in found.on("line").rows]
        ['reference', 'mean-field']
    """
    settings = Settings(steps, lr, samples, held_out)
    counts = {"seeds": len(seeds) if isinstance(seeds, Sequence) else seeds, "steps": steps, "samples": samples}
    counts["workers"] = workers
    for name, count in counts.items():
        check_count(name, count)
    check_positive("lr", lr)
    numbers = list(seeds) if isinstance(seeds, Sequence) else list(range(seeds))
    for number in numbers:
        check_seed(number)
    posed = _problems(suite, problems, held_out)
    entered = _entries(entries)
    with claimed(Path(out), make=True):
        _check_settings(Path(out), settings)
        plan = [(entry, problem, seed) for problem in posed for entry in entered for seed in numbers]
        files = [
            Path(out, CELLS, quote(entry.name, safe=""), f"{problem.name}-{seed}.json") for entry, problem, seed in plan
        ]
        left = [(*each, file) for each, file in zip(plan, files, strict=True) if not _is_done(file, *each[:2])]
        with tqdm(total=len(plan), initial=len(plan) - len(left), unit="run", disable=not progress) as bar:
            if (count := min(workers, len(left))) > 1:
                for done in _shared(left, settings, count):
                    bar.set_postfix_str(f"done: {done}")
                    bar.update()
            else:
                for entry, problem, seed, file in left:
                    bar.set_postfix_str(f"{entry.name} on {problem.name}, seed {seed}")
                    write_record(file, measured(entry, problem, seed, settings))
                    bar.update()
        return Results.read(out)


def _problems(suite: Any, names: Sequence[str] | None, held_out: bool) -> list[Problem]:
    known = problems("full" if names is not None else suite)
    for name in names or ():
        check_choice("a name in problems", name, list(known))
    chosen = known if names is None else {name: known[name] for name in names}
    found = [problem for problem in chosen.values() if held_out or not problem.held_out]
    if not found:
        raise PyroDropoutError("there is no problem left: without held_out, give some that are not held out.")
    return found


def _entries(given: Mapping[str, object] | Sequence[object] | None) -> list[Entry]:
    if given is None:
        given = list(guides())
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence) or not given:
        raise PyroDropoutError(
            f"entries must be a list such as ['mean-field'], or a dict by name; got {describe(given)}."
        )
    pairs = given.items() if isinstance(given, Mapping) else [("", each) for each in given]
    found = [entry_of(each, str(name)) for name, each in pairs]
    found = [replace(entry, name=name) for entry, name in zip(found, distinct(e.name for e in found), strict=True)]
    if REFERENCE in {entry.name for entry in found}:
        raise PyroDropoutError(f"a posterior cannot be called {REFERENCE!r}.")
    return found


Job = tuple[Entry, Problem, int, Path]


def _shared(jobs: list[Job], settings: Settings, workers: int) -> Iterator[str]:
    """Write the record of every job in one of several processes, and yield what is done."""
    for entry in {each.name: each for each, *_ in jobs}.values():
        _check_sendable(entry)
    others = set(active_children())
    threads = max(1, torch.get_num_threads() // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_started, initargs=(threads,))
    try:
        calls = [
            pool.submit(_elsewhere, each.given, (each.name, each.what, each.code), problem.name, seed, file, settings)
            for each, problem, seed, file in jobs
        ]
        for call in as_completed(calls):
            yield call.result()
    except BaseException as cause:
        for worker in set(active_children()) - others:
            worker.terminate()
        if not isinstance(cause, BrokenProcessPool):
            raise
        raise PyroDropoutError(
            f"a worker ended, perhaps for lack of memory: with fewer than {workers} each has more of it. What is done"
            " is kept, and the same command continues. (A script that calls this needs if __name__ == '__main__'.)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _check_sendable(entry: Entry) -> None:
    """Raise unless another process can make an entry of what was given."""
    typed = getattr(entry.given, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    try:
        ForkingPickler.dumps(entry.given)
        cause = "other processes do not have what is defined in a notebook" if typed else ""
    except Exception as error:  # whatever an object says that cannot be pickled
        cause = str(error)
    if cause:
        raise PyroDropoutError(
            f"{entry.name!r} cannot be sent to other processes: {cause}. Give it as FILE.py:NAME, or give workers=1."
        )


def _started(threads: int) -> None:
    """Prepare a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the benchmark ends it
    torch.set_num_threads(threads)


def _elsewhere(given: object, known: tuple[str, str, str], name: str, seed: int, file: Path, settings: Settings) -> str:
    """Write the record of one job, in a worker."""
    (problem,) = _problems("full", [name], held_out=True)
    own, what, code = known
    write_record(file, measured(replace(entry_of(given, own), what=what, code=code), problem, seed, settings))
    return f"{own} on {name}, seed {seed}"


# --- the folder -------------------------------------------------------------------------------------------------------


def _check_settings(folder: Path, settings: Settings) -> None:
    """Write the settings of a new folder, or raise if it has results of others."""
    asked = {**asdict(settings), "pyro-dropout": version("pyro-dropout")}
    if not (folder / MARK).exists():
        if any(each.name not in (".lock", CELLS) for each in folder.iterdir()):
            raise PyroDropoutError(
                f"{str(folder)!r} is not empty and holds no benchmark; give a new or an empty folder."
            )
        write_record(folder / MARK, {"format": FORMAT, "settings": asked})
    found = json.loads((folder / MARK).read_text("utf-8"))["settings"]
    wrong = [f"{name} {found.get(name)} and not {value}" for name, value in asked.items() if found.get(name) != value]
    if wrong:
        raise PyroDropoutError(
            f"{str(folder)!r} has results with {', '.join(wrong)}. Give another folder, or the same."
        )


def _stamp(entry: Entry, problem: Problem) -> Record:
    """Return what a result depends on: the code of the posterior, and the problem with its reference."""
    return {"code": entry.code, "reference": hashlib.sha256(problem.path.read_bytes()).hexdigest()}


def _is_done(file: Path, entry: Entry, problem: Problem) -> bool:
    """Whether a result is there, of this very posterior; what failed, or has changed since, is run again."""
    if not file.exists():
        return False
    record = json.loads(file.read_text("utf-8"))
    if record["what"] != entry.what:
        raise PyroDropoutError(
            f"the folder has results of another {entry.name!r}, from {record['what']!r} and not {entry.what!r}. Give"
            " another name or another folder."
        )
    same = bool(entry.code) and all(record[name] == each for name, each in _stamp(entry, problem).items())
    return same and not record["note"].startswith("failed")


# --- one posterior on one problem -------------------------------------------------------------------------------------


def measured(entry: Entry, problem: Problem, seed: int, settings: Settings) -> Record:
    """Return the record of one posterior on one problem from one seed; errors are in its note."""
    record: Record = {
        "entry": entry.name, "what": entry.what, "problem": problem.name, "seed": seed, "note": "",
        **_stamp(entry, problem),
        "when": time.strftime("%Y-%m-%d %H:%M %z"), "versions": versions("pyro-dropout", "torch", "pyro-ppl"),
        "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)",
    }  # fmt: skip
    set_rng_seed(seed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model, posterior, costs = _trained(entry, problem, seed, settings)
            drawn = _drawn(model, posterior, entry, problem, settings)
            rows = rows_of(problem, settings.held_out)
            asked = replace(drawn, quantities=drawn.quantities[:, rows])
            found = scored(asked, Truth.of(problem, rows), problem.kind)
            record |= costs | {"scores": found, "draws": len(drawn.quantities), "band": _band(drawn.quantities)}
        except DivergedError as cause:
            record["note"] = f"diverged: {cause}"
        except Exception as cause:  # whatever is wrong with a posterior must not stop the others
            record["note"] = f"failed: {type(cause).__name__}: {cause}"
    record["warnings"] = sorted({str(each.message) for each in said})
    return record


def _trained(entry: Entry, problem: Problem, seed: int, settings: Settings) -> tuple[Any, Any, Record]:
    """Return a model, its posterior, and what that cost."""
    started, model, gradients = time.perf_counter(), problem.make(seed), None
    if entry.trains:
        options = {"steps": settings.steps, "lr": settings.lr, "schedule": cosine_decay(settings.steps)}
        call = ModelCall(model, problem.arguments)
        pairs, _, lost = one_by_one(lambda seed: (model, entry.make(model)), [seed], call, options)
        if lost:
            raise DivergedError("the loss was not finite.")
        model, posterior = pairs[0]
        copies = posterior.members if isinstance(posterior, Ensemble) else 1
        gradients = settings.steps * (call.count or 1) * copies
    else:
        posterior = as_posterior(entry.make(model, problem.arguments, problem.name))
        gradients = getattr(posterior, "gradients", None)
    costs = {"seconds": round(time.perf_counter() - started, 3), "gradients": gradients}
    return model, posterior, costs | {"parameters": _size(posterior)}


def _size(posterior: Any) -> int | None:
    """Return how many numbers a posterior keeps; None if that is not known."""
    if isinstance(posterior, Owned):
        return sum(value.numel() for value in {*posterior._state["params"].values()})  # some have two names
    if isinstance(posterior, nn.Module):
        return sum(value.numel() for value in posterior.parameters())
    draws = getattr(posterior, "draws", None)
    return sum(value.numel() for value in draws.values()) if isinstance(draws, dict) else None


def _drawn(model: Any, posterior: Any, entry: Entry, problem: Problem, settings: Settings) -> Drawn:
    weights = weights_of(posterior, ModelCall(model, problem.arguments), settings.samples)
    if is_network(model) and getattr(posterior, "method", entry.method) == "linearised":
        if not isinstance(posterior, HasMean):
            raise PyroDropoutError(f"method 'linearised' needs posterior.mean(); {type(posterior).__name__} has none.")
        model = linearised(model, posterior.mean())
    count = len(next(iter(weights.values())))
    pieces: list[Weights] = [
        {name: value[k : k + _PIECE] for name, value in weights.items()} for k in range(0, count, _PIECE)
    ]
    with torch.no_grad():
        quantities: Tensor = torch.cat([problem.quantities(model, each).double().cpu() for each in pieces])
    if not bool(quantities.isfinite().all()):
        raise DivergedError("the draws' predictions are not numbers.")
    return Drawn(quantities, {name: weights[name].cpu() for name in problem.reference.moments})


def _band(quantities: Tensor) -> Record:
    """Return the mean and the ends of the central 95 % interval of every quantity."""
    ends = torch.quantile(quantities, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    parts = {"mean": quantities.mean(0), "low": ends[0], "high": ends[1]}
    return {name: [float(f"{each:.5g}") for each in part.flatten().tolist()] for name, part in parts.items()}
