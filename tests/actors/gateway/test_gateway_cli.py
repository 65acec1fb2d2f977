"""`actorium serve` with HTTP."""

from __future__ import annotations

import json
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from helpers_cli import NULL, Cli

from actorium.tools.cli.command_line import parse
from actorium.tools.cli.serve_command import PORT, ServeOptions, configured


@pytest.fixture
def cli() -> Iterator[Cli]:
    with tempfile.TemporaryDirectory(dir="/tmp") as run_dir:
        yield Cli(run_dir)


@pytest.mark.parametrize(("argv", "port"), [
    ([], PORT), (["--port", "81"], 81), (["--no-http"], None),
    (["--no-http", "--port", "81"], None)])
def test_http_is_the_rule(argv: list[str], port: int | None) -> None:
    assert configured(parse("serve", argv, ServeOptions)).gateway.port == port


def test_serve_prints_its_address_and_port_errors(cli: Cli) -> None:
    with cli.serve("--name", "web", "--port", "0", "--api-key", "sesame-sesame", *NULL):
        rows = {row["role"]: row for row in cli.actors()}
        url = rows["gateway-0"]["detail"].removeprefix("HTTP at ")
        with urllib.request.urlopen(f"{url}/version") as answer:
            assert "version" in json.load(answer)
        port = url.rpartition(":")[2]
        taken = cli.run("serve", "--name", "other", "--port", port, *NULL)
        assert taken.returncode == 2 and b"--port" in taken.stderr and port.encode() in taken.stderr
        assert "sesame" not in json.dumps(rows)


def test_a_port_in_use_by_others(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = cli.run("serve", "--port", port, *NULL)
    assert done.returncode == 2 and b"--port" in done.stderr


def test_a_file_of_keys_that_cannot_be_read(cli: Cli) -> None:
    done = cli.run("serve", "--port", "0", "--api-keys-file", "/nowhere", *NULL)
    assert done.returncode == 2 and b"api_keys_file" in done.stderr.replace(b"-", b"_")


def test_a_stop_finishes_answers_and_refuses_new_requests(cli: Cli) -> None:
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True,
                       "stream": True}).encode()
    with cli.serve("--name", "web", "--port", "0", *NULL) as process:
        rows = {row["role"]: row for row in cli.actors()}
        url = rows["gateway-0"]["detail"].removeprefix("HTTP at ") + "/v1/completions"
        with urllib.request.urlopen(url, body, timeout=60) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            refused = None
            while refused is None:
                try:
                    urllib.request.urlopen(f"{url[:-15]}/model_info", timeout=60).read()
                    time.sleep(0.02)
                except urllib.error.HTTPError as error:
                    refused = error
            assert (refused.code, refused.headers["retry-after"]) == (503, "1")
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(30) == 0
