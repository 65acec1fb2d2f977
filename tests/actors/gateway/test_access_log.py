"""Lines on requests, and that nothing that was said is in any of them: of a whole engine."""

from __future__ import annotations

import http.client
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_cli import NULL, Cli, eventually

from actorium.actors.gateway import actor
from actorium.actors.gateway.http.access_log import _printable

PROMPT, QUERY, TOOL = "xyzzy-prompt-9c1", "xyzzy-query-5d2", "xyzzy-tool-7e3"
KEY, WRONG, BAD, NAMED = "sk-xyzzy-4f8a", "sk-wrong-2b7c", "xyzzy-body-8a4", "xyzzy-field-3c6"
SECRETS = (PROMPT, QUERY, TOOL, KEY, WRONG, BAD, NAMED)
NULL_WITH_TEXT = ("--null-worker", "--device", "cpu")


class Run(NamedTuple):
    """What an engine has written, and what it was asked."""

    terminal: list[str]
    files: str
    outputs: list[str]
    statuses: dict[str, int]


class Asker:
    """Calls to one engine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outputs: list[str] = []
        self.statuses: dict[str, int] = {}

    def ask(self, name: str, path: str, body: Any = None, key: str = KEY) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": name}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request("POST" if body is not None else "GET", path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        self.statuses[name] = answer.status
        return text


@contextmanager
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


def requests(to: Asker) -> None:
    """Secrets in everything that a caller sends, and what comes of it."""
    said = json.loads(to.ask("whole", f"/v1/completions?key={QUERY}",
                             {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}))
    to.outputs.append(said["choices"][0]["text"])
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30, "stream": True,
            "ignore_eos": True}
    streamed = to.ask("stream", "/v1/chat/completions", chat)
    events = [json.loads(line[6:]) for line in streamed.split("\n")
              if line.startswith("data: {")]
    to.outputs.append("".join(c["delta"].get("content") or "" for e in events
                              for c in e["choices"]))
    to.ask("key", "/v1/completions", {"prompt": PROMPT}, key=WRONG)
    to.ask("json", "/v1/completions", b'{"prompt": "' + BAD.encode())
    to.ask("type", "/v1/completions", {"prompt": PROMPT, "max_tokens": BAD, NAMED: 1})
    to.ask("schema", "/v1/completions", {"prompt": PROMPT, "guided_regex": f"(({BAD}"})
    to.ask("tool", "/v1/chat/completions", chat | {"tools": [{"type": TOOL}]})
    to.ask("long", "/v1/completions", {"prompt": PROMPT * 9000, "max_tokens": 5})
    to.ask("none", f"/nowhere?key={QUERY}")


def stopped(process: Any) -> str:
    """All that it has written to stderr."""
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    return (process.report + rest).decode()


@pytest.fixture(scope="module")
def seen() -> Iterator[Run]:
    with run_dir() as base:
        with Cli(base).serve("--name", "e", "--port", "0", "--api-key", KEY, "--log-interval",
                             "0.2", "--log-format", "json", *NULL_WITH_TEXT) as process:
            where = actor.where(Path(base) / "e")
            assert where is not None
            to = Asker(where.port)
            requests(to)
            gone = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
            gone.request("POST", "/v1/completions", json.dumps(
                {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}),
                {"Authorization": f"Bearer {KEY}", "X-Request-Id": "gone"})
            gone.getresponse().read(100)
            gone.close()
            log = Path(base) / "e" / "gateway-0.log"
            assert eventually(lambda: '"gone"' in log.read_text(), 20)
            files = "".join(path.read_text() for path in log.parent.glob("*.log"))
            terminal = stopped(process)
        yield Run(terminal.splitlines(), files, to.outputs, to.statuses)


def lines(seen: Run) -> dict[str, dict[str, Any]]:
    """Those on requests, by request id."""
    found = [json.loads(line) for line in seen.terminal]
    return {line["request_id"]: line for line in found if line.get("logger") == "actorium.access"}


def test_every_terminal_line_is_json(seen: Run) -> None:
    for line in seen.terminal:
        found = json.loads(line)
        assert {"time", "level", "role", "epoch", "message"} <= set(found), line
    report = [m for m in (json.loads(line)["message"] for line in seen.terminal) if "serves" in m]
    assert report and "ready after" in report[0], "the report of the start is there"


def test_no_content_is_logged(seen: Run) -> None:
    written = "\n".join(seen.terminal) + seen.files
    for secret in SECRETS:
        assert secret not in written, secret
    words = {word for text in seen.outputs for word in text.split() if len(word) > 7}
    assert all(len(text) > 20 for text in seen.outputs)
    assert not [word for word in words if word in written]


def test_a_log_line_has_the_requests_usage(seen: Run) -> None:
    found = lines(seen)
    assert {name: found[name]["status"] for name in seen.statuses} == seen.statuses
    assert {seen.statuses[name] for name in ("json", "type", "schema", "long")} == {400}
    assert (seen.statuses["key"], seen.statuses["none"]) == (401, 404)
    for name, path in (("whole", "/v1/completions"), ("stream", "/v1/chat/completions")):
        line = found[name]
        assert (line["method"], line["path"], line["output_tokens"]) == ("POST", path, 30)
        assert line["prompt_tokens"] > 3 and line["cached_tokens"] == 0
        assert line["duration_s"] > 0 and line["rids"] and name in line["message"]
        assert f'"POST {path} HTTP/1.1" 200' in line["message"]
    assert 0 < found["stream"]["ttft_s"] <= found["stream"]["duration_s"]
    assert "ttft_s" not in found["whole"] and "output_tokens" not in found["none"]


def test_a_disconnected_caller_is_logged(seen: Run) -> None:
    line = lines(seen)["gone"]
    assert line["disconnected"] and 0 < line["output_tokens"] < 4000


def test_a_throughput_line_is_logged_while_there_is_work(seen: Run) -> None:
    found = [line for line in map(json.loads, seen.terminal)
             if line.get("logger") == "actorium.stats"]
    assert found and found[0]["role"] == "watchdog"
    assert sum(line["generation_tokens_per_second"] for line in found) > 0
    assert all(line["message"].startswith("Avg prompt throughput: ") for line in found)


def test_lines_are_text_by_default_and_can_be_off() -> None:
    with run_dir() as base, Cli(base).serve(
            "--name", "e", "--port", "0", "--disable-uvicorn-access-log", "--log-interval", "0.2",
            *NULL) as process:
        where = actor.where(Path(base) / "e")
        assert where is not None
        log, to = Path(base) / "e" / "watchdog.log", Asker(where.port)
        body = {"prompt": [5, 6], "max_tokens": 900, "ignore_eos": True}
        until = time.monotonic() + 20
        while "Avg generation" not in log.read_text() and time.monotonic() < until:
            to.ask("one", "/v1/completions", body)
        text = stopped(process)
    assert " [watchdog] Avg prompt throughput: " in text and "/v1/completions" not in text


def test_a_path_cannot_inject_log_lines() -> None:
    assert _printable("/a\n\x1b[2J\u202e") == "/a\\n\\x1b[2J\\u202e"
    assert len(_printable("/" + "a" * 9999)) == 200
