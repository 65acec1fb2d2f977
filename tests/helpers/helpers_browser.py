"""A headless Chromium over its debugging pipe: the DevTools protocol without a package for it.

Messages are JSON, each ended by a zero byte: the browser reads them from descriptor 3 and writes
them to 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NOT_THERE = f"no browser: none of {', '.join(NAMES)} in the path"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--hide-scrollbars", "--disable-extensions", "--mute-audio",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--remote-debugging-pipe", "--force-color-profile=srgb", "about:blank")
PATIENCE = 20.0
"""Seconds for anything the browser is asked."""


def browser_path() -> str | None:
    """The first of `NAMES` that is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser says no, or nothing."""


class Browser:
    """One browser process, as a context."""

    def __init__(self, path: str) -> None:
        self._home = tempfile.mkdtemp(prefix="actorium-browser-", dir="/tmp")
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        self._in, self._out = ours_in, ours_out
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        self._pid = os.posix_spawn(path, [path, f"--user-data-dir={self._home}", *FLAGS],
                                   {**os.environ, "HOME": self._home}, setpgroup=0,
                                   file_actions=[*quiet, *pipes])
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises `BrowserError`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        _write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def _next(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise BrowserError(f"{method}: no answer from the browser")
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, url: str, width: int = 1280, height: int = 860, dark: bool = False,
             init: str = "") -> Tab:
        """A tab of a context of its own (no cookies, no storage), loaded. `init` runs before any
        script of the page."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank",
                           browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.size(width, height)
        tab.dark(dark)
        if init:
            tab.call("Page.addScriptToEvaluateOnNewDocument", source=init)
        tab.call("Page.navigate", url=url)
        tab.wait("document.readyState === 'complete'")
        return tab

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        shutil.rmtree(self._home, ignore_errors=True)


class Tab:
    """One open page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def js(self, expression: str) -> Any:
        """The value; promises are waited for. Raises `BrowserError` on an exception."""
        got = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                        returnByValue=True, allowUnsafeEvalBlockedByCSP=False)
        if "exceptionDetails" in got:
            raise BrowserError(f"{expression}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def wait(self, condition: str, seconds: float = PATIENCE / 2) -> None:
        """Return as soon as the condition is true. Raises `BrowserError`."""
        until = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise BrowserError(f"{condition}: not true within {seconds:g} s; the page says: "
                                   f"{self.js('document.body.innerText')[:600]!r}")
            self.js("new Promise(done => setTimeout(done, 15))")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element."""
        found = self.js(f"(b => [b.left, b.top, b.width, b.height])"
                        f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())")
        return found[0], found[1], found[2], found[3]

    def hover(self, selector: str) -> None:
        self._mouse("mouseMoved", selector)

    def click(self, selector: str) -> None:
        """Clicks in the middle of the element: an element above it would take the click."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, selector, button="left", clickCount=1)

    def _mouse(self, kind: str, selector: str, **more: Any) -> None:
        left, top, width, height = self.box(selector)
        self.call("Input.dispatchMouseEvent", type=kind, x=left + width / 2, y=top + height / 2,
                  **more)

    def type(self, text: str) -> None:
        """Where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers,
                      windowsVirtualKeyCode=code, **(text if kind == "keyDown" else {}))

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 500)

    def dark(self, dark: bool) -> None:
        """Emulates the system's preferred colour scheme."""
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def shot(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[str]:
        """Exceptions, and what the console says is wrong (breaches of the policy are)."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


def _pipe() -> tuple[int, int]:
    """Ends that are far from 3 and 4, so that one is not put over the other."""
    ends = os.pipe()
    far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return far[0], far[1]


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data):]
