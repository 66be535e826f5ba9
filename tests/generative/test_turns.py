"""The lock that threads take in turn."""

import os
import threading
import time

import pytest

from pyro_dropout.generative.turns import Turn


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


@pytest.mark.parametrize("_", range(20))
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


def test_an_error_gives_the_lock_back() -> None:
    turn = Turn()
    with pytest.raises(ZeroDivisionError), turn:
        _ = 1 / 0
    thread, done = held_by_another(turn)
    done.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_lock_is_taken_if_it_is_free() -> None:
    turn = Turn()
    thread, done = held_by_another(turn)
    assert not turn.take_if_free()
    done.set()
    thread.join()
    assert turn.take_if_free()
    assert not turn.take_if_free()
    turn.give_back()
    thread, done = held_by_another(turn)
    done.set()


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
