"""Commands reach the sockets' thread in order, wake it when it sleeps and only then, and none is left lying."""

import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from transport.commands import Commands


@pytest.fixture
def commands() -> Iterator[Commands]:
    made = Commands()
    yield made
    made.close()


def woken(commands: Commands) -> bool:
    return bool(select.select([commands], [], [], 0)[0])


def test_whoever_sleeps_is_woken_once(commands: Commands) -> None:
    done: list[int] = []
    assert commands.may_sleep()
    for number in range(3):
        commands.give(lambda _, number=number: done.append(number))  # type: ignore[misc]
    assert woken(commands)
    assert commands.carry_out(woken=True) and done == [0, 1, 2]
    assert not woken(commands) and not commands.carry_out(woken=False)


def test_whoever_is_awake_is_not_woken_and_may_not_sleep(commands: Commands) -> None:
    done: list[int] = []
    commands.give(lambda _: done.append(1))
    assert not woken(commands)
    assert not commands.may_sleep()
    assert commands.carry_out(woken=False) and done == [1]


def test_what_is_left_waits_for_the_next_reason_to_wake_up(commands: Commands) -> None:
    done: list[int] = []
    assert commands.may_sleep()
    commands.leave(lambda _: done.append(1))
    assert not woken(commands)
    commands.give(lambda _: done.append(2))
    assert woken(commands)
    commands.carry_out(woken=True)
    assert done == [1, 2]


def test_a_command_is_told_the_time_at_which_it_runs(commands: Commands) -> None:
    times: list[float] = []
    before = time.monotonic()
    commands.give(times.append)
    commands.carry_out(woken=False)
    assert before <= times[0] <= time.monotonic()


def test_no_command_is_left_lying(commands: Commands) -> None:
    """A thread that sleeps until it is woken carries out every one of many commands, whenever they come."""
    many, done = 20_000, threading.Event()
    seen: list[int] = []

    def work() -> None:
        while len(seen) < many:
            ready = bool(select.select([commands], [], [], 30.0 if commands.may_sleep() else 0.0)[0])
            commands.carry_out(ready)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(many):
        commands.give(lambda _, number=number: seen.append(number))  # type: ignore[misc]
        if number % 7 == 0:
            time.sleep(0)  # let the other one fall asleep now and then
    assert done.wait(20.0)  # a command that nobody was woken for would take 30 s
    thread.join()
    assert seen == list(range(many))


def test_the_end_of_the_thread_is_no_error(commands: Commands) -> None:
    assert commands.may_sleep()
    commands.close()
    commands.give(lambda _: None)


def test_a_block_given_back_goes_to_the_offer_that_waits(nodes: Any, wait_until: Callable[..., None]) -> None:
    """Also when the sockets' thread sleeps: giving back wakes it only for the sake of such an offer."""
    nodes.start({(0, 2), (1, 2)}, concurrent=1, beat_s=15.0, suspect_s=18.0, retry_s=30.0, retry_max_s=30.0)
    for id in (0, 1, 2):
        nodes.nodes[id].enter(1)
    nodes.share(0, 1, 2)
    nodes.share(1, 1, 2)
    arrivals = nodes.nodes[2].gather([0, 1])
    first = next(arrivals)
    wait_until(lambda: nodes.loops[2].blocks_wanted)
    began = time.monotonic()
    nodes.nodes[2].release(first.block)
    second = next(arrivals)
    assert {first.sender, second.sender} == {0, 1}
    assert time.monotonic() - began < 10.0  # and not with the next beat
