"""Time limits of tests that nothing outlasts but C code. pytest-timeout raises once, stops counting
where a test fails, and raises in vain while uvloop runs: clean-up then could wait for ever.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

AGAIN = 20.0
"""Seconds between the end of a test's time and the next try to end it."""
START = pytest.StashKey[Callable[[], None]]()
"""Starts a test's time anew."""
RUNS = pytest.StashKey[bool]()
"""Whether the test's own code runs, or pytest's."""


@pytest.hookimpl(optionalhook=True, hookwrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    yield
    end_test = signal.getsignal(signal.SIGALRM)
    if not callable(end_test) or not signal.getitimer(signal.ITIMER_REAL)[0]:
        return  # a thread measures the time

    def on_alarm(number: int, frame: FrameType | None) -> None:
        for task in _tasks():
            task.cancel()
        if item.stash.get(RUNS, False):
            end_test(number, frame)

    def start() -> None:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, min(AGAIN, settings.timeout))

    item.stash[START] = start
    start()


def _tasks() -> set[asyncio.Task[Any]]:
    """Of the loop that runs in this thread."""
    try:
        return asyncio.all_tasks()
    except RuntimeError:
        return set()


def _running(item: pytest.Item) -> Iterator[None]:
    item.stash[RUNS] = True
    yield
    item.stash[RUNS] = False


pytest_runtest_setup = pytest.hookimpl(hookwrapper=True, tryfirst=True)(_running)
pytest_runtest_call = pytest_runtest_setup


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    if START in item.stash:
        item.stash[START]()
    yield from _running(item)
