"""An engine as systemd's service, without systemd: its unit's protocol on a real socket."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from helpers_cli import NULL, Cli, cli, read_until

__all__ = ["cli"]


class Systemd:
    """Reads all that comes, as systemd does: the socket's queue is short."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.states: SimpleQueue[bytes] = SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            self.states.put(self._socket.recv(100))

    def until(self, last: bytes) -> set[bytes]:
        """What comes before `last`."""
        states = set()
        deadline = time.monotonic() + 60
        while (state := self.states.get(timeout=30)) != last:
            assert time.monotonic() < deadline, states
            states.add(state)
        return states


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path / "notify")


@contextlib.contextmanager
def service(cli: Cli, systemd: Systemd, watchdog: str
            ) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that is ready, as a service. watchdog: microseconds."""
    # systemd names the process that it has started by its id, which `exec` leaves as it is.
    script = 'SYSTEMD_EXEC_PID=$$ WATCHDOG_PID=$$ exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", *cli.argv("serve", "--no-http", *NULL)],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=cli.env | {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": watchdog})
    try:
        read_until(process, b"ready after:")
        yield process
    finally:
        for number in (signal.SIGCONT, signal.SIGTERM):
            process.send_signal(number)
        process.communicate(timeout=30)


def test_systemd_hears_of_its_life(cli: Cli, systemd: Systemd) -> None:
    with service(cli, systemd, watchdog="400000") as process:
        assert systemd.until(b"READY=1") <= {b"WATCHDOG=1"}
        for _ in range(3):
            assert systemd.states.get(timeout=30) == b"WATCHDOG=1", "idle, it goes on"
        process.send_signal(signal.SIGTERM)
        assert systemd.until(b"STOPPING=1") <= {b"WATCHDOG=1"}
        assert process.wait(20) == 0


def test_nobody_speaks_for_a_launcher_that_hangs(cli: Cli, systemd: Systemd) -> None:
    """Then systemd ends it after WatchdogSec."""
    with service(cli, systemd, watchdog="200000") as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(Empty):
            for _ in range(1000):
                systemd.states.get(timeout=1.0)
