"""An engine as systemd's service, without systemd: its unit's protocol on a real socket."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_cli import NULL, Cli, cli, read_until

__all__ = ["cli"]


@pytest.fixture
def systemd(tmp_path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(30)
    return listener


@contextlib.contextmanager
def service(cli: Cli, systemd: socket.socket, watchdog: str
            ) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that is ready, as a service. watchdog: microseconds."""
    # systemd names the process that it has started by its id, which `exec` leaves as it is.
    script = 'SYSTEMD_EXEC_PID=$$ WATCHDOG_PID=$$ exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", *cli.argv("serve", "--no-http", *NULL)],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=cli.env | {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": watchdog})
    try:
        read_until(process, b"ready after:")
        yield process
    finally:
        for number in (signal.SIGCONT, signal.SIGTERM):
            process.send_signal(number)
        process.communicate(timeout=30)


def received(systemd: socket.socket, last: bytes) -> set[bytes]:
    """What comes before `last`."""
    states = [systemd.recv(100)]
    while states[-1] != last:
        states.append(systemd.recv(100))
    return set(states[:-1])


def test_systemd_hears_of_its_life(cli: Cli, systemd: socket.socket) -> None:
    with service(cli, systemd, watchdog="400000") as process:
        assert received(systemd, last=b"READY=1") <= {b"WATCHDOG=1"}
        assert [systemd.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3, "idle, it goes on"
        process.send_signal(signal.SIGTERM)
        assert received(systemd, last=b"STOPPING=1") <= {b"WATCHDOG=1"}
        assert process.wait(20) == 0


def test_nobody_speaks_for_a_launcher_that_hangs(cli: Cli, systemd: socket.socket) -> None:
    """Then systemd ends it after WatchdogSec."""
    with service(cli, systemd, watchdog="200000") as process:
        process.send_signal(signal.SIGSTOP)
        systemd.settimeout(1.0)
        with pytest.raises(TimeoutError):
            received(systemd, last=b"")
