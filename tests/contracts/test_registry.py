"""One place to add a guide or a likelihood: a module with its entry, here or in another package; all lists have it."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout import protocols, registry
from pyro_dropout.comparison.findings import columns
from pyro_dropout.guides import GUIDES
from pyro_dropout.protocols import FunctionPosterior, HasDraws, HasMean, Posterior
from tests.own_process import ROOT, python

TOY = '''"""Toy: q(w) = Laplace(m, b), independent double exponentials."""

import pyro.distributions as dist

from pyro_dropout.guides.base import SiteGuide, trained
from pyro_dropout.registry import guide


@guide("toy")
class AutoToy(SiteGuide):
    """Independent double exponentials."""

    def __init__(self, model, *, bias="gaussian", **options):
        super().__init__(model, bias=bias, **options)
        self._start()

    def parameters_of(self, site):
        return {"loc": trained(site.start), "log_scale": trained(self.log_width(site))}

    def weight_distribution(self, site, state):
        return dist.Laplace(state.loc, state.log_scale.exp()).to_event(site.start.dim())
'''
BIAS = """from pyro_dropout.registry import score


@score("bias", heading="bias", meaning="Mean of y - E[y].", better="", of=("numbers",))
def bias(prediction, y):
    return (y - prediction.mean).mean()
