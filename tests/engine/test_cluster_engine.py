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
from helpers_cli import NULL, Cli, alive, cli, eventually, read_until

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.chaos.faults import actors
from actorium.tools.null import null_worker

__all__ = ["cli"]
CLUSTER = ("--name", "c", "--replicas", "2", *NULL)
STREAMS = 8
TOKENS = 1500
Streams = list[dict[int, list[int]]]


def undisturbed(count: int, tokens: int) -> Streams:
    """What `streams` finds where nothing dies."""
    return [{index: [
        null_worker.next_token(choice_seed(number, index), position, null_worker.VOCAB)
        for position in range(3, 3 + tokens)] for index in range(1 + number % 2)}
        for number in range(count)]


WHOLE = undisturbed(STREAMS, TOKENS)


def rows_of(cli: Cli) -> list[dict[str, Any]]:
    """What `ps` says, which fails where a heartbeat is late, and says all the same."""
    shown: list[bytes] = []
    assert eventually(lambda: bool(shown.append(cli.run("ps", "--json").stdout) or shown[-1]), 30)
    rows: list[dict[str, Any]] = json.loads(shown[-1])
    return rows


def pids_of(cli: Cli) -> dict[tuple[str, str], int]:
    """By engine and role."""
    return {(row["name"], row["role"]): row["pid"] for row in rows_of(cli)}


def streams(cli: Cli, then: Callable[[], Any], count: int = STREAMS, tokens: int = TOKENS
            ) -> Streams:
    """The tokens of several streams, by choice; `then` is called when some are under way."""
    found: Streams = [{} for _ in range(count)]
    begun = threading.Semaphore(0)

    def follow(number: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number, n=1 + number % 2)
        begins = True
        with Client("c", cli.run_dir, resume_timeout=60.0) as client:
            for delta in client.stream([1 + number, 2, 3], params):
                found[number].setdefault(delta.index, []).extend(delta.token_ids)
                if begins and len(found[number].get(0, ())) > 100:
                    begins = False
                    begun.release()

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=30) for _ in range(4))
    then()
    for thread in threads:
        thread.join(120)
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
            for row in rows_of(cli)), 30)
        pids |= pids_of(cli)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not [pid for pid in pids.values() if alive(pid)]
    assert cli.entries() == []


