"""The lock that threads take in turn."""

import os
import threading
import time
from typing import Any

import pyro
import pytest
import torch
from pyro import poutine
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from pyro_dropout.generative.process_lock import RUNNING, Turn, modules_stay, one_at_a_time


def held_by_another(turn: Turn) -> tuple[threading.Thread, threading.Event]:
    """Return a thread that holds the lock, and the event that ends it."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait()
    return thread, done


@pytest.mark.parametrize("_", range(3))
def test_a_thread_that_takes_the_lock_back_lets_one_that_waits_go_first(_: int) -> None:
    turn, order = Turn(), list[str]()

    def wait() -> None:
        with turn:
            order.append("waiting")

    thread = threading.Thread(target=wait, daemon=True)
    with turn, turn:
        thread.start()
        while not turn._next.locked():  # until the other thread waits
            time.sleep(0.001)
        assert order == []
    with turn:
        order.append("again")
    assert order == ["waiting", "again"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mine", [False, True])
def test_a_child_process_waits_for_no_thread_of_its_parent(mine: bool) -> None:
    turn = Turn()
    if mine:
        turn.__enter__()
        waiting = threading.Thread(target=turn.__enter__, daemon=True)
        waiting.start()
        while not turn._next.locked():
            time.sleep(0.001)
    else:
        held_by_another(turn)
    child = os.fork()
    if not child:
        if mine:
            turn.__exit__()
        with turn:
            os._exit(0)
    ended = (0, 0)
    for _ in range(500):
        ended = os.waitpid(child, os.WNOHANG)
        if ended[0]:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.parametrize("gradients", [True, False])
def test_an_interrupt_that_comes_before_a_with_block_begins_leaves_nothing_switched(gradients: bool) -> None:
    """Only what the call itself has switched: a caller's handlers and modes stay."""

    @one_at_a_time
    def cut_short() -> None:
        torch.set_grad_enabled(not gradients)
        poutine.block().__enter__()
        pyro.plate("data", 3).__enter__()
        RUNNING.__enter__()
        raise KeyboardInterrupt

    plate = pyro.plate("other", 2)
    with torch.set_grad_enabled(gradients), poutine.trace() as outer, plate:
        with pytest.raises(KeyboardInterrupt):
            cut_short()
        assert torch.is_grad_enabled() == gradients
        assert list(_PYRO_STACK) == [outer, plate]
        assert _DIM_ALLOCATOR._stack == ["other"]
        assert not RUNNING.taken_here()


def test_an_interrupt_amid_a_swap_of_weights_leaves_the_network_its_own_parameters() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False))
    own = dict(net.named_parameters())

    @modules_stay
    def cut_short(net: torch.nn.Module) -> None:
        net.get_submodule("0")._parameters["weight"] = torch.zeros(3, 2)  # as torch.func.functional_call does
        del net.get_submodule("1")._parameters["weight"]
        net.get_submodule("0").register_parameter("late", torch.nn.Parameter(torch.ones(1)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short(net)
    found = dict(net.named_parameters())
    assert all(found[name] is value for name, value in own.items())
    assert set(found) == {*own, "0.late"}  # what it made on purpose stays


class Mode(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_interruption_leaves_torchs_modes_as_they_were() -> None:
    @one_at_a_time
    def entered_and_never_left() -> None:
        Mode().__enter__()
        raise KeyboardInterrupt

    @one_at_a_time
    def put_aside_for_a_moment() -> None:
        with Mode():
            _pop_mode()  # as torch does while a mode works
            raise KeyboardInterrupt

    @one_at_a_time
    def fails_by_itself() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("the disk is full") from None

    with Mode():
        before = _get_current_function_mode_stack()
        with pytest.raises(KeyboardInterrupt):
            entered_and_never_left()
        assert _get_current_function_mode_stack() == before
    for broken in (entered_and_never_left, put_aside_for_a_moment):
        with pytest.raises(KeyboardInterrupt):
            broken()
        assert _get_current_function_mode_stack() == []
    with pytest.raises(RuntimeError, match="disk is full"):
        fails_by_itself()
