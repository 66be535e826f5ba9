"""Kernels that are kept on disk give the same steps, and are never trusted blindly."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError

import pyro_dropout as pd
from pyro_dropout.engines import kernel_folder, program
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.generated import formulas, library
from pyro_dropout.engines.in_c import in_c
from pyro_dropout.engines.program import Program


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return tmp_path / "torch" / "pyro_dropout"


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def entry(folder: Path) -> Path:
    kernel_folder.write("key", b"kernel")
    assert kernel_folder.read("key") == b"kernel"
    return folder / "key"


def test_what_is_damaged_is_absent_until_it_is_written_again(entry: Path) -> None:
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole[1:], whole.replace(b"kernel", b"kornel"), b""):
        entry.write_bytes(damaged)
        assert kernel_folder.read("key") is None
        kernel_folder.write("key", b"kernel")
        assert kernel_folder.read("key") is not None


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("above", [0, 1, 2, 3])
def test_what_others_can_write_to_is_not_used(entry: Path, mode: int, above: int) -> None:
    path = [entry, *entry.parents][above]
    path.chmod(path.stat().st_mode | mode)
    assert kernel_folder.read("key") is None
    if above:
        kernel_folder.write("other", b"")
        assert not (entry.parent / "other").exists()


@pytest.mark.parametrize("sticky", [0, 0o1000])
def test_a_temporary_folder_of_all_users_needs_the_sticky_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sticky: int
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o777 | sticky)
    kernel_folder.write("key", b"")
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
    kernel_folder.write("key", b"")
    assert not list(mine.iterdir())


def test_torchs_own_folder_made_by_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    with kernel_folder.compiler_folder():
        pass
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me == 0:
        os.chown(theirs, 2, 2)  # what belongs to root is trusted
    with pytest.raises(pd.errors.PyroDropoutError, match="belongs to another user"), kernel_folder.compiler_folder():
        pass


@pytest.mark.parametrize("by_compiler", [False, True])
def test_a_full_folder_of_torchs_compiler_is_named(
    by_compiler: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = RuntimeError(f"CppCompileError: cannot write: {disk.strerror}")
    told = rf"cannot write to {tmp_path} or .*No space left.*Free some space"
    with pytest.raises(pd.errors.PyroDropoutError, match=told), kernel_folder.compiler_folder():
        raise InductorError(said if by_compiler else disk, None)


def test_a_folder_that_is_exchanged_after_the_check_runs_nothing_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (library.compiled(f"int segment0(void *const *p) {{ return {k}; }}") for k in (0, 1))
    assert good is not None
    assert bad is not None
    kernel_folder.write("key", bad)
    folder.rename(tmp_path / "theirs")
    kernel_folder.write("key", good)
    found = kernel_folder.read("key")
    folder.rename(tmp_path / "mine")
    (tmp_path / "theirs").rename(folder)
    assert found is not None
    library.function_of(found, "segment0", [])()  # the other one would raise IndexError


def test_links_are_not_followed(entry: Path) -> None:
    entry.rename(entry.parent / "other")
    entry.symlink_to(entry.parent / "other")
    assert kernel_folder.read("key") is None


def test_old_programs_give_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_folder, "_MOST", 2)
    for k in range(4):
        kernel_folder.write(f"key{k}", b"kernel")
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
    kernel_folder.write("key", b"")
    assert kernel_folder.read("key") is None


# --- programs ---------------------------------------------------------------------------------------------------------

Function = Callable[..., list[Tensor]]


def step(x: Tensor, y: Tensor) -> list[Tensor]:
    """Noise is drawn, multiplied, and written over x."""
    product = torch.mm(torch.randn(3, 3), y)
    x.copy_(product)
    return [product + 1]


def in_c_of(function: Function, *inputs: Tensor) -> Callable[[], list[Tensor]]:
    return in_c(Program(function, *[each.clone() for each in inputs], compile=False), inputs)


def test_a_program_runs_on_the_tensors_it_was_made_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    in_c_of(step, x, y)
    assert not x.any(), "to make it has changed nothing"
    monkeypatch.setattr(library, "compiled", lambda _: None)  # what is kept needs no compiler
    x, y = torch.zeros(9).view(3, 3), torch.randn(3, 3)
    run = in_c_of(step, x, y)
    torch.manual_seed(0)
    found = run()
    torch.manual_seed(0)
    torch.testing.assert_close(x, torch.randn(3, 3) @ y)
    torch.testing.assert_close(found[0], x + 1)


def test_a_library_that_is_wrong_or_none_is_replaced(folder: Path) -> None:
    source = "int segment0(void *const *p) { return 0; }"
    wrong = library.compiled(source)
    assert wrong is not None
    function: Function = lambda x: [x.exp() * 2]  # noqa: E731
    in_c_of(function, torch.ones(3))
    (entry,) = folder.iterdir()
    kept = kernel_folder.read(entry.name)
    for other in (wrong, b"no library"):
        kernel_folder.write(entry.name, other)
        torch.testing.assert_close(in_c_of(function, torch.ones(3))(), function(torch.ones(3)))
        assert kernel_folder.read(entry.name) != other
    assert kept is not None


def test_another_program_machine_or_flag_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [library.key_of("int a;"), library.key_of("int b;")]
    for name, value in (("_instructions", lambda: "another one"), ("FLAGS", ("-O0",)), ("compiler", lambda: ("cc",))):
        monkeypatch.setattr(library, name, value)
        keys.append(library.key_of("int a;"))
    assert len(set(keys)) == len(keys)


def test_where_the_program_itself_fails_nothing_is_compared(folder: Path) -> None:
    def inverted(x: Tensor) -> list[Tensor]:
        found = torch.linalg.cholesky_ex(x, check_errors=True).L  # which exists at the start, and not far away
        x.copy_(x * 0.9)
        return [found.sum()]

    assert in_c_of(inverted, torch.eye(3))


@pytest.mark.parametrize(
    "held", [torch.tensor(2.0).expand(3), torch.ones(3, 1).expand(3, 3), torch.ones(0, 1).expand(0, 3)]
)
def test_what_a_step_holds_may_be_expanded(folder: Path, held: Tensor) -> None:
    assert in_c_of(lambda x: [(x * held).sum()], torch.ones(3))


def step_with_a_branch(x: Tensor) -> list[Tensor]:
    """A step that does something else far from where it starts."""
    loss = torch.where(x > 0.5, 3 * x, x).sum()
    x.copy_(x * 0.9)
    return [loss]


def test_a_branch_that_is_off_at_the_start_is_compared_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_c_of(step_with_a_branch, torch.zeros(5))
    monkeypatch.setitem(formulas.FORMULAS, "where", "{2}")
    wrong = "does not compute what the recorded one does"
    x = torch.zeros(5)
    with pytest.warns(UserWarning, match=wrong), pytest.raises(CannotError, match=wrong):
        in_c_of(step_with_a_branch, x)
    assert not x.any()


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
def test_a_second_training_takes_the_same_steps_without_a_compiler(
    folder: Path, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = _counted(monkeypatch)
    first = trained(batch_size)
    assert count == ["C"]
    torch.testing.assert_close(trained(batch_size), first, rtol=0, atol=0)
    assert count == ["C"]
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-8])
    torch.testing.assert_close(trained(batch_size), first, rtol=0, atol=0)
    assert count == ["C", "C"], "a damaged library is made anew"
