"""What actors write: formats, the file's bound, and a stderr that nobody reads."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.runtime import logs
from actorium.actors.runtime.console import print_notice


def record(message: str = "said", name: str = "actorium.test", level: int = logging.INFO,
           **more: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": name, "levelno": level, "msg": message,
                                  "levelname": logging.getLevelName(level)})
    made.__dict__.update(more)
    return made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_a_json_line_has_what_collectors_want() -> None:
    line = logs.JsonFormatter("gateway-0", 3).format(
        record(fields={"status": 200, "message": "not this"}))
    found = json.loads(line)
    assert found["time"] == pytest.approx(time.time(), abs=60)
    del found["time"]
    assert found == {"level": "info", "role": "gateway-0", "epoch": 3, "logger": "actorium.test",
                     "message": "said", "status": 200}


def test_a_text_line_has_level_time_and_role() -> None:
    line = logs.TextFormatter("watchdog").format(record(level=logging.WARNING))
    assert re.fullmatch(r"WARNING \d\d-\d\d \d\d:\d\d:\d\d \[watchdog\] said", line)


def test_only_an_exceptions_type_and_place_are_logged() -> None:
    try:
        raise ValueError("the secret that a caller sent")
    except ValueError as error:
        told = logs.error_fields(error)
    assert told["error"] == "ValueError" and "test_logs.py" in told["stack"]
    assert "that a caller sent" not in told["stack"].replace(
        'raise ValueError("the secret that a caller sent")', "")


@pytest.mark.parametrize(("operation", "shown"), [(True, ["work", "bad"]), (False, ["bad"])])
def test_stderr_has_warnings_and_the_work_where_it_is_wanted(
        pipe: tuple[int, int], operation: bool, shown: list[str]) -> None:
    terminal = logs.Terminal(pipe[1])
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.addFilter(logs._Shown(operation))
    for one in (record("work", "actorium.stats"), record("chat", "actorium.model"),
                record("bad", level=logging.ERROR),
                record("last words", logs.FATAL, logging.ERROR)):
        terminal.handle(one)
    terminal.finish(5.0)
    assert os.read(pipe[0], 10_000).decode().split("\n")[:-1] == shown


def test_an_unread_stderr_blocks_no_actor(pipe: tuple[int, int]) -> None:
    terminal = logs.Terminal(pipe[1])
    began = time.monotonic()
    for i in range(2 * logs.LINES_HELD + 200):
        terminal.handle(record(f"{i} " + "x" * 1000))
    assert time.monotonic() - began < 5
    thread = terminal._thread
    assert thread is not None
    terminal.finish(0.05)
    assert thread.is_alive(), "it is stuck"
    read = b""
    while thread.is_alive():  # else it would write to whatever has the pipe's number next
        if select.select([pipe[0]], [], [], 0.05)[0]:
            read += os.read(pipe[0], 1 << 16)
    assert read.startswith(b"0 x") and b"were dropped" in read


def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 1000)
    path = tmp_path / "gateway-0.log"
    file = logs.LogFile(path)
    try:
        for i in range(300):
            file.handle(record(f"line {i:3}"))
        old = path.with_suffix(".old.log")
        assert sorted(tmp_path.iterdir()) == [path, old]
        assert max(path.stat().st_size, old.stat().st_size) <= 1000
        lines = (old.read_text() + path.read_text()).splitlines()
        assert lines == [f"line {i:3}" for i in range(300 - len(lines), 300)] and len(lines) > 80
        assert logs.LogFile(path)._left == 1000 - path.stat().st_size, "a later life goes on"
    finally:
        import faulthandler

        faulthandler.enable(file=sys.__stderr__)
        faulthandler.unregister(logs.signal.SIGUSR1)


def test_the_launcher_logs_in_the_same_format(capsys: pytest.CaptureFixture[str]) -> None:
    print_notice("worker-0 is killed", RuntimeConfig())
    print_notice("worker-0 is killed", RuntimeConfig(log_format="json"))
    text, line = capsys.readouterr().err.splitlines()
    assert text == "actorium: worker-0 is killed"
    found = json.loads(line)
    assert (found["role"], found["message"]) == ("launcher", "worker-0 is killed")


@pytest.mark.parametrize(("settings", "what"), [
    ({"log_format": "xml"}, "log_format: must be text or json, got 'xml'"),
    ({"log_interval": -1.0}, "log_interval: must be 0"),
    ({"log_interval": 0.01}, "log_interval: must be 0")])
def test_settings_are_checked(settings: dict[str, object], what: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(what)):
        validate(Config(runtime=RuntimeConfig(**settings)))  # type: ignore[arg-type]
