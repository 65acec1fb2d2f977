"""What whoever waits for a download sees: a bar on a terminal, two lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.2
"""Between two looks of the bar."""
Report = Callable[[int, int], None]
"""(bytes that are there, all bytes)"""


def human_bytes(count: float) -> str:
    """`1.5 GB`, as hubs and indices show sizes."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


class DownloadBar:
    """Progress of one download, which several threads may report. A context."""

    def __init__(self, what: str, total: int, say: Callable[[str], None] | None = None,
                 terminal: bool | None = None, report: Report | None = None) -> None:
        """total: bytes; say: prints a line (default: to stderr); terminal: whether stderr shows a
        bar, default: where it is one; report: gets the bytes that are there, and all, now and
        then, on any thread."""
        self.what, self.total, self.done = what, total, 0
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._report = report
        self._began = time.monotonic()
        self._received, self._shown_at = 0, 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> DownloadBar:
        if self._terminal:
            self.add(0)
        else:
            self._say(f"fetching {self.what}, {human_bytes(self.total)}")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if kind is None:
            took = max(time.monotonic() - self._began, 1e-3)
            self._say(f"fetched {self.what}: {human_bytes(self._received)} in {took:.1f} s "
                      f"({human_bytes(self._received / took)}/s)")

    def add(self, count: int, received: bool = True) -> None:
        """So many bytes more are there; received: from the network, not from an earlier attempt.
        Negative: so many are not there after all."""
        with self._lock:
            self.done += count
            self._received += count if received else 0
            now = time.monotonic()
            if now - self._shown_at < LOOK_SECONDS:
                return
            self._shown_at = now
            if self._report is not None:
                self._report(self.done, self.total)
            if self._terminal:
                print(f"\r\033[K{self._line(now)}", end="", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        rate = self._received / max(now - self._began, 1e-3)
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate > 0 else ""
        share = 100 * self.done / self.total if self.total else 100
        return (f"fetching {self.what}: {share:.0f} % of {human_bytes(self.total)}, "
                f"{human_bytes(rate)}/s{left}")
