"""Who asks the engine to stop: a signal, a caller, the death of the process that it belongs to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequests:
    """Counts requests to stop, and wakes the poll that waits for them."""

    def __init__(self) -> None:
        self.count = 0
        self._poll: select.poll | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._parent_fd: int | None = None
        self.tied = False
        """A parent's end is a request."""
        self._handlers: dict[signal.Signals, Any] = {}
        """Those that were there before `catch_signals`."""

    def add(self) -> None:
        """One request more. Safe in a signal handler, and in any thread."""
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"!")

    def catch_signals(self) -> None:
        """Each of `SIGNALS` is a request from now on, until `close`; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        # A signal that comes just before poll, or to another thread, does not interrupt poll; the
        # byte that C code writes to this pipe does.
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: self.add())
                          for number in SIGNALS}

    def tie_to(self, parent: int) -> None:
        """The end of the process `parent` is a request. Unlike with the parent-death signal, it
        does not matter which of the parent's threads started us."""
        self._parent_fd, self.tied = os.pidfd_open(parent), True
        if os.getppid() != parent:
            self.add()

    def register(self, poll: select.poll) -> None:
        """Has `poll` wake for requests; hand `on_readable` the descriptors that it reports."""
        self._poll = poll
        for fd in (self._wake_r, self._parent_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)

    def on_readable(self, fd: int) -> None:
        """`fd` is readable; one that is not of this object is passed over."""
        if fd == self._wake_r:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
        elif fd == self._parent_fd:
            assert self._poll is not None
            self._poll.unregister(fd)
            self.add()

    def close(self) -> None:
        """Signals are handled as before."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for fd in (self._wake_r, self._wake_w, self._parent_fd):
            if fd is not None:
                os.close(fd)
