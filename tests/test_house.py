"""The house rules that can be read off the source: the floors, the sizes, what is forbidden, style and types."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from pyro_dropout.mathematics.label_entropy import label_entropy
from pyro_dropout.registry import FLOORS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_dropout"
OUTSIDE = {"models", "tests", "notebooks", "docs"}
EXEMPT = {"__init__.py", "__main__.py", "errors.py", "paper.py", "registry.py", "protocols.py"}  # for all floors


@functools.cache
def parsed(path: Path) -> list[ast.AST]:
    """The imports, calls, attributes and names in a file of the package, which several tests read."""
    return nodes(path.read_text("utf-8"))


def nodes(source: str) -> list[ast.AST]:
    kinds = ast.Import | ast.ImportFrom | ast.Call | ast.Attribute | ast.Name
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imported_names(found: list[ast.AST], package: list[str]) -> Iterator[tuple[int, str]]:
    """Every import in a file, at any depth, as (line, absolute dotted name); ``package`` is where the file lies."""
    for node in found:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def called_name(call: ast.Call) -> str:
    """The last word of what is called: ``load`` for ``torch.load(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def misplaced_imports(package: Path) -> list[str]:
    """Describe every import that goes upward, or out of the package into the scripts and tests beside it."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        where = "/".join(inside)
        if len(inside) == 1 and inside[0] in EXEMPT:
            continue
        if inside[0] not in FLOORS:
            wrong.append(f"{where} stands on no floor; the floors are {', '.join(FLOORS)}")
            continue
        height = FLOORS.index(inside[0])
        for line, name in imported_names(parsed(path), [package.name, *inside[:-1]]):
            first, *rest = name.split(".")
            if first in OUTSIDE:
                wrong.append(f"{where}:{line} imports {name}, which is not installed with the package")
            elif first == package.name and rest[:1] in (["errors"], ["registry"], ["protocols"]):
                continue
            elif first == package.name and (not rest or rest[0] not in FLOORS[: height + 1]):
                wrong.append(f"{where}:{line} imports {name}, which is not on its floor or below")
    return wrong


def undirected_draws(package: Path) -> list[str]:
    """Describe every draw of torch's with a generator whose device is left to torch's default, which may be a GPU."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        if "generator=" not in path.read_text("utf-8"):
            continue
        for node in parsed(path):
            named = {keyword.arg for keyword in node.keywords} if isinstance(node, ast.Call) else set()
            if "generator" in named and "device" not in named and ast.unparse(node.func).startswith("torch."):
                wrong.append(f"{path.relative_to(package)}:{node.lineno} {ast.unparse(node)}")
    return wrong


def test_draws_with_a_generator_name_their_device(tmp_path: Path) -> None:
    assert undirected_draws(PACKAGE) == []
    (tmp_path / "wrong.py").write_text("torch.randn(3, generator=dice)\ntorch.randn(3)\n")
    assert undirected_draws(tmp_path) == ["wrong.py:1 torch.randn(3, generator=dice)"]


def test_imports_go_downward() -> None:
    assert misplaced_imports(PACKAGE) == []


def check_no_circles(package: Path) -> None:
    """Raise if a module imports itself by way of others, whether at once, later or for types only."""
    paths = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    ways = {
        name: {target for _, each in imported_names(parsed(path), name.split(".")[:-1]) for target in prefixes(each)}
        & paths.keys() - {name}
        for name, path in paths.items()
    }
    graphlib.TopologicalSorter(ways).prepare()


def prefixes(name: str) -> Iterator[str]:
    """``a.b.c``, and ``a.b``: an import of a name is one of its module."""
    yield name
    yield name.rpartition(".")[0]


def test_no_module_imports_itself_by_way_of_others(tmp_path: Path) -> None:
    check_no_circles(PACKAGE)
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "a.py").write_text("from house.b import thing\n")
    (tmp_path / "house" / "b.py").write_text("def late():\n    from house import a\n")
    with pytest.raises(graphlib.CycleError, match=r"house\.[ab]"):
        check_no_circles(tmp_path / "house")


def private_names(path: Path) -> list[str]:
    """Describe every name of torch in a file that begins with an underscore, or is in such a module."""
    wrong, tree = [], parsed(path)
    wrong += [f"{line}: {name}" for line, name in imported_names(tree, []) if re.search(r"^torch\b.*\._[a-z]", name)]
    for node in tree if re.search(r"torch\s*[\w.\s]*\._", path.read_text("utf-8")) else ():
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"torch(\.[a-z]\w*)*\._[A-Za-z]\w*", name) and not name.startswith(
            ("torch.ops.", "torch._foreach_")
        ):
            wrong.append(f"{node.lineno}: {name}")
    return wrong


def test_private_names_of_torch_are_in_one_file(tmp_path: Path) -> None:
    below = (PACKAGE / "mathematics").rglob("*.py")  # which imports nothing
    exempt = {PACKAGE / "engines" / "torch_internals.py", *below}
    found = {str(path): private_names(path) for path in PACKAGE.rglob("*.py") if path not in exempt}
    assert {path: names for path, names in found.items() if names} == {}
    (tmp_path / "wrong.py").write_text("from torch._ops import OpOverload\ntorch.compiler._flag\ntorch._C._nn\n")
    assert len(private_names(tmp_path / "wrong.py")) == 3


def test_engines_know_nothing_of_pyro() -> None:
    found = {
        path.name: [name for _, name in imported_names(parsed(path), []) if "pyro." in f"{name}."]
        for path in (PACKAGE / "engines").rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pyro_dropout.guides.dropout",
        "from pyro_dropout import guides",
        "from .. import guides",
        "def late():\n    from ..guides import dropout",
        "import importlib\nimportlib.import_module('pyro_dropout.guides')",
        "from pyro_dropout import AutoDropout",
        "import models.bnn",
    ],
)
def test_an_upward_import_is_caught(tmp_path: Path, line: str) -> None:
    package = tmp_path / "pyro_dropout"
    (package / "mathematics").mkdir(parents=True)
    (package / "mathematics" / "objective.py").write_text(line + "\n")
    assert len(misplaced_imports(package)) == 1


def forbidden_words(tree: list[ast.AST]) -> Iterator[str]:
    """Every way in which a file could run code that came as data."""
    for line, name in imported_names(tree, []):
        if {"pickle", "cPickle", "dill", "cloudpickle", "joblib"} & set(name.split(".")) or name == "torch.load":
            yield f"{line}: imports {name}"
    for node in tree:
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value).startswith("torch"):
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Name) and node.id in {"eval", "exec"}:
            yield f"{node.lineno}: {node.id}"


def test_no_file_runs_code_that_came_as_data() -> None:
    found = {str(path): list(forbidden_words(parsed(path))) for path in PACKAGE.rglob("*.py")}
    assert {path: words for path, words in found.items() if words} == {}


def test_files_are_short_and_have_names() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 400} == {}
    nameless = {"utils.py", "helpers.py", "common.py"}
    assert [path for path in lengths if Path(path).name in nameless] == []


@pytest.mark.deep
def test_annotated_shapes_are_checked_here() -> None:
    probs = torch.full((3, 2), 0.5)
    assert label_entropy(probs, torch.ones(3)).shape == (3,)
    with pytest.raises(TypeCheckError):
        label_entropy(probs, torch.ones(4))