@pytest.mark.slow
def test_actors_of_a_replica_may_be_killed_while_it_starts(cli: Cli) -> None:
    """However often: it ends with them, and that is no death of its own doing."""
    run_dir, killed = Path(cli.run_dir) / "c", set[int]()

    def kill_next_worker() -> bool:
        worker = actors(run_dir).get("0/worker-0")
        if worker is None or worker.pid in killed:
            return False
        killed.add(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        return True

    with cli.serve(*CLUSTER, "--max-restarts", "1") as process:
        pids = pids_of(cli)
        killed.add(pids["c.0", "worker-0"])
        os.kill(pids["c", "replica-0"], signal.SIGKILL)
        for _ in range(4):
            assert eventually(kill_next_worker, 60)
        assert eventually(lambda: any(
            row["role"] == "replica-0" and row["epoch"] > 2 and row["phase"] == "ready"
            for row in rows_of(cli)), 60)
        assert streams(cli, lambda: None) == WHOLE
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_replicas_come_rest_and_go_under_streams(cli: Cli) -> None:
    """One more, one drained, and all but one sent home, while streams run: nothing is lost."""
    shown: list[dict[str, Any]] = []

    def order(*words: str) -> None:
        done = cli.run("cluster", *words, "--json")
        assert done.returncode == 0, done.stderr
        shown.append(json.loads(done.stdout))

    def change() -> None:
        order("scale", "c", "3")
        order("drain", "c", "0")
        order("undrain", "c", "0")
        order("scale", "c", "1")

    with cli.serve(*CLUSTER):
        assert streams(cli, change, tokens=4000) == undisturbed(STREAMS, 4000)
        three, drained, _, one = shown
        assert [row["phase"] for row in three["replicas"]] == ["ready"] * 3
        assert drained["replicas"][0]["phase"] == "drained"
        assert drained["replicas"][0]["migrated_out"] > 0
        assert [row["replica"] for row in one["replicas"]] == [0]
        assert {role for name, role in pids_of(cli) if name == "c"} == {
            "tokenizer", "scheduler", "detokenizer", "watchdog", "replica-0"}
        assert not [name for name, _ in pids_of(cli) if name not in ("c", "c.0")]
        table = cli.run("cluster", "status", "c").stdout.decode()
        assert "ready" in table and "1 replicas wanted" in table
        order("scale", "c", "2")
        assert [row["phase"] for row in shown[-1]["replicas"]] == ["ready"] * 2
        refused = cli.run("cluster", "scale", "c", "0")
        assert refused.returncode == 2 and b"at least one" in refused.stderr
    assert cli.entries() == []


@pytest.mark.slow
def test_a_router_that_is_killed_after_a_change_leaves_no_ghost(cli: Cli) -> None:
    """Fewer than the cluster was started with, the router killed, as many as before again: each
    order comes back, and the last one that lives cannot be drained."""
    def shown(*words: str) -> list[tuple[int, str]]:
        done = cli.run("cluster", *words, "--json")
        assert done.returncode == 0, done.stderr
        return [(row["replica"], row["phase"]) for row in json.loads(done.stdout)["replicas"]]

    with cli.serve("--name", "c", "--replicas", "3", *NULL):
        assert shown("scale", "c", "2") == [(0, "ready"), (1, "ready")]
        for order in (("drain", "c", "1"), ("undrain", "c", "1"), ("scale", "c", "3")):
            # The order is answered by the router; the process ends some moments later.
            assert eventually(lambda: ("c", "replica-2") not in pids_of(cli))
            os.kill(pids_of(cli)["c", "scheduler"], signal.SIGKILL)
            assert len(shown("status", "c")) == 2
            said = shown(*order)
        assert said == [(0, "ready"), (1, "ready"), (2, "ready")]
        assert shown("scale", "c", "1") == [(0, "ready")]
        os.kill(pids_of(cli)["c", "scheduler"], signal.SIGKILL)
        refused = cli.run("cluster", "drain", "c", "0")
        assert refused.returncode == 2 and b"no other replica than 0" in refused.stderr
        assert streams(cli, lambda: None) == WHOLE


@pytest.mark.slow
def test_a_replica_that_finds_no_device_is_left_out(cli: Cli) -> None:
    """Though there is none at all: workers without a model need none."""
    visible = {"CUDA_VISIBLE_DEVICES": "0,1"}
    with cli.serve(*CLUSTER, "--device", "auto", **visible) as process:
        assert cli.run("cluster", "scale", "c", "3", "--no-wait").returncode == 0
        said = read_until(process, b"replica-2 is left out")
        assert b"replica 2 needs CUDA devices 2 to 2 of CUDA_VISIBLE_DEVICES=0,1" in said
        assert streams(cli, lambda: None) == WHOLE
        shown = json.loads(cli.run("cluster", "status", "c", "--json").stdout)["replicas"]
        assert [row["phase"] for row in shown] == ["ready", "ready", "left out"]
        waited = cli.run("cluster", "scale", "c", "3")
        assert waited.returncode != 0 and b"is left out: replicas: replica 2 needs" in waited.stderr
        assert cli.run("cluster", "scale", "c", "2").returncode == 0
        assert "replica-2" not in {role for _, role in pids_of(cli)}
        assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("who", [
    [("c", "scheduler")], [("c.0", "scheduler")], [("c.1", "worker-0")], [("c", "detokenizer")],
    [("c", "tokenizer")], [("c", "watchdog")], [("c.1", "watchdog")],
    [("c", "scheduler"), ("c", "replica-0")],
    [("c", "scheduler"), ("c", "replica-0"), ("c", "replica-1"), ("c", "detokenizer")]])
def test_streams_go_on_whoever_dies(cli: Cli, who: list[tuple[str, str]]) -> None:
    """The router ("scheduler" of the cluster) among them, and several at once."""
    with cli.serve(*CLUSTER):
        pids = pids_of(cli)
        assert streams(cli, lambda: [os.kill(pids[each], signal.SIGKILL) for each in who]) == WHOLE


@pytest.mark.slow
def test_a_cluster_that_is_killed_as_a_whole_goes_on_from_its_ledgers(cli: Cli, tmp_path: Path
                                                                      ) -> None:
    flags = (*CLUSTER, "--ledger-dir", str(tmp_path / "ledgers"))
    again: list[Any] = []

    def restart() -> None:
        process.kill()
        process.wait(30)
        again.append(cli.serve(*flags))
        again[0].__enter__()

    with cli.serve(*flags) as process:
        try:
            assert streams(cli, restart) == WHOLE
        finally:
            for each in again:
                each.__exit__(None, None, None)
    assert {path.name for path in (tmp_path / "ledgers").iterdir()} >= {"router", "replica-0"}


@pytest.mark.slow
def test_30_streams_under_many_deaths(cli: Cli) -> None:
    """One after the other, each as soon as what died before is back: nothing is lost, changed or
    told twice."""
    kills = [("c", "replica-1"), ("c.0", "scheduler"), ("c", "scheduler"), ("c.1", "worker-0"),
             ("c", "replica-0"), ("c", "detokenizer"), ("c", "replica-1"), ("c", "scheduler")]
    done: list[tuple[str, str]] = []
    left: list[float] = []

    def kill_all() -> None:
        for who in kills:
            assert eventually(lambda: all(row["phase"] in ("ready", "idle", "stepping")
                                          for row in rows_of(cli)), 30)
            left.append(sum(row["gauges"].get("router_live", 0) for row in rows_of(cli)))
            os.kill(pids_of(cli)[who], signal.SIGKILL)
            done.append(who)

    with cli.serve(*CLUSTER, "--max-restarts", "20", "--max-num-seqs", "3"):
        assert streams(cli, kill_all, 30, 1500) == undisturbed(30, 1500)
    assert done == kills and sum(map(bool, left)) >= 3, f"streams at each death: {left}"
