"""`actorium chat` as a person meets it: a banner, commands, a line that can be edited."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actorium.actors.client.requests import StreamDelta
from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.params import SamplingParams
from actorium.tools.cli import chat_command
from actorium.tools.cli.chat_command import COMMANDS, banner, talk

INFO: dict[str, Any] = {
    "model": "fox", "max_model_len": 8192, "generation_defaults": {"temperature": 0.6},
    "config": msgspec.to_builtins(Config())}


class Echo:
    """A client that says back what it was told last."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    @contextmanager
    def chat(self, history: list[Any], params: SamplingParams, stream: bool, adapter: str
             ) -> Iterator[Iterator[StreamDelta]]:
        self.asked.append([turn["content"] for turn in history])
        yield iter([StreamDelta(text=history[-1]["content"], token_ids=[1])])


def said(monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[list[str]]:
    """What the client was asked, of these turns."""
    left = iter([*lines, "/exit"])
    monkeypatch.setattr(chat_command, "_read", lambda: next(left))
    client: Any = Echo()
    talk(client, SamplingParams())
    return client.asked  # type: ignore[no-any-return]


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = said(monkeypatch, "one", "/help", "/new", "two", "/nwe", "/image", "/home/me is a path",
                 "/")
    assert asked == [["one"], ["two"], ["two", "two", "/home/me is a path"],
                     ["two", "two", "/home/me is a path", "/home/me is a path", "/"]]
    told = capsys.readouterr()
    for name, about in COMMANDS.items():
        assert f"{name:<12} {about}\n" in told.out
    assert told.err == ("error: /nwe: no such command (/help lists them)\n"
                        "error: /image: FILE is missing\n")


def test_the_banner_says_who_answers_and_how() -> None:
    assert banner(INFO, {}) == (
        "fox: conversations of up to 8,192 tokens\n"
        "sampling: temperature 0.6 (the model's generation_config.json); others: "
        "--generation-config vllm, --override-generation-config JSON\n"
        "/help lists the commands, Ctrl-D leaves")
    assert "\nsampling: temperature 0.0, top_k 5 (flags), else temperature 0.6 (" in banner(
        INFO, {"temperature": 0.0, "top_k": 5})
    config = Config(model=ModelConfig(generation_config="vllm"))
    other = {**INFO, "generation_defaults": {}, "config": msgspec.to_builtins(config)}
    assert "temperature 1, nothing cut off (--generation-config vllm)" in banner(other, {})


PROGRAM = """
from test_chat import Echo
from actorium.actors.params import SamplingParams
from actorium.tools.cli.chat_command import talk
client = Echo()
talk(client, SamplingParams())
print("asked", client.asked)
"""


def test_a_line_can_be_edited_and_called_back() -> None:
    """On a terminal: the arrows go back in the line, and to the turns before."""
    pytest.importorskip("readline")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parent)})
    os.close(theirs)
    told = b""
    for keys in (b"fx\x1b[Do\r", b"\x1b[A!\r", b"\x04"):
        told += _until(ours, b"> ")
        os.write(ours, keys)
    while part := _read(ours):
        told += part
    assert process.wait(30) == 0
    assert b"asked [['fox'], ['fox', 'fox', 'fox!']]" in told
    os.close(ours)


def _until(terminal: int, text: bytes) -> bytes:
    found = b""
    while not found.endswith(text):
        part = _read(terminal)
        assert part, found
        found += part
    return found


def _read(terminal: int) -> bytes:
    """Nothing at the end."""
    try:
        return os.read(terminal, 1024)
    except OSError:
        return b""
