"""What compilers write lies where nobody else can change it, and programs in C are never trusted blindly."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.engines import kernel_folder
from pyro_dropout.engines.engine import CannotError
from pyro_dropout.engines.generated import formulas
from pyro_dropout.engines.in_c import compiled, in_c
from pyro_dropout.engines.program import Program


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_what_others_can_write_to_is_not_trusted(tmp_path: Path, mode: int, above: int) -> None:
    (tmp_path / "a").mkdir()
    path = [tmp_path / "a", *(tmp_path / "a").parents][above]
    assert kernel_folder.trusted(tmp_path / "a")
    before = path.stat().st_mode
    path.chmod(before | mode)
    try:
        assert not kernel_folder.trusted(tmp_path / "a")
    finally:
        path.chmod(before)


@pytest.mark.parametrize("sticky", [0, 0o1000])
def test_a_temporary_folder_of_all_users_needs_the_sticky_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sticky: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o777 | sticky)
    text = f"int segment0(void *const *p) {{ return 0; }} // {sticky}"
    if sticky:
        assert compiled(text)
    else:
        with pytest.raises(CannotError, match="failed"):
            compiled(text)


def test_a_folder_that_another_user_has_made_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = os.lstat

    def lstat(path: Any) -> Any:  # as if another user had made it; only root could in fact
        found = others(path)
        return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:])) if path == tmp_path else found

    assert kernel_folder.trusted(tmp_path)
    monkeypatch.setattr(os, "lstat", lstat)
    assert not kernel_folder.trusted(tmp_path)


def test_torchs_own_folder_made_by_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    kernel_folder.check_compiler_folder()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me == 0:
        os.chown(theirs, 2, 2)  # what belongs to root is trusted
    with pytest.raises(pd.errors.PyroDropoutError, match="belongs to another user"):
        kernel_folder.check_compiler_folder()


# --- programs ---------------------------------------------------------------------------------------------------------

Function = Callable[..., list[Tensor]]


def step(x: Tensor, y: Tensor) -> list[Tensor]:
    """Noise is drawn, multiplied, and written over x."""
    product = torch.mm(torch.randn(3, 3), y)
    x.copy_(product)
    return [product + 1]


def in_c_of(function: Function, *inputs: Tensor) -> Callable[[], list[Tensor]]:
    return in_c(Program(function, *[each.clone() for each in inputs], compile=False), inputs)


def test_a_program_runs_on_the_tensors_it_was_made_for_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(3, 3), torch.randn(3, 3)
    in_c_of(step, x, y)
    assert not x.any(), "to make it has changed nothing"
    monkeypatch.setattr("subprocess.run", None)
    x, y = torch.zeros(9).view(3, 3), torch.randn(3, 3)
    run = in_c_of(step, x, y)
    torch.manual_seed(0)
    found = run()
    torch.manual_seed(0)
    torch.testing.assert_close(x, torch.randn(3, 3) @ y)
    torch.testing.assert_close(found[0], x + 1)


def test_where_the_program_itself_fails_nothing_is_compared() -> None:
    def inverted(x: Tensor) -> list[Tensor]:
        found = torch.linalg.cholesky_ex(x, check_errors=True).L  # which exists at the start, and not far away
        x.copy_(x * 0.9)
        return [found.sum()]

    assert in_c_of(inverted, torch.eye(3))


@pytest.mark.parametrize(
    "held", [torch.tensor(2.0).expand(3), torch.ones(3, 1).expand(3, 3), torch.ones(0, 1).expand(0, 3)]
)
def test_what_a_step_holds_may_be_expanded(held: Tensor) -> None:
    assert in_c_of(lambda x: [(x * held).sum()], torch.ones(3))


def step_with_a_branch(x: Tensor) -> list[Tensor]:
    """A step that does something else far from where it starts."""
    loss = torch.where(x > 0.5, 3 * x, x).sum()
    x.copy_(x * 0.9)
    return [loss]


def test_a_branch_that_is_off_at_the_start_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_c_of(step_with_a_branch, torch.zeros(5))
    monkeypatch.setitem(formulas.FORMULAS, "where", "{2}")
    wrong = "does not compute what the recorded one does"
    x = torch.zeros(5)
    with pytest.warns(UserWarning, match=wrong), pytest.raises(CannotError, match=wrong):
        in_c_of(step_with_a_branch, x)
    assert not x.any()
