"""The documents tell the truth: equations and code name each other, and every example that is shown runs."""

import ast
import doctest
import importlib
import inspect
import os
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import pyro_dropout
from pyro_dropout.engines import program
from pyro_dropout.mathematics.errors import UnfinishedTrainingWarning

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_dropout"
EQUATIONS = ROOT / "docs" / "equations.md"
# Pages whose blocks take seconds, but for one block of each three.
LONG = ("comparison.md", "ensembles.md", "first_hour.md", "interop.md", "linearised.md", "long_runs.md")
LONG += ("pyro_models.md", "training.md", "trust.md")
# Names whose examples take seconds.
SLOW = {"AutoLaplace", "Comparison", "DropoutClassifier", "DropoutRegressor", "Ensemble", "FittedTable", "Fleet"}
SLOW |= {"Evidence", "compare", "fit_table", "nuts", "swag"}
LONGEST = ("laplace.md",)  # whose blocks all take seconds
EQUATION_LINE = re.compile(r"^\s*Equation: (\S+)\.\s*$", re.MULTILINE)
HEADING = re.compile(r"^## `(?P<id>[^`\s]+)` — \S.*$", re.MULTILINE)
PUBLIC = [name for name in getattr(pyro_dropout, "__all__", []) if not name.startswith("__")]
SKIPPED_FOLDERS = {"__pycache__", "_build", "build", "dist", "out"}
PRINTED = re.compile(r"\n+It prints\n+```text\n(.*?)```", re.DOTALL)
PYTHON_FILE = re.compile(r"\b(?:tests|pyro_dropout|models)/[\w/]+\.py\b")
CITATION = re.compile(  # "Eq. (3)", "eqs. 8, 9 and 10", "Sec. 4.5", "§§3.1 to 4.5"
    r"(?P<main>\bmain paper, )?(?:\b(?P<eq>eq(?:uation)?s?\b)|\b(?P<prop>prop(?:osition)?s?\b)|§+|\bsec(?:t|tion)?s?\b)"
    r"\.?[ ~]?\(?(?P<first>\d+(?:\.\d+)*)\)?(?P<more>(?:(?:, and |, | and | to |[-–])\(?\d+(?:\.\d+)*\)?)*)",
    re.IGNORECASE,
)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|opt)/\w")


def resolve(dotted: str) -> Any:
    """The object that a dotted name means, whether it lies in a module or in a class."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def equations_in_code() -> Counter[str]:
    """How often each equation is named by a docstring of the package."""
    named: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "Equation: " in text else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                named.update(EQUATION_LINE.findall(ast.get_docstring(node) or ""))
    return named


def equation_sections() -> dict[str, str]:
    """The sections of docs/equations.md by id; each ``##`` heading must be one."""
    text = EQUATIONS.read_text("utf-8")
    headings = list(HEADING.finditer(text))
    assert len(headings) == len(re.findall(r"^## ", text, re.MULTILINE)), "a heading is not of the form ## `id` — title"
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    sections = {heading["id"]: text[heading.end() : end] for heading, end in zip(headings, ends, strict=True)}
    assert len(sections) == len(headings), "two sections have the same id"
    return sections


def test_equations_and_code_name_the_same_set() -> None:
    in_code = equations_in_code()
    assert [name for name, times in in_code.items() if times > 1] == []
    assert set(in_code) == set(equation_sections())


def cited_numbers(text: str) -> set[str]:
    """The paper's numbers that a text cites, each as "eq. 3", "§4.5", "Prop. 1" or "main paper, §5.4"."""
    cited = set()
    for found in CITATION.finditer(text):
        kind = "eq. " if found["eq"] else "Prop. " if found["prop"] else "§"
        numbers = [found["first"]]
        for joint, number in re.findall(r"(, and |, | and | to |[-–])\(?(\d+(?:\.\d+)*)", found["more"]):
            if joint in (" to ", "-", "–") and kind != "§":
                numbers += map(str, range(int(numbers[-1]) + 1, int(number)))
            numbers.append(number)
        cited |= {("main paper, " if found["main"] else "") + kind + number for number in numbers}
    return cited


