"""Stopping while nobody waits for an answer any more: real processes, and the cores that know."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_cli import NULL, Cli
from helpers_gateway import Scripted, ScriptedStream

from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.detokenizer.client_connections import (
    RECONNECT_HURRIED,
    RETURN_HURRIED,
    ClientConnections,
)
from actorium.actors.gateway import actor
from actorium.actors.gateway.resume.delta_streams import SharedStreams

CLIENT = """
import sys
from actorium import Client, SamplingParams
client = Client("e")
streams = [iter(client.stream([5, 6, i], SamplingParams(max_tokens=4000, ignore_eos=True)))
           for i in range(3)]
for stream in streams:
    next(stream)
print("on", flush=True)
sys.stdin.read()
"""
TOLERATED = 10.0
"""Seconds on a busy machine; alone it takes 0.6. What was asked for takes a minute."""


@pytest.fixture
def cli() -> Iterator[Cli]:
    with tempfile.TemporaryDirectory(dir="/tmp") as run_dir:
        yield Cli(run_dir)


def leave_requests(port: int) -> None:
    """Callers who ask, some of them so that another call may take the answer up, and go."""
    calls = [http.client.HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(8)]
    for i, call in enumerate(calls):
        body = {"prompt": [5, 6, i], "max_tokens": 4000, "ignore_eos": True, "n": 2,
                "stream": i % 2 == 0}
        headers = {"Idempotency-Key": f"key-{i}"} if i < 4 else {}
        call.request("POST", "/v1/completions", json.dumps(body), headers)
        if i == 0:
            call.getresponse().read(10)  # it is under way, before others can be
    for call in calls:
        call.close()


@pytest.mark.slow
def test_abandoned_requests_do_not_hold_a_stop_and_others_are_finished(cli: Cli) -> None:
    with cli.serve("--name", "e", "--port", "0", "--max-num-seqs", "2", *NULL) as process:
        where = actor.where(Path(cli.run_dir) / "e")
        assert where is not None
        waits = http.client.HTTPConnection("127.0.0.1", where.port, timeout=30)
        waits.request("POST", "/v1/completions", json.dumps(
            {"prompt": [9], "max_tokens": 300, "ignore_eos": True}))
        time.sleep(0.1)  # it is the first in the queue
        leave_requests(where.port)
        with subprocess.Popen([sys.executable, "-c", CLIENT], env=cli.env, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdin is not None
            time.sleep(0.3)
            other.kill()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        answer = waits.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 300
        waits.close()
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert time.monotonic() - began < TOLERATED


def test_a_draining_detokenizer_waits_no_longer_than_it_must() -> None:
    readers = ClientConnections()
    readers.add(b"new", 100.0)
    readers.disconnected(b"gone", 100.0)
    readers.left(b"gone", 30.0)  # that can be resumed
    readers.shorten_patience(101.0)
    readers.disconnected(b"later", 101.0)
    assert readers.overdue(101.0 + 0.9 * RETURN_HURRIED) == []
    assert sorted(readers.overdue(101.0 + 1.1 * RETURN_HURRIED)) == [b"gone", b"later"]
    assert b"new" in readers.overdue(101.0 + 1.1 * RECONNECT_HURRIED)
    assert readers.idle_clients([b"quiet"], 101.0) == [b"quiet"], "who may have gone unnoticed"


class Endless(ScriptedStream):
    """Says nothing, and remembers that it was closed."""

    closed = False

    async def __anext__(self) -> StreamDelta:
        await asyncio.sleep(3600)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


def test_a_draining_gateway_keeps_no_stream_of_a_disconnected_client() -> None:
    async def run() -> list[bool]:
        joins = SharedStreams()
        streams = [Endless(Scripted([]), Request(prompt="a")) for _ in range(3)]
        readers = [joins.join(f"n{i}", f"n{i}.x", lambda i=i: streams[i],
                              30.0)  # type: ignore[misc]
                   for i in range(2)]
        await asyncio.sleep(0)
        await readers[0].aclose()
        joins.drain()
        late = joins.join("n2", "n2.x", lambda: streams[2], 30.0)
        await asyncio.sleep(0.01)
        before = [stream.closed for stream in streams]
        await readers[1].aclose()
        await late.aclose()
        await asyncio.sleep(0.01)
        return before + [stream.closed for stream in streams]

    assert asyncio.run(run()) == [True, False, False, True, True, True]
