"""Files of tensors are whole or refused: damage, hostile headers, code in disguise, full disks."""

import errno
import hashlib
import json
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_dropout.errors import DamagedFileError, PyroDropoutError
from pyro_dropout.training.checkpoints.safe_files import whole_file
from pyro_dropout.training.checkpoints.tensor_file import digest, read_facts, read_tensors, write_tensors
from tests.oracles.both_types import dtypes

OTHERS = [torch.int64, torch.uint8, torch.bool, torch.bfloat16]


def made(path: Path) -> bytes:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.zeros(0, 4)}
    write_tensors(path, tensors, {"step": 7, "note": "é"})
    return path.read_bytes()


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=dtypes | st.sampled_from(OTHERS),
    facts=st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.floats(allow_nan=False), st.text())),
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, shape: Any, dtype: Any, facts: Any) -> None:
    path = tmp_path_factory.mktemp("file") / "some.safetensors"
    tensor = (torch.rand(shape) * 5).to(dtype)
    write_tensors(path, {"weights/0.loc": tensor}, facts)
    found, told = read_tensors(path)
    assert told == facts == read_facts(path)
    assert found["weights/0.loc"].dtype == dtype
    assert torch.equal(found["weights/0.loc"], tensor)


def test_a_slice_is_written_as_what_it_shows(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path / "x", {"column": whole[:, 1], "turned": whole.T, "same": whole}, {})
    found, _ = read_tensors(tmp_path / "x")
    assert found["column"].tolist() == [1.0, 5.0, 9.0]
    assert torch.equal(found["turned"], whole.T)


def test_type_and_shape_belong_to_the_digest() -> None:
    zeros = torch.zeros(4)
    assert len({digest(t) for t in (zeros, zeros.view(2, 2), zeros.int(), -zeros)}) == 4
    assert digest(torch.zeros(()).expand(1)) == digest(zeros[:1])


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(content: bytes, dice: random.Random) -> bytes:
    """One file with a few bytes changed, a part cut off, put in, doubled or moved, or its header's length changed."""
    raw = bytearray(content)
    kind = dice.randrange(6)
    if kind == 0:
        for _ in range(dice.randint(1, 4)):
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del raw[dice.randrange(len(raw)) :]
    elif kind == 2:
        at = dice.randrange(len(raw))
        raw[at:at] = dice.randbytes(dice.randint(1, 40))
    elif kind == 3:
        raw[:8] = struct.pack("<Q", dice.choice([0, 1, 2**63, 2**64 - 1, len(raw), dice.randrange(2 * len(raw))]))
    elif kind == 4:
        a, b = sorted(dice.randrange(len(raw)) for _ in range(2))
        raw[a:b] = raw[a:b][::-1]
    else:
        at = dice.randrange(len(raw))
        raw[at : at + 8] = dice.randbytes(8)
    return bytes(raw)


def refuses(path: Path, content: bytes, tensors: Any) -> bool:
    """Whether a file is refused; one that loads must hold what was written."""
    path.write_bytes(content)
    try:
        found, _ = read_tensors(path)
    except PyroDropoutError:
        return True
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    return False


@pytest.mark.parametrize("count", [800, pytest.param(100_000, marks=pytest.mark.deep)])
def test_no_damage_is_loaded(tmp_path: Path, count: int) -> None:
    good = made(tmp_path / "good")
    tensors, _ = read_tensors(tmp_path / "good")
    dice = random.Random(count)
    refused = sum(refuses(tmp_path / "bad", damaged(good, dice), tensors) for _ in range(count))
    assert refused > 0.9 * count  # what is not refused is a change that changes nothing, and was checked


def _header(told: Any, **more: Any) -> bytes:
    text = told if isinstance(told, str) else json.dumps(told)
    header = {"__metadata__": {"pyro_dropout": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}, **more}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HOSTILE = {
    "empty": b"",
    "a pickle": pickle.dumps({"a": 1}),
    "a header as long as memory": struct.pack("<Q", 2**40) + b"{}",
    "deep JSON": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no facts": _header({"format": 1, "tensors": {}}),
    "our text that is deep": _header("[" * 100_000),
    "our text that is no JSON": _header("{'a': 1}"),
    "a future format": _header({"format": 2, "facts": {}, "tensors": {}}),
    "a tensor too few": _header({"format": 1, "facts": {}, "tensors": {"a": "0"}}),
    "a tensor too many": _header({"format": 1, "facts": {}, "tensors": {}}, a=FLOAT) + b"\0" * 4,
    "a wrong digest": _header({"format": 1, "facts": {}, "tensors": {"a": "0"}}, a=FLOAT) + b"\0" * 4,
    "a digest that is a list": _header({"format": 1, "facts": {}, "tensors": {"a": []}}, a=FLOAT) + b"\0" * 4,
    "a huge shape": _header(
        {"format": 1, "facts": {}, "tensors": {"a": "0"}}, a={**FLOAT, "shape": [2**40, 2**40]}
    ) + b"\0" * 4,
    "overlapping tensors": _header({"format": 1, "facts": {}, "tensors": {"a": "0", "b": "0"}}, a=FLOAT, b=FLOAT)
    + b"\0" * 4,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    for read in (read_tensors, read_facts):
        if read is read_facts and name in {
            "a tensor too few",
            "a tensor too many",
            "a wrong digest",
            "a digest that is a list",
        }:
            continue  # what is wrong with these is their tensors
        with pytest.raises(DamagedFileError, match=r"x\.safetensors cannot be used"):
            read(path)


class Trap:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("trap",))


def test_code_in_disguise_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p").write_bytes(pickle.dumps(Trap()))
    torch.save({"weights": Trap()}, "t")
    with zipfile.ZipFile("z", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("a", b"\0" * 10_000_000)
    for name in ("p", "t", "z"):
        with pytest.raises(DamagedFileError):
            read_tensors(name)
    assert not Path("trap").exists()


# --- the disk ---------------------------------------------------------------------------------------------------------


class Full:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        self.file.write(content[: self.room])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_at_any_byte_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    old = made(path)
    real = Path.open
    for room in range(0, len(old) + 1, 97):

        def full(self: Path, mode: str, room: int = room) -> Full:
            return Full(real(self, mode), room)

        with mock.patch.object(Path, "open", full), pytest.raises(OSError, match="No space"):
            write_tensors(path, {"other": torch.ones(100)}, {})
        assert path.read_bytes() == old
        assert [found.name for found in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_fault_on_the_way_leaves_the_old_file(tmp_path: Path, call: str) -> None:
    path = tmp_path / "x"
    old = made(path)
    with (
        mock.patch.object(os, call, side_effect=OSError(errno.EIO, "I/O error")),
        pytest.raises(OSError, match="I/O error"),
    ):
        write_tensors(path, {"other": torch.ones(2)}, {})
    assert path.read_bytes() == old
    assert [found.name for found in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to(target)
    with whole_file(link) as beside:
        beside.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(path.name for path in (*tmp_path.iterdir(), *target.parent.iterdir())) == ["far", "link", "target"]
