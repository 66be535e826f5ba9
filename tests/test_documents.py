"""The documents tell the truth: equations and code name each other, and every example that is shown runs."""

import ast
import doctest
import inspect
import pkgutil
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pyro_dropout.errors import UnfinishedTrainingWarning
from tests.test_public_names import API, found_at

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_dropout"
EQUATIONS = ROOT / "docs" / "equations.md"
# Pages whose blocks take seconds, but for one block of each three.
LONG = ("choosing.md", "ensembles.md", "first_hour.md", "long_runs.md", "pyro_models.md", "training.md", "trust.md")
# Names whose examples take seconds.
SLOW = {
    "AutoLaplace",
    "Comparison",
    "DropoutClassifier",
    "DropoutRegressor",
    "Ensemble",
    "FittedTable",
    "Fleet",
    "Results",
}
SLOW |= {"AutoLowRank", "Checkpoint", "Evidence", "compare", "fit_table", "maximise_evidence", "mclmc", "nuts", "swag"}
LONGEST = ("laplace.md", "coming_from.md")  # whose blocks all take seconds
EQUATION_LINE = re.compile(r"^\s*Equation: (\S+)\.\s*$", re.MULTILINE)
HEADING = re.compile(r"^## `(?P<id>[^`\s]+)` — \S.*$", re.MULTILINE)
SKIPPED_FOLDERS = {"__pycache__", "_build", "build", "dist", "out"}
PRINTED = re.compile(r"\n+It prints\n+```text\n(.*?)```", re.DOTALL)
PYTHON_FILE = re.compile(r"\b(?:tests|pyro_dropout|models)/[\w/]+\.py\b")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|opt)/\w")


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


def test_the_papers_equations_are_in_the_table_of_its_numbers() -> None:
    page = (ROOT / "docs" / "notation.md").read_text("utf-8").split("## The paper's numbers")[1]
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("|")][2:]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    of_the_paper = {name for name in equation_sections() if re.match(r"(eq|sec|prop)\d", name)}
    assert Counter(names) == Counter(of_the_paper)
    for row in rows:  # a name begins with the number of its row
        written = row[0].strip().lower()
        for left, right in (("eqs. ", "eq"), ("eq. ", "eq"), ("prop. ", "prop"), ("§", "sec")):
            written = written.replace(left, right)
        assert all(name.split("-")[0] == written.split("-")[0] for name in re.findall(r"`([^`]+)`", row[2])), row


CITED = re.compile(r"§(\d+(?:\.\d+)*)|\b(Eq|Prop)s?\. ?(\d+)(?: ?(?:-|–|to|and) ?(\d+))?", re.IGNORECASE)


def cited_numbers(text: str) -> set[str]:
    """The sections, equations and propositions that a text cites, as in "§3.1", "eq 9" and "prop 1"; ranges in full."""
    found = set()
    for section, kind, first, last in CITED.findall(text):
        ends = range(int(first), int(last or first) + 1) if first else ()
        found |= {f"§{section}"} if section else {f"{kind.lower()} {number}" for number in ends}
    return found


def test_every_citation_of_the_paper_is_in_the_table_of_its_numbers() -> None:
    page = (ROOT / "docs" / "notation.md").read_text("utf-8").split("## The paper's numbers")[1]
    known = cited_numbers("\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|")))
    assert {"§3.1", "eq 11", "prop 4"} <= known
    files = [path for name in ("pyro_dropout", "models") for path in (ROOT / name).rglob("*.py")]
    files += [*(ROOT / "notebooks").glob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    cited = {path: cited_numbers(path.read_text("utf-8")) for path in files if "_build" not in path.parts}
    assert sum(map(len, cited.values())) > 30
    assert {str(path.relative_to(ROOT)): unknown for path, own in cited.items() if (unknown := own - known)} == {}


def test_every_equation_shows_its_formula_and_its_code() -> None:
    for name, body in equation_sections().items():
        assert re.search(r"\$\$.+?\$\$", body, re.DOTALL), f"{name} has no formula between $$ and $$"
        code = re.findall(r"^Code: `([\w.]+)`", body, re.MULTILINE)
        assert len(code) == 1, f"{name} needs one line 'Code: `dotted.name`'; it has {len(code)}"
        docstring = inspect.getdoc(pkgutil.resolve_name(code[0])) or ""
        assert name in EQUATION_LINE.findall(docstring), f"the docstring of {code[0]} does not say 'Equation: {name}.'"


def test_every_equation_names_tests_that_exist() -> None:
    for name, body in equation_sections().items():
        named = re.findall(r"^Test: `(tests/[\w/]+\.py)::(test_\w+)`$", body, re.MULTILINE)
        assert named, f"{name} needs a line 'Test: `tests/....py::test_...`'"
        for path, test in named:
            there = re.search(rf"^def {test}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE)
            assert there, f"{name} names {test}, which is not in {path}"


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name.split(".")[-1] in SLOW else ()) for name in API]
)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    thing = found_at(name)
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


