"""Kernels that are kept on disk give the same steps, and are never trusted blindly."""

import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.training.compile import kept_kernels, kernel_folder, program
from pyro_dropout.training.compile.kept_kernels import KeptKernels
from pyro_dropout.training.compile.plain_c import formulas, library
from pyro_dropout.training.compile.plain_c import program as plain_program
from pyro_dropout.training.compile.recorder import record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return tmp_path / "torch" / "pyro_dropout"


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def entry(folder: Path) -> Path:
    kernel_folder.write("key", {"calls": [1]}, {"0.so": b"kernel"})
    assert kernel_folder.read("key") == ({"calls": [1]}, {"0.so": b"kernel"})
    return folder / "key"


def test_what_is_damaged_is_absent_until_it_is_written_again(entry: Path) -> None:
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole[1:], whole.replace(b"[1]", b"[3]"), b""):
        entry.write_bytes(damaged)
        assert kernel_folder.read("key") is None
        kernel_folder.write("key", {"calls": [2]}, {"0.so": b"kernel"})
        assert kernel_folder.read("key") is not None


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("above", [0, 1, 2, 3])
def test_what_others_can_write_to_is_not_used(entry: Path, mode: int, above: int) -> None:
    path = [entry, *entry.parents][above]
    path.chmod(path.stat().st_mode | mode)
    assert kernel_folder.read("key") is None
    if above:
        kernel_folder.write("other", {}, {})
        assert not (entry.parent / "other").exists()


@pytest.mark.parametrize("sticky", [0, 0o1000])
def test_a_temporary_folder_of_all_users_needs_the_sticky_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sticky: int
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o777 | sticky)
    kernel_folder.write("key", {}, {})
    assert (kernel_folder.read("key") is not None) == bool(sticky)
    assert (library.compiled("int segment0(void *const *p) { return 0; }") is not None) == bool(sticky)


def test_a_folder_that_another_user_has_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    mine, others = kernel_folder.place(), os.lstat
    assert mine is not None
    mine.mkdir(mode=0o755)

    def lstat(path: Any) -> Any:  # as if another user had made it; only root could in fact
        found = others(path)
        return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:])) if path == mine else found

    monkeypatch.setattr(os, "lstat", lstat)
    kernel_folder.write("key", {}, {})
    assert not list(mine.iterdir())


def test_torchs_own_folder_made_by_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    kernel_folder.check_compiler_folder()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me == 0:
        os.chown(theirs, 2, 2)  # what belongs to root is trusted
    with pytest.raises(pd.PyroDropoutError, match="belongs to another user"):
        kernel_folder.check_compiler_folder()


def test_a_folder_that_is_exchanged_after_the_check_runs_nothing_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (library.compiled(f"int segment0(void *const *p) {{ return {k}; }}") for k in (0, 1))
    assert good is not None
    assert bad is not None
    kernel_folder.write("key", {}, {"0.so": bad})
    folder.rename(tmp_path / "theirs")
    kernel_folder.write("key", {}, {"0.so": good})
    found = kernel_folder.read("key")
    folder.rename(tmp_path / "mine")
    (tmp_path / "theirs").rename(folder)
    assert found is not None
    library.bound(found[1]["0.so"], 0, [])()  # the other one would raise IndexError


def test_links_are_not_followed(entry: Path) -> None:
    entry.rename(entry.parent / "other")
    entry.symlink_to(entry.parent / "other")
    assert kernel_folder.read("key") is None


def test_old_programs_give_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_folder, "_MOST", 2)
    for k in range(4):
        kernel_folder.write(f"key{k}", {}, {"0.so": b"kernel"})
        os.utime(folder / f"key{k}", (k, k))
    assert sorted(path.name for path in folder.iterdir()) == ["key2", "key3"]


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FX_GRAPH_CACHE"])
def test_nothing_is_kept_where_torch_keeps_nothing(entry: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1" if "DISABLE" in name else "0")
    assert kernel_folder.place() is None
    assert kernel_folder.read("key") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").write_text("a file")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    kernel_folder.write("key", {}, {})
    assert kernel_folder.read("key") is None


# --- calls ------------------------------------------------------------------------------------------------------------


def step(x: Tensor, y: Tensor) -> list[Tensor]:
    """What the calls below do: noise is drawn, multiplied, and written over x."""
    product = torch.mm(torch.randn(3, 3), y)
    x.copy_(product)
    return [product]


def made(x: Tensor, y: Tensor) -> tuple[KeptKernels, list[Any], list[Tensor]]:
    graph = record(step, [x.clone(), y.clone()])
    assert graph is not None
    noise, found = torch.empty(3, 3), torch.empty(20).as_strided((3, 3), (4, 1), 2)
    calls = [(noise.normal_, (), {}), (torch.mm, (noise, y), {"out": found}), (torch.mm, (noise, y), {"out": x})]
    return KeptKernels(graph, [x, y], "settings"), calls, [found]


def test_calls_are_read_back_for_other_tensors(folder: Path) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    kept, calls, results = made(x, y)
    assert kept.read() is None
    kept.write(calls, results)
    others = torch.zeros(9).view(3, 3), torch.randn(4, 3)[1:]
    again, *_ = made(*others)
    found = again.read()
    assert found is not None
    torch.manual_seed(0)
    for function, args, named in found[0]:
        function(*args, **named)
    torch.manual_seed(0)
    expected = torch.randn(3, 3) @ others[1]
    torch.testing.assert_close(found[1][0], expected)
    torch.testing.assert_close(others[0], expected)


def test_calls_that_do_something_else_are_refused(folder: Path) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    kept, calls, results = made(x, y)
    kept.write([*calls[:1], (torch.mm, (x, y), calls[1][2]), calls[2]], results)
    assert len(list(folder.iterdir())) == 1
    assert kept.read() is None
    kept.write(calls, results)
    assert kept.read() is not None


def test_another_program_machine_or_setting_is_another_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    graph = record(step, [x.clone(), y.clone()])
    other = record(lambda x, y: [x.copy_(y), x + 1], [x.clone(), y.clone()])
    assert graph is not None
    assert other is not None

    def key(graph: Any = graph, x: Tensor = x, settings: str = "") -> str:
        return KeptKernels(graph, [x, y], settings)._key

    keys = [key(), key(other), key(x=x.t()), key(x=x.double()), key(settings="other")]
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "1")
    keys.append(key())
    monkeypatch.delenv("TORCHINDUCTOR_CPP_WRAPPER")
    import torch._inductor.config as config

    assert key() == keys[0]
    with config.patch({"cpp.simdlen": 256}):
        keys.append(key())
    assert key() == keys[0]
    monkeypatch.setattr(kept_kernels, "_processor", lambda: "another one")
    keys.append(key())
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_written_down_is_not_kept(folder: Path) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    kept, calls, results = made(x, y)
    for call in ((torch.exp, (x,), {"out": y}), (x.normal_, (1.0,), {}), (torch.mm, (x.double(), 3), {"out": y})):
        kept.write([*calls, call], results)
    kept.write(calls, [torch.empty(3, device="meta")])
    assert not folder.exists()


