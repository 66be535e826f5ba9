"""One file of named tensors and a few plain facts, which is whole or is refused, and never runs anything.

Tensors lie in the safetensors format, the facts as JSON in its header. Every tensor has its SHA-256 among the facts,
and the facts have one of their own, so that a flipped bit is found before anything is used.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pyro_dropout.errors import DamagedFileError, PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.safe_files import check_regular, whole_file

FORMAT = 1
ADVICE = " Take an older checkpoint, or train anew."  # ends the error of a damaged file
_KEY = "pyro_dropout"


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
    """Write tensors, by name, and facts that JSON can hold to ``path``: all of it or nothing."""
    path = _as_path(path)
    ready = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    told = {"format": FORMAT, "facts": facts, "tensors": {name: digest(tensor) for name, tensor in ready.items()}}
    text = json.dumps(told, sort_keys=True)
    header = {_KEY: text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    with whole_file(path) as beside, beside.open("wb") as file:
        file.write(save(ready, header))


def read_facts(path: str | Path) -> Record:
    """Return the facts of a file, checked, without its tensors."""
    with _opened(_as_path(path)) as (_, told):
        facts: Record = told["facts"]
        return facts


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], Record]:
    """Return the tensors, by name, and the facts of a file, all of them checked."""
    tensors: dict[str, Tensor] = {}
    with _opened(path := _as_path(path)) as (file, told):
        if set(file.keys()) != set(told["tensors"]):
            raise _damaged(path, "its tensors are not those that its header tells of")
        for name, expected in told["tensors"].items():
            tensors[name] = file.get_tensor(name).clone()
            if digest(tensors[name]) != expected:
                raise _damaged(path, f"tensor {name!r} is not what was written")
        return tensors, told["facts"]


def _as_path(path: object) -> Path:
    if not isinstance(path, str | Path):
        raise PyroDropoutError(f"path must name a file, as text or a pathlib.Path; got {type(path).__name__} {path!r}.")
    return Path(path)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Record]]:
    """Open a file of tensors, with its checked header."""
    check_regular(path, "give the file that save wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            text = header.get(_KEY)
            if text is None:
                raise _damaged(path, "it was not written by pyro_dropout")
            if hashlib.sha256(text.encode()).hexdigest() != header.get("sha256"):
                raise _damaged(path, "its header is not what was written")
            try:
                told = json.loads(text)
            except (ValueError, RecursionError):
                raise _damaged(path, "its header is not JSON") from None
            if not isinstance(told, dict) or told.get("format") != FORMAT:
                version = told.get("format") if isinstance(told, dict) else None
                raise _damaged(path, f"it has format {version!r}, and this version reads format {FORMAT}")
            if not all(isinstance(told.get(part), dict) for part in ("facts", "tensors")):
                raise _damaged(path, "its header lacks facts or tensors")
            yield file, told
    except SafetensorError as cause:
        raise _damaged(path, f"it is cut off or damaged ({str(cause).splitlines()[0][:200]})") from None
    except OSError as cause:
        raise PyroDropoutError(f"{path.name} cannot be read: {cause.strerror or cause}.") from None


def _damaged(path: Path, why: str) -> DamagedFileError:
    return DamagedFileError(f"{path.name} cannot be used: {why}.{ADVICE}")


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and values."""
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one number that was expanded counts as contiguous, but cannot be read as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()
