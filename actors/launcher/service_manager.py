"""What systemd is told of an engine that it has started (`Type=notify`, `WatchdogSec=`).

The protocol is that of sd_notify(3): datagrams of `NAME=value` to the socket in NOTIFY_SOCKET. Only
the process that systemd itself has started speaks: engines that another program starts for itself,
and the replicas of a cluster, stay silent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"
SEND_SECONDS = 1.0
"""To wait for room in the socket's queue, which holds some datagrams until systemd reads them."""


class ServiceManager:
    """The other end of NOTIFY_SOCKET, if there is one. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        """environ: of the process `pid`, this one."""
        started = environ.get("SYSTEMD_EXEC_PID") == str(pid)
        address = environ.get("NOTIFY_SOCKET", "") if started else ""
        # A leading @ is how the variable writes the zero byte of the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched = bool(address) and environ.get("WATCHDOG_PID") == str(pid)
        self._interval = int(environ["WATCHDOG_USEC"]) / 2e6 if watched else 0.0
        self.next_ping: float | None = 0.0 if watched else None
        """When `ping` sends next; None = systemd does not wait for it."""

    @classmethod
    def of_this_process(cls) -> ServiceManager:
        """Returns that of this process. A launcher in a thread has none: the service is the program
        around it."""
        own = threading.current_thread() is threading.main_thread()
        return cls(os.environ if own else {}, os.getpid())

    def send(self, state: str, seconds: float = SEND_SECONDS) -> None:
        """Sends a state, or nothing where nobody reads: an engine does not depend on it."""
        if not self._address:
            return
        with (contextlib.suppress(OSError),
              socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender):
            sender.settimeout(seconds)
            sender.sendto(state.encode(), self._address)

    def ping(self, now: float) -> None:
        """Says, twice in each WatchdogSec, that the launcher's loop turns."""
        if self.next_ping is not None and now >= self.next_ping:
            self.send(ALIVE, seconds=0.0)  # another one follows
            self.next_ping = now + self._interval
