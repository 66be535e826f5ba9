"""Runs the notebooks and writes each beside its script, as .ipynb with its outputs: ``make notebooks``.

A notebook that is newer than its script is left as it is. ``--short`` takes few steps and draws.
"""

import argparse
import os
from pathlib import Path

import jupytext
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def written(script: Path, folder: Path) -> Path:
    """Run a percent-format script and write it as a notebook; return where."""
    notebook = jupytext.reads(script.read_text("utf-8"), fmt="py:percent")
    where = {"metadata": {"path": str(script.parent)}}
    NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=where).execute()
    for cell in notebook.cells:  # warnings and progress bars of this machine say nothing to a reader
        cell["outputs"] = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
        if cell.cell_type != "code":
            del cell["outputs"]
    path = folder / f"{script.stem}.ipynb"
    jupytext.write(notebook, path)
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="how the names of the notebooks begin, such as 04; by default all")
    parser.add_argument("--short", action="store_true", help="few steps and draws, to see that they run")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where to write them")
    args = parser.parse_args(argv)
    os.environ["PYRO_DROPOUT_SHORT"] = "1" if args.short else "0"
    for script in sorted(FOLDER.glob("*.py")):
        path = args.out / f"{script.stem}.ipynb"
        fresh = path.exists() and path.stat().st_mtime > script.stat().st_mtime
        if script.name.startswith(tuple(args.names or [""])):
            print(path if fresh else written(script, args.out), flush=True)


if __name__ == "__main__":
    main()