def test_every_number_of_the_paper_is_in_one_table() -> None:
    page = (ROOT / "docs" / "notation.md").read_text("utf-8").split("## The paper's numbers")[1]
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("|")][2:]
    numbers = {number for row in rows for number in cited_numbers(row[0])}
    lost = {
        f"{path.relative_to(ROOT)}: {number}"
        for path in texts(ROOT)
        if path.name not in {"LICENSE", "CHANGELOG.md", "test_documents.py"} and path.suffix not in {".json", ".csv"}
        for number in cited_numbers(path.read_text("utf-8")) - numbers
    }
    assert lost == set()
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    of_the_paper = {name for name in equation_sections() if re.match(r"(eq|sec|prop)\d", name)}
    assert Counter(names) == Counter(of_the_paper)
    for row in rows:  # a name begins with the number of its row
        written = row[0].strip().lower()
        for left, right in (("eqs. ", "eq"), ("eq. ", "eq"), ("prop. ", "prop"), ("§", "sec")):
            written = written.replace(left, right)
        assert all(name.split("-")[0] == written.split("-")[0] for name in re.findall(r"`([^`]+)`", row[2])), row


def test_a_citation_is_read_as_it_is_written() -> None:
    assert cited_numbers("(Eqs. 8-10, §5; Prop. 4)") == {"eq. 8", "eq. 9", "eq. 10", "§5", "Prop. 4"}
    assert cited_numbers("sections 3.1 and 4.6, equation 12") == {"§3.1", "§4.6", "eq. 12"}
    assert cited_numbers("main paper, §5.4; Proposition 1") == {"main paper, §5.4", "Prop. 1"}
    assert cited_numbers("Eq. (12), eqs. 8, 9 and (10)") == {"eq. 12", "eq. 8", "eq. 9", "eq. 10"}
    assert cited_numbers("Sec. 4.6; §§4.5, 4.6; Prop 7") == {"§4.5", "§4.6", "Prop. 7"}
    assert cited_numbers("a sequence 3, seq. 4, cross-section") == set()


def test_every_equation_shows_its_formula_and_its_code() -> None:
    for name, body in equation_sections().items():
        assert re.search(r"\$\$.+?\$\$", body, re.DOTALL), f"{name} has no formula between $$ and $$"
        code = re.findall(r"^Code: `([\w.]+)`", body, re.MULTILINE)
        assert len(code) == 1, f"{name} needs one line 'Code: `dotted.name`'; it has {len(code)}"
        docstring = inspect.getdoc(resolve(code[0])) or ""
        assert name in EQUATION_LINE.findall(docstring), f"the docstring of {code[0]} does not say 'Equation: {name}.'"


def test_every_equation_names_tests_that_exist() -> None:
    for name, body in equation_sections().items():
        named = re.findall(r"^Test: `(tests/[\w/]+\.py)::(test_\w+)`$", body, re.MULTILINE)
        assert named, f"{name} needs a line 'Test: `tests/....py::test_...`'"
        for path, test in named:
            functions = [node for node in ast.parse((ROOT / path).read_text("utf-8")).body if hasattr(node, "name")]
            assert test in {node.name for node in functions}, f"{name} names {test}, which is not in {path}"


def test_the_public_names_are_listed_once_and_all() -> None:
    listed = pyro_dropout.__all__
    assert [name for name, times in Counter(listed).items() if times > 1] == []
    assert [name for name in listed if not hasattr(pyro_dropout, name)] == []
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    assert {name for name in bound if not name.startswith("_")} - set(listed) == set()


def test_the_public_names_are_in_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    shown = Counter(re.findall(r"^\.\. auto\w+:: (\w+)", page, re.MULTILINE))
    assert shown == Counter(PUBLIC)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the short tests programs run as they were traced: a C++ compiler takes ten seconds for each."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "deep":
        monkeypatch.setattr(program, "_compile", lambda graph, inputs: graph)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name in SLOW else ()) for name in PUBLIC]
)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    thing = getattr(pyro_dropout, name)
    docstring = inspect.getdoc(thing) or ""
    assert re.search(r"^Examples?:\n(?:.*\n)*?\s+>>> ", docstring, re.MULTILINE), f"{name} shows no example"
    # Nothing is in scope but what the example itself imports, as for a reader who pastes it.
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    said: list[str] = []
    for example in doctest.DocTestFinder().find(thing, name, module=False, globs={}):
        runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0


