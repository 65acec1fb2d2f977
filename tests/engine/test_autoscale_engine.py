"""A whole engine with null workers: a burst makes replicas start, quiet makes them leave."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import NULL, Cli, cli, eventually

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null import null_worker

__all__ = ["cli"]
POLICY = ("--max-replicas", "2", "--autoscale-queue", "2", "--upscale-delay", "1",
          "--downscale-delay", "4")
TOKENS = 3000
pytestmark = [pytest.mark.slow]


def status(cli: Cli) -> dict[str, Any]:
    done = cli.run("cluster", "status", "c", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def phases(cli: Cli) -> list[str]:
    return [row["phase"] for row in status(cli)["replicas"]]


def metrics(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return {name: float(value) for name, value in
            (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("actorium:"))}


def test_a_burst_makes_a_replica_start_and_quiet_makes_it_leave(cli: Cli) -> None:
    found: list[list[int]] = [[] for _ in range(16)]

    def follow(number: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number)
        with Client("c", cli.run_dir, resume_timeout=60.0) as client:
            for delta in client.stream([1 + number, 2, 3], params):
                found[number].extend(delta.token_ids)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(found))]
    with cli.serve("--name", "c", *NULL, *POLICY, "--max-num-seqs", "2", "--port", "0"):
        assert phases(cli) == ["ready"]
        for thread in threads:
            thread.start()
        assert eventually(lambda: phases(cli) == ["ready", "ready"], 60)
        assert "1 -> 2 (queue: 1 ready" in status(cli)["policy"]
        for thread in threads:
            thread.join(300)
        assert eventually(lambda: phases(cli) == ["ready"], 60)
        port = json.loads((Path(cli.run_dir) / "c" / "gateway.json").read_bytes())["port"]
        assert eventually(lambda: metrics(port)["actorium:replicas_wanted"] == 1, 10)
        counts = metrics(port)
        assert counts['actorium:autoscale_decisions_total{reason="queue"}'] == 1
        assert counts['actorium:autoscale_decisions_total{reason="room"}'] == 1
        rows = status(cli)["replicas"]
        assert [row["replica"] for row in rows] == [0]
        assert rows[0]["migrated_out"] > 0, "the other one got its part of what waited"
        assert json.loads(cli.run("cluster", "scale", "c", "2", "--json").stdout)["target"] == 2
        assert "is suspended" in status(cli)["policy"]
        assert cli.run("cluster", "scale", "c", "auto").returncode == 0
        assert eventually(lambda: phases(cli) == ["ready"], 60)
        refused = cli.run("cluster", "scale", "c", "3:2")
        assert refused.returncode == 2 and b"MIN:MAX" in refused.stderr
    assert cli.entries() == []
    assert found == [[null_worker.next_token(choice_seed(number, 0), position, null_worker.VOCAB)
                      for position in range(3, 3 + TOKENS)] for number in range(len(found))]
