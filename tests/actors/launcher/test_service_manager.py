"""What systemd hears of an engine: from which process, what, and how often."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from actorium.actors.launcher.service_manager import ALIVE, READY, ServiceManager

PID = 77


@pytest.fixture
def systemd(tmp_path: Path) -> socket.socket:
    """The socket at which systemd listens."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.setblocking(False)
    return listener


def environment(address: str, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": address, "SYSTEMD_EXEC_PID": str(PID)} | more


def received(listener: socket.socket) -> list[bytes]:
    found = []
    try:
        while True:
            found.append(listener.recv(100))
    except BlockingIOError:
        return found


def test_it_hears_what_is_sent(systemd: socket.socket) -> None:
    manager = ServiceManager(environment(systemd.getsockname()), PID)
    manager.send(READY)
    assert received(systemd) == [b"READY=1"]
    manager.ping(5.0)
    assert manager.next_ping is None and received(systemd) == [], "without WatchdogSec"


def test_sockets_of_the_abstract_namespace() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0actorium-test-" + str(os.getpid()))
        listener.setblocking(False)
        ServiceManager(environment("@" + listener.getsockname()[1:].decode()), PID).send(READY)
        assert received(listener) == [b"READY=1"]


def test_pings_come_twice_in_the_time_that_systemd_waits(systemd: socket.socket) -> None:
    manager = ServiceManager(environment(
        systemd.getsockname(), WATCHDOG_USEC="20000000", WATCHDOG_PID=str(PID)), PID)
    sent = []
    for second in range(31):
        manager.ping(100.0 + second)
        sent.append(len(received(systemd)))
    assert [second for second, count in enumerate(sent) if count] == [0, 10, 20, 30]
    assert manager.next_ping == 140.0


def test_a_state_waits_for_room_and_a_ping_does_not(systemd: socket.socket) -> None:
    manager = ServiceManager(environment(
        systemd.getsockname(), WATCHDOG_USEC="2000000", WATCHDOG_PID=str(PID)), PID)
    for second in range(1000):
        manager.ping(float(second))
    queued = len(received(systemd))
    assert 0 < queued < 1000, "the queue was full"
    for second in range(1000):
        manager.ping(2000.0 + second)
    sender = threading.Thread(target=lambda: manager.send(READY))
    sender.start()
    time.sleep(0.05)
    states = received(systemd)
    sender.join()
    assert (states + received(systemd))[-1] == READY.encode()


@pytest.mark.parametrize("started", [str(PID + 1), ""])
def test_other_processes_of_a_service_stay_silent(systemd: socket.socket, started: str) -> None:
    """Replicas, and engines that a program of a service starts, have its environment."""
    manager = ServiceManager(environment(
        systemd.getsockname(), SYSTEMD_EXEC_PID=started, WATCHDOG_USEC="1", WATCHDOG_PID="1"), PID)
    manager.send(READY)
    manager.ping(5.0)
    assert received(systemd) == [] and manager.next_ping is None


def test_nobody_needs_to_listen(systemd: socket.socket) -> None:
    address = systemd.getsockname()
    systemd.close()
    manager = ServiceManager(environment(address), PID)
    manager.send(ALIVE)
    os.unlink(address)
    manager.send(ALIVE)
    ServiceManager({}, PID).send(READY)


def test_a_launcher_in_a_thread_leaves_it_to_the_program(
        monkeypatch: pytest.MonkeyPatch, systemd: socket.socket) -> None:
    for name, value in environment(systemd.getsockname(),
                                   SYSTEMD_EXEC_PID=str(os.getpid())).items():
        monkeypatch.setenv(name, value)
    thread = threading.Thread(target=lambda: ServiceManager.of_this_process().send(READY))
    thread.start()
    thread.join()
    assert received(systemd) == []
    ServiceManager.of_this_process().send(READY)
    assert received(systemd) == [b"READY=1"]