def python_blocks() -> list[Any]:
    """Every ```python block of the README and the documentation, named by file and line."""
    blocks = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text("utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, found.start(1))
            shown = PRINTED.match(text, found.end())
            earlier = sum(block.id.startswith(path.name) for block in blocks)
            long = path.name in LONGEST or (path.name in LONG and earlier % 3 != 2)
            marks = [pytest.mark.deep] if long else []
            blocks.append(pytest.param(path, line, found[1], shown and shown[1], id=f"{path.name}:{line}", marks=marks))
    return blocks


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("path", "line", "source", "shown"), python_blocks())
def test_a_block_runs_and_prints_what_it_says(
    path: Path,
    line: int,
    source: str,
    shown: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnfinishedTrainingWarning)  # what the pages train, they train to the end
        exec(
            compile("\n" * line + source, path, "exec"), {"__name__": "__main__"}
        )  # blank lines: errors point into the page
    promised = re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE) or (shown or "").splitlines()
    assert not promised or capsys.readouterr().out.splitlines() == promised


def test_what_a_block_prints_is_held_where_the_page_shows_it() -> None:
    shown = {str(block.id): block.values[3] for block in python_blocks()}
    assert any(name.startswith("gotchas.md") and text for name, text in shown.items())


def test_every_work_that_is_cited_is_in_the_list() -> None:
    page = (ROOT / "docs" / "references.md").read_text("utf-8")
    works = re.findall(r"^- (.+? \(\d{4}[ab]?\))\. \*", page, re.MULTILINE)
    assert len(works) == page.count("\n- ") == len(set(works))
    cited = {
        f"{who} ({year})"
        for path in sorted((ROOT / "docs").glob("*.md"))
        for text in re.findall(r"\[([^]\[]+)\]\(references\.md\)", path.read_text("utf-8"))
        for who, year in re.findall(r"^(.+?),? \(?(\d{4}[ab]?)\)?$", " ".join(text.split()))
    }
    assert cited
    assert cited - set(works) == set()
    plain = lambda text: re.sub(r"\W", "", text.replace("--", "").replace("–", "")).lower()  # noqa: E731
    listed = {plain(title) for title in re.findall(r"\. \*(.+?)\*", " ".join(page.split()))}
    bibtex = " ".join((ROOT / "docs" / "refs.bib").read_text("utf-8").split())
    assert listed == {
        plain(title) for title in re.findall(r"\btitle = \{(.+?)\},? (?:[a-z]+ = |\})", re.sub(" +", " ", bibtex))
    }
    assert not [path.name for path in (ROOT / "docs").glob("*.md") if "{cite:" in path.read_text("utf-8")]


def test_links_between_pages_lead_somewhere() -> None:
    lost = []
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text("utf-8")):
            if target.startswith(("http:", "https:")):
                continue
            place = path.parent / target if target else path
            if not place.exists() or (anchor and anchor not in anchors(place)):
                lost.append(f"{path.name} -> {target}#{anchor}")
    assert lost == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as MyST makes them: in small letters, with hyphens and without punctuation."""
    titles = re.findall(r"^#{1,3} (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_the_python_files_that_pages_name_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = [(page.name, path) for page in pages for path in PYTHON_FILE.findall(page.read_text("utf-8"))]
    assert len(named) > 10
    assert [(page, path) for page, path in named if not (ROOT / path).is_file()] == []


def test_every_page_and_notebook_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    listed = Counter(
        line
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
        for line in tree.split()
        if ":" not in line
    )
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    notebooks = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.py")}
    assert pages | notebooks <= set(listed)
    assert [name for name in pages | notebooks if listed[name] > 1] == []
    count = {6: "Six", 7: "Seven", 8: "Eight", 9: "Nine"}[len(notebooks)]
    assert f"- {count} [notebooks](notebooks)" in (ROOT / "README.md").read_text("utf-8")


def texts(folder: Path) -> list[Path]:
    """The repository's own text files: neither caches nor environments nor pictures."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in {".ci", ".github"}
            if not hidden and path.name not in SKIPPED_FOLDERS and path.suffix != ".egg-info":
                found += texts(path)
        elif b"\0" not in path.read_bytes()[:8192]:
            found.append(path)
    return found


def test_no_file_knows_a_machine() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}": line
        for path in texts(ROOT)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    }
    assert found == {}


def test_a_machine_path_is_caught() -> None:
    for place in ("home", "root", "Users", "work", "opt"):
        assert MACHINE_PATH.search(f"read('/{place}/data.csv')")
    for harmless in ("https://example.org/home/page", "docs/opt/x", "an /optimal/ one"):
        assert not MACHINE_PATH.search(harmless)
