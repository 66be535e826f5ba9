"""Find and run the experiment scripts in the repository's ``models`` folder, which is not installed."""

import ast
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pyro_dropout.mathematics.errors import PyroDropoutError


def scripts(folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """Return the experiment scripts by name, from the first folder that has any.

    Args:
        folders: where to look; by default ``models`` next to the package, then in the working directory.

    Example:
        >>> from pyro_dropout.cli.scripts import scripts
        >>> {"bnn", "deep_gp"} <= set(scripts())
        True
    """
    if folders is None:
        folders = (Path(__file__).parents[2] / "models", Path("models"))
    for folder in folders:
        found = {path.stem: path for path in sorted(folder.glob("*.py")) if _is_script(path)}
        if found:
            return found
    raise PyroDropoutError(
        "the scripts of the experiments are not installed with the package: they are in the folder 'models' of its"
        " repository. Run the command from the root of a checkout."
    )


def beside_the_scripts(name: str) -> ModuleType:
    """Return a module of ``experiments``, the package next to the scripts.

    Example:
        >>> from pyro_dropout.cli.scripts import beside_the_scripts
        >>> beside_the_scripts("collection").VARIABLE
        'PYRO_DROPOUT_DATA'
    """
    _put_on_path(next(iter(scripts().values())))
    return importlib.import_module(f"experiments.{name}")


def _put_on_path(script: Path) -> None:
    """Let ``import experiments`` find the package next to a script, as when Python runs the script."""
    folder = str(script.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)


def about(path: Path) -> str:
    """Return the first line of a script's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]


def reproduce(name: str, options: Sequence[str] = ()) -> None:
    """Run the script of that name with its own options.

    Example:
        >>> from pyro_dropout.cli.scripts import reproduce
        >>> reproduce("bnn", ["--quick"])  # doctest: +SKIP
    """
    known = scripts()
    if name not in known:
        raise PyroDropoutError(f"unknown experiment {name!r}; choose from {', '.join(known)}.")
    _put_on_path(known[name])
    spec = importlib.util.spec_from_file_location(f"pyro_dropout_script_{name}", known[name])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(options))


def _is_script(path: Path) -> bool:
    """Return whether a file imports pyro_dropout and has a main: any project may have a folder 'models'."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return False
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    return has_main and any(name.split(".")[0] == "pyro_dropout" for name in imported)
