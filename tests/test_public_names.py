"""The door of the package: every name is there, comes when it is asked for, and is on the API page where it belongs."""

import importlib
import inspect
import re
from typing import Any

import pytest

import pyro_dropout as pd
from pyro_dropout.registry import FLOORS
from tests import interface
from tests.own_process import ROOT, python

COMMANDS = ("benchmark", "compare", "fit", "predict", "resume", "reproduce", "datasets", "info", "benchmark")


def api_entries() -> dict[str, str]:
    """{name with its module: directive} on the API page."""
    found, place = {}, ""
    for line in (ROOT / "docs" / "api.md").read_text("utf-8").splitlines():
        place = line.split()[-1] if line.startswith(".. currentmodule::") else place
        entry = re.match(r"\.\. (auto\w+):: (\w+)$", line)
        if entry:
            found[f"{place}.{entry[2]}"] = entry[1]
    return found


API = api_entries()


def found_at(dotted: str) -> Any:
    """What a name with its module means."""
    place, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(place), name)


def fresh(source: str) -> str:
    """What a program prints in a process of its own."""
    return python("-c", source, seconds=120).stdout


# --- every name has one place -----------------------------------------------------------------------------------------

# Scripts outside the repository use these; a name may be added, and none may go before its warning says so.


def test_every_change_of_the_interface_is_in_the_changelog() -> None:
    released = (ROOT / "tests" / "interface.txt").read_text("utf-8").splitlines()[1:]
    unreleased = "".join(re.findall("`[^`]+`", (ROOT / "CHANGELOG.md").read_text("utf-8").split("\n## ")[1]))
    unsaid = {word for word in interface.differences(released, interface.lines()) if word not in unreleased}
    assert not unsaid, "say in CHANGELOG.md, under its first heading and between backticks, what became of these"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pyro_dropout.fit(model, guide, *, steps=None, speed=1)", {"speed"}),
        ("pyro_dropout.fit(model, guide, *, steps=(1, 2))", {"steps"}),
        ("pyro_dropout.fit(model, *, steps=None)", {"guide"}),
        ("pyro_dropout.fits(model, guide, *, steps=None)", {"fit", "fits"}),
        ("pyro-dropout fit --steps", {"fit", "--steps"}),
    ],
)
def test_differences_of_the_interface_are_named(line: str, words: set[str]) -> None:
    assert interface.differences(["pyro_dropout.fit(model, guide, *, steps=None)"], [line]) == words


def test_no_public_name_is_lost() -> None:
    lost = [name for name in pd._PLACES if f"pyro_dropout.{pd._PLACES[name]}" not in API]
    assert not lost, f"pyro_dropout/__init__.py: {lost} must be there, or in _PLACES"
    assert not set(pd.__all__) & set(pd._PLACES)


def test_the_top_is_small_and_dir_shows_it_and_the_submodules() -> None:
    assert len(pd.__all__) <= 45
    shown = {name for name in dir(pd) if not name.startswith("__")}
    assert shown == {*pd.__all__, *FLOORS, "errors", "paper", "protocols", "registry"}


@pytest.mark.parametrize("name", pd._PLACES)
def test_a_name_that_moved_says_where_it_is_now(name: str) -> None:
    new = f"pyro_dropout.{pd._PLACES[name]}"
    with pytest.warns(
        DeprecationWarning, match=rf"^pyro_dropout\.{name} will be removed in version 2\.0; use {new}\.$"
    ) as seen:
        assert getattr(pd, name) is found_at(new)
    assert seen[0].filename == __file__


def test_an_import_of_a_name_that_moved_warns_where_it_is_written() -> None:
    with pytest.warns(DeprecationWarning, match="use pyro_dropout.paper.kl_gap") as seen:
        exec(compile("from pyro_dropout import kl_gap", "script.py", "exec"), {})
    assert {each.filename for each in seen} == {"script.py"}


def test_the_rooms_and_the_api_page_list_the_same_names() -> None:
    rooms = {place for place in (name.rpartition(".")[0] for name in API) if place != "pyro_dropout.guides"}
    listed = {f"{place}.{name}" for place in rooms for name in importlib.import_module(place).__all__}
    assert {name for name in API if not name.startswith("pyro_dropout.guides.")} == listed