def test_every_work_that_is_cited_is_in_the_list() -> None:
    page = (ROOT / "docs" / "references.md").read_text("utf-8")
    works = re.findall(r"^- (.+? \(\d{4}[ab]?\))\. \*", page, re.MULTILINE)
    assert len(works) == page.count("\n- ") == len(set(works))
    cited = {
        f"{who} ({year})"
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for text in re.findall(r"\[([^]\[]+)\]\((?:\.\./)?references\.md\)", path.read_text("utf-8"))
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


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> list[tuple[str, str]]:
    """The relative links of a page: path and anchor."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8"))
    return [(target, anchor) for target, anchor in found if not target.startswith(("http:", "https:"))]


def test_links_between_pages_lead_somewhere_on_github_and_on_the_site() -> None:
    lost = []
    for path in PAGES:
        for target, anchor in links(path):
            place = path.parent / target if target else path
            if not place.exists() or (anchor and anchor not in anchors(place)):
                lost.append(f"{path.name} -> {target}#{anchor}")
            elif path.parent.name == "docs" and not re.match(r"(?!\.\.)|\.\./notebooks/\w+\.py$", target):
                lost.append(f"{path.name} -> {target}: it is not on the site")
    assert lost == []


def test_no_page_shows_raw_directives_on_github() -> None:
    raw = {path.name for path in PAGES if re.search(r"^```\{|\{cite:", path.read_text("utf-8"), re.MULTILINE)}
    assert raw <= {"api.md", "benchmarks.md"}  # the first is made from docstrings


def table(page: str, title: str) -> list[dict[str, str]]:
    """The rows of the first table after a title, by column."""
    text = (ROOT / "docs" / page).read_text("utf-8").split(title, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines, f"{page}: no table after {title!r}"
    names, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines[0].splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_the_table_of_posteriors_follows_from_the_results() -> None:
    widths = table("results/in_between.md", "**Standard deviation of f")
    gains = {row["method"]: row for row in table("results/uci.md", "**Gain over MC dropout")}
    named = {"dropout, σ = 0": "dropout", "ensemble (anchored)": "ensemble"}
    scored = {"concrete dropout": "concrete", "mean field": "mean-field", "row mixture": "row-mixture"}
    scored |= {"low rank": "low-rank", "ensemble (anchored)": "ensemble"}
    shown = table("choosing.md", "<!-- choosing: begin -->")
    assert len(shown) > 10
    for row in shown:
        name = row["posterior"]
        for column, heading in (("at data", "std of f at the data ÷ NUTS"), ("in gap", "in the gap ÷ NUTS")):
            of = {
                guide: [float(each[column]) for each in widths if each["guide"] == guide]
                for guide in ("NUTS", named.get(name, name))
            }
            ratios = [a / b for a, b in zip(of[named.get(name, name)], of["NUTS"], strict=True)]
            assert row[heading] == f"{min(ratios):.2f} to {max(ratios):.2f}", name
        gain = gains.get(f"{scored.get(name, name)}, 1", {})
        parts = [[float(part) for part in cell.split(" ± ")] for cell in gain.values() if "±" in cell]
        above, below = (sum(side * mean > error for mean, error in parts) for side in (1, -1))
        assert row["tables above / below MC dropout"] == (f"{above} / {below}" if parts else ""), name


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as MyST makes them: in small letters, with hyphens and without punctuation."""
    titles = re.findall(r"^#{1,3} (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_the_python_files_that_pages_name_exist() -> None:
    named = [(page.name, path) for page in PAGES for path in PYTHON_FILE.findall(page.read_text("utf-8"))]
    assert len(named) > 10
    assert [(page, path) for page, path in named if not (ROOT / path).is_file()] == []


def test_every_page_and_notebook_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    listed = Counter(re.findall(r"^- .*\]\(([^)]+)\)", index, re.MULTILINE))  # docs/conf.py makes the side bar of these
    parts = {ROOT / "docs" / "index.md", *(ROOT / "docs" / "benchmarks").glob("*.md")}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md") if path not in parts}
    notebooks = {f"../notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.py")}
    assert listed == Counter(pages | notebooks)


def texts(folder: Path) -> list[Path]:
    """The repository's own text files: neither caches nor environments nor pictures."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in {".ci", ".github"}
            if not hidden and path.name not in SKIPPED_FOLDERS and path.suffix != ".egg-info":
                found += texts(path)
        elif (
            path.name != ".git" and b"\0" not in path.read_bytes()[:8192]
        ):  # a worktree's has the path of its repository
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
