"""Mutations of run folders: links, pipes, files of other runs, cut and flipped bytes, missing and stray files."""

import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

Mutation = Callable[[Path, Path, Path, random.Random], str]  # of a run, with a folder elsewhere and one of other runs


def own_files(run: Path) -> list[Path]:
    """Return the files of a run."""
    return [run / "run.json", run / "posterior.safetensors", *sorted((run / "checkpoints").glob("step-*"))]


def _links(run: Path, far: Path, others: Path, dice: random.Random) -> str:
    path = dice.choice([*own_files(run), run / "checkpoints", run / ".lock"])
    if path.exists():
        path.rename(far / path.name)
    kind = dice.choice(["to its file", "to itself", "to nothing", "to a device", "to another run", "hard"])
    other = others / dice.choice(sorted(os.listdir(others))) / path.relative_to(run)
    if kind == "hard" and (far / path.name).is_file():
        os.link(far / path.name, path)
    else:
        places = {"to itself": path, "to nothing": far / "none", "to a device": "/dev/zero", "to another run": other}
        path.symlink_to(places.get(kind, far / path.name))
    return f"{path.name}, {kind}"


def _special(run: Path, far: Path, others: Path, dice: random.Random) -> str:
    path = dice.choice([*own_files(run), run / "checkpoints", run / ".lock"])
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kind = dice.choice(["pipe", "socket", "folder", "file"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        before = os.getcwd()
        os.chdir(path.parent)  # the paths of sockets are short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(before)
    elif kind == "folder":
        path.mkdir()
        (path / "mine").touch()
    else:
        path.write_bytes(dice.randbytes(dice.choice([0, 1, 8, 1000])))
    return f"{path.name}, {kind}"


def _swaps(run: Path, far: Path, others: Path, dice: random.Random) -> str:
    other = others / dice.choice(sorted(os.listdir(others)))
    what = dice.choice(["run.json", "posterior.safetensors", "checkpoints", "one checkpoint", "cross", "two"])
    if what in ("run.json", "posterior.safetensors"):
        shutil.copy(other / what, run / what)
    elif what == "checkpoints":
        shutil.rmtree(run / what)
        shutil.copytree(other / what, run / what)
    elif what == "one checkpoint":
        theirs = dice.choice(own_files(other)[2:])
        name = dice.choice([theirs.name, f"step-{dice.choice([0, 1, 2, 4, 10**11]):012d}.safetensors"])
        shutil.copy(theirs, run / "checkpoints" / name)
    elif what == "cross":  # the posterior as a checkpoint, or a checkpoint as the posterior
        pair = [run / "posterior.safetensors", own_files(run)[-1]]
        dice.shuffle(pair)
        shutil.copy(*pair)
    else:  # not the record and the posterior: together they are the other run
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(other / "checkpoints", run / "checkpoints")
        name = dice.choice(["run.json", "posterior.safetensors"])
        shutil.copy(other / name, run / name)
    return f"{what} of {other.name}"


def _bytes(run: Path, far: Path, others: Path, dice: random.Random) -> str:
    path = dice.choice(own_files(run))
    found = bytearray(path.read_bytes())
    kind = dice.choice(["cut", "cut", "flipped", "flipped", "longer", "sparse", "header"])
    if kind == "cut":
        del found[dice.randrange(len(found)) :]
    elif kind == "flipped":
        for _ in range(dice.choice([1, 1, 3, 50])):
            found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    elif kind == "longer":
        found += dice.randbytes(dice.choice([1, 8, 4096]))
    elif kind == "header":
        found[:8] = dice.choice([0, 1, 7, 2**26, 2**40, 2**63]).to_bytes(8, "little")
    path.write_bytes(found)
    if kind == "sparse":
        os.truncate(path, dice.choice([2**26, 2**30, 2**36]))
    return f"{path.name}, {kind}"


def _missing(run: Path, far: Path, others: Path, dice: random.Random) -> str:
    path = dice.choice([*own_files(run), run / "checkpoints"])
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path.name


def _stray(run: Path, far: Path, others: Path, dice: random.Random) -> str:
    name = dice.choice([
        ".lock", ".abcdefgh-run.json", ".abcdefgh-posterior.safetensors", "notes.txt", "checkpoints/notes.txt",
        "checkpoints/.abcdefgh-step-000000000009.safetensors", "checkpoints/step-000000000009.safetensors",
        "checkpoints/step-x.safetensors", f"checkpoints/step-{'9' * 200}.safetensors", "checkpoints/group-000/step-1",
    ])  # fmt: skip
    (run / name).parent.mkdir(exist_ok=True)
    if dice.random() < 0.5:
        shutil.copy(dice.choice(own_files(run)), run / name)
    else:
        (run / name).write_bytes(dice.randbytes(dice.choice([0, 100])))
    return name


KINDS: dict[str, Mutation] = {
    "links": _links,
    "pipes, sockets, folders": _special,
    "files of other runs": _swaps,
    "cut and flipped bytes": _bytes,
    "missing files": _missing,
    "stray files": _stray,
}