@pytest.mark.parametrize("name", API)
def test_a_name_is_described_and_comes_from_its_room(name: str) -> None:
    thing = found_at(name)
    room = name.split(".")[1]
    assert thing.__module__.startswith(f"pyro_dropout.{room}" if room in FLOORS else "pyro_dropout.")
    assert (inspect.getdoc(thing) or "").strip()
    assert API[name] == ("autoclass" if inspect.isclass(thing) else "autofunction")


@pytest.mark.parametrize("name", [name for name in API if inspect.isclass(found_at(name))])
def test_the_methods_of_a_public_class_are_described(name: str) -> None:
    kind = found_at(name)
    own = {key: value for key, value in vars(kind).items() if not key.startswith("_")}
    methods = {
        key
        for key, value in own.items()
        if isinstance(value, property | classmethod)
        or (inspect.isfunction(value) and value.__name__ == key)  # not a lambda that is a field's default
    }
    assert [key for key in methods if not (inspect.getdoc(getattr(kind, key)) or "").strip()] == []


# --- names come when they are asked for -------------------------------------------------------------------------------


def test_neither_the_package_nor_any_help_waits_for_torch() -> None:
    said = fresh(
        "import sys, io, contextlib\n"
        "import pyro_dropout, pyro_dropout.cli.main as cli\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        f"    codes = [cli.main([*words, '--help']) for words in ([], *([each] for each in {COMMANDS!r}))]\n"
        "print(codes, len(out.getvalue()) > 5000, {'torch', 'numpy', 'pyro', 'matplotlib'} & set(sys.modules))\n"
    )
    assert said.split("\n")[0] == f"{[0] * (1 + len(COMMANDS))} True set()"


def test_a_word_is_completed_without_torch() -> None:
    program = (
        "import os, sys, io, contextlib\n"
        "os.environ.update(_PYRO_DROPOUT_COMPLETE='complete_bash', COMP_CWORD='3')\n"
        "os.environ.update(COMP_WORDS='pyro-dropout fit --guide lo')\n"
        "from pyro_dropout.cli.main import app\n"
        "try:\n"
        "    app(prog_name='pyro-dropout')\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('torch' in sys.modules)\n"
    )
    assert fresh(program).split() == ["low-rank", "False"]


@pytest.mark.deep
def test_a_program_meets_the_package_as_if_it_were_imported_whole() -> None:
    said = fresh(
        "import torch, pyro_dropout as pd\n"
        "q = pd.paper.BernoulliMixture(torch.ones(2, 3), keep=0.9)\n"
        "p = torch.distributions.Normal(torch.zeros(2, 3), 1.0)\n"
        "import sys\n"
        "print(torch.distributions.kl_divergence(q, torch.distributions.Independent(p, 2)).shape == ())\n"
        "print('pyro_dropout.comparison.compare' in sys.modules)\n"  # nothing that was not asked for
        "print(pd.judging.__name__, pd.cli.__name__)\n"
        "from pyro_dropout import *\n"
        "print(fit is pd.fit, set(pd.__all__) - set(globals()))\n"
    )
    assert said.splitlines() == ["True", "False", "pyro_dropout.judging pyro_dropout.cli", "True set()"]


@pytest.mark.deep
def test_without_scikit_learn_the_estimators_say_what_to_install() -> None:
    said = fresh(
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'sklearn' else real(name, *rest)\n"
        "sys.modules['sklearn'] = None\n"
        "import pyro_dropout as pd\n"
        "from pyro_dropout import *\n"
        "print('DropoutRegressor' in dir(pd), 'fit' in globals())\n"
        "try:\n"
        "    pd.DropoutRegressor\n"
        "except ImportError as mistake:\n"
        "    print(mistake)\n"
    )
    wanted = 'DropoutRegressor needs scikit-learn; pip install "pyro-dropout[sklearn]"'
    assert said.splitlines() == ["False True", wanted]


@pytest.mark.parametrize(
    ("wrong", "meant"), [("autodropout", "AutoDropout"), ("Elbo", "ELBO"), ("predit", "predict"), ("guide", "guides")]
)
def test_a_name_that_is_not_there_is_an_attribute_error_with_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'pyro_dropout' has no .* '{wrong}'; did you mean '{meant}'\?"):
        getattr(pd, wrong)
