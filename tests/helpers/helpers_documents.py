"""The commands of README.md and docs/: fenced blocks, their marks, and a shell that runs them.

    ```sh run              run by tests, in the page's order, in a folder of the page's own
    ```sh run server       the same, in the background; the next block waits until it is ready
    ```sh run slow         run by `make battery` alone
    ```sh no-run: REASON   not run; its `actorium` commands are still read by the parser of flags
    ```python run          run by Python

A page with `<!-- engine: actorium serve -->` finds an engine there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helpers_code_facts import ROOT
from helpers_zygote import ForkedPython

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENGINE = "<!-- engine: actorium serve -->"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n|\A)((?:    [^\n]*\n)+)", re.MULTILINE)
MARKS = re.compile(r" (run(?: server| slow)?|no-run: \S.*)")
SHELLS = ("sh", "bash", "shell", "console")


class Block(NamedTuple):
    language: str
    mark: str
    """What stands behind the language."""
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks with a language, in order."""
    return [Block(language, rest.strip(), text)
            for language, rest, text in FENCE.findall(page.read_text())]


def indented(page: Path) -> list[str]:
    """The blocks that are indented instead."""
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE)
            for block in INDENTED.findall(FENCE.sub("", page.read_text()))]


def commands(*shells: str) -> Iterator[list[str]]:
    """The words behind `actorium` in each line that begins with it, behind a prompt or without."""
    for shell in shells:
        for line in re.sub(r"\\\n\s*", "", shell).splitlines():
            line = re.sub(r"^(?:[\w-]*\$ )?(?:\S*/)?(?=actorium )", "", line)
            if line.startswith("actorium "):
                yield from _calls(line)


def commands_of(page: Path) -> Iterator[list[str]]:
    """Those of all blocks of a page."""
    return commands(*(block.text for block in blocks(page) if block.language in SHELLS),
                    *indented(page))


def _calls(line: str) -> Iterator[list[str]]:
    words = shlex.shlex(line, posix=True, punctuation_chars=";&|>")
    words.whitespace_split = True
    call: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set(";&|>"):
            if call and call[0] == "actorium":
                yield call[1:]
            call = []
        else:
            call.append(word)


SHIM = """\
#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
    control.connect({path!r})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: control.send(b"%d" % number))
    request = json.dumps([sys.argv[1:], dict(os.environ)]).encode()
    socket.send_fds(control, [request], [0, 1, 2])
    sys.exit(int(control.recv(16)))
"""


class ForkedCommands:
    """A folder with an `actorium` whose calls are forked off the process of `helpers_zygote`."""

    def __init__(self, folder: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = str(folder / "commands.sock")
        self._server.bind(path)
        self._server.listen()
        shim = folder / "actorium"
        shim.write_text(SHIM.format(python=sys.executable, path=path))
        shim.chmod(0o755)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: socket.socket) -> None:
        with call:
            data, fds, _, _ = socket.recv_fds(call, 1 << 18, 3)
            words, env = json.loads(data)
            process = ForkedPython(["-m", "actorium.tools.cli", *words], env,
                                   stdin=fds[0], stdout=fds[1], stderr=fds[2])
            for fd in fds:
                os.close(fd)
            threading.Thread(target=_pass_signals, args=(call, process), daemon=True).start()
            call.send(b"%d" % (process.wait() % 256))


def _pass_signals(call: socket.socket, process: ForkedPython) -> None:
    try:
        while data := call.recv(16):
            process.send_signal(int(data))
    except OSError:
        pass