"""
STUDENT = (Path(__file__).parent / "student_t.py").read_text("utf-8") + "\n\nregister()\n"
COMMAND = ("-m", "pyro_dropout")
FEW = ("--steps", "3", "--samples", "10", "--quiet")


def test_names_read_from_the_source_are_those_that_are_registered() -> None:
    entries = registry.guides()
    assert [entry.name for entry in registry.listed_guides()] == list(entries)
    for listed in registry.listed_guides():
        entry = entries[listed.name]
        assert (entry.alias, entry.order, entry.compared) == (listed.alias, listed.order, listed.compared)
    assert {entry.guide for entry in entries.values() if entry.per_site} == set(GUIDES)
    assert registry.resolve_guide("row-mixture") is entries["mixture"]


@pytest.mark.parametrize("name", registry.guides())
def test_a_guide_is_a_posterior_with_a_mean(name: str) -> None:
    guide = registry.guides()[name].make(pd.BayesianNet(nn.Linear(1, 1)), lambda site: 0.8)
    assert isinstance(guide, Posterior)
    assert isinstance(guide, HasMean)
    assert not isinstance(guide, FunctionPosterior)
    assert isinstance(guide, HasDraws) == ("ensemble" in name)  # it numbers its members


def test_one_class_of_ones_own_is_enough() -> None:
    class Mine:
        def sample_weights(self, n: int) -> dict[str, torch.Tensor]:
            return {"weight": torch.ones(n, 1, 1), "bias": torch.zeros(n, 1)}

    x = torch.linspace(-1, 1, 8).unsqueeze(-1)
    assert isinstance(Mine(), Posterior)
    answer = pd.predict(pd.BayesianNet(nn.Linear(1, 1)), Mine(), x, samples=4, shared=True)
    assert isinstance(answer, protocols.Prediction)
    assert torch.allclose(answer.mean, x)


def check_list(page: str, place: str, pattern: str, names: set[str], lists: int = 1) -> None:
    """Every part of a page that matches ``place`` has each of the names once, and no other."""
    found = re.findall(place, (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == lists, f"{page}: {len(found)} lists of guides, and not {lists}"
    for part in found:
        listed = re.findall(pattern, part, re.MULTILINE)
        missing, unknown = sorted(names - set(listed)), sorted(set(listed) - names)
        assert not missing, f"{page}: {', '.join(missing)} missing in {part[:60]!r}..."
        assert not unknown, f"{page}: {', '.join(unknown)} not registered, in {part[:60]!r}..."
        assert len(listed) == len(names), f"{page}: a guide is listed twice: {listed}"


def test_the_pages_list_the_guides_that_are_registered() -> None:
    classes = {kind.__name__ for kind in GUIDES}
    everything = {entry.guide.__name__ for entry in registry.guides().values()}
    check_list("docs/api.md", r"^### Guides and ensembles\n(.*)", r"autoclass:: (Auto\w+|Ensemble)\b", everything)
    kinds = {entry.likelihood.__name__ for entry in registry.likelihoods().values()}
    check_list("docs/api.md", r"^### Likelihoods\n(.*?)^### ", r"autoclass:: (\w+)", kinds)
    check_list(
        "docs/choosing.md", r"^\| guide \|[^\n]*\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", r"^\| `(\w+)`", classes, lists=2
    )
    check_list("docs/command_line.md", r"`--guide` accepts (.*?)\.\n", r"`([\w-]+)`", set(registry.guides()))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another package as pip installs it, with a guide, a score and a module that cannot be imported; and a table."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "toy.py").write_text(TOY)
    (folder / "bias.py").write_text(BIAS)
    (folder / "student.py").write_text(STUDENT)
    (folder / "broken.py").write_text("import a_module_that_nobody_has\n")
    (folder / "theirs-1.0.dist-info").mkdir()
    (folder / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "theirs-1.0.dist-info" / "entry_points.txt").write_text(
        "[pyro_dropout.guides]\ntoy = toy\n[pyro_dropout.likelihoods]\nstudent = student\n"
        "[pyro_dropout.scores]\nbias = bias\nbroken = broken\n"
    )
    rows = "\n".join(f"{k / 10},{(k % 7) - 0.3 * k}" for k in range(40))
    (folder / "table.csv").write_text(f"x,y\n{rows}\n")
    return folder


def ran(elsewhere: Path, *words: str, at: Path | None = None) -> str:
    path = os.pathsep.join(map(str, [ROOT, elsewhere, ROOT / "models"]))
    done = python(*words, folder=at or elsewhere, seconds=600, PYTHONPATH=path)
    return done.stdout + done.stderr


@pytest.mark.deep
def test_a_new_guide_is_fitted_compared_and_under_contract(elsewhere: Path) -> None:
    ran(elsewhere, *COMMAND, "fit", "table.csv", "--guide", "toy", "--out", "run", "--steps", "3", "--quiet")
    ran(elsewhere, *COMMAND, "predict", "run", "table.csv", "--out", "predicted.csv", "--quiet")
    assert len((elsewhere / "predicted.csv").read_text().splitlines()) == 41
    ran(elsewhere, *COMMAND, "compare", "table.csv", "--guides", "toy,mean-field", "--out", "both", *FEW)
    report = (elsewhere / "both" / "report.html").read_text("utf-8")
    assert "toy" in report
    assert re.findall(r'<span class="failed">.*', report) == []
    said = ran(elsewhere, "-m", "pytest", "-q", "-n", "2", "tests/contracts", "-k", "toy", at=ROOT)
    assert "passed" in said


@pytest.mark.deep
def test_a_new_likelihood_is_registered_and_under_contract(elsewhere: Path) -> None:
    said = ran(elsewhere, "-m", "pytest", "-q", "tests/contracts/test_likelihoods.py", "-k", "heavy-tails", at=ROOT)
    assert re.search(r"^6 passed", said, re.MULTILINE), said


@pytest.mark.deep
def test_a_new_score_is_a_column_of_comparisons(elsewhere: Path) -> None:
    said = ran(
        elsewhere,
        "-c",
        "import torch, pyro_dropout as pd\n"
        "x = torch.linspace(0, 1, 20).unsqueeze(-1)\n"
        "net = pd.BayesianNet(torch.nn.Linear(1, 1))\n"
        "found = pd.compare(net, {'m': pd.AutoMeanField}, (x, x), (x, x + 3),"
        " steps=2, samples=5, seeds=1, reference=None, compile=False, progress=False)\n"
        "print(round(found.rows[0].scores['bias'].mean) in (2, 3, 4), found.columns['bias'].heading)\n",
    )
    assert "True bias\n" in said
    assert "'broken', which another package registers, is left out. ModuleNotFoundError: No module named" in said


def test_a_score_that_comes_later_is_not_lost_and_a_name_is_taken_once() -> None:
    try:
        registry.score("late", heading="late", meaning="Nothing.", better="")(lambda prediction, y: 0.0)
        assert columns()["late"].heading == "late"
        with pytest.raises(ValueError, match="a score named 'crps' is registered already"):
            registry.score("crps", heading="", meaning="", better="")(lambda prediction, y: 0.0)
    finally:
        registry._SCORES.pop("late", None)
    assert "late" not in columns()
