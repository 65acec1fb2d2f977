"""Whole clusters: requests over the SDK and HTTP, and deaths of everybody in mid-stream."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import NULL, Cli, alive, cli, eventually

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null import null_worker

__all__ = ["cli"]
CLUSTER = ("--name", "c", "--replicas", "2", *NULL)
STREAMS = 8
TOKENS = 1500
Streams = list[dict[int, list[int]]]
WHOLE: Streams = [{index: [
    null_worker.next_token(choice_seed(number, index), position, null_worker.VOCAB)
    for position in range(3, 3 + TOKENS)] for index in range(1 + number % 2)}
    for number in range(STREAMS)]
"""What streams without a disturbance are."""


def pids_of(cli: Cli) -> dict[tuple[str, str], int]:
    """By engine and role. (`ps` fails where a heartbeat is late, and says all the same.)"""
    return {(row["name"], row["role"]): row["pid"]
            for row in json.loads(cli.run("ps", "--json").stdout)}


def streams(cli: Cli, then: Callable[[], Any] = lambda: None) -> Streams:
    """The tokens of several streams, by choice; `then` is called when they are under way."""
    found: Streams = [{} for _ in range(STREAMS)]
    begun = threading.Barrier(STREAMS + 1)

    def follow(number: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number, n=1 + number % 2)
        waits = True
        with Client("c", cli.run_dir, resume_timeout=60.0) as client:
            for delta in client.stream([1 + number, 2, 3], params):
                found[number].setdefault(delta.index, []).extend(delta.token_ids)
                if waits and len(found[number][0]) > 100:
                    waits = False
                    begun.wait(30)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    then()
    for thread in threads:
        thread.join(60)
    return found


def test_a_cluster_answers_and_survives_a_replica(cli: Cli) -> None:
    """Over HTTP and the SDK; a replica is killed with all its actors."""
    with cli.serve(*CLUSTER, "--port", "0") as process:
        pids = pids_of(cli)
        assert {role for name, role in pids if name == "c"} == {
            "tokenizer", "scheduler", "detokenizer", "watchdog", "replica-0", "replica-1",
            "gateway-0"}
        assert {role for name, role in pids if name == "c.1"} == {
            "scheduler", "worker-0", "watchdog"}
        port = json.loads((Path(cli.run_dir) / "c" / "gateway.json").read_bytes())["port"]
        ask = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", headers={"Content-Type": "application/json"},
            data=json.dumps({"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}).encode())
        answer = json.load(urllib.request.urlopen(ask))
        assert answer["usage"]["completion_tokens"] == 4
        assert streams(cli, lambda: os.kill(pids["c", "replica-0"], signal.SIGKILL)) == WHOLE
        assert eventually(lambda: any(
            row["role"] == "replica-0" and row["epoch"] == 2 and row["phase"] == "ready"
            for row in json.loads(cli.run("ps", "--json").stdout)), 30)
        pids |= pids_of(cli)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not [pid for pid in pids.values() if alive(pid)]
    assert cli.entries() == []


@pytest.mark.slow
@pytest.mark.parametrize("who", [("c", "scheduler"), ("c.0", "scheduler"), ("c.1", "worker-0"),
                                 ("c", "detokenizer"), ("c", "tokenizer"), ("c", "watchdog"),
                                 ("c.1", "watchdog")])
def test_streams_go_on_whoever_dies(cli: Cli, who: tuple[str, str]) -> None:
    """The router ("scheduler" of the cluster) among them."""
    with cli.serve(*CLUSTER):
        pids = pids_of(cli)
        assert streams(cli, lambda: os.kill(pids[who], signal.SIGKILL)) == WHOLE
