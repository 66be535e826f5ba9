"""Which statements of the package the tests run: ``COVERED=folder make test``, then ``python -m tests.covered folder``.

When a module of the package is imported, its statements are given notes that they were run: one for those that follow
each other without a branch, before the last of them, so that those before an error do not count. That costs a few
hundredths of the time of the tests; tracing costs half of it. What runs in processes of its own is not counted.
"""

import ast
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "pyro_dropout"
SEEN: dict[str, bytearray] = {}  # by file: whether each line was run
NOTE = "__lines_run__"


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements in a module or a statement. Expressions hold none, and are not looked at."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if inner := getattr(node, name, None):
            if name not in ("handlers", "cases"):
                yield inner
            for each in inner:
                yield from _blocks(each)


def _runs(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """The statements of a block that count, in runs after which it branches: who reaches the last has run them all."""
    run = []
    for node in block:
        if _counts(node):
            run.append(node)
            if next(_blocks(node), None):
                yield run
                run = []
    if run:
        yield run


def _counts(node: ast.stmt) -> bool:
    """Whether a statement does something: a docstring and an import for the future do not."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return not text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _note(node: ast.stmt) -> ast.stmt:
    """The statement ``__lines_run__[line] = 1``. Parsing its text would take most of the time of the whole."""
    at = {"lineno": node.lineno, "col_offset": 0, "end_lineno": node.lineno, "end_col_offset": 0}
    lines, line = ast.Name(NOTE, ast.Load(), **at), ast.Constant(node.lineno, **at)
    return ast.Assign([ast.Subscript(lines, line, ast.Store(), **at)], ast.Constant(1, **at), **at)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # type: ignore[override]
        """Compile the source anew: bytecode on disk has no notes."""
        text = self.get_data(self.path)
        tree = ast.parse(text)
        for block in _blocks(tree):
            last = {id(run[-1]) for run in _runs(block)}
            block[:] = [each for node in block for each in ([_note(node), node] if id(node) in last else [node])]
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        lines = self.get_data(self.path).count(b"\n") + 2
        setattr(module, NOTE, SEEN.setdefault(self.path, bytearray(lines)))
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the package's own modules, and no others."""
        if fullname.split(".")[0] != PACKAGE.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def begin() -> None:
    """From now on, note what the package's modules run; none may have been imported."""
    assert PACKAGE.name not in sys.modules, f"{PACKAGE.name} was imported too early"
    sys.meta_path.insert(0, _Finder())


def write(folder: Path) -> None:
    """Write what was run, for ``shares`` to read."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, lines in SEEN.items():
        run = " ".join(str(k) for k, seen in enumerate(lines) if seen)
        with (folder / f"{os.getpid()}.txt").open("a", encoding="utf-8") as said:
            said.write(f"{Path(path).relative_to(PACKAGE)} {run}\n")


def shares(folder: Path) -> dict[str, tuple[int, int]]:
    """By file: how many of its statements were run by any process, and how many it has."""
    run: dict[str, set[int]] = {}
    for each in folder.glob("*.txt"):
        for line in each.read_text("utf-8").splitlines():
            name, *lines = line.split(" ")
            run.setdefault(name, set()).update(int(k) for k in lines if k)
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        noted = run.get(name, set())
        runs = [each for block in _blocks(ast.parse(path.read_text("utf-8"))) for each in _runs(block)]
        found[name] = (sum(len(each) for each in runs if each[-1].lineno in noted), sum(map(len, runs)))
    return found


if __name__ == "__main__":
    found = shares(Path(sys.argv[1]))
    for name, (run, of) in sorted(found.items(), key=lambda item: item[1][0] - item[1][1])[:20]:
        print(f"{of - run:5} of {of:4} statements were not run in {name}")
    run, of = (sum(parts) for parts in zip(*found.values(), strict=True))
    print(f"statements run: {run} of {of} ({run / of:.1%})")
