"""The lock that threads take in turn."""

import os
import threading
import time

import pyro
import pytest
import torch
from pyro import poutine
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK

from pyro_dropout.generative.process_state import RUNNING, Turn, modules_stay, one_at_a_time


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


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mine", [False, True])
def test_a_child_process_waits_for_no_thread_of_its_parent(mine: bool) -> None:
    turn = Turn()
    if mine:
        turn.__enter__()
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
