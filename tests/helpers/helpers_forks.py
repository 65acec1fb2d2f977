"""`--forks N`: what pytest has collected is run by N processes that are forked off it.

A file's tests go to one of them; so do all tests of the code itself (tests/house), which parse it
once. Each process takes the next file when it has ended one, in the order of the collection.
Fourteen thousand tests are collected once, and what they need is imported once, where every worker
of pytest-xdist would do it again. The first process reports, to the terminal and to a JUnit file.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

NUMBER_BYTES = 4
"""Of a group, in the pipe from which forks take the next one."""
REPORTING = ("pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_runtest_logfinish")
"""Hooks that the first process calls with what its forks send."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N",
                     help="run files of tests in N processes, forked once all are collected")


def group_of(item: pytest.Item) -> str:
    """Of tests that one process must run."""
    path, _, _ = item.nodeid.partition("::")
    return "house" if path.startswith("tests/house/") else path


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest's own, which runs if nothing is to be forked."""
    config = session.config
    if config.option.forks < 2 or config.option.collectonly or session.testsfailed:
        return None
    groups: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        groups.setdefault(group_of(item), []).append(item)
    ForkedRun(session, [*groups.values()]).run(min(config.option.forks, len(groups)))
    return True


@dataclass
class Fork:
    """A process that runs tests, as the first one knows it."""

    number: int
    pid: int
    pipe: socket.socket
    buffer: bytes = b""
    at: tuple[int, int] | None = None
    """Group and index of the test that it has begun."""


class ForkedRun:
    """The first process's part: it forks, and reports what its forks send."""

    def __init__(self, session: pytest.Session, groups: list[list[pytest.Item]]) -> None:
        self._session, self._groups = session, groups
        self._selector = selectors.DefaultSelector()
        self._base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._next, write = os.pipe()
        with os.fdopen(write, "wb") as numbers:
            assert len(groups) * NUMBER_BYTES < 65536, "more than a pipe holds"
            for number in range(len(groups)):
                numbers.write(number.to_bytes(NUMBER_BYTES, "little"))

    def run(self, count: int) -> None:
        """Raises as pytest's own loop, if tests that failed end it."""
        session = self._session
        try:
            for number in range(count):
                self._fork(number)
            while self._selector.get_map():
                for key, _ in self._selector.select():
                    self._read(key.data)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            for key in [*self._selector.get_map().values()]:
                os.kill(key.data.pid, signal.SIGKILL)
                os.waitpid(key.data.pid, 0)
                key.data.pipe.close()
            self._selector.close()
            os.close(self._next)

    def _fork(self, number: int, left: tuple[int, int] | None = None) -> None:
        near, far = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            near.close()
            _run_tests(self._session, self._groups, self._next, far,
                       self._base / f"fork-{number}", left)
        far.close()
        self._selector.register(near, selectors.EVENT_READ, Fork(number, pid, near))

    def _read(self, fork: Fork) -> None:
        with suppress(ConnectionResetError):
            if data := fork.pipe.recv(1 << 16):
                *lines, fork.buffer = (fork.buffer + data).split(b"\n")
                for line in lines:
                    self._report(fork, *json.loads(line))
                return
        self._selector.unregister(fork.pipe)
        fork.pipe.close()
        _, status = os.waitpid(fork.pid, 0)
        if fork.at is not None:
            self._report_death(fork, os.waitstatus_to_exitcode(status))
            self._fork(fork.number, (fork.at[0], fork.at[1] + 1))

    def _report(self, fork: Fork, hook: str, said: Any) -> None:
        config = self._session.config
        if hook == "at":
            fork.at = said and tuple(said)
        elif hook == "pytest_warning_recorded":
            text, category, filename, line = said.pop("warning")
            known = getattr(builtins, category, None) or type(category, (Warning,), {})
            message = warnings.WarningMessage(known(text), known, filename, line)
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={**said, "warning_message": message})
        elif hook == "pytest_runtest_logreport":
            report = config.hook.pytest_report_from_serializable(config=config, data=said)
            if isinstance(report.longrepr, list):  # why it was skipped, which JSON has as a list
                report.longrepr = tuple(report.longrepr)
            config.hook.pytest_runtest_logreport(report=report)
        else:
            getattr(config.hook, hook)(**said)

    def _report_death(self, fork: Fork, code: int) -> None:
        """Fails the test during which a process ended."""
        assert fork.at is not None
        item = self._groups[fork.at[0]][fork.at[1]]
        said = f"the process that ran this test ended with {code}"
        self._session.config.hook.pytest_runtest_logreport(report=pytest.TestReport(
            item.nodeid, item.location, {}, "failed", said, "call"))


# --- in a fork ---

class Sender:
    """Hooks whose calls are sent to the first process."""

    def __init__(self, config: pytest.Config, pipe: socket.socket) -> None:
        self._config, self._pipe = config, pipe

    def send(self, hook: str, said: Any) -> None:
        """said: what JSON can say."""
        self._pipe.sendall(json.dumps([hook, said], default=str).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.send("pytest_runtest_logstart", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send("pytest_runtest_logreport", self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.send("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location})

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str,
                                nodeid: str, location: Any) -> None:
        self.send("pytest_warning_recorded", {
            "warning": [str(warning_message.message), warning_message.category.__name__,
                        warning_message.filename, warning_message.lineno],
            "when": when, "nodeid": nodeid, "location": location})


def _run_tests(session: pytest.Session, groups: list[list[pytest.Item]], queue: int,
               pipe: socket.socket, temporary: Path, left: tuple[int, int] | None) -> NoReturn:
    """left: a group whose first tests an earlier process has run, and the first that is left."""
    code = 1
    try:
        config, hook = session.config, session.config.hook
        sender = Sender(config, pipe)
        _become_a_fork(config, sender, temporary)
        for group, first in _taken(queue, left):
            items = groups[group]
            for index in range(first, len(items)):
                sender.send("at", [group, index])
                after = items[index + 1] if index + 1 < len(items) else session
                # behind a file's last test all is torn down but the session
                hook.pytest_runtest_protocol(item=items[index], nextitem=after)
        session._setupstate.teardown_exact(None)
        sender.send("at", None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _taken(queue: int, left: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
    if left is not None:
        yield left
    while number := os.read(queue, NUMBER_BYTES):
        yield int.from_bytes(number, "little"), 0


def _become_a_fork(config: pytest.Config, sender: Sender, temporary: Path) -> None:
    """Reports go to the sender alone; files, output and draws are this process's."""
    for name in (*REPORTING, "pytest_warning_recorded"):
        caller = getattr(config.hook, name)
        for implementation in caller.get_hookimpls():
            caller._remove_plugin(implementation.plugin)
    config.pluginmanager.register(sender, "forks-sender")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    temporary.mkdir(mode=0o700, exist_ok=True)
    config._tmp_path_factory._basetemp = temporary  # type: ignore[attr-defined]
    random.seed()
