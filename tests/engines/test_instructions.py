"""The processor's instructions are assumed to be known to the C++ compiler, and tried only where that was wrong."""

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dropout.engines import program

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, at its first import


class CppCompileError(RuntimeError):
    """Named as inductor's own."""


def _compiling(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> list[object]:
    """Let inductor fail so, one time each; return what it was told about the instructions."""
    told: list[object] = []

    def compile_fx(graph: Any, inputs: list[Tensor]) -> Any:
        told.append(inductor.cpp.vec_isa_ok)
        if len(told) <= len(failures):
            raise failures[len(told) - 1]
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return told


def _compile() -> Any:
    return program._compile(make_fx(lambda x: [x + 1])(torch.zeros(2)), [torch.zeros(2)])


@pytest.mark.parametrize("given", [None, False])
def test_they_are_assumed_unless_the_user_knows(given: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told = _compiling(monkeypatch)
    with inductor.patch({"cpp.vec_isa_ok": given}):
        assert _compile()(torch.zeros(2))[0].tolist() == [1.0, 1.0]
    assert told == [True if given is None else given]
    assert inductor.cpp.vec_isa_ok is None


def test_they_are_tried_where_the_compiler_does_not_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _compiling(monkeypatch, CppCompileError("unrecognized option -mavx512f"), ValueError("no"))
    with pytest.raises(ValueError, match="no"):  # which is not hidden
        _compile()
    assert told == [True, None]