# --- trainings --------------------------------------------------------------------------------------------------------


def trained(batch_size: int | None = None, compile: Any = True) -> list[Tensor]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
    guide = pd.AutoDropout(model, keep=0.8)
    x = torch.linspace(-1, 1, 30).unsqueeze(-1)
    how: dict[str, Any] = {"steps": 7, "batch_size": batch_size, "compile": compile, "progress": False, "seed": 0}
    history = pd.fit(model, guide, x, x**2, **how)
    assert history.compiled == (compile is True)
    return [history.losses, *(value.detach() for value in guide.parameters())]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by one name whenever something is compiled."""
    count: list[str] = []
    real, plain = program._compile, library.compiled
    monkeypatch.setattr(program, "_compile", lambda *given: (count.append("torch"), real(*given))[1])
    monkeypatch.setattr(library, "compiled", lambda source: (count.append("C"), plain(source))[1])
    return count


@pytest.mark.deep
@pytest.mark.parametrize("batch_size", [None, 10])
@pytest.mark.parametrize("how", ["C", "torch"])
def test_a_second_training_takes_the_same_steps_without_a_compiler(
    folder: Path, batch_size: int | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "torch":
        monkeypatch.setattr(plain_program, "plain", lambda *given: None)
    count = _counted(monkeypatch)
    first = trained(batch_size)
    assert count == [how]
    torch.testing.assert_close(trained(batch_size), first, rtol=0, atol=0)
    assert count == [how]
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-8])
    torch.testing.assert_close(trained(batch_size), first, rtol=0, atol=0)
    assert count == [how, how], "a damaged library is made anew"


@pytest.mark.parametrize("batch_size", [None, 10])
def test_steps_in_plain_c_are_those_of_torch(
    folder: Path, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = _counted(monkeypatch)
    found, expected = trained(batch_size), trained(batch_size, compile="traced")
    assert count == ["C"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.deep
def test_plain_c_that_computes_something_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(compile="traced")
    monkeypatch.setitem(formulas.FORMULAS, torch.ops.aten.relu.default, "{0}")
    count = _counted(monkeypatch)
    torch.testing.assert_close(trained(), expected, rtol=1e-5, atol=1e-5)
    assert count == ["C", "torch"]


@pytest.mark.deep
def test_without_a_c_compiler_torch_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compiler", lambda: ("no-such-compiler",))
    count = _counted(monkeypatch)
    trained()
    assert count == ["C", "torch"]


def test_another_compiler_is_another_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    graph = record(step, [x.clone(), y.clone()])
    assert graph is not None
    keys = [KeptKernels(graph, [x, y], "")._key]
    other = tmp_path / "compiler"
    for text in ("one", "another"):
        other.write_text(text)
        other.chmod(0o700)
        monkeypatch.setattr(library, "compiler", lambda: (str(other),))
        keys.append(KeptKernels(graph, [x, y], "")._key)
    monkeypatch.setattr(library, "FLAGS", ("-O0",))
    keys.append(KeptKernels(graph, [x, y], "")._key)
    assert len(set(keys)) == 4


@pytest.mark.parametrize("held", [lambda value: value, lambda value: ContextVar("setting", default=value)])
def test_settings_are_read_as_each_version_of_torch_keeps_them(held: Callable[[object], object]) -> None:
    def entry(default: object, override: object) -> SimpleNamespace:
        return SimpleNamespace(default=default, user_override=held(override))

    entries = {
        "untouched": entry(1, kept_kernels._UNSET_SENTINEL),
        "the same": entry(2, 2),
        "other": entry(3, 4),
        "like a mapping": entry({}, {"get": 5}),
    }
    assert kept_kernels._changed(SimpleNamespace(_config=entries)) == [("like a mapping", "{'get': 5}"), ("other", "4")]
